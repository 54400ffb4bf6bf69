"""Heads of cards of presets without weights of ours.

`experiments` has the test of those that were trained here.
"""

import pytest
from huggingface_hub import ModelCard

from keras_softmoe import catalogue, presets

DENSE, MIXTURE = "vit_base_patch16_224", "soft_moe_base_patch16_128e_224"
LIMOE = "limoe_small_patch32_32e_224"
RELEASED = "vmoe_base_patch16_every2_8e_384_imagenet"


@pytest.mark.parametrize("name", [DENSE, MIXTURE, LIMOE, RELEASED])
def test_hubs_read_the_card(name, tmp_path):
    presets.write(name, tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.lstrip().startswith(f"# {name}\n")
    head = card.data
    assert head.library_name == "keras-hub" and head.tags[0] == "keras"
    assert ("mixture-of-experts" in head.tags) == (name != DENSE)
    prefix = "zero-shot-" if name == LIMOE else ""
    assert head.pipeline_tag == f"{prefix}image-classification"
    # What others published was not measured here.
    assert head.eval_results is None
    if name == RELEASED:
        # Pretrained, then fine-tuned; of the checkpoint itself no licence is known.
        assert head.datasets == ["imagenet-21k", "imagenet-1k"]
        assert head.license == "other"
        assert head["license_name"].startswith("apache-2.0-of-the-repository")
    else:
        assert head.datasets is None and head.license == "apache-2.0"


def test_every_released_checkpoint_names_its_data(tmp_path):
    for name in catalogue.names_of_kind("convertible"):
        presets.write(name, tmp_path / name)
        text = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        assert '\ndatasets: ["imagenet-' in text, name


def test_a_card_without_its_head():
    about = catalogue.read_metadata(DENSE)
    card = "# Title\n\n---\nText\n---\n"
    head = catalogue.front_matter(DENSE, about, (), False)
    assert head.startswith("---\n") and head.endswith("\n---\n\n")
    assert catalogue.without_front_matter(head + card) == card
    assert catalogue.without_front_matter(card) == card
