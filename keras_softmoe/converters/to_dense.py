"""Conversion of a model with experts to a dense one."""

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_whole_numbers, quote
from keras_softmoe.keras_adapter.surgery import renew_parameters, sublayers
from keras_softmoe.layers import Experts
from keras_softmoe.models.backbone import MoEBackbone
from keras_softmoe.models.with_experts.copies import describe_layers, task_with
from keras_softmoe.models.with_experts.experts_from_mlps import Chain, plain_mlp
from keras_softmoe.models.with_experts.mlp_sites import find_sites, sites_at
from keras_softmoe.models.with_experts.model import ModelWithExperts
from keras_softmoe.ops import DenseRouting, to_dense
from keras_softmoe.routers import record
from keras_softmoe.types import Data


def to_dense_model(
    model: keras.Model, data: Data = None, batch_size: int = 32, verbose: int = 1
) -> keras.Model:
    """Convert a model with experts to a dense one, to be distilled or fine-tuned.

    Each mixture of experts becomes one MLP, with the mean of the weights of its experts
    (with a shared expert: the hidden units of both). All else is copied, and the model
    that is passed in is not changed. The outputs are the same only if the experts are
    equal and the gates of each token sum to one.

    Args:
        model: a model from `add_experts`, a `ViTMoEBackbone`, `TextMoEBackbone` or
            `LIMoEBackbone`, or a task with one of these.
        data: inputs of the backbone, an array or a dict of arrays: some hundred. The
            mean is weighted by the tokens of each expert (for soft routers and LIMoE's:
            by the sum of the combine weights). `None` for the plain mean.
        batch_size: int, inputs at a time.
        verbose: 0 or 1, whether to print the difference in features.

    Returns:
        A dense model of the same class, or of the original one. With data it has the
        attribute `feature_difference`, a float: the norm of the difference in outputs
        over the norm of the outputs.

    Examples:
        >>> router = ksm.routers.SoftRouter(num_experts=4)
        >>> soft = ksm.converters.add_experts(vit, (1,), router, verbose=0)
        >>> images = np.random.uniform(size=(4, 32, 32, 3))
        >>> dense = ksm.converters.to_dense_model(soft, images, verbose=0)
        >>> type(dense).__name__, dense.feature_difference < 0.5
        ('ViTBackbone', True)
    """
    check_whole_numbers(1, batch_size=batch_size)
    backbone = getattr(model, "backbone", model)
    mixtures = _mixtures(model, backbone)
    shares = _shares(backbone, mixtures, data, batch_size)
    if isinstance(backbone, ModelWithExperts):
        dense = _dense_of_any(backbone, shares)
    else:
        dense = _dense_of_ours(backbone, shares)
    note, difference = "plain means of their experts. Pass `data` to weight them.", None
    if data is not None:
        difference = _difference(backbone, dense, data, batch_size)
        note = f"features differ by {100 * difference:.3g} % (of their norm)."
    if verbose:
        print(f"{len(mixtures)} mixtures of {backbone.name!r} became MLPs: {note}")
    if backbone is not model:
        dense = task_with(model, dense)
    renew_parameters(dense)
    if difference is not None:
        dense.feature_difference = difference
    return dense


def _mixtures(model, backbone):
    """Return a dict from blocks to their `layers.MoE`, after checks."""
    if isinstance(backbone, ModelWithExperts):
        mixtures = backbone.moe_layers
    elif isinstance(backbone, MoEBackbone) and hasattr(backbone, "moe_layers"):
        mixtures = {block: backbone.blocks[block].moe for block in backbone.moe_layers}
    else:
        raise ValueError(
            "`model` must be a model from `add_experts`, a backbone with blocks of "
            "this library, or a task with one; pass two towers separately. "
            f"Received: model={quote(model)}."
        )
    if not mixtures:
        raise ValueError(f"A dense model has no experts. Received: {quote(model)}.")
    for block, moe in mixtures.items():
        if isinstance(backbone, ModelWithExperts) and moe.shared_mlp_dim:
            raise ValueError(
                "An MLP with the units of a shared expert and of the mean of the "
                "others does not fit into the class of the dense model. Received: "
                f"shared_mlp_dim={moe.shared_mlp_dim} in block {block}."
            )
    if getattr(backbone, "expert_mlp_dim", None):
        raise ValueError(
            "The mean of experts must be as wide as an MLP of the dense model. "
            f"Received: a model with expert_mlp_dim={backbone.expert_mlp_dim}."
        )
    changed = [
        layer.path
        for _, layer, _ in sublayers(backbone)
        if getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
    ]
    if changed:
        raise ValueError(
            "Weights must be floats without LoRA factors. Received: "
            f"{len(changed)} changed layers, such as {changed[0]!r}. Merge the factors "
            "(`ksm.models.merge_lora`), or use the model from before `quantize`."
        )
    return mixtures


def _shares(backbone, mixtures, data, batch_size):
    """Return a dict from blocks to the share of each expert, `(E,)`, which sum to 1."""
    totals = {b: np.zeros(moe.router.num_experts) for b, moe in mixtures.items()}
    blocks = {id(moe.router): block for block, moe in mixtures.items()}
    for batch in _batches(data, batch_size):
        with record(key=lambda router: (blocks.get(id(router)), router)) as decisions:
            backbone(batch, training=False)
        for (block, router), decision in decisions.items():
            if block is not None:
                totals[block] += _load(router, decision)
    shares = {}
    for block, total in totals.items():
        even = np.full(len(total), 1 / len(total))
        shares[block] = total / total.sum() if total.sum() else even
    return shares


