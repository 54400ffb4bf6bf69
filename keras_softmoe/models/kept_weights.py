"""Weights that survive data that fail."""

import contextlib

import keras


@contextlib.contextmanager
def keeps_weights(model, trains):
    """Within it, a model keeps its weights when the data of a first step fail.

    On JAX Keras takes the weights out of the model for a step and puts them back after
    it. If a pipeline fails when it is asked for the very first batch, nobody would.

    Args:
        model: a `keras.Model`, compiled.
        trains: bool, whether the steps are those of `fit`.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    variables = [*model.variables, *model.metrics_variables]
    if trains:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables += model.optimizer.variables
    values = [variable.value for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in zip(variables, values, strict=True):
            # Taken out, and not used up by a step.
            if variable._value is None and not value.is_deleted():
                variable.assign(value)
        raise
