"""The number of functions that a call passes stays what a reader can follow.

    KERAS_BACKEND=torch python -m tests.test_walks

prints the functions of each walk in order.
"""

import numpy as np
import pytest

from keras_softmoe import converters, layers, models, routers
from tests.support import families
from tests.support.walk import walk

PRESET = "soft_moe_tiny_patch8_16e_32_icons"


def tokens():
    return np.random.default_rng(0).normal(size=(4, 16, 32)).astype("float32")


def called_again(layer):
    """The second call of a layer: the first one builds it."""
    layer(tokens())
    return walk(layer, tokens(), training=False)


def token_choice(_):
    router = routers.SoftmaxTokenChoiceRouter(8, num_selected_experts=2)
    return called_again(layers.MoE(router, 64))


def soft(_):
    return called_again(layers.SoftMoE(8, mlp_dim=64))


def loaded():
    return models.ViTMoEImageClassifier.from_preset(PRESET)


def from_preset(_):
    return walk(loaded)


def add_experts(_):
    source = families.FAMILIES["ViT"]()
    router = routers.SoftmaxTokenChoiceRouter(4)
    return walk(converters.add_experts, source, (1,), router)


def save_to_preset(path):
    return walk(loaded().save_to_preset, path / "new")


def second_fit(_):
    model = loaded()
    images = np.zeros((2, *model.backbone.image_shape), "uint8")
    labels = np.zeros(2, "int32")
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    model.fit(images, labels, batch_size=2, verbose=0)
    return walk(model.fit, images, labels, batch_size=2, verbose=0)


# Walk, most functions, most returns to a file, most calls.
WALKS = {
    "token choice": (token_choice, 43, 19, 71),
    "soft": (soft, 27, 11, 50),
    # Keras reads all properties of a model that it loads or saves: also its pyramid.
    "from_preset": (from_preset, 133, None, None),
    "add_experts": (add_experts, 91, None, None),
    "save_to_preset": (save_to_preset, 49, None, None),
    "second fit": (second_fit, 82, None, None),
}


@pytest.mark.parametrize("name", WALKS)
def test_walk(name, tmp_path):
    make, *limits = WALKS[name]
    found = make(tmp_path)
    counts = len(found.functions), found.num_returns, found.num_calls
    within = [n <= limit for n, limit in zip(counts, limits, strict=True) if limit]
    assert found.functions and all(within), f"{counts} of {limits}: {found}"


if __name__ == "__main__":
    import pathlib
    import sys
    import tempfile

    for _name in sys.argv[1:] or WALKS:
        with tempfile.TemporaryDirectory() as _path:
            _walk = WALKS[_name][0](pathlib.Path(_path))
        print(f"== {_name}: {_walk.num_calls} calls, {_walk}", flush=True)
