"""Parameters of KerasHub's Vision Transformers under V-MoE's names, by rules."""

import re
from collections import Counter

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_softmoe.checkpoints import (
    Checkpoint,
    LazyArray,
    count_patches,
    place_tokens,
    same,
    token,
    translate,
)
from keras_softmoe.checks import pair
from keras_softmoe.keras_adapter.layers import flatten_layers

_OURS = r"Encoder/encoderblock_\1/"
# Any beginning of a path
_ANY = r"(?:.*[/_])?"


def _norm(theirs, ours):
    return (
        (_ANY + theirs + "/gamma", ours + "/scale", same),
        (_ANY + theirs + "/beta", ours + "/bias", same),
    )


def _same(theirs, ours):
    parts = ("kernel", "bias")
    return tuple((_ANY + f"{theirs}/{x}", f"{ours}/{x}", same) for x in parts)


def _attention(theirs, ours):
    parts = [("attention_output", "out"), *((x, x) for x in ("query", "key", "value"))]
    rules = (_same(f"{theirs}/{x}", f"{ours}/{y}") for x, y in parts)
    return tuple(rule for pair_of_rules in rules for rule in pair_of_rules)


def _block(theirs, first_norm, second_norm, attention, mlp):
    """Return rules for a block; the first group of `theirs` is its number."""
    return (
        *_norm(f"{theirs}/{first_norm}", _OURS + "LayerNorm_0"),
        *_norm(f"{theirs}/{second_norm}", _OURS + "LayerNorm_1"),
        *_attention(f"{theirs}/{attention}", _OURS + "SelfAttention"),
        *_same(f"{theirs}/{mlp[0]}", _OURS + "Mlp/Dense_0"),
        *_same(f"{theirs}/{mlp[1]}", _OURS + "Mlp/Dense_1"),
    )


_HEAD = (*_same("predictions", "head"), *_same("pre_logits", "pre_logits"))
_NUMBERED = r"transformer_block_(\d+)"
_FC = ("mlp/fc1", "mlp/fc2")
_VIT = (
    *_same("patch_embedding", "embedding"),
    (_ANY + "class_token", "cls", token),
    (_ANY + "position_embedding/embeddings", "positions", token),
    *_block(_NUMBERED, "ln_1", "ln_2", "mha", ("mlp/dense_1", "mlp/dense_2")),
    *_norm("encoder/ln", "Encoder/encoder_norm"),
    *_HEAD,
)
_DEIT = (
    *_same("patch_embedding", "embedding"),
    (_ANY + "class_token", "cls", token),
    (_ANY + "distillation_token", "distillation_token", token),
    (_ANY + "position_embedding", "positions", token),
    *_block(_NUMBERED, "ln_1", "ln_2", "mha", ("mlp/dense", "output_layer/output")),
    *_norm("encoder/ln", "Encoder/encoder_norm"),
    *_HEAD,
)
_DINOV2 = (
    *_same("patch_embeddings/projection", "embedding"),
    (_ANY + "cls_token", "cls", token),
    (_ANY + "register_tokens", "registers", token),
    (_ANY + "interpolated_position_embeddings", "positions", token),
    # The table that is interpolated when weights are loaded, and the token for training
    # on masked images.
    (_ANY + r"(?:position_embeddings|mask_token)", None, same),
    *_block(r"layers_(\d+)", "norm1", "norm2", "attention/attention", _FC),
    (_ANY + r"layers_(\d+)/layer_scale1/lambda1", _OURS + "LayerScale_0/scale", same),
    (_ANY + r"layers_(\d+)/layer_scale2/lambda1", _OURS + "LayerScale_1/scale", same),
    *_norm("layernorm", "Encoder/encoder_norm"),
)
_SIGLIP = (
    *_same("patch_embedding", "embedding"),
    (_ANY + "position_embedding/embeddings", "positions", token),
    (_ANY + "position_ids", None, same),
    *_block(r"encoder_block_(\d+)", "layer_norm1", "layer_norm2", "self_attn", _FC),
    *_norm("post_layer_norm", "Encoder/encoder_norm"),
    # It has no name of its own.
    (_ANY + r"head/variable(?:_\d+)?", "MapHead/probe", token),
    *_attention("head/attention", "MapHead/MultiHeadDotProductAttention"),
    *_norm("head/layernorm", "MapHead/LayerNorm"),
    *_same("head/mlp/fc1", "MapHead/Mlp/Dense_0"),
    *_same("head/mlp/fc2", "MapHead/Mlp/Dense_1"),
)

