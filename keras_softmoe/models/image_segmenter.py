"""Semantic segmentation on the pyramid of a Vision Transformer."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_softmoe.checks import check_finite, check_numbers, check_whole_numbers, quote
from keras_softmoe.models import configuration, data, fitting, image_preprocessor
from keras_softmoe.models.adaptation import quantize
from keras_softmoe.models.arguments import check_kind, offer_names
from keras_softmoe.models.image_classifier import ViTMoEImageClassifier
from keras_softmoe.models.mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.models.vit import ViTMoEBackbone
from keras_softmoe.sharding.constraints import check_placement
from keras_softmoe.types import DType

_SPARSE = keras.losses.SparseCategoricalCrossentropy


@keras.saving.register_keras_serializable(package="keras_softmoe")
@recompile_on_change
@offer_names
class ViTMoEImageSegmenter(keras_hub.models.ImageSegmenter, MutableRouting):
    """Semantic segmentation: a small decoder on the maps of a `ViTMoEBackbone`.

    `fit` and `evaluate` take images and masks, `(N, height, width)` whole numbers, of
    any size if there is a `preprocessor`, which resizes both to the backbone's
    `image_shape`; `from_preset(..., image_shape=...)` loads it for another one.

    Args:
        backbone: `ViTMoEBackbone`. Its `pyramid_outputs` are decoded.
        num_classes: int, number of classes, background included.
        preprocessor: `None`, a `ViTMoEImageSegmenterPreprocessor` or any callable.
        decoder_dim: int, width of a convolutional decoder: maps are projected, resized
            to the largest and summed, and a convolution of 3 x 3 follows. `None` for a
            linear one, on the resized maps side by side.
        activation: `None` (logits), str or callable, of the outputs.
        dropout: float, dropout before the last layer.
        head_dtype: dtype or policy of the decoder; `None` for the backbone's.
        compile: bool, whether to compile at once with the defaults of `compile`.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights of backbone and decoder are trained.

    Returns, when called on `(B, height, width, channels)` images in `[-1, 1]`:
        `(B, height, width, num_classes)` logits (or activations).

    Source: Strudel et al. 2021 (Segmenter), section 3.2, the linear decoder; Kirillov
    et al. 2019 (Panoptic FPN), section 3, the sum of projected maps.

    Examples:
        >>> backbone = ksm.models.ViTMoEBackbone.from_preset(name)
        >>> segmenter = ksm.models.ViTMoEImageSegmenter(backbone, num_classes=3)
        >>> segmenter(np.zeros((2, 32, 32, 3))).shape
        (2, 32, 32, 3)
    """

    backbone_cls = ViTMoEBackbone
    preprocessor_cls = image_preprocessor.ViTMoEImageSegmenterPreprocessor

    fit, evaluate, predict = fitting.fit, fitting.evaluate, fitting.predict
    batches = data.prepare
    compile_from_config = configuration.compile_from_config
    quantize = quantize
    # See there
    _as = ViTMoEImageClassifier
    metrics, compute_loss = _as.metrics, _as.compute_loss
    get_metrics_result = _as.get_metrics_result
    get_compile_config = _as.get_compile_config
    routers, check_input = _as.routers, _as.check_input
    save_task_weights, load_task_weights = _as.save_task_weights, _as.load_task_weights
    _but_the_head, _sparse_loss = _as._but_the_head, _as._sparse_loss
    del _as

    def __init__(
        self,
        backbone: keras.Model,
        num_classes: int,
        preprocessor: Callable | None = None,
        decoder_dim: int | None = 64,
        activation: str | None = None,
        dropout: float = 0.0,
        head_dtype: DType = None,
        compile: bool = True,
        name: str | None = None,
        trainable: bool = True,
    ):
        check_kind("backbone", backbone, self.backbone_cls)
        check_whole_numbers(1, num_classes=num_classes)
        if decoder_dim is not None:
            check_whole_numbers(1, decoder_dim=decoder_dim)
        check_numbers(least=0, under=1, dropout=dropout)
        # === Config ===
        # First, because `compile` reads the activation.
        self.num_classes, self.decoder_dim = int(num_classes), decoder_dim
        self.activation, self.dropout = activation, dropout
        self.head_dtype = head_dtype

        # === Layers ===
        self.preprocessor = preprocessor
        image_preprocessor.fit_image_size(preprocessor, backbone.image_shape[:2])
        maps = backbone.pyramid_outputs
        pyramid = keras.Model(backbone.input, maps, name="pyramid")
        policy = keras.dtype_policies.get(head_dtype or backbone.dtype_policy)
        policy = getattr(policy, "default_policy", policy)
        # The last layer alone is quantized: convolutions and resizing cannot be.
        dtype = policy.get_config().get("source_name", policy)
        known = {"data_format": "channels_last", "dtype": dtype}
        convolution = functools.partial(keras.layers.Conv2D, decoder_dim, **known)

        def resizing(size, name):
            return keras.layers.Resizing(
                *size, interpolation="bilinear", name=name, **known
            )

        self.output_dense = keras.layers.Dense(
            self.num_classes, dtype=policy, name="predictions"
        )

        # === Functional Model ===
        inputs = backbone.input
        found, size = [], max(tuple(x.shape[1:3]) for x in maps.values())
        for level, x in pyramid(inputs).items():
            if decoder_dim is not None:
                x = convolution(1, name=f"project_{level}")(x)
            if tuple(x.shape[1:3]) != size:
                x = resizing(size, f"resize_{level}")(x)
            found.append(x)
        merge = keras.layers.Concatenate if decoder_dim is None else keras.layers.Add
        x = merge(dtype=dtype, name="maps")(found) if len(found) > 1 else found[0]
        if decoder_dim is not None:
            x = keras.layers.Activation("gelu", dtype=dtype, name="activation")(x)
            x = convolution(3, padding="same", activation="gelu", name="convolution")(x)
        x = keras.layers.Dropout(dropout, dtype=dtype, name="output_dropout")(x)
        x = self.output_dense(x)
        outputs = resizing(backbone.image_shape[:2], "output_resizing")(x)
        if activation is not None:
            activate = keras.layers.Activation(activation, dtype=dtype, name="activate")
            outputs = activate(outputs)
        keras_hub.models.Task.__init__(
            self, inputs=inputs, outputs=outputs, compile=False, name=name
        )
        # Its layers are in the graph; set before, Keras would forget it on PyTorch.
        self.backbone = backbone
        if compile:
            self.compile()
        if trainable is not True:
            configuration.set_trainable_argument(self, trainable)
        check_placement("check_model", self)

    def compile(self, optimizer="auto", loss="auto", *, metrics="auto", **kwargs):
        """Configure training, as `keras.Model.compile`.

        Args:
            optimizer: `"auto"` is Adam with a rate of 5e-5, as in KerasHub.
            loss: `"auto"` is the cross-entropy of whole numbers. That of Keras has an
                `ignore_class`, a class whose pixels do not count.
            metrics: `"auto"` is `keras.metrics.MeanIoU`, named `mean_iou`.
            **kwargs: as in `keras.Model.compile`. `weighted_metrics="auto"` is a
                `weighted_mean_iou`, in which pixels count by their sample weights.
        """
        if optimizer == "auto":
            optimizer = keras.optimizers.Adam(5e-5)
        if isinstance(loss, str) and loss in (
            "auto",
            "sparse_categorical_crossentropy",
        ):
            loss = _SPARSE(from_logits=self.activation is None)
        is_sparse = isinstance(loss, _SPARSE)
        ignored = loss.get_config()["ignore_class"] if is_sparse else None
        # Without metrics Keras would keep those of an earlier call.
        known = {"metrics": metrics or [], **kwargs}
        for kind, prefix in (("metrics", ""), ("weighted_metrics", "weighted_")):
            if known.get(kind) == "auto":
                iou = _MeanIoU(self.num_classes, prefix + "mean_iou", None, ignored)
                known[kind] = [iou]
        known |= {"optimizer": optimizer, "loss": loss}
        keras_hub.models.ImageSegmenter.compile(self, **known)
        self._routing_loss = fitting.RoutingLoss(self)

    # === Data ===

    def checked_class_weight(self, class_weight: dict) -> None:
        """Raise: Keras has weights of classes for one label each."""
        raise ValueError(
            "`class_weight` is for one label of an image. Received: class_weight="
            f"{quote(class_weight)} for masks. Weigh classes in the `loss`, or pixels "
            "by `sample_weight`."
        )

    def check_labels(self, y: Any) -> None:
        """Raise unless masks have classes of the model, or are finite."""
        loss = self._sparse_loss()
        if loss is None:
            for array in keras.tree.flatten(y):
                check_finite("Masks", array, "the mask", data.LEAVE_OUT)
            return
        y, size = np.asarray(y), self.backbone.image_shape[:2]
        shape = y.shape[:3] if y.shape[3:] == (1,) else y.shape
        converter = getattr(self.preprocessor, "image_converter", None)
        any_size = getattr(converter, "image_size", None) is not None
        if len(shape) != 3 or (shape[1:] != size and not any_size):
            raise ValueError(
                f"Masks must have the shape {('N', *size)}, a class for each pixel, or "
                "another size with a preprocessor that resizes them. Received: masks "
                f"of shape {y.shape}."
            )
        if y.dtype.kind not in "biuf":
            raise _wrong_masks(f"masks of dtype {y.dtype}", self.num_classes)
        wrong = (y != np.floor(y)) | (y < 0) | (y >= self.num_classes)
        ignored = loss.get_config()["ignore_class"]
        wrong &= y != ignored if ignored is not None else True
        if wrong.any():
            some = np.unique(y[wrong])[:5].tolist()
            raise _wrong_masks(f"masks with {quote(some)}", self.num_classes)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        known = ViTMoEImageClassifier.preprocess_samples(self, x, y, sample_weight)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(known)
        rank = len(getattr(weight, "shape", ()))
        # One weight for all pixels of an image, (B, 1, 1), or (B, height, width)
        weight = weight[:, None, None] if rank == 1 else weight
        weight = weight[..., 0] if rank == 4 else weight
        if y is not None and len(y.shape) == 4 and y.shape[-1] == 1:
            y = y[..., 0]
        return keras.utils.pack_x_y_sample_weight(x, y, weight)

    def get_config(self):
        config = ViTMoEImageClassifier.get_config(self)
        return {**config, "decoder_dim": self.decoder_dim}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class _MeanIoU(keras.metrics.MeanIoU):
    """Counts with a product: on PyTorch, Keras adds one pixel after the other."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        # One-hot masks for any loss; others have no axis of classes, or one of size 1.
        if tuple(y_true.shape[3:]) == tuple(y_pred.shape[3:]):
            y_true = ops.argmax(y_true, axis=-1)
        y_pred = ops.argmax(y_pred, axis=-1)
        shape = ops.shape(y_pred)
        y_true, y_pred = (ops.cast(ops.ravel(y), "int32") for y in (y_true, y_pred))
        ignored = -1 if self.ignore_class is None else self.ignore_class
        counts = ops.cast(y_true != ignored, "float32")
        if sample_weight is not None:
            weight = ops.cast(sample_weight, "float32")
            counts = counts * ops.ravel(ops.broadcast_to(weight, shape))
        # Rows of zeros for what is ignored, (pixels, classes)
        rows = ops.one_hot(ops.where(counts > 0, y_true, 0), self.num_classes)
        rows = rows * counts[:, None]
        columns = ops.one_hot(y_pred, self.num_classes)
        found = ops.matmul(ops.transpose(rows), columns)
        self.total_cm.assign_add(ops.cast(found, self.total_cm.dtype))


def _wrong_masks(received, num_classes):
    return ValueError(
        f"Masks must be whole numbers from 0 to {num_classes - 1}, one for each pixel. "
        f"Received: {received}. For pixels that do not count, compile with `loss=keras."
        "losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)`."
    )
