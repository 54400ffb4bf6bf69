"""Models small enough for tests, with weights at which mistakes show."""

import numpy as np
import pytest

from keras_softmoe import models, routers
from tests.support.layer_checks import randomize

IMAGE_SHAPE = (8, 8, 3)
NUM_CLASSES = 3
SOFT = routers.SoftRouter(4)
# Groups of two images drop tokens; no multiple, so that the capacity is the ratio.
SPARSE = routers.SoftmaxTokenChoiceRouter(4, priority="max", capacity_factor=0.75)
DENSE = {"moe_layers": (), "router": None}
# Sizes of any transformer, and of one of images.
SIZES_OF_BLOCKS = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
SIZES = {"image_shape": IMAGE_SHAPE, "patch_size": 4, **SIZES_OF_BLOCKS}
# Settings of blocks that are no defaults.
UNUSUAL = {
    "moe_layers": (1,),
    "use_qk_norm": True,
    "dropout_rate": 0.1,
    "group_images": 3,
    "dispatcher": "einsum",
    "equal_experts": True,
    "expert_dropout_rate": 0.2,
    "remat_experts": True,
    "dispatch_dtype": "bfloat16",
    "dtype": "mixed_bfloat16",
}

# What Keras and KerasHub warn of in ordinary use.
FITTING = pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
LOADING = pytest.mark.filterwarnings("ignore:.compile.*was not called:UserWarning")
LOADING_WRONG_WEIGHTS = pytest.mark.filterwarnings(
    "ignore:Skipping nested container:UserWarning"
)


def backbone(**overrides):
    """A Soft MoE backbone of two blocks, the second a mixture of experts."""
    arguments = {**SIZES, "moe_layers": (1,), "router": SOFT, **overrides}
    model = models.ViTMoEBackbone(**arguments)
    randomize(model)
    return model


def preprocessor():
    return models.ViTMoEImageClassifierPreprocessor(
        models.ViTMoEImageConverter(image_size=IMAGE_SHAPE[:2])
    )


def classifier(head=None, **overrides):
    """A classifier on `backbone(**overrides)`; `head` are its own arguments."""
    model = models.ViTMoEImageClassifier(
        backbone(**overrides),
        NUM_CLASSES,
        **{"preprocessor": preprocessor(), **(head or {})},
    )
    randomize(model)
    return model


def pixels(num_images, shape=IMAGE_SHAPE, seed=0):
    """Images with values from 0 to 255."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, size=(num_images, *shape)).astype("float32")


def images(num_images, shape=IMAGE_SHAPE, seed=0):
    """Images with values from -1 to 1, what a backbone takes."""
    return pixels(num_images, shape, seed) / 127.5 - 1.0


def labels(num_images):
    return np.arange(num_images) % NUM_CLASSES


def predict(model, x, **kwargs):
    return model.predict(x, verbose=0, **kwargs)
