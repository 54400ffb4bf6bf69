"""Uploads of presets: dry unless asked for, with the cards that hubs want."""

import types
from pathlib import Path

import huggingface_hub
import pytest

from experiments import upload_presets
from keras_softmoe import catalogue, presets

NAME = "vit_tiny_patch4_32_glyphs"


@pytest.fixture
def sent(monkeypatch):
    """Dict from each address to the card there, on a hub that stands in for one.

    KerasHub uploads as it is, up to the calls of the hub's own client.
    """
    sent = {}

    def create(repo_id, exist_ok):
        return types.SimpleNamespace(repo_id=repo_id)

    def file_exists(repo_id, filename):
        return (repo_id, filename) in sent

    def upload_file(path_or_fileobj, path_in_repo, repo_id):
        sent[repo_id, path_in_repo] = path_or_fileobj.read_text(encoding="utf-8")

    def upload_folder(repo_id, folder_path):
        for file in Path(folder_path).glob("*.[mj][ds]*"):
            upload_file(file, file.name, repo_id)

    monkeypatch.setattr(huggingface_hub, "create_repo", create)
    for function in (file_exists, upload_file, upload_folder):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    return sent


def test_nothing_is_sent_by_default(sent, capsys):
    upload_presets.main(["hf://someone"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalogue.names_of_kind("trained")) + 1
    assert lines[-1].startswith("Nothing was sent") and not sent


def test_what_is_sent_has_the_card_of_the_preset(sent):
    path = presets.describe(NAME).path
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    upload_presets.main(["hf://someone/", "--presets", NAME, "--yes"])
    card = before["README.md"].decode("utf-8")
    assert sent[f"someone/{NAME}", "README.md"] == card
    assert (f"someone/{NAME}", "config.json") in sent
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("hub", ["someone", "hf://", "ftp://someone"])
def test_unknown_hub(hub):
    with pytest.raises(ValueError, match="Give the hub and the user"):
        upload_presets.upload(NAME, hub)


def test_presets_without_weights_of_ours():
    with pytest.raises(ValueError, match="Received: name='vit_base_patch16_224'"):
        upload_presets.upload("vit_base_patch16_224", "hf://someone")
