"""Inputs of models of other libraries, and shapes of tokens inside them."""

import functools

import keras
from keras import ops

from keras_softmoe.keras_adapter.surgery import FUNCTIONAL, call_symbolically
from keras_softmoe.models.with_experts.mlp_sites import GATED

# Tokens of a text whose length a model leaves open, where a number is needed.
_TOKENS = 128


def ends(model):
    """Return the inputs and outputs of a model as (structures of) Keras tensors."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    if isinstance(model, FUNCTIONAL):
        return model.input, model.output
    inputs = keras.Input(model.get_build_config()["input_shape"][1:])
    return inputs, model(inputs)


def check_sites(model, sites):
    """Raise unless the sites that a user has named compute like MLPs in a call."""
    sites = [site for site in sites if site.gate is None]
    calls = {id(part): [] for site in sites for part in site.parts}

    def note(key, call, *args, **kwargs):
        outputs = call(*args, **kwargs)
        calls[key].append((args, kwargs, outputs))
        return outputs

    around = {key: functools.partial(note, key) for key in calls}
    call_symbolically(model, example_inputs(model), around)
    for site in sites:
        flows = [calls[id(part)] for part in site.parts]
        for flow in zip(*flows, strict=False) if all(flows) else [None]:
            _check_flow(site, flow)


def _check_flow(site, flow):
    """Raise unless the calls of the parts of a site make up an MLP."""
    parts = ", ".join(
        f"{path!r} (`{type(part).__name__}`)"
        for path, part in zip(site.paths, site.parts, strict=True)
    )

    def refuse(problem):
        raise ValueError(
            "A site is an MLP, from tokens to tokens of the same shape: a layer, or "
            f"all layers from its first to its last one in their order. But {problem}. "
            f"Received: sites with {parts}."
        )

    if flow is None:
        refuse("one of these is not called")
    first = [args[0] for args, _, _ in flow if args]
    is_half = len(flow) == 1 and "gat" in site.paths[0].rpartition("/")[2]
    if len({id(x) for x in first}) < len(first) or (
        is_half and getattr(flow[0][2], "shape", None) != first[0].shape
    ):
        raise ValueError(f"{GATED} Received: sites with {site.paths}.")
    tokens = outputs = first[0] if first else None
    for path, (args, kwargs, results) in zip(site.paths, flow, strict=True):
        further = [x for x in kwargs if x not in ("mask", "training")]
        if len(args) != 1 or further or not ops.is_tensor(args[0]):
            refuse(f"{path!r} is called with more than one tensor")
        if path != site.paths[0] and args[0] is not outputs:
            refuse(
                f"{path!r} does not get the outputs of the part before it: name the "
                "layers between them too, or a layer around them"
            )
        outputs = results
    shapes = [
        tuple(x.shape) if ops.is_tensor(x) else f"a {type(x).__name__}"
        for x in (tokens, outputs)
    ]
    is_float = "float" in keras.backend.standardize_dtype(tokens.dtype)
    if len(shapes[0]) < 3 or shapes[0] != shapes[1] or not is_float:
        refuse(f"these map inputs of shape {shapes[0]} to {shapes[1]}")


def token_shapes(model, sites):
    """Return a dict from blocks to the input shapes of MLPs, `(None, ..., D)`."""
    shapes = {}

    def note(block, call, inputs, *args, **kwargs):
        shapes[block] = (None, *inputs.shape[1:])
        return call(inputs, *args, **kwargs)

    around = {id(s.parts[0]): functools.partial(note, b) for b, s in sites.items()}
    call_symbolically(model, example_inputs(model), around)
    never = [block for block in sites if block not in shapes]
    if never:
        raise ValueError(
            "The model does not call these MLPs for its outputs, so their experts "
            f"would compute nothing. Received: blocks={never}."
        )
    return shapes


def example_inputs(model, batch_size=1):
    """Return the inputs of a model as Keras tensors of known sizes."""
    tokens = getattr(model, "max_sequence_length", None) or _TOKENS
    inputs, found = ends(model)[0], []
    for x in keras.tree.flatten(inputs):
        sizes = [tokens if n is None else n for n in x.shape[1:]]
        if x.shape[1:].count(None) > 2:
            # Any number of masks of any size, which prompt SAM: none
            sizes[0] = 0
        found.append(keras.KerasTensor((batch_size, *sizes), x.dtype))
    return keras.tree.pack_sequence_as(inputs, found)
