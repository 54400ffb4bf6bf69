"""The safetensors format, and the names of `timm` and `transformers` in such files."""

import functools
import os
import re

import ml_dtypes
import numpy as np
from safetensors import safe_open

from keras_softmoe.checkpoints import translation as layouts
from keras_softmoe.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    LazyArray,
    open_file,
)
from keras_softmoe.checkpoints.translation import (
    CLASS_TOKEN,
    DISTILLATION_TOKEN,
    POSITIONS,
    REGISTERS,
    count_patches,
    place_tokens,
    same,
    token,
    translate,
    vector,
)

_open = functools.partial(open_file, kind="a safetensors file")
# Kept, as opening a file reads its whole header. A changed file is opened anew.
_opened = functools.lru_cache(1)(lambda path, time: safe_open(path, framework="numpy"))
_DTYPES = {
    **{f"F{8 * size}": np.dtype(f"float{8 * size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
}


def read_safetensors(path):
    """Open a file in the safetensors format, see `read_checkpoint`."""
    arrays = {}
    with _open(path), safe_open(path, framework="numpy") as file:
        for name in file.keys():
            about = file.get_slice(name)
            dtype = about.get_dtype()
            if dtype not in _DTYPES:
                raise ValueError(f"{name[:80]!r} is of dtype {dtype}")
            read = functools.partial(_read, path, name)
            arrays[name] = LazyArray(tuple(about.get_shape()), _DTYPES[dtype], read)
    return Checkpoint(arrays)


def _read(path, name):
    with _open(path):
        return _opened(path, os.stat(path).st_mtime_ns).get_tensor(name)


_OURS = r"Encoder/encoderblock_\1/"
_POOLING = "MapHead/MultiHeadDotProductAttention/"


def _dense(theirs, ours, kernel="kernel", weight=layouts.matrix, bias=vector):
    """Return rules for the weight and the bias of a layer."""
    return (
        (theirs + r"\.weight", f"{ours}/{kernel}", weight),
        (theirs + r"\.bias", f"{ours}/bias", bias),
    )


_convolution = functools.partial(_dense, weight=layouts.convolution)
_norm = functools.partial(_dense, kernel="scale", weight=vector)
_to_heads = functools.partial(
    _dense, weight=layouts.to_heads, bias=layouts.to_heads_bias
)
_from_heads = functools.partial(_dense, weight=layouts.from_heads)


def _fused(theirs, ours, *parts, joint="."):
    theirs, split = theirs + re.escape(joint), layouts.fused(*parts)
    return tuple(
        (theirs + old, ours + "{}/" + new, split)
        for old, new in (("weight", "kernel"), ("bias", "bias"))
    )


_QKV = ("query", "key", "value")


def _apart(theirs):
    """Return rules for three layers, by `{0}` their name and `{1}` its first letter."""
    return tuple(
        rule
        for name in _QKV
        for rule in _to_heads(
            theirs.format(name, name[0]), _OURS + f"SelfAttention/{name}"
        )
    )


_TIMM_BLOCK = r"blocks\.(\d+)\."
_TIMM = (
    *_convolution(r"patch_embed\.proj", "embedding"),
    (r"cls_token", CLASS_TOKEN, token),
    (r"dist_token", DISTILLATION_TOKEN, token),
    (r"reg_token", REGISTERS, token),
    (r"pos_embed", POSITIONS, token),
    *_norm(_TIMM_BLOCK + r"norm1", _OURS + "LayerNorm_0"),
    *_norm(_TIMM_BLOCK + r"norm2", _OURS + "LayerNorm_1"),
    *_fused(_TIMM_BLOCK + r"attn\.qkv", _OURS + "SelfAttention/", *_QKV),
    *_from_heads(_TIMM_BLOCK + r"attn\.proj", _OURS + "SelfAttention/out"),
    (_TIMM_BLOCK + r"ls1\.gamma", _OURS + "LayerScale_0/scale", vector),
    (_TIMM_BLOCK + r"ls2\.gamma", _OURS + "LayerScale_1/scale", vector),
    *_dense(_TIMM_BLOCK + r"mlp\.fc1", _OURS + "Mlp/Dense_0"),
    *_dense(_TIMM_BLOCK + r"mlp\.fc2", _OURS + "Mlp/Dense_1"),
    *_norm("norm", "Encoder/encoder_norm"),
    *_dense(r"pre_logits\.fc", "pre_logits"),
    *_dense("head", "head"),
    (r"attn_pool\.latent", "MapHead/probe", token),
    *_to_heads(r"attn_pool\.q", _POOLING + "query"),
    *_fused(r"attn_pool\.kv", _POOLING, "key", "value"),
    *_from_heads(r"attn_pool\.proj", _POOLING + "out"),
    *_norm(r"attn_pool\.norm", "MapHead/LayerNorm"),
    *_dense(r"attn_pool\.mlp\.fc1", "MapHead/Mlp/Dense_0"),
    *_dense(r"attn_pool\.mlp\.fc2", "MapHead/Mlp/Dense_1"),
)

# Newer versions of `transformers` have shorter names in a block.
_HF_PREFIX = r"(?:vit\.|deit\.|dinov2\.|dinov2_with_registers\.)?"
_HF_BLOCK = _HF_PREFIX + r"(?:encoder\.)?layers?\.(\d+)\."
_HF_EMBEDDINGS = _HF_PREFIX + r"embeddings\."
_HF = (
    (_HF_EMBEDDINGS + r"cls_token", CLASS_TOKEN, token),
    (_HF_EMBEDDINGS + r"distillation_token", DISTILLATION_TOKEN, token),
    (_HF_EMBEDDINGS + r"register_tokens", REGISTERS, token),
    (_HF_EMBEDDINGS + r"position_embeddings", POSITIONS, token),
    # Used only in training on masked images
    (_HF_EMBEDDINGS + r"mask_token", None, same),
    *_convolution(_HF_EMBEDDINGS + r"patch_embeddings\.projection", "embedding"),
    *_norm(_HF_BLOCK + r"(?:layernorm_before|norm1)", _OURS + "LayerNorm_0"),
    *_norm(_HF_BLOCK + r"(?:layernorm_after|norm2)", _OURS + "LayerNorm_1"),
    *_apart(_HF_BLOCK + r"attention\.(?:attention\.{0}|{1}_proj)"),
    *_from_heads(
        _HF_BLOCK + r"attention\.(?:output\.dense|o_proj)", _OURS + "SelfAttention/out"
    ),
    (_HF_BLOCK + r"layer_scale1\.lambda1", _OURS + "LayerScale_0/scale", vector),
    (_HF_BLOCK + r"layer_scale2\.lambda1", _OURS + "LayerScale_1/scale", vector),
    *_dense(_HF_BLOCK + r"(?:intermediate\.dense|mlp\.fc1)", _OURS + "Mlp/Dense_0"),
    *_dense(_HF_BLOCK + r"(?:output\.dense|mlp\.fc2)", _OURS + "Mlp/Dense_1"),
    *_norm(_HF_PREFIX + "layernorm", "Encoder/encoder_norm"),
    # With a tanh; other libraries call it pre-logits
    *_dense(_HF_PREFIX + r"pooler\.dense", "pre_logits"),
    *_dense("classifier", "head"),
)

_SIGLIP_REST = r"(?:vision_model\.)?"
_SIGLIP_BLOCK = _SIGLIP_REST + r"encoder\.layers\.(\d+)\."
_SIGLIP = (
    (r"text_model\..*|logit_(scale|bias)|.*position_ids", None, same),
    *_convolution(_SIGLIP_REST + r"embeddings\.patch_embedding", "embedding"),
    (_SIGLIP_REST + r"embeddings\.position_embedding\.weight", POSITIONS, token),
    *_norm(_SIGLIP_BLOCK + "layer_norm1", _OURS + "LayerNorm_0"),
    *_norm(_SIGLIP_BLOCK + "layer_norm2", _OURS + "LayerNorm_1"),
    *_apart(_SIGLIP_BLOCK + r"self_attn\.{1}_proj"),
    *_from_heads(_SIGLIP_BLOCK + r"self_attn\.out_proj", _OURS + "SelfAttention/out"),
    *_dense(_SIGLIP_BLOCK + r"mlp\.fc1", _OURS + "Mlp/Dense_0"),
    *_dense(_SIGLIP_BLOCK + r"mlp\.fc2", _OURS + "Mlp/Dense_1"),
    *_norm(_SIGLIP_REST + "post_layernorm", "Encoder/encoder_norm"),
    (_SIGLIP_REST + r"head\.probe", "MapHead/probe", token),
    *_fused(_SIGLIP_REST + r"head\.attention\.in_proj", _POOLING, *_QKV, joint="_"),
    *_from_heads(_SIGLIP_REST + r"head\.attention\.out_proj", _POOLING + "out"),
    *_norm(_SIGLIP_REST + r"head\.layernorm", "MapHead/LayerNorm"),
    *_dense(_SIGLIP_REST + r"head\.mlp\.fc1", "MapHead/Mlp/Dense_0"),
    *_dense(_SIGLIP_REST + r"head\.mlp\.fc2", "MapHead/Mlp/Dense_1"),
    *_dense("classifier", "head"),
)

# The heads of DeiT, one of them on the distillation token
_TWO_HEADS = r"(head_dist|distillation_classifier|cls_classifier)\..*"

# By the name of the patch embedding's kernel
_FORMATS = (
    (r"patch_embed\.proj\.weight", _TIMM),
    (_HF_EMBEDDINGS + r"patch_embeddings\.projection\.weight", _HF),
    (_SIGLIP_REST + r"embeddings\.patch_embedding\.weight", _SIGLIP),
)
# Models whose heads do not have 64 channels, unlike nearly all others
_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_torch_names(
    checkpoint, path, about=None, num_heads=None, image_shape=None, head=True
):
    """Return the parameters of a PyTorch Vision Transformer under V-MoE's names.

    `about` is the content of `config.json`; `num_heads` is used where that lacks it.
    """
    about = about or {}
    if isinstance(nested := about.get("vision_config"), dict):
        about = {**about, **nested}
    found = [
        (name, rules)
        for name in checkpoint
        for pattern, rules in _FORMATS
        if re.fullmatch(pattern, name)
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"'{path}' does not have the names of a Vision Transformer of `timm` or "
            "`transformers`: exactly one kernel of a patch embedding, such as "
            "'patch_embed.proj.weight' or "
            f"'embeddings.patch_embeddings.projection.weight'. Received: {len(found)} "
            f"of them in {len(checkpoint)} arrays, the first of which are "
            f"{', '.join(name[:80] for name in list(checkpoint)[:5]) or '(none)'}."
        )
    ((name, rules),) = found
    shape = checkpoint.shapes[name]
    if len(shape) != 4 or 0 in shape:
        raise CheckpointError(f"{name!r} in '{path}' has the shape {shape}, not four.")
    width, _, *patch_size = shape
    num_heads = num_heads or about.get("num_attention_heads") or _HEADS.get(width)
    if num_heads is None and width % 64 == 0:
        num_heads = width // 64
    if not isinstance(num_heads, int) or num_heads < 1 or width % num_heads:
        raise CheckpointError(
            f"'{path}' does not determine the number of attention heads of a model "
            f"that is {width} wide: pass `num_heads`, or put the model's config.json "
            f"beside the file. Received: {num_heads!r}."
        )
    arrays = {}
    for n in checkpoint:
        if head or not re.fullmatch(_TWO_HEADS, n):
            read = functools.partial(checkpoint.__getitem__, n)
            arrays[n] = LazyArray(checkpoint.shapes[n], checkpoint.dtypes[n], read)
    arrays = translate(arrays, rules, f"'{path}'", num_heads)
    settings = _settings(rules, arrays, about, path)
    num_patches = image_shape and count_patches(image_shape, patch_size)
    of_classes = sum(name in arrays for name in (CLASS_TOKEN, DISTILLATION_TOKEN))
    covered = (of_classes,)
    if rules is _TIMM:
        # With "no_embed_class" only patches have positions.
        registers = arrays[REGISTERS].shape[1] if REGISTERS in arrays else 0
        covered = (0, of_classes + registers)
    return Checkpoint(place_tokens(arrays, covered, num_patches), settings)


def _settings(rules, arrays, about, path):
    activation, epsilon, resampling = "gelu", 1e-6, "bicubic"
    if rules is _TIMM:
        resampling = "bicubic_antialias"
    elif rules is _SIGLIP:
        activation = "gelu_tanh"
    elif "Encoder/encoderblock_0/LayerScale_0/scale" not in arrays:
        epsilon = 1e-12
    elif REGISTERS in arrays:
        resampling = "bicubic_antialias"
    word = about.get("hidden_act", activation)
    if word not in _ACTIVATIONS:
        raise CheckpointError(
            f"The model of '{path}' has an unsupported activation. Accepted: "
            f"{', '.join(_ACTIVATIONS)}. Received: hidden_act={str(word)[:40]!r}."
        )
    epsilon = about.get("layer_norm_eps", epsilon)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise CheckpointError(
            f"The config.json beside '{path}' is damaged. Received: "
            f"layer_norm_eps={str(epsilon)[:40]!r}."
        )
    return {
        "activation": _ACTIVATIONS[word],
        "layer_norm_epsilon": epsilon,
        "position_resampling": resampling,
    }
