"""Parameters under the names of V-MoE's and Soft MoE's released code.

The names are flat and joined by slashes, `Encoder/encoderblock_0/LayerNorm_0/scale`.
One table of rules, read in either direction, says which of our variables each is and
how its shape differs.
"""

import re
from collections.abc import Mapping

import keras
import numpy as np
from keras import ops

from keras_softmoe.checkpoints import Checkpoint

# Our variable (a pattern over the end of its path) -> their name. A word in braces is
# translated. Values never change, and shapes only for the biases of expert banks.
_RULES = (
    (r"patch_embedding/projection/(kernel|bias)", r"embedding/\1"),
    (r"class_token/class_token", r"cls"),
    (r"position_embedding/embedding", r"Encoder/posembed_input/pos_embedding"),
    (r"block_(\d+)/attention_norm/(gamma|beta)", r"{block}\1/LayerNorm_0/{\2}"),
    (r"block_(\d+)/mlp_norm/(gamma|beta)", r"{block}\1/LayerNorm_1/{\2}"),
    (
        r"block_(\d+)/attention/(query|key|value)/(kernel|bias)",
        r"{block}\1/SelfAttention/\2/\3",
    ),
    (
        r"block_(\d+)/attention/attention_output/(kernel|bias)",
        r"{block}\1/SelfAttention/out/\2",
    ),
    (
        r"block_(\d+)/attention/(query|key)_norm/(gamma)",
        r"{block}\1/SelfAttention/\2_ln/{\3}",
    ),
    (
        r"block_(\d+)/mlp/(intermediate|output)_dense/(kernel|bias)",
        r"{block}\1/Mlp/{\2}/\3",
    ),
    (
        r"block_(\d+)/moe/experts/(intermediate|output)_dense/(kernel|bias)",
        r"{block}\1/Moe/Mlp/{\2}/\3",
    ),
    # Neither code has a shared expert.
    (
        r"block_(\d+)/moe/shared_mlp/(intermediate|output)_dense/(kernel|bias)",
        r"{block}\1/Moe/Shared/{\2}/\3",
    ),
    (r"block_(\d+)/moe/router/(mu|scale)", r"{block}\1/Moe/Router/\2"),
    (r"block_(\d+)/moe/router/kernel", r"{block}\1/Moe/Router/dense/kernel"),
    (r"encoder_norm/(gamma|beta)", r"Encoder/encoder_norm/{\1}"),
    # V-MoE's models have neither of these.
    (r"block_(\d+)/(attention|mlp)_scale/gamma", r"{block}\1/LayerScale_{\2}/scale"),
    (r"registers/registers", r"registers"),
    (r"attention_pooling/probe", r"MapHead/probe"),
    (
        r"attention_pooling/attention/(query|key|value)/(kernel|bias)",
        r"MapHead/MultiHeadDotProductAttention/\1/\2",
    ),
    (
        r"attention_pooling/attention/attention_output/(kernel|bias)",
        r"MapHead/MultiHeadDotProductAttention/out/\1",
    ),
    (
        r"attention_pooling/attention/(query|key)_norm/(gamma)",
        r"MapHead/MultiHeadDotProductAttention/\1_ln/{\2}",
    ),
    (r"attention_pooling/mlp_norm/(gamma|beta)", r"MapHead/LayerNorm/{\1}"),
    (
        r"attention_pooling/mlp/(intermediate|output)_dense/(kernel|bias)",
        r"MapHead/Mlp/{\1}/\2",
    ),
    (r"pre_logits/(kernel|bias)", r"pre_logits/\1"),
    (r"predictions/(kernel|bias)", r"head/\1"),
    # A text tower, which two towers have below `txt/`, and the parts around both.
    (r"token_embedding/token_embedding/embeddings", r"Embed_0/embedding"),
    (r"token_embedding/position_embedding", r"Encoder/posembed_input/pos_embedding"),
    (r"image_projection/(kernel|bias)", r"img/head/\1"),
    (r"text_projection/(kernel|bias)", r"txt/head/\1"),
    (r"contrastive_scale/log_scale", r"s"),
    (r"contrastive_scale/logit_bias", r"b"),
)

_WORDS = {
    "block": "Encoder/encoderblock_",
    "gamma": "scale",
    "beta": "bias",
    "intermediate": "Dense_0",
    "output": "Dense_1",
    "attention": "0",
    "mlp": "1",
}


