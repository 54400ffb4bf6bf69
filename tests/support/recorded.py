"""What a layer returns, together with what its router decided."""

import keras

from keras_softmoe import routers
from tests.support.gradients import outputs


def recorded(layer, inputs, **kwargs):
    """Outputs of a call and the `Decision` of the one router in the layer.

    On JAX they are arrays of one program, which compiles faster than each operation of
    it, and the layer keeps no losses and draws the same random numbers again.
    """

    def call(inputs):
        with routers.record() as decisions:
            found = layer(inputs, **kwargs)
        (decision,) = decisions.values()
        return found, decision

    if keras.backend.backend() == "jax":
        return outputs(call, inputs)
    return call(inputs)
