"""Inputs and shapes of models of somebody else."""

import keras

from keras_softmoe.keras_adapter.surgery import call_symbolically, is_functional

# Tokens of a text whose length a model leaves open, where a number is needed.
_TOKENS = 128


def ends(model):
    """Return the inputs and outputs of a model as (structures of) Keras tensors."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    if is_functional(model):
        return model.input, model.output
    inputs = keras.Input(model.get_build_config()["input_shape"][1:])
    return inputs, model(inputs)


def token_shapes(model, sites):
    """Return the shapes of the inputs of some MLPs, `(None, ..., D)`.

    Args:
        model: built model.
        sites: dict from blocks to their `Site`.

    Returns:
        dict from the same blocks.
    """
    shapes = {}

    def noting(block):
        def around(call, inputs, *args, **kwargs):
            shapes[block] = (None, *inputs.shape[1:])
            return call(inputs, *args, **kwargs)

        return around

    around = {id(site.parts[0]): noting(block) for block, site in sites.items()}
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

    def known(x):
        sizes = (tokens if size is None else size for size in x.shape[1:])
        return keras.KerasTensor((batch_size, *sizes), dtype=x.dtype)

    return keras.tree.map_structure(known, ends(model)[0])
