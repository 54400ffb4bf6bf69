"""Calls of routers that move weights without gradient."""

import keras

from tests.support.sparse_routers import as_numpy


def call_in_training(router):
    """Callable from tokens and a mask to a decision in training, as NumPy arrays.

    On JAX and TensorFlow it is compiled once. The weights of the router are moved.
    """
    backend = keras.backend.backend()

    def call(tokens, valid):
        return router(tokens, valid=valid, training=True)

    if backend == "tensorflow":
        import tensorflow as tf

        call = tf.function(call)
    elif backend == "jax":
        import jax

        stateless = jax.jit(
            lambda state, tokens, valid: router.stateless_call(
                *state, tokens, valid=valid, training=True
            )
        )

        def call(tokens, valid):
            variables = router.non_trainable_variables
            state = (
                [v.value for v in router.trainable_variables],
                [v.value for v in variables],
            )
            decision, moved = stateless(state, tokens, valid)
            for variable, value in zip(variables, moved, strict=True):
                variable.assign(value)
            return decision

    def called(*arrays):
        return as_numpy(call(*map(keras.ops.convert_to_tensor, arrays)))

    return called
