"""Small models of KerasHub with random weights at which mistakes show."""

import functools

import keras
import keras_hub
import numpy as np

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8}
SHAPE = (12, 12, 3)


def _made(cls, **arguments):
    return cls(**{"image_shape": SHAPE, "patch_size": 4, **SIZES, **arguments})


_vit = functools.partial(_made, keras_hub.models.ViTBackbone, mlp_dim=12)
_dinov2 = functools.partial(
    *(_made, keras_hub.models.DINOV2Backbone),
    position_embedding_shape=SHAPE,
    intermediate_dim=12,
)


def _vit_classifier(
    intermediate_dim=None, pooling="token", activation=None, **backbone
):
    return keras_hub.models.ViTImageClassifier(
        _vit(**backbone),
        3,
        intermediate_dim=intermediate_dim,
        pooling=pooling,
        activation=activation,
    )


# Name -> callable that makes it from overrides
MODELS = {
    "ViTBackbone": _vit,
    "ViTBackbone, rectangle": lambda **x: _vit(**{"image_shape": (8, 12, 3), **x}),
    "ViTBackbone, epsilon": lambda **x: _vit(layer_norm_epsilon=1e-2, **x),
    "ViTBackbone, no class token": lambda **x: _vit(use_class_token=False, **x),
    "ViTImageClassifier": lambda **x: _vit_classifier(5, **x),
    "ViTImageClassifier, gap": lambda **x: _vit_classifier(
        pooling="gap", use_class_token=False, activation="softmax", **x
    ),
    "DeiTBackbone": functools.partial(
        _made, keras_hub.models.DeiTBackbone, intermediate_dim=12
    ),
    "DINOV2Backbone": _dinov2,
    "DINOV2Backbone, registers": lambda **x: _dinov2(
        num_register_tokens=2, antialias_in_interpolation=True, **x
    ),
    "SigLIPVisionEncoder": functools.partial(
        _made, keras_hub.models.SigLIPVisionEncoder, intermediate_dim=12
    ),
}


def make(name, **overrides):
    """One of `MODELS`, with random weights.

    Other than zeros and ones they show a mistake in the place of each.
    """
    model = MODELS[name](**overrides)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            center = 1.0 if weight.path.endswith(("gamma", "lambda1")) else 0.0
            weight.assign(center + 0.3 * rng.normal(size=weight.shape))
    return model
