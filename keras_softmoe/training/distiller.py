"""Distillation to a student with balancing losses."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Distiller(keras.distillation.Distiller):
    """`keras.distillation.Distiller` that also trains the student's balancing losses.

    The class of Keras leaves out whatever the layers of a student add to the loss, the
    balancing losses of routers and weight regularizers: experts would soon be unused.
    Here they are added as in `fit` of the student, whatever `student_loss_weight` is.

    In the history `loss` has them, and `total_loss` is the loss of Keras' class. Models
    are called without their preprocessors: pass preprocessed images. For losses of
    `FeatureDistillation` on inner layers Keras calls the student twice in each step, so
    a router with a `bias_update_rate` moves its bias twice.

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
        # Before the call of the teacher, whose losses do not count, and perhaps another
        # call of the student
        added = [ops.sum(loss) for loss in self.losses]
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return sum((ops.cast(a, loss.dtype) for a in added), start=loss)
