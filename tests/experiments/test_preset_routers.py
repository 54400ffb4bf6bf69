"""The scripts that train the presets make the routers that the presets have."""

import keras
import pytest

from experiments import glyph_presets, limoe_presets
from keras_softmoe import catalogue

# Those that an earlier form of the script trained saw fewer images.
IMAGES = glyph_presets.EPOCHS * glyph_presets.EPOCH_IMAGES
TRAINED = {
    twin.name: twin.router
    for twin in glyph_presets.TWINS.values()
    if twin.router
    and catalogue.read_metadata(twin.name)["training"]["images"] == IMAGES
}


def settings(router):
    """Its configuration but for the name."""
    return {**router.get_config(), "name": None}


def saved_router(preset):
    _, config = catalogue.read_config(preset)
    return keras.saving.deserialize_keras_object(config["router"])


def test_glyph_presets_are_there():
    assert len(TRAINED) >= 2


@pytest.mark.parametrize("preset", TRAINED)
def test_glyph_presets(preset):
    assert settings(TRAINED[preset]) == settings(saved_router(preset))


def test_limoe_preset():
    router = limoe_presets.build("limoe").backbone.router
    assert settings(router) == settings(saved_router(limoe_presets.NAMES["limoe"]))
