"""Distillation to a student with balancing losses."""

import keras
from keras import ops


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
        >>> distiller = ksm.training.Distiller(
        ...     teacher=make_classifier(),
        ...     student=classifier,
        ...     distillation_losses=keras.distillation.LogitsDistillation(
        ...         temperature=2
        ...     ),
        ...     student_loss_weight=0.5,
        ... )
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
