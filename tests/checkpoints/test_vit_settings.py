"""Settings of a model from the names and shapes of its parameters."""

import pytest

from keras_softmoe import architecture, converters, routers
from keras_softmoe.checkpoints import fits_positions, read_vit_settings
from tests.support import tiny

MODELS = {
    "soft": {},
    "token choice": {"router": tiny.SPARSE, "representation_dim": 5},
    "dense": tiny.DENSE,
    "map": {"pooling": "map", "use_qk_norm": True},
    "registers": {"num_registers": 2, "layer_scale": 0.5, **tiny.DENSE},
    "no positions": {"pooling": "first", "position_embedding": "none"},
}
# Settings that no parameter tells.
OPEN = {
    "no positions": {
        "image_shape": tiny.IMAGE_SHAPE,
        "pooling": "first",
        "position_embedding": "none",
    },
    "registers": {"layer_scale": 0.5},
}


def shapes_of(model):
    params = converters.to_vmoe_params(model)
    return {name: tuple(array.shape) for name, array in params.items()}


@pytest.mark.parametrize("name", MODELS)
def test_settings_are_those_of_the_model(name):
    model = tiny.backbone(**MODELS[name])
    found = read_vit_settings(shapes_of(model), **OPEN.get(name, {}))
    expected = model.architecture.flat()
    assert found.settings == {key: expected[key] for key in found.settings}
    is_dense = not model.moe_layers
    assert found.num_experts == (None if is_dense else 4)
    is_soft = isinstance(model.router, routers.SoftRouter)
    assert found.slots_per_expert == (1 if is_soft else None)
    assert found.num_classes is None
    router = None if is_dense else model.router
    assert architecture.ViT.of({**found.settings, "router": router}).num_layers == 2


def test_head_and_further_settings():
    found = read_vit_settings(shapes_of(tiny.classifier()), activation="gelu")
    assert found.num_classes == tiny.NUM_CLASSES
    assert found.settings["activation"] == "gelu"
    assert found.settings["layer_scale"] is None


def test_images_that_fit_the_positions():
    shapes = shapes_of(tiny.backbone())
    assert fits_positions(shapes, (4, 16, 3)) and not fits_positions(shapes, (8, 16, 3))
    found = read_vit_settings(shapes, image_shape=(4, 16, 3))
    assert found.settings["image_shape"] == (4, 16, 3)
    with pytest.raises(ValueError, match="saved for 4 patches"):
        read_vit_settings(shapes, image_shape=(8, 16, 3))
    free = shapes_of(tiny.backbone(**MODELS["no positions"]))
    assert fits_positions(free, (8, 16, 3))
    with pytest.raises(
        converters.CheckpointError, match="size of the images does not follow"
    ):
        read_vit_settings(free)
