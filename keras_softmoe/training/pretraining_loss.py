"""The loss of the papers' pretraining."""

import keras
from keras import ops

from keras_softmoe.types import DType


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SigmoidCrossentropy(keras.losses.Loss):
    """Binary cross-entropy of every class, summed over the classes.

    Takes labels that are one-hot, multi-hot (an image with several true classes) or
    mixed. `keras.losses.BinaryCrossentropy` takes the *mean* over the classes instead,
    which is `num_classes` times smaller: beside it the routers' balancing losses weigh
    that much more than in the papers, and a limit on the gradient that much less.

    A head with logits of 0 has the loss `num_classes * log(2)`. The released code
    therefore starts the bias of the head at `-log(num_classes)`.

    Args:
        reduction: see `keras.losses.Loss`.
        name: str, name of the loss.
        dtype: see `keras.losses.Loss`.

    Call arguments:
        - `y_true`: `(B, num_classes)` tensor, labels from 0 to 1.
        - `y_pred`: `(B, num_classes)` tensor, logits.

    Returns:
        `()` tensor, the mean over the images.

    Source: V-MoE's and Soft MoE's released code ("sigmoid_xent"); the papers do not
    name their loss.

    Examples:
        >>> classifier.compile("adam", loss=ksm.training.SigmoidCrossentropy())
    """

    def __init__(
        self,
        reduction: str = "sum_over_batch_size",
        name: str = "sigmoid_crossentropy",
        dtype: DType = None,
    ):
        super().__init__(reduction=reduction, name=name, dtype=dtype)

    def call(self, y_true, y_pred):
        y_pred = ops.convert_to_tensor(y_pred)
        y_true = ops.cast(y_true, y_pred.dtype)
        mean = ops.binary_crossentropy(y_true, y_pred, from_logits=True)
        return ops.sum(mean, axis=-1)
