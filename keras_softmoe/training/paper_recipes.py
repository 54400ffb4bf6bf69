"""The recipes of the papers as rows, of a record that compiles and feeds a model."""

import dataclasses
import numbers
from typing import Any

import keras
from numpy.typing import ArrayLike

from keras_softmoe import checks
from keras_softmoe.training import pipeline
from keras_softmoe.training.objectives import PrecisionAt1, SigmoidCrossentropy
from keras_softmoe.training.optimizer_base import check_rules
from keras_softmoe.training.optimizers import SGD, Adafactor, Adam
from keras_softmoe.training.pipeline import Augmentation
from keras_softmoe.training.schedules import WarmupSchedule
from keras_softmoe.types import Data

_OPTIMIZERS = {"adam": Adam, "sgd": SGD, "adafactor": Adafactor}

# Arguments of `compile`. Of labels: functions that make them. Of pairs: names of losses
_LABEL_LOSSES = {
    "sigmoid": lambda: {"loss": SigmoidCrossentropy(), "metrics": [PrecisionAt1()]},
    "softmax": lambda: {
        "loss": keras.losses.CategoricalCrossentropy(from_logits=True),
        "metrics": [keras.metrics.CategoricalAccuracy(name="accuracy")],
    },
}
_PAIR_LOSSES = {
    "contrastive": "auto",
    "contrastive_softmax": "softmax",
    "contrastive_sigmoid": "sigmoid",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training, of a classifier or on pairs of image and caption.

    `recipe` makes the papers' recipes. `dataclasses.replace` makes a copy with other
    values; its schedule ends with its `steps`.

    Attributes:
        steps: int, steps of the whole training.
        batch_size: int, images or pairs per step.
        image_size: int, side of the square images in pixels.
        num_classes: int, number of classes, or `None` for pairs.
        augmentation: `Augmentation` of training images, or its name in `AUGMENTATIONS`.
        central_crop: float, share of the shorter side to evaluate; 1 for whole images.
        loss: of labels `"sigmoid"` (`SigmoidCrossentropy`, `PrecisionAt1`) or
            `"softmax"` (categorical cross-entropy, accuracy). Of pairs
            `"contrastive_softmax"`, `"contrastive_sigmoid"`, or `"contrastive"`: the
            sigmoid loss if the backbone has a `logit_bias`, else the softmax loss.
        optimizer: `"adam"`, `"sgd"` (with a momentum of 0.9) or `"adafactor"`.
        peak_learning_rate, decay, end_learning_rate, timescale, cooldown_steps: see
            `WarmupSchedule`.
        warmup_steps: int. If `None` 500 or a fifth of `steps`, whichever is less.
        weight_decay: float, or `(pattern, rate)` pairs as `weight_decay_rules`.
        decoupled_weight_decay: bool, whether the decay of a step is the rate times
            `learning_rate / peak_learning_rate`, rather than times the learning rate.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.
        average_momentum: float or `None`, of a debiased average (Polyak) at the end.
        momentum_dtype: see `Adam` and `Adafactor`, their default if `None`.
        steps_per_epoch: int, steps between reports of `fit`, `None` for all steps.
        source: str, papers, sections and tables of the numbers.

    Examples:
        >>> changes = {"num_classes": 10, "steps": 2, "image_size": 32, "batch_size": 4}
        >>> recipe = ksm.training.recipe("finetuning", **changes)
        >>> recipe.compile(classifier)
        >>> data = recipe.training_data((images, labels))
        >>> classifier.fit(data, **recipe.fit_arguments)
    """

    steps: int
    batch_size: int
    image_size: int = 224
    num_classes: int | None = None
    augmentation: Augmentation | str = "light0"
    central_crop: float = 1.0
    loss: str = "sigmoid"
    optimizer: str = "adam"
    peak_learning_rate: float = 1e-3
    warmup_steps: int | None = None
    decay: str = "linear"
    end_learning_rate: float = 0.0
    timescale: float = 10_000
    cooldown_steps: int = 0
    weight_decay: float | tuple = 0.0
    decoupled_weight_decay: bool = False
    clip_norm: float | None = None
    average_momentum: float | None = None
    momentum_dtype: str | None = None
    steps_per_epoch: int | None = None
    source: str = ""

    def __post_init__(self):
        names = ("steps", "batch_size", "image_size", "steps_per_epoch", "num_classes")
        given = ((name, getattr(self, name)) for name in names)
        checks.check_whole_numbers(1, **{k: v for k, v in given if v is not None})
        checks.check_choice("loss", self.loss, (*_LABEL_LOSSES, *_PAIR_LOSSES))
        checks.check_choice("optimizer", self.optimizer, tuple(_OPTIMIZERS))
        augmentation = pipeline.named_augmentation(self.augmentation)
        checks.check_numbers(over=0, central_crop=self.central_crop)
        if self.steps % (self.steps_per_epoch or self.steps):
            raise ValueError(
                "`steps_per_epoch` must divide `steps`, so that training and schedule "
                "end together. "
                + checks.received(
                    steps=self.steps, steps_per_epoch=self.steps_per_epoch
                )
            )
        if self._has_captions:
            checks.check_whole_numbers(2, batch_size=self.batch_size)
            if augmentation.mixup_alpha:
                raise ValueError(
                    "MixUp mixes labels, which captions are not: `mixup_alpha` must be "
                    f"0. Received: augmentation={self.augmentation!r}, {augmentation}."
                )
        self.schedule()
        if isinstance(self.weight_decay, numbers.Real):
            checks.check_numbers(least=0, weight_decay=self.weight_decay)
        else:
            check_rules("weight_decay", self.weight_decay)

    @property
    def _has_captions(self):
        return self.loss in _PAIR_LOSSES

    @property
    def fit_arguments(self) -> dict:
        """Keyword arguments of `fit` for data from `training_data`."""
        steps_per_epoch = self.steps_per_epoch or self.steps
        return {
            "epochs": self.steps // steps_per_epoch,
            "steps_per_epoch": steps_per_epoch,
            "shuffle": False,
        }

    def schedule(self) -> WarmupSchedule:
        """Return the learning-rate schedule, which ends with `steps`."""
        warmup_steps = self.warmup_steps
        if warmup_steps is None:
            warmup_steps = min(500, self.steps // 5)
        return WarmupSchedule(
            self.peak_learning_rate,
            self.steps,
            warmup_steps,
            decay=self.decay,
            end_learning_rate=self.end_learning_rate,
            timescale=self.timescale,
            cooldown_steps=self.cooldown_steps,
        )

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """Return a new optimizer with the schedule."""
        arguments = {"global_clipnorm": self.clip_norm}
        # Optimizers multiply the rates of decay by the learning rate.
        scale = self.peak_learning_rate if self.decoupled_weight_decay else 1.0
        if not isinstance(self.weight_decay, numbers.Real):
            rules = [(pattern, rate / scale) for pattern, rate in self.weight_decay]
            arguments["weight_decay_rules"] = rules
        elif self.weight_decay:
            arguments["weight_decay"] = self.weight_decay / scale
        if self.optimizer == "sgd":
            arguments["momentum"] = 0.9
        if self.momentum_dtype is not None:
            arguments["momentum_dtype"] = self.momentum_dtype
        if self.average_momentum is not None:
            arguments |= {"use_ema": True, "ema_momentum": self.average_momentum}
        return _OPTIMIZERS[self.optimizer](self.schedule(), **arguments)

    def compile(self, model: keras.Model, **kwargs) -> None:
        """Compile a model with a new optimizer, the loss and the metrics.

        Args:
            model: `keras.Model` whose output is `(B, num_classes)` logits. For pairs a
                `models.LIMoEContrastive` or `models.TwoTowerContrastive`.
            **kwargs: arguments of its `compile`, which replace those of the recipe:
                `optimizer=keras.optimizers.Lion(recipe.schedule())`.
        """
        if self._has_captions:
            # Not at the top: it loads KerasHub and TensorFlow.
            from keras_softmoe.models import LIMoEContrastive, TwoTowerContrastive

            if not isinstance(model, LIMoEContrastive | TwoTowerContrastive):
                raise ValueError(
                    "The model of pairs must be a `models.LIMoEContrastive` or a "
                    f"`models.TwoTowerContrastive`. Received: {type(model).__name__}."
                )
            arguments = {"loss": _PAIR_LOSSES[self.loss]}
        else:
            if model.output_shape[-1] != self.num_classes:
                raise ValueError(
                    "The recipe and the model must agree on the number of classes. "
                    f"Received: a model with output shape {model.output_shape}, "
                    f"num_classes={self.num_classes}."
                )
            arguments = _LABEL_LOSSES[self.loss]()
        model.compile(**{"optimizer": self.make_optimizer(), **arguments, **kwargs})

    def training_data(
        self, data: Data, shuffle_buffer: int = 10_000, seed: int = 0
    ) -> Any:
        """Return shuffled and augmented batches without end.

        Args:
            data: `(images, labels)` or `(images, captions)`, or a `tf.data.Dataset` of
                single pairs of them, whose images may differ in size. Images: `(height,
                width, 3)`, 0 to 255. Labels: int, or `(num_classes,)` with 1 for each
                true class. Captions: str, or `(S,)` int token ids.
            shuffle_buffer: int, images in memory among which the next one is drawn.
            seed: int, of order, crops and flips. (RandAugment and MixUp have none.)

        Returns:
            `tf.data.Dataset` of `(batch_size, image_size, image_size, 3)` float32 0 to
            255, and `(batch_size, num_classes)` float32 labels or captions.

        Raises:
            ValueError: if data have another form, or arrays hold NaN, infinity or wrong
                labels. (A `tf.data.Dataset` raises `InvalidArgumentError` for these.)
        """
        return pipeline.training_batches(
            *self._rows(data),
            image_size=self.image_size,
            batch_size=self.batch_size,
            augmentation=pipeline.named_augmentation(self.augmentation),
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        )

    def evaluation_data(self, data: Data) -> Any:
        """Return all images once, in batches for `evaluate` or validation.

        Takes and returns what `training_data` does. The last batch of labels may be
        smaller. Pairs that do not fill it are left out: accuracies depend on the batch.
        """
        return pipeline.evaluation_batches(
            *self._rows(data),
            image_size=self.image_size,
            batch_size=self.batch_size,
            central_crop=self.central_crop,
            drop_remainder=self._has_captions,
        )

    def _rows(self, data: ArrayLike):
        """Return a data set of images and targets, and a function of the targets."""
        if self._has_captions:
            return pipeline.captioned_rows(data)
        return pipeline.labelled_rows(data, self.num_classes)


# Paths of variables, for the rules of weight decay. Attention, MLPs, experts, sparse
# routers, patches, projections and head have kernels.
_KERNELS = "kernel$"
_HEAD_AND_KERNELS = (
    ("predictions/kernel$", 3.0),
    (_KERNELS, 0.03),
    ("router/scale$", 0.03),
)

# For evaluation: the middle square of 224 of 256 pixels.
_CENTRAL_CROP = 224 / 256

# V-MoE-B/16; other models have other steps and peaks. From the Vision Transformer's
# setup, to which the paper points: batch and warmup. From released code: the loss, the
# end of the schedule, the augmentation.
_VMOE = Recipe(
    steps=521_000,
    batch_size=4096,
    num_classes=18_291,
    peak_learning_rate=8e-4,
    warmup_steps=10_000,
    end_learning_rate=1e-5,
    weight_decay=0.1,
    central_crop=_CENTRAL_CROP,
    source="V-MoE, appendices B.2 and C.3, tables 6 and 8",
)

# Section 3.3's 106 models. From released code, since the paper is silent: optimizer,
# peak, warmup, timescale, weight decay and loss.
_SOFT_MOE = Recipe(
    steps=300_000,
    batch_size=4096,
    num_classes=29_593,
    peak_learning_rate=1e-3,
    warmup_steps=10_000,
    decay="rsqrt",
    cooldown_steps=50_000,
    weight_decay=_HEAD_AND_KERNELS,
    clip_norm=1.0,
    central_crop=_CENTRAL_CROP,
    source="Soft MoE, sections 3.3 and 3.4, appendices E and J",
)

# Chosen here: all others are Soft MoE's, with the same kind of schedule and decay.
_VMOE_15B = dataclasses.replace(
    _SOFT_MOE,
    steps=2_900_000,
    num_classes=30_000,
    optimizer="adafactor",
    momentum_dtype="bfloat16",
    peak_learning_rate=8e-4,
    source="V-MoE, section 3.6, table 6 and appendix B.3",
)

# In no paper: all numbers come from the released code.
_IMAGENET = Recipe(
    steps=46_448,
    batch_size=8192,
    num_classes=1_000,
    augmentation="light1",
    peak_learning_rate=3e-3,
    warmup_steps=10_000,
    end_learning_rate=1e-5,
    weight_decay=((_KERNELS, 0.1),),
    clip_norm=1.0,
    central_crop=_CENTRAL_CROP,
    source="V-MoE's released code (vmoe_s32_last2_ilsvrc2012_randaug_light1)",
)

# Steps of ImageNet; CIFAR-10 2,500, CIFAR-100 5,000, Oxford-IIIT Pets and Flowers-102
# 250. From released code: batch, warmup, limit of the norm, end of the schedule. Chosen
# here: short trainings warm up for a fifth.
_FINETUNING = Recipe(
    steps=10_000,
    batch_size=1024,
    image_size=384,
    loss="softmax",
    optimizer="sgd",
    peak_learning_rate=0.003,
    decay="cosine",
    end_learning_rate=1e-5,
    clip_norm=10.0,
    source="V-MoE, section 3.5, appendices B.4, C.4 and E.5, tables 5, 7 and 8",
)

# Chosen here: the Vision Transformer's batch, a warmup of a fifth, no crops and flips,
# since many tasks depend on position or orientation.
_VTAB = dataclasses.replace(
    _FINETUNING,
    steps=1_250,
    batch_size=512,
    peak_learning_rate=0.001,
    augmentation="none",
    source="V-MoE, section 3.5, appendices B.1 and B.4, tables 1 and 7",
)

# The scaling study. Chosen here: only kernels decay, no clipping of gradients, a cosine
# that ends at 0, images without augmentation.
_LIMOE = Recipe(
    steps=781_250,
    batch_size=16_384,
    augmentation="none",
    loss="contrastive_softmax",
    optimizer="adafactor",
    momentum_dtype="bfloat16",
    peak_learning_rate=1e-3,
    warmup_steps=40_000,
    decay="cosine",
    weight_decay=((_KERNELS, 1e-5),),
    decoupled_weight_decay=True,
    source="LIMoE, appendices A and A.1 to A.3, table 4",
)

# Not in the paper. Chosen here: LIMoE's, with steps, warmup, batch of its ablations.
_SOFT_MOE_CONTRASTIVE = dataclasses.replace(
    _LIMOE,
    steps=100_000,
    batch_size=8_192,
    warmup_steps=10_000,
    loss="contrastive",
    source="Soft MoE, section 4, appendix F.1, figure 15",
)

_RECIPES = {
    "vmoe_pretraining": _VMOE,
    "soft_moe_pretraining": _SOFT_MOE,
    "vmoe_15b_pretraining": _VMOE_15B,
    "imagenet_from_scratch": _IMAGENET,
    "finetuning": _FINETUNING,
    "vtab": _VTAB,
    "limoe_pretraining": _LIMOE,
    "soft_moe_contrastive": _SOFT_MOE_CONTRASTIVE,
}


def recipes() -> list[str]:
    """Return the names of the recipes.

    Examples:
        >>> ksm.training.recipes()
    """
    return list(_RECIPES)


def recipe(name: str, **changes) -> Recipe:
    """Return a recipe of the papers, with changes.

    - `"vmoe_pretraining"`: Adam, linear decay, weight decay of all parameters.
    - `"soft_moe_pretraining"`: Adam, reciprocal square root, a cooldown.
    - `"vmoe_15b_pretraining"`: the same with Adafactor.
    - `"imagenet_from_scratch"`: 300 epochs with RandAugment and MixUp.
    - `"finetuning"`: SGD with momentum, cosine, 384 pixels.
    - `"vtab"`: fine-tuning on 1,000 images.
    - `"limoe_pretraining"`: pairs of image and caption; Adafactor, cosine.
    - `"soft_moe_contrastive"`: the same for two towers.

    Data, cost and results: `docs/concepts/recipes.md`.

    Args:
        name: str, one of `recipes()`.
        **changes: settings of `Recipe`. `"finetuning"` and `"vtab"` need `num_classes`.

    Examples:
        >>> recipe = ksm.training.recipe("finetuning", num_classes=10, steps=2_500)
        >>> recipe.compile(classifier)  # and `fit`, see `Recipe`
    """
    if name not in _RECIPES:
        raise ValueError(
            f"`name` must be a recipe.{checks.did_you_mean([name], list(_RECIPES))} "
            f"Accepted: {', '.join(map(repr, _RECIPES))}. {checks.received(name=name)}"
        )
    fields = [field.name for field in dataclasses.fields(Recipe)]
    checks.check_names(f"`recipe({name!r})`", changes, fields)
    return dataclasses.replace(_RECIPES[name], **changes)
