"""Image classification on a Vision Transformer."""

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np

from keras_softmoe.checks import check_finite, check_numbers, check_whole_numbers, quote
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.models import configuration, data, fitting, image_preprocessor
from keras_softmoe.models.adaptation import quantize
from keras_softmoe.models.arguments import check_images, check_kind, offer_names
from keras_softmoe.models.mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.models.vit import ViTMoEBackbone
from keras_softmoe.sharding.constraints import check_placement
from keras_softmoe.types import DType

_SPARSE = keras.losses.SparseCategoricalCrossentropy
_CROSSENTROPIES = {
    "binary_crossentropy": keras.losses.BinaryCrossentropy,
    "categorical_crossentropy": keras.losses.CategoricalCrossentropy,
    "sparse_categorical_crossentropy": _SPARSE,
}


@keras.saving.register_keras_serializable(package="keras_softmoe")
@recompile_on_change
@offer_names
class ViTMoEImageClassifier(keras_hub.models.ImageClassifier, MutableRouting):
    """Image classifier on a `ViTMoEBackbone`.

    `fit`, `evaluate` and `predict` accept pixels from 0 to 255 if there is a
    `preprocessor`. Images have their channels last, independent of
    `keras.config.image_data_format()`.

    Args:
        backbone: `ViTMoEBackbone`.
        num_classes: int, number of classes.
        preprocessor: `None`, a `ViTMoEImageClassifierPreprocessor` or any callable. Its
            image converter resizes to the backbone's `image_shape`.
        activation: `None` (logits), str or callable, of the last layer.
        dropout: float, dropout before the last layer.
        head_dtype: dtype or policy of the head; `None` for the backbone's.
        compile: bool, whether to compile at once with the defaults of
            `keras_hub.models.ImageClassifier.compile`.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights of backbone and head are trained.

    Returns, when called on `(B, height, width, channels)` images in `[-1, 1]`:
        `(B, num_classes)` logits (or activations).

    Source: V-MoE, section 2.1. The head starts from zeros, as in its released code.

    Examples:
        >>> backbone = ksm.models.ViTMoEBackbone.from_preset(name)
        >>> converter = ksm.models.ViTMoEImageConverter(image_size=(32, 32))
        >>> preprocessor = ksm.models.ViTMoEImageClassifierPreprocessor(converter)
        >>> classifier = ksm.models.ViTMoEImageClassifier(backbone, 1229, preprocessor)
        >>> classifier.fit(images, labels, epochs=1)
    """

    backbone_cls = ViTMoEBackbone
    preprocessor_cls = image_preprocessor.ViTMoEImageClassifierPreprocessor

    fit, evaluate, predict = fitting.fit, fitting.evaluate, fitting.predict
    batches = data.prepare
    compile_from_config = configuration.compile_from_config
    quantize = quantize

    def __init__(
        self,
        backbone: keras.Model,
        num_classes: int,
        preprocessor: Callable | None = None,
        activation: str | None = None,
        dropout: float = 0.0,
        head_dtype: DType = None,
        compile: bool = True,
        name: str | None = None,
        trainable: bool = True,
    ):
        check_kind("backbone", backbone, self.backbone_cls)
        check_whole_numbers(1, num_classes=num_classes)
        check_numbers(least=0, under=1, dropout=dropout)
        # === Config ===
        # First, because `compile` reads the activation.
        self.num_classes = num_classes = int(num_classes)
        self.activation = activation
        self.dropout = dropout
        self.head_dtype = head_dtype

        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor
        image_preprocessor.fit_image_size(preprocessor, backbone.image_shape[:2])
        self.output_dropout = keras.layers.Dropout(
            dropout, dtype=backbone.dtype_policy, name="output_dropout"
        )
        self.output_dense = keras.layers.Dense(
            num_classes,
            activation=activation,
            kernel_initializer="zeros",
            dtype=head_dtype or backbone.dtype_policy,
            name="predictions",
        )

        # === Functional Model ===
        inputs = self.backbone.input
        x = self.backbone(inputs)["pooled_output"]
        x = self.output_dropout(x)
        outputs = self.output_dense(x)
        # KerasHub's `ImageClassifier.__init__` would add a pooling layer.
        keras_hub.models.Task.__init__(
            self, inputs=inputs, outputs=outputs, compile=compile, name=name
        )
        if trainable is not True:
            configuration.set_trainable_argument(self, trainable)
        check_placement("check_model", self)

    def compile(self, optimizer="auto", loss="auto", *, metrics="auto", **kwargs):
        """Configure training, as `keras_hub.models.ImageClassifier.compile` does.

        A cross-entropy given by its name is computed from logits, unless the model has
        an activation. (Keras would expect probabilities.) `"auto"` is the cross-entropy
        of int labels, and the accuracy.
        """
        if self.activation is None and isinstance(loss, str):
            if loss in _CROSSENTROPIES:
                loss = _CROSSENTROPIES[loss](from_logits=True)
        if metrics is None:
            # Keras would keep the metrics of an earlier call.
            metrics = []
        elif metrics == "auto" and loss != "auto" and not isinstance(loss, _SPARSE):
            # KerasHub's is for int labels; this one tells them apart by their shape.
            metrics = ["accuracy"]
        keras_hub.models.ImageClassifier.compile(
            self, optimizer=optimizer, loss=loss, metrics=metrics, **kwargs
        )
        self._routing_loss = fitting.RoutingLoss(self)

    # The methods from here to `get_config` are also those of the segmenter, which is of
    # another class of KerasHub: without `super()`, which would refuse it.

    # === Balancing losses ===

    @property
    def metrics(self):
        own = getattr(self, "_routing_loss", None)
        known = keras_hub.models.Task.metrics.fget(self)
        return [*known, *(own.metrics if own else [])]

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        self._routing_loss.count(self.losses if training else [])
        arguments = x, y, y_pred, sample_weight, training
        return keras_hub.models.Task.compute_loss(self, *arguments)

    def get_metrics_result(self):
        found = keras_hub.models.Task.get_metrics_result(self)
        return self._routing_loss.without(found)

    # === Saving ===

    def get_compile_config(self):
        config = keras_hub.models.Task.get_compile_config(self)
        return configuration.with_optimizer(self, config)

    @property
    def routers(self) -> dict:
        """Dict from the index of each MoE block to its router."""
        return self.backbone.routers

    # KerasHub's methods would write the state of the optimizer with the head: twice the
    # size of the model, and of no use in a preset.

    def save_task_weights(self, filepath):
        keras.saving.save_weights(self, filepath, objects_to_skip=self._but_the_head())

    def load_task_weights(self, filepath):
        keras.saving.load_weights(self, filepath, objects_to_skip=self._but_the_head())

    def _but_the_head(self):
        layers = flatten_layers(self.backbone)
        # A model has no optimizer before it is compiled.
        return [*layers, self.optimizer] if self.compiled else layers

    # === Data ===

    def checked_class_weight(self, class_weight: dict) -> dict:
        """Return the weights of all classes, 1 unless given."""
        return data.checked_class_weight(class_weight, self.num_classes)

    def check_input(self, x: Any) -> None:
        """Raise unless images, or their `tf.TensorSpec`, can be preprocessed."""
        if self.preprocessor is None or hasattr(self.preprocessor, "image_converter"):
            is_resized = getattr(self.preprocessor, "image_size", None) is not None
            check_images(x, self.backbone.image_shape, is_resized, grey=True)

    def check_labels(self, y: Any) -> None:
        """Raise unless labels are classes of the model, or finite for other losses."""
        loss = self._sparse_loss()
        if loss is None:
            for array in keras.tree.flatten(y):
                check_finite("Labels", array, "the label", data.LEAVE_OUT)
            return
        y = np.asarray(y)
        if y.dtype.kind not in "biuf":
            raise _wrong_labels(f"labels of dtype {y.dtype}", self.num_classes)
        if y.ndim > 1 and y.shape[1:] != (1,):
            raise _wrong_labels(f"labels of shape {y.shape}", self.num_classes)
        wrong = (y != np.floor(y)) | (y < 0) | (y >= self.num_classes)
        ignored = loss.get_config()["ignore_class"]
        if ignored is not None:
            wrong &= y != ignored
        if wrong.any():
            found = f"labels with {quote(y[wrong][:5].tolist())}"
            raise _wrong_labels(found, self.num_classes)

    def _sparse_loss(self):
        """Return the loss if it is for int labels, else `None`."""
        loss = keras.losses.get(self.loss) if isinstance(self.loss, str) else self.loss
        return loss if isinstance(loss, _SPARSE) else None

    def preprocess_samples(self, x, y=None, sample_weight=None):
        if not hasattr(x, "shape"):
            x = data.as_arrays(x)
        self.check_input(x)
        # Not `super()`: in a `tf.data` pipeline AutoGraph may resolve it to the class
        # of another caller.
        rows = keras_hub.models.Task.preprocess_samples(self, x, y, sample_weight)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(rows)
        x = data.repeat_grey(x, self.backbone.image_shape[-1])
        check_images(x, self.backbone.image_shape)
        # A TensorFlow step traced with both shapes loses the rank of its inputs.
        sample_weight = data.without_column(sample_weight)
        if self._sparse_loss() is not None:
            y = data.without_column(y)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def get_config(self):
        head_dtype = self.head_dtype
        if self.output_dense.quantization_mode:
            head_dtype = self.output_dense.dtype_policy
        if head_dtype is not None:
            head_dtype = keras.dtype_policies.get(head_dtype)
            head_dtype = keras.dtype_policies.serialize(head_dtype)
        config = {
            **keras_hub.models.Task.get_config(self),
            "num_classes": self.num_classes,
            "activation": self.activation,
            "dropout": self.dropout,
            "head_dtype": head_dtype,
            "trainable": configuration.trainable_argument(self),
        }
        return configuration.with_compilation(self, config)


def _wrong_labels(received, num_classes):
    return ValueError(
        f"Labels must be whole numbers from 0 to {num_classes - 1}, one for each image."
        f" Received: {received}. One-hot labels need a loss for them, such as "
        '`loss="categorical_crossentropy"`.'
    )
