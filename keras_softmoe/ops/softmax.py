"""The softmax of routers and of attention."""

from keras import ops


def softmax(logits, axis=-1):
    """Softmax that also takes an axis of size one.

    Keras warns that this gives ones. With a single expert, slot or token it is meant.

    Args:
        logits: float tensor.
        axis: int.

    Returns:
        Tensor like `logits`, which sums to one along the axis.
    """
    if logits.shape[axis] == 1:
        return ops.ones_like(logits)
    return ops.softmax(logits, axis=axis)
