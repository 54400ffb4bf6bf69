"""Uploads of presets: dry unless asked for, with the cards that hubs want."""

import keras_hub
import pytest

from experiments import upload_presets

NAME = "vit_tiny_patch4_32_glyphs"


@pytest.fixture
def sent(monkeypatch):
    """Dict from each address to the beginning of the card that was sent there."""
    sent = {}

    def upload(uri, folder):
        with open(f"{folder}/README.md", encoding="utf-8") as card:
            sent[uri] = card.read()

    monkeypatch.setattr(keras_hub, "upload_preset", upload)
    return sent


def test_nothing_is_sent_by_default(sent, capsys):
    upload_presets.main(["hf://someone"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(upload_presets.trained()) + 1
    assert lines[-1].startswith("Nothing was sent") and not sent


def test_what_is_sent_has_a_card(sent):
    upload_presets.main(["hf://someone/", "--presets", NAME, "--yes"])
    (card,) = sent.values()
    assert list(sent) == [f"hf://someone/{NAME}"]
    assert card.startswith("---\nlibrary_name: keras-hub\nlicense: apache-2.0\n")
    assert f"# {NAME}" in card


@pytest.mark.parametrize("hub", ["someone", "hf://", "ftp://someone"])
def test_unknown_hub(hub):
    with pytest.raises(ValueError, match="Give the hub and the user"):
        upload_presets.upload(NAME, hub)


def test_presets_without_weights_of_ours():
    with pytest.raises(ValueError, match="Received: name='vit_base_patch16_224'"):
        upload_presets.upload("vit_base_patch16_224", "hf://someone")
