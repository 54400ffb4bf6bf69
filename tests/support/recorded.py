"""What a layer returns, together with what its router decided."""

from keras_softmoe import routers


def recorded(layer, inputs, **kwargs):
    """Outputs of a call and the `Decision` of the one router in the layer."""
    with routers.record() as decisions:
        outputs = layer(inputs, **kwargs)
    (decision,) = decisions.values()
    return outputs, decision
