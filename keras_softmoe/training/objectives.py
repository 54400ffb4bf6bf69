"""Loss and metric of pretraining with many labels, and balanced distillation."""

import keras
from keras import ops

from keras_softmoe.types import DType


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SigmoidCrossentropy(keras.losses.Loss):
    """Binary cross-entropy of every class, summed over the classes.

    A *mean* (`keras.losses.BinaryCrossentropy`) would be outweighed by routers' losses.
    The released code starts the bias of the head at `-log(num_classes)`.

    Args:
        reduction: see `keras.losses.Loss`.
        name: str, name of the loss.
        dtype: see `keras.losses.Loss`.

    Called on `(B, num_classes)` labels from 0 to 1 and logits. Returns the mean over B.

    Source: V-MoE's and Soft MoE's released code ("sigmoid_xent"), not the papers.

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


@keras.saving.register_keras_serializable(package="keras_softmoe")
class PrecisionAt1(keras.metrics.Mean):
    """Share of images whose most probable class is one of their labels.

    With one label per image it is the accuracy. Images without any label are left out
    of the mean. Of equal predictions the class with the lower index counts.

    Args:
        name: str, name of the metric.
        dtype: dtype of the result and of the sums, Keras' default if `None`.

    Called on `(B, num_classes)` labels (positive: the class is a label of the image),
    predictions, and optional weights of the images, `(B,)`, `(B, 1)` or a number. The
    result is 0 before the first image with a label.

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
        shapes = tuple(y_true.shape), tuple(y_pred.shape)
        sizes = zip(*shapes, strict=False)
        may_equal = all(None in pair or pair[0] == pair[1] for pair in sizes)
        if not len(shapes[0]) == len(shapes[1]) == 2 or not may_equal:
            raise ValueError(
                "Labels and predictions must have the same shape (B, num_classes). "
                f"Received: y_true with shape={shapes[0]}, y_pred with "
                f"shape={shapes[1]}. Turn integer labels into multi-hot ones with "
                "`keras.ops.one_hot(labels, num_classes)`."
            )
        is_label = ops.cast(ops.greater(y_true, 0), self.dtype)
        best = ops.expand_dims(ops.argmax(y_pred, axis=-1), -1)
        hits = ops.take_along_axis(is_label, best, axis=-1)[:, 0]
        weights = ops.max(is_label, axis=-1)
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, self.dtype)
            shape = tuple(sample_weight.shape)
            if len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
                raise ValueError(
                    "`sample_weight` must have one number per image, shape (B,) or (B, "
                    f"1). Received: sample_weight with shape={shape}."
                )
            flat = sample_weight[:, 0] if len(shape) == 2 else sample_weight
            weights = weights * flat
        super().update_state(hits, weights)

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Distiller(keras.distillation.Distiller):
    """`keras.distillation.Distiller` that also trains the student's balancing losses.

    The class of Keras leaves out the losses that the student's layers add. Here they
    are part of `loss` in the history, not of `total_loss`, as in `fit` of the student.
    Models are called without their preprocessors: pass preprocessed images.

    Args:
        teacher: built `keras.Model`, which is frozen.
        student: built `keras.Model` with the same outputs.
        distillation_losses: as in `keras.distillation.Distiller`.
        **kwargs: as there, such as `student_loss_weight`.

    Examples:
        >>> losses = keras.distillation.LogitsDistillation(temperature=2)
        >>> teacher = make_classifier()
        >>> distiller = ksm.training.Distiller(teacher, classifier, losses)
        >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> distiller.compile("adam", loss)
        >>> history = distiller.fit(images / 127.5 - 1, labels)
    """

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if y_pred is None:
            y_pred = self(x, training=training)
        # Before Keras calls the teacher, and perhaps the student again.
        added = [ops.sum(loss) for loss in self.losses]
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return sum((ops.cast(a, loss.dtype) for a in added), start=loss)