def _load(router, decision):
    """Return the load of each expert in a decision, `(E,)`."""
    routing = decision.routing
    if isinstance(routing, DenseRouting) or router.knows_modalities:
        if not isinstance(routing, DenseRouting):
            num_tokens = decision.summary["valid"].shape[1]
            routing = to_dense(routing, num_tokens)
        weights = ops.sum(ops.cast(routing.combine, "float32"), axis=(0, 1, 3))
        return ops.convert_to_numpy(weights).astype("float64")
    load = ops.convert_to_numpy(decision.summary["load"])
    return load.sum(axis=0).astype("float64")


def _batches(data, batch_size):
    """Yield batches of an array, or of a dict of them."""
    size = 0 if data is None else len(keras.tree.flatten(data)[0])
    for start in range(0, size, batch_size):
        rows = slice(start, start + batch_size)
        yield keras.tree.map_structure(
            lambda x, rows=rows: ops.convert_to_tensor(x[rows]), data
        )


def _difference(backbone, dense, data, batch_size):
    """Return the norm of the difference in outputs over that of the outputs."""
    squares = np.zeros(2)
    for batch in _batches(data, batch_size):
        outputs = backbone(batch, training=False), dense(batch, training=False)
        for x, y in zip(*map(keras.tree.flatten, outputs), strict=True):
            x, y = (ops.convert_to_numpy(ops.cast(z, "float32")) for z in (x, y))
            squares += np.square(x - y).sum(), np.square(x).sum()
    return float(np.sqrt(squares[0] / max(squares[1], np.finfo("float32").tiny)))


def _mean(weight, share):
    """Return the mean of `(E, ...)` weights of experts, an array."""
    weight = ops.convert_to_numpy(ops.cast(weight, "float32"))
    return np.tensordot(share, weight.astype("float64"), 1).astype("float32")


def _dense_of_any(sparse, shares):
    """Return the dense model of a `ModelWithExperts`."""
    # The user's own objects, not those of a file
    config = sparse.held.dense_config
    dense = keras.saving.deserialize_keras_object(config, safe_mode=False)
    kept = sparse.held.dense_weights
    for variable, source in zip(dense.weights, kept, strict=True):
        if source is not None:
            variable.assign(ops.convert_to_numpy(source))
    places = sparse.held.sites
    sites = find_sites(dense) if places is None else sites_at(dense, places)
    for block, moe in sparse.moe_layers.items():
        mlp = Chain(sites[block].parts, sites[block].gate)
        if isinstance(moe.experts, Experts):
            plain = plain_mlp(mlp, sparse.held.shapes[block])
            plain.write(_mean_mlp(moe.experts, shares[block]))
            continue
        for variable, stacked in zip(mlp.weights, moe.experts.stacked, strict=True):
            variable.assign(_mean(stacked, shares[block]))
    describe_layers(dense)
    return dense


def _dense_of_ours(sparse, shares):
    """Return the dense twin of a backbone of this library."""
    config = {**sparse.get_config(), "moe_layers": (), "router": None}
    config["mlp_dim"] += config.pop("shared_mlp_dim", None) or 0
    dense = type(sparse).from_config(config)
    # The layers of both have the same names, apart from MLPs and mixtures.
    sources = {weight.path: weight for weight in sparse.weights}
    for weight in dense.weights:
        if weight.path not in sources:
            continue
        value = ops.convert_to_numpy(sources[weight.path])
        if tuple(weight.shape) != value.shape:
            # An MLP with more units computes the same if their output weights are 0.
            whole = np.array(ops.convert_to_numpy(weight))
            if weight.path.endswith("output_dense/kernel"):
                whole[:] = 0
            whole[tuple(map(slice, value.shape))] = value
            value = whole
        weight.assign(value)
    for block, share in shares.items():
        mlp, moe = dense.blocks[block].mlp, sparse.blocks[block].moe
        means = _mean_mlp(moe.experts, share)
        if moe.shared_mlp is not None:
            means = _sum_of_mlps(moe.shared_mlp, means)
        for part, (kernel, bias) in means.items():
            getattr(mlp, part).kernel.assign(kernel)
            getattr(mlp, part).bias.assign(bias)
    return dense


def _sum_of_mlps(shared, means):
    """Return the weights of the MLP that computes the sum of two."""
    found = {}
    for name, (kernel, bias) in means.items():
        layer, is_last = getattr(shared, name), name == "output_dense"
        first, first_bias = map(ops.convert_to_numpy, (layer.kernel, layer.bias))
        found[name] = (
            np.concatenate((first, kernel), axis=0 if is_last else -1),
            first_bias + bias if is_last else np.concatenate((first_bias, bias)),
        )
    return found


def _mean_mlp(experts, share):
    """Return a dict from the names of banks to their mean kernel and bias, arrays."""
    return {
        bank.name: (_mean(bank.kernel, share), _mean(bank.bias, share)[0])
        for bank in experts.banks
    }
