"""Parameters under the names of V-MoE's and Soft MoE's released code.

The names are flat and joined by slashes, `Encoder/encoderblock_0/LayerNorm_0/scale`.
Values never change, and shapes only for the biases of expert banks.
"""

import re
from collections.abc import Mapping

import keras
import numpy as np
from keras import ops

from keras_softmoe.checkpoints import Checkpoint

_BLOCK = r"Encoder/encoderblock_\1/"
_POSITIONS = "Encoder/posembed_input/pos_embedding"
# Part of the path of our variable (a pattern) -> theirs. The rest goes word by word.
_PARTS = (
    (r"patch_embedding/projection/", "embedding/"),
    (r"class_token/class_token", "cls"),
    (r"position_embedding/embedding$", _POSITIONS),
    (r"block_(\d+)/attention_norm/", _BLOCK + "LayerNorm_0/"),
    (r"block_(\d+)/attention/", _BLOCK + "SelfAttention/"),
    (r"block_(\d+)/mlp_norm/", _BLOCK + "LayerNorm_1/"),
    (r"block_(\d+)/mlp/", _BLOCK + "Mlp/"),
    (r"block_(\d+)/moe/experts/", _BLOCK + "Moe/Mlp/"),
    (r"block_(\d+)/moe/router/(?=kernel)", _BLOCK + "Moe/Router/dense/"),
    (r"block_(\d+)/moe/router/(?=mu|scale)", _BLOCK + "Moe/Router/"),
    (r"encoder_norm/", "Encoder/encoder_norm/"),
    (r"attention_pooling/probe", "MapHead/probe"),
    (r"attention_pooling/attention/", "MapHead/MultiHeadDotProductAttention/"),
    (r"attention_pooling/mlp_norm/", "MapHead/LayerNorm/"),
    (r"attention_pooling/mlp/", "MapHead/Mlp/"),
    (r"pre_logits/", "pre_logits/"),
    (r"predictions/", "head/"),
    # V-MoE's models have none of these.
    (r"(project_P\d|convolution)/", r"Decoder/\1/"),
    (r"block_(\d+)/moe/shared_mlp/", _BLOCK + "Moe/Shared/"),
    (r"block_(\d+)/attention_scale/", _BLOCK + "LayerScale_0/"),
    (r"block_(\d+)/mlp_scale/", _BLOCK + "LayerScale_1/"),
    (r"registers/registers", "registers"),
    # A text tower, which two towers have below `txt/`, and the parts around both.
    (r"token_embedding/token_embedding/embeddings", "Embed_0/embedding"),
    (r"token_embedding/position_embedding$", _POSITIONS),
    (r"image_projection/", "img/head/"),
    (r"text_projection/", "txt/head/"),
    (r"contrastive_scale/log_scale", "s"),
    (r"contrastive_scale/logit_bias", "b"),
)
_WORDS = {
    **{word: word for word in ("kernel", "bias", "query", "key", "value", "mu")},
    **{"scale": "scale", "gamma": "scale", "beta": "bias"},
    **{"intermediate_dense": "Dense_0", "output_dense": "Dense_1"},
    **{"attention_output": "out", "query_norm": "query_ln", "key_norm": "key_ln"},
}