# Name of the backbone's class -> rules, number of the first block, activation
SUPPORTED = {
    "ViTBackbone": (_VIT, 1, "gelu"),
    "DeiTBackbone": (_DEIT, 1, "gelu"),
    "DINOV2Backbone": (_DINOV2, 0, "gelu"),
    "SigLIPVisionEncoder": (_SIGLIP, 0, None),
}
# Unsupported classes, and the part that ours lack.
_REFUSED = {
    "DINOV3Backbone": "rotations of queries and keys by position (RoPE)",
    "CLIPVisionEncoder": "a normalization before the first block, and QuickGELU",
    "CLIPBackbone": "a normalization before the first block, and QuickGELU",
}
_ACTIVATIONS = {"gelu_approximate": "gelu_tanh", "gelu": "gelu"}
# In float32 the difference between smaller ones is not visible in a variance.
_SMALL_EPSILON = 1e-5


def read_keras_hub(model):
    """Return the parameters of a KerasHub Vision Transformer under V-MoE's names.

    `model` is of a class in `SUPPORTED`, or has one as `backbone` or `vision_encoder`.
    """
    backbone = getattr(model, "backbone", model)
    backbone = getattr(backbone, "vision_encoder", backbone)
    name = _class_name(backbone)
    rules, first_block, activation = SUPPORTED[name]
    if getattr(backbone, "use_swiglu_ffn", False):
        _refuse(model, "MLPs with gates (SwiGLU)")
    if activation is None:
        activation = _ACTIVATIONS.get(backbone.intermediate_activation)
        if activation is None:
            _refuse(model, f"the activation {backbone.intermediate_activation!r}")
    is_classifier = isinstance(model, keras_hub.models.ImageClassifier)
    owner = model if is_classifier else backbone
    arrays = {
        # A copy: NumPy may share the memory of the variable, and JAX deletes that.
        v.path: LazyArray(
            tuple(v.shape),
            np.dtype("float32"),
            lambda v=v: np.array(ops.convert_to_numpy(v.value)),
        )
        for v in owner.weights
    }
    arrays = translate(arrays, rules, f"the {name}", backbone.num_heads)

    def renumber(match):
        return f"encoderblock_{int(match[1]) - first_block}"

    blocks = r"encoderblock_(\d+)"
    arrays = {re.sub(blocks, renumber, name): x for name, x in arrays.items()}
    height, width, channels = backbone.image_shape
    formats = [getattr(x, "data_format", None) for x in flatten_layers(backbone)]
    if "channels_first" in formats:
        channels, height, width = backbone.image_shape
    rows, columns = pair(backbone.patch_size)
    # Of whole patches only
    image_shape = (height // rows * rows, width // columns * columns, channels)
    patches = count_patches(image_shape, pair(backbone.patch_size))
    covered = sum(name in arrays for name in ("cls", "distillation_token"))
    settings = {
        "image_shape": image_shape,
        "activation": activation,
        "layer_norm_epsilon": _epsilon(model, backbone),
        "position_resampling": "bicubic",
    }
    if getattr(backbone, "antialias_in_interpolation", False):
        settings["position_resampling"] = "bicubic_antialias"
    if hasattr(backbone, "layer_scale_init_value"):
        settings["layer_scale"] = backbone.layer_scale_init_value
    if is_classifier and (model.pooling == "gap") == ("cls" in arrays):
        led = "led" if "cls" in arrays else "not led"
        _refuse(model, f"pooling={model.pooling!r} of tokens {led} by a class token")
    return Checkpoint(place_tokens(arrays, (covered,), patches), settings)


def _class_name(backbone):
    """Return the name of the supported KerasHub class of a backbone."""
    for name in SUPPORTED:
        if isinstance(backbone, getattr(keras_hub.models, name)):
            return name
    for name, missing in _REFUSED.items():
        cls = getattr(keras_hub.models, name, None)
        if cls is not None and isinstance(backbone, cls):
            _refuse(backbone, missing)
    raise ValueError(
        "The source must be a dense Vision Transformer of this library, or KerasHub's "
        f"{', '.join(SUPPORTED)}. Received: {type(backbone).__name__}."
    )


def _refuse(model, missing):
    raise ValueError(
        f"A {type(model).__name__} cannot become a model of this library, which lacks "
        f"{missing}. Supported are KerasHub's {', '.join(SUPPORTED)} with plain MLPs."
    )


def _epsilon(model, backbone):
    """Return the epsilon of most normalizations; others may differ if all are small."""
    norms = keras.layers.LayerNormalization
    layers = flatten_layers(backbone)
    epsilons = Counter(layer.epsilon for layer in layers if isinstance(layer, norms))
    if len(epsilons) > 1 and max(epsilons) > _SMALL_EPSILON:
        _refuse(model, f"normalizations of different epsilon, {sorted(epsilons)}")
    return float(epsilons.most_common(1)[0][0])
