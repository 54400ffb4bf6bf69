"""The metric of the papers' pretraining."""

import keras
from keras import ops

from keras_softmoe.types import DType


@keras.saving.register_keras_serializable(package="keras_softmoe")
class PrecisionAt1(keras.metrics.Mean):
    """Share of images whose most probable class is one of their labels.

    The papers' upstream metric, for images with several labels each. With one label
    per image it is the accuracy.

    Images without any label are left out of the mean: no prediction could be right.
    The empty images that fill up a last batch are such. Of equal predictions the class
    with the lower index counts.

    Args:
        name: str, name of the metric.
        dtype: dtype of the result and of the sums. That of Keras if `None`.

    Call arguments:
        - `y_true`: `(B, num_classes)` labels, positive where the class is a label of
          the image (multi-hot).
        - `y_pred`: `(B, num_classes)` logits or probabilities.
        - `sample_weight`: optional weights of the images, `(B,)`, `(B, 1)` or a number.

    Returns:
        a float in [0, 1]; 0 before the first image with a label.

    Raises:
        ValueError: if labels and predictions have not the same shape
            `(B, num_classes)`.

    Source: V-MoE, appendix B.6, which does not mention images without labels.

    Examples:
        >>> metric = ksm.training.PrecisionAt1()
        >>> truth = np.array([[1, 0, 1], [0, 1, 0]])
        >>> float(metric(truth, np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])))
        0.5
    """

    def __init__(self, name: str = "precision_at_1", dtype: DType = None):
        super().__init__(name=name, dtype=dtype)
        # Callbacks read it to find out whether higher is better.
        self._direction = "up"

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        if len(y_pred.shape) != 2 or not _may_equal(y_true.shape, y_pred.shape):
            raise ValueError(
                "Labels and predictions must have the same shape (B, num_classes). "
                f"Received: y_true with shape={tuple(y_true.shape)}, y_pred with "
                f"shape={tuple(y_pred.shape)}. Turn integer labels into multi-hot ones "
                "with `keras.ops.one_hot(labels, num_classes)`."
            )
        is_label = ops.cast(ops.greater(y_true, 0), self.dtype)
        best = ops.expand_dims(ops.argmax(y_pred, axis=-1), -1)
        hits = ops.take_along_axis(is_label, best, axis=-1)[:, 0]
        weights = ops.max(is_label, axis=-1)
        if sample_weight is not None:
            weights = weights * _one_per_image(ops.cast(sample_weight, self.dtype))
        super().update_state(hits, weights)

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


def _one_per_image(sample_weight):
    shape = sample_weight.shape
    if len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
        raise ValueError(
            "`sample_weight` must have one number per image, shape (B,) or (B, 1). "
            f"Received: sample_weight with shape={tuple(shape)}."
        )
    return sample_weight[:, 0] if len(shape) == 2 else sample_weight


def _may_equal(shape, other):
    return len(shape) == len(other) and all(
        None in sizes or sizes[0] == sizes[1]
        for sizes in zip(shape, other, strict=True)
    )
