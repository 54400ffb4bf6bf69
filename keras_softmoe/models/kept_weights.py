"""Weights that survive data that fail."""

import contextlib

import keras


@contextlib.contextmanager
def keeps_weights(model, trains):
    """Within it, a model keeps its weights when the data of a step fail.

    On JAX Keras takes the weights out of the model for its steps. If a pipeline fails
    when it is asked for the first batch of `fit`, or for any of `evaluate`, nobody else
    would put them back.

    Args:
        model: a `keras.Model`.
        trains: bool, whether the steps are those of `fit`.
    """
    if keras.backend.backend() != "jax" or not model.compiled:
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
        # What steps have made of them; then those that no step has used up.
        model.jax_state_sync()
        model._jax_state = None
        for variable, value in zip(variables, values, strict=True):
            if variable._value is None and not value.is_deleted():
                variable.assign(value)
        raise