def load_vmoe_params(model: keras.Model, params: Mapping, verbose: int = 0) -> None:
    """Load parameters under the names of the V-MoE and Soft MoE code.

    Args:
        model: a built backbone, classifier or two-tower model of this library.
        params: mapping from flat name to array. Arrays of a result of `read_checkpoint`
            are read one at a time. A leading `params/` is ignored.
        verbose: 0 or 1, whether to show a progress bar.

    Raises:
        ValueError: if a variable of the model finds no array, an array no variable, or
            one has another shape or no real numbers. The message lists all of them;
            the model is then unchanged. Also if a number is not finite.

    Examples:
        >>> np.savez("params.npz", **ksm.converters.to_vmoe_params(classifier))
        >>> ksm.converters.load_vmoe_params(classifier, dict(np.load("params.npz")))
    """
    keys = {key.removeprefix("params/"): key for key in params}
    is_checkpoint = isinstance(params, Checkpoint)
    shapes, wrong = {}, []
    for name, key in keys.items():
        array = None if is_checkpoint else np.asarray(params[key])
        shapes[name] = params.shapes[key] if is_checkpoint else array.shape
        dtype = params.dtypes[key] if is_checkpoint else array.dtype
        if dtype.kind not in "fiu" and dtype.name != "bfloat16":
            wrong.append(f"{name} ({dtype})")
    if wrong:
        raise ValueError(
            f"Parameters are real numbers. Received: {', '.join(sorted(wrong)[:5])}."
        )
    named = named_variables(model)
    _check_fit(named, shapes)
    progress = keras.utils.Progbar(len(named), verbose=verbose, unit_name="array")
    for name, variable in named.items():
        array = np.asarray(params[keys[name]])
        if array.dtype.name == "bfloat16":
            # Not every backend accepts NumPy arrays of it.
            array = array.astype("float32")
        if not np.isfinite(array).all():
            raise ValueError(
                "Parameters must be finite numbers: the file is damaged, or the "
                f"training had failed. Received: NaN or infinity in {name!r}. "
                "Fetch the file again."
            )
        variable.assign(np.reshape(array, variable.shape))
        progress.add(1)


def _check_fit(named, shapes):
    """Raise unless the variables and the arrays of these shapes match."""
    problems = [f"unused: {n}, shape {shapes[n]}" for n in shapes.keys() - named.keys()]
    for name, variable in named.items():
        expected = _array_shape(variable)
        if name not in shapes:
            shape = tuple(variable.shape)
            problems.append(f"missing: {name} (for {variable.path}, shape {shape})")
        elif shapes[name] != expected:
            problems.append(
                f"shape: {name} is {shapes[name]}, {variable.path} takes {expected}"
            )
    if problems:
        raise ValueError(
            "These parameters do not fit the model. Build the model with the settings "
            "they were trained with, or pass the matching part of them. Received "
            f"{len(shapes)} arrays for {len(named)} variables:\n  "
            + "\n  ".join(sorted(problems))
        )


def to_vmoe_params(model: keras.Model) -> dict:
    """Return the parameters under the names of the V-MoE and Soft MoE code.

    Args:
        model: a built backbone or classifier of this library.

    Returns:
        dict from flat name to NumPy array. `load_vmoe_params` reads it back.

    Examples:
        >>> parameters = ksm.converters.to_vmoe_params(classifier)
        >>> parameters["head/bias"].shape
        (1229,)
        >>> np.savez("params.npz", **parameters)
    """
    return {
        name: np.reshape(ops.convert_to_numpy(variable), _array_shape(variable))
        for name, variable in named_variables(model).items()
    }


def named_variables(model, with_routers=True):
    """Return a dict from V-MoE's name to our variable, for all weights of a model."""
    named, unknown = {}, []
    backbone = getattr(model, "backbone", model)
    for prefix, tower in (("img", "image_backbone"), ("txt", "text_backbone")):
        if hasattr(backbone, tower):
            variables = named_variables(getattr(backbone, tower), with_routers)
            named |= {f"{prefix}/{name}": v for name, v in variables.items()}
    known = {id(variable) for variable in named.values()}
    for variable in model.weights:
        is_of_router = "/router/" in variable.path
        if id(variable) in known or (is_of_router and not with_routers):
            continue
        name = _translate(variable.path)
        if name is None:
            unknown.append(variable.path)
        else:
            named[name] = variable
    if unknown:
        raise ValueError(
            "The model has variables that V-MoE's code has no name for (a quantized or "
            f"LoRA-adapted model, for example). Received: {', '.join(unknown)}."
        )
    return named


def _translate(path):
    """Return V-MoE's name of a variable, `None` if there is none."""
    for pattern, replacement in _PARTS:
        match = re.search(rf"(?:^|/){pattern}", path)
        if match:
            words = list(filter(None, path[match.end() :].split("/")))
            if all(word in _WORDS for word in words):
                return match.expand(replacement) + "/".join(map(_WORDS.get, words))
    return None


def _array_shape(variable):
    """Return the shape of the variable as the V-MoE code stores it."""
    shape = tuple(variable.shape)
    # Our banks of biases are (E, 1, H), ready to be added to (G, E, C, H).
    if variable.path.endswith("bias") and "/experts/" in variable.path:
        return (shape[0], shape[-1])
    return shape
