"""Contrastive tasks on pairs of image and caption."""

from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_softmoe.checks import check_choice, check_whole_numbers
from keras_softmoe.models import arguments, configuration, data, fitting
from keras_softmoe.models.adaptation import quantize
from keras_softmoe.models.contrastive_preprocessor import (
    LIMoEPreprocessor,
    TwoTowerPreprocessor,
    fit_preprocessor,
    no_weights,
)
from keras_softmoe.models.limoe import LIMoEBackbone
from keras_softmoe.models.mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.models.pair_encoding import PairEncoding
from keras_softmoe.models.two_towers import TwoTowerBackbone
from keras_softmoe.ops import contrastive
from keras_softmoe.sharding.constraints import check_placement

LOSSES = {
    "softmax": contrastive.softmax_contrastive_loss,
    "sigmoid": contrastive.sigmoid_contrastive_loss,
}


@recompile_on_change
@arguments.offer_names
class ContrastiveTask(keras_hub.models.Task, PairEncoding, MutableRouting):
    """Base class of contrastive learning on pairs of image and caption.

    `models` attaches `from_preset`, `save_to_preset` and `export`. Arguments are those
    of `LIMoEContrastive`, with a backbone and a preprocessor of the task's own classes.
    """

    fit, evaluate, predict = fitting.fit, fitting.evaluate, fitting.predict
    compile_from_config = configuration.compile_from_config
    quantize = quantize

    def __init__(
        self, backbone, preprocessor=None, compile=True, name=None, trainable=True
    ):
        arguments.check_kind("backbone", backbone, self.backbone_cls)
        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor
        fit_preprocessor(preprocessor, backbone)

        # === Functional Model ===
        outputs = backbone(backbone.input)
        names = ("image_embedding", "text_embedding", "logit_scale", "logit_bias")
        super().__init__(
            inputs=backbone.input,
            outputs={name: outputs[name] for name in names if name in outputs},
            compile=compile,
            name=name,
        )
        if trainable is not True:
            configuration.set_trainable_argument(self, trainable)
        check_placement("check_model", self)

    # === Training ===

    def compile(self, optimizer="auto", loss="auto", metrics="auto", **kwargs):
        """Configure training.

        `loss` is `"softmax"` (as CLIP and LIMoE), `"sigmoid"` (as SigLIP) or `"auto"`:
        sigmoid if the backbone has a `logit_bias`. `metrics` `"auto"` is the share of
        pairs that are the most similar in their batch, in both directions.
        """
        if optimizer == "auto":
            optimizer = keras.optimizers.AdamW(3e-4)
        if loss in ("auto", None):
            loss = "sigmoid" if "logit_bias" in self.backbone.output else "softmax"
        check_choice("loss", loss, tuple(LOSSES))
        check_choice("metrics", metrics, ("auto", None))
        super().compile(optimizer=optimizer, **kwargs)
        self._loss_name = loss
        names = ("image_to_text_accuracy", "text_to_image_accuracy")
        accuracies = [keras.metrics.Mean(name=name) for name in names]
        # In an object that Keras does not track: metrics of earlier calls would stay.
        self._own_metrics = SimpleNamespace(
            accuracies=accuracies if metrics == "auto" else [],
            routing_loss=fitting.RoutingLoss(self),
        )

    def get_config(self):
        trainable = configuration.trainable_argument(self)
        config = {**super().get_config(), "trainable": trainable}
        return configuration.with_compilation(self, config)

    def get_compile_config(self):
        config = super().get_compile_config()
        if not config:
            return config
        metrics = "auto" if self._own_metrics.accuracies else None
        # `keras.models.clone_model` makes a plain model, without `metrics="auto"`.
        config = {**config, "loss": self._loss_name, "metrics": None}
        return configuration.with_optimizer(self, config, metrics=metrics)

    @property
    def metrics(self):
        own = getattr(self, "_own_metrics", None)
        own = [*own.accuracies, *own.routing_loss.metrics] if own else []
        return [*super().metrics, *own]

    def get_metrics_result(self):
        return self._own_metrics.routing_loss.without(super().get_metrics_result())

    def logits(self, outputs):
        """Return scaled similarities `(B, B)` of the images and captions of a batch."""
        texts = ops.transpose(outputs["text_embedding"])
        similarity = ops.matmul(outputs["image_embedding"], texts)
        logits = ops.expand_dims(outputs["logit_scale"], -1) * similarity
        if "logit_bias" in outputs:
            logits = logits + ops.expand_dims(outputs["logit_bias"], -1)
        return logits

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        """Return the mean contrastive loss, in training with the routers' losses."""
        loss = ops.mean(LOSSES[self._loss_name](self.logits(y_pred)))
        losses = self.losses if training else []
        self._own_metrics.routing_loss.count(losses)
        return sum((ops.cast(ops.sum(x), loss.dtype) for x in losses), start=loss)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        accuracies = self._own_metrics.accuracies
        if accuracies:
            logits = self.logits(y_pred)
            pair = ops.arange(ops.shape(logits)[0], dtype="int32")
            for metric, axis in zip(accuracies, (1, 0), strict=True):
                found = ops.cast(ops.argmax(logits, axis=axis), pair.dtype)
                metric.update_state(ops.cast(ops.equal(found, pair), "float32"))
        return self.get_metrics_result()

    # === Data ===

    def batches(
        self,
        x,
        y=None,
        sample_weight=None,
        *,
        batch_size=None,
        shuffle=False,
        class_weight=None,
    ):
        """Return batches for `fit` and `evaluate`, of arrays only full ones."""
        if sample_weight is not None:
            raise no_weights("sample_weight", sample_weight)
        if isinstance(x, dict):
            x, y = x["images"], x.get("captions", x.get("token_ids"))
        elif y is None:
            return data.prepare(self, x, batch_size=batch_size, shuffle=shuffle)
        images, token_ids = data.as_arrays(x), self._token_ids(y)
        if len(images) != len(token_ids) or len(images) < 2:
            raise ValueError(
                "There must be two or more pairs of an image and a caption. "
                f"Received: {len(images)} images, {len(token_ids)} captions."
            )
        if batch_size is not None:
            check_whole_numbers(2, batch_size=batch_size)
        how = {"batch_size": min(batch_size or 32, len(images)), "shuffle": shuffle}
        return data.prepare(self, images, token_ids, drop_remainder=True, **how)

    def checked_class_weight(self, class_weight):
        """Raise if there are weights of classes, which pairs do not have."""
        if class_weight is not None:
            raise no_weights("class_weight", class_weight)

    def check_input(self, x):
        """Raise unless images, or their `tf.TensorSpec`, can be preprocessed."""
        images = x
        if isinstance(x, dict):
            images = x.get("images")
            if isinstance(x.get("token_ids"), np.ndarray):
                arguments.check_vocabulary(x["token_ids"], self.backbone)
        is_resized = getattr(self.preprocessor, "image_size", None) is not None
        arguments.check_images(images, self.backbone.image_shape, is_resized, grey=True)

    def check_labels(self, y):
        """Raise unless token ids are of the vocabulary. Captions are checked later."""
        arguments.check_vocabulary(y, self.backbone)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        # Not `super()`, which AutoGraph may resolve to the class of another caller.
        if self.preprocessor is not None:
            x = keras_hub.models.Task.preprocess_samples(self, x, y, sample_weight)
        elif y is not None:
            x = {"images": x, "token_ids": y}
        elif not isinstance(x, dict):
            raise ValueError(
                "Without a preprocessor data must be pairs of images and token ids, or "
                f"dicts of 'images' and 'token_ids'. Received: {type(x).__name__}."
            )
        if sample_weight is not None:
            raise no_weights("sample_weight", sample_weight)
        images = data.repeat_grey(x["images"], self.backbone.image_shape[-1])
        x = {**x, "images": images}
        arguments.check_pairs(self.backbone, x["images"], x["token_ids"])
        return (x,)

    @property
    def routers(self):
        """Dict from each MoE block to its router."""
        return self.backbone.routers


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoEContrastive(ContrastiveTask):
    """Contrastive learning with one sparse tower for images and captions.

    With a preprocessor `fit` and `evaluate` accept pixels from 0 to 255, channels last,
    and captions. `encode_image` and `encode_text` embed one modality.

    Args:
        backbone: `LIMoEBackbone`.
        preprocessor: `LIMoEPreprocessor`, which resizes to `image_shape`, or `None`.
        compile: bool, whether to compile at once with the defaults of `compile`.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.

    Returns, when called on a dict of `"images"` in `[-1, 1]` and `"token_ids"`: dict of
        `"image_embedding"` and `"text_embedding"` `(B, width)`, rows of length one, and
        `"logit_scale"` `(B,)` and, if there is one, `"logit_bias"` `(B,)`.

    Source: LIMoE, section 2.

    Examples:
        >>> model = ksm.models.LIMoEContrastive(limoe.backbone, limoe.preprocessor)
        >>> model.fit(images, captions, batch_size=8, epochs=1)
        >>> model.zero_shot(images, ["hammer", "cloud"], ["a {}"]).shape
        (8, 2)
    """

    backbone_cls = LIMoEBackbone
    preprocessor_cls = LIMoEPreprocessor


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TwoTowerContrastive(ContrastiveTask):
    """Contrastive learning with a tower for images and one for captions.

    All as in `LIMoEContrastive`, with `TwoTowerBackbone` and `TwoTowerPreprocessor`.

    Source: Soft MoE, section 4.

    Examples:
        >>> image_tower = ksm.models.ViTMoEBackbone((32, 32, 3), 8, 1, 2, 32, 64)
        >>> text_tower = ksm.models.TextMoEBackbone(400, 16, 1, 2, 32, 64)
        >>> towers = ksm.models.TwoTowerBackbone(image_tower, text_tower)
        >>> model = ksm.models.TwoTowerContrastive(towers)
        >>> model.encode_text(np.ones((2, 16), "int32")).shape
        (2, 32)
    """

    backbone_cls = TwoTowerBackbone
    preprocessor_cls = TwoTowerPreprocessor