def load_vmoe_params(model: keras.Model, params: Mapping, verbose: int = 0) -> None:
    """Load parameters under the names of the V-MoE and Soft MoE code.

    Args:
        model: a built backbone, classifier or two-tower model of this library.
        params: mapping from flat name to array. Arrays of a result of `read_checkpoint`
            are read one at a time. A leading `params/` is ignored.
        verbose: 0 or 1, whether to show a progress bar.

    Raises:
        ValueError: if a variable of the model finds no array, an array no variable, a
            shape does not fit or an array holds no real numbers. The message lists all
            of them; the model is then unchanged. Also if a number is not finite; the
            arrays before it are then in the model.

    Examples:
        >>> np.savez("params.npz", **ksm.converters.to_vmoe_params(classifier))
        >>> ksm.converters.load_vmoe_params(classifier, dict(np.load("params.npz")))
    """
    keys = {key.removeprefix("params/"): key for key in params}
    if isinstance(params, Checkpoint):
        shapes = {name: params.shapes[key] for name, key in keys.items()}
    else:
        shapes = {name: np.shape(params[key]) for name, key in keys.items()}
    _check_dtypes(params, keys)
    named = named_variables(model)
    _check_fit(named, shapes)
    progress = keras.utils.Progbar(len(named), verbose=verbose, unit_name="array")
    for name, variable in named.items():
        array = np.asarray(params[keys[name]])
        if array.dtype.name == "bfloat16":
            # Not every backend takes NumPy arrays of it.
            array = array.astype("float32")
        if not np.isfinite(array).all():
            raise ValueError(
                "Parameters must be finite numbers: the file is damaged, or the "
                f"training had failed. Received: NaN or infinity in {name!r}. Fetch "
                "the file again, or take an earlier one."
            )
        variable.assign(np.reshape(array, variable.shape))
        progress.add(1)


def _check_dtypes(params, keys):
    """Raise unless all arrays hold real numbers."""
    dtypes = getattr(params, "dtypes", {})
    wrong = []
    for name, key in keys.items():
        dtype = dtypes[key] if key in dtypes else np.asarray(params[key]).dtype
        if dtype.kind not in "fiu" and dtype.name != "bfloat16":
            wrong.append(f"{name} ({dtype})")
    if wrong:
        raise ValueError(
            "Parameters must be real numbers. Received: "
            f"{', '.join(sorted(wrong)[:5])}. Of complex numbers the imaginary part "
            "would be lost: these are the parameters of something else."
        )


def _check_fit(named, shapes):
    """Raise unless the variables and the arrays of these shapes match."""
    problems = [
        f"missing: {name} (for {variable.path}, shape {tuple(variable.shape)})"
        for name, variable in named.items()
        if name not in shapes
    ]
    problems += [
        f"unused: {name}, shape {shape}"
        for name, shape in shapes.items()
        if name not in named
    ]
    problems += [
        f"shape: {name} is {shapes[name]}, {variable.path} takes "
        f"{_array_shape(variable)}"
        for name, variable in named.items()
        if name in shapes and shapes[name] != _array_shape(variable)
    ]
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

    Raises:
        ValueError: if the model has a variable that those names do not cover.

    Examples:
        >>> parameters = ksm.converters.to_vmoe_params(classifier)
        >>> parameters["head/bias"].shape
        (179,)
        >>> np.savez("params.npz", **parameters)
    """
    return {
        name: np.reshape(ops.convert_to_numpy(variable), _array_shape(variable))
        for name, variable in named_variables(model).items()
    }


def named_variables(model, with_routers=True):
    """Return a dict from V-MoE's name to our variable, for all weights of a model.

    Args:
        model: a backbone or classifier of this library.
        with_routers: bool, whether the weights of routers are among them.
    """
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
    for pattern, replacement in _RULES:
        match = re.search(rf"(?:^|/){pattern}$", path)
        if match:
            # "{\1}" becomes "{gamma}", which the words then translate.
            return match.expand(replacement).format(**_WORDS)
    return None


def _array_shape(variable):
    """Return the shape of the variable as the V-MoE code stores it."""
    shape = tuple(variable.shape)
    # Our banks of biases are (E, 1, H), ready to be added to (G, E, C, H).
    if variable.path.endswith("bias") and "/experts/" in variable.path:
        return (shape[0], shape[-1])
    return shape
