"""What a training consists of, in one object that compiles a model and feeds `fit`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import keras
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.training._pair_pipeline import (
    evaluation_pairs,
    training_pairs,
)
from keras_softmoe.training._pipeline import (
    Augmentation,
    evaluation_batches,
    named_augmentation,
    training_batches,
)
from keras_softmoe.types import Data


def scheduled(optimizer, schedule, **arguments):
    """A function from steps to an optimizer whose schedule ends with them.

    Args:
        optimizer: class of a `keras.optimizers.Optimizer`.
        schedule: function from steps to its learning rate.
        **arguments: its other arguments.
    """
    # No lambda, so that a recipe can be pickled.
    return functools.partial(_optimizer_for, optimizer, schedule, arguments)


def _optimizer_for(optimizer, schedule, arguments, steps):
    return optimizer(schedule(steps), **arguments)


class _Made(NamedTuple):
    """An optimizer, and the function and the steps that it was made of."""

    optimizer: Any
    make: Any
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Training:
    """What all recipes have. Attributes: see `Recipe`."""

    image_size: int
    batch_size: int
    steps: int
    optimizer: Any
    augmentation: Augmentation | str
    steps_per_epoch: int | None = None
    # What `replace` hands on, beside the optimizer.
    _made: _Made | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self):
        # It is frozen: a copy with other values comes from `replace`.
        known = named_augmentation(self.augmentation)
        object.__setattr__(self, "augmentation", known)
        names = ("image_size", "batch_size", "steps")
        check_whole_numbers(1, **{name: getattr(self, name) for name in names})
        if self.steps_per_epoch is not None:
            check_whole_numbers(1, steps_per_epoch=self.steps_per_epoch)
        if self.steps % (self.steps_per_epoch or self.steps):
            raise ValueError(
                "`steps_per_epoch` must divide `steps`, or training would end before "
                f"the schedule or after it. Received: steps={self.steps}, "
                f"steps_per_epoch={self.steps_per_epoch}."
            )
        self._make_optimizer()

    def _make_optimizer(self):
        """Make the optimizer for these steps, unless one was given as it is."""
        made = self._made
        if isinstance(self.optimizer, type):
            raise ValueError(
                "`optimizer` must be an optimizer, or a function that makes one for a "
                f"number of steps. Received: the class {self.optimizer.__name__}. Make "
                "one."
            )
        if callable(self.optimizer):
            made = _Made(None, self.optimizer, None)
        elif made is not None and self.optimizer is not made.optimizer:
            made = None
        if made is not None and made.steps != self.steps:
            made = _Made(made.make(self.steps), made.make, self.steps)
            object.__setattr__(self, "optimizer", made.optimizer)
        object.__setattr__(self, "_made", made)

    @property
    def fit_arguments(self):
        """Keyword arguments of `fit`: epochs and steps, and not to shuffle again."""
        steps_per_epoch = self.steps_per_epoch or self.steps
        return {
            "epochs": self.steps // steps_per_epoch,
            "steps_per_epoch": steps_per_epoch,
            "shuffle": False,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(_Training):
    """What it takes to train a classifier, made by functions such as `finetuning`.

    Every part can be changed with `dataclasses.replace`. With other `steps` the
    optimizer of a recipe is made anew, and its schedule is that of these steps. An
    optimizer that was given as it is keeps its own.

    Attributes:
        num_classes: int, number of classes.
        image_size: int, side of the square images in pixels.
        batch_size: int, images per step.
        steps: int, steps of the whole training, at which the schedule ends.
        optimizer: `keras.optimizers.Optimizer`; each compiled model gets its copy. When
            a recipe is made, also a function from `steps` to one.
        loss: `keras.losses.Loss` of dense labels and logits.
        metrics: tuple of `keras.metrics.Metric`; each compiled model gets its copies.
        augmentation: `Augmentation` of the training images, or its name in
            `AUGMENTATIONS`.
        central_crop: float, share of the shorter side of the image that is cut out for
            evaluation; 1 takes the whole image.
        steps_per_epoch: int, steps after which `fit` reports and validates; all steps
            if `None`.

    Raises:
        ValueError: if a count is not positive, `steps_per_epoch` does not divide
            `steps`, or there is no augmentation of that name.

    Examples:
        >>> import dataclasses
        >>> recipe = ksm.training.finetuning(num_classes=10, steps=2, image_size=32)
        >>> recipe = dataclasses.replace(recipe, augmentation="medium1", batch_size=4)
        >>> recipe.compile(classifier)
        >>> classifier.fit(
        ...     recipe.training_data((images, labels)), **recipe.fit_arguments
        ... )
    """

    num_classes: int
    loss: Any
    metrics: tuple
    central_crop: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_whole_numbers(1, num_classes=self.num_classes)

    def compile(self, model: keras.Model, **kwargs) -> None:
        """Compile a model with the optimizer, the loss and the metrics.

        Args:
            model: `keras.Model` whose output is `(B, num_classes)` logits.
            **kwargs: further arguments of `keras.Model.compile`.

        Raises:
            ValueError: if the model has another number of outputs.
        """
        if model.output_shape[-1] != self.num_classes:
            raise ValueError(
                "The recipe and the model must agree on the number of classes. "
                f"Received: a model with output shape {model.output_shape}, "
                f"num_classes={self.num_classes}."
            )
        model.compile(
            optimizer=_copy(self.optimizer),
            loss=self.loss,
            metrics=[_copy(metric) for metric in self.metrics],
            **kwargs,
        )

    def training_data(
        self, data: ArrayLike, shuffle_buffer: int = 10_000, seed: int = 0
    ) -> Any:
        """Shuffled and augmented batches without end.

        Args:
            data: `(images, labels)` arrays, or a `tf.data.Dataset` of single `(image,
                label)` pairs, which may differ in size. Images: `(height, width, 3)`,
                0 to 255. Labels: int, or `(num_classes,)` with 1 for each true class.
            shuffle_buffer: int, images among which the next one is drawn. They are
                kept in memory, at their original size.
            seed: int. Repeats the order of the images, the crops and the flips.
                RandAugment and MixUp run in parallel and take their numbers as they
                come.

        Returns:
            `tf.data.Dataset` of `(batch_size, image_size, image_size, 3)` float32
            images, 0 to 255 (what a classifier with a preprocessor takes), and
            `(batch_size, num_classes)` float32 labels.

        Raises:
            ValueError: if the data have another form, or arrays hold NaN, infinity or
                labels that are no classes. (Such labels of a data set end in an
                `InvalidArgumentError` of TensorFlow when they are drawn.)
        """
        return training_batches(
            data,
            self.num_classes,
            self.image_size,
            self.batch_size,
            self.augmentation,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        )

    def evaluation_data(self, data: Data) -> Any:
        """All images once, as they are, in batches for `evaluate` or validation.

        Args:
            data: as in `training_data`.

        Returns:
            `tf.data.Dataset` as from `training_data`; the last batch may be smaller.

        Raises:
            ValueError: as `training_data`.
        """
        return evaluation_batches(
            data,
            self.num_classes,
            self.image_size,
            self.batch_size,
            self.central_crop,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveRecipe(_Training):
    """What it takes to train on pairs of image and caption.

    Made by `limoe_pretraining` and `soft_moe_contrastive`. Every part can be changed
    with `dataclasses.replace`. With other `steps` the optimizer of a recipe is made
    anew, and its schedule is that of these steps.

    Attributes:
        image_size: int, side of the square images in pixels.
        batch_size: int, pairs per step, all of which are compared with each other.
        steps: int, steps of the whole training, at which the schedule ends.
        optimizer: `keras.optimizers.Optimizer`; each compiled model gets its copy. When
            a recipe is made, also a function from `steps` to one.
        loss: str, as in `models.LIMoEContrastive.compile`.
        augmentation: `Augmentation` of the training images, or its name in
            `AUGMENTATIONS`. Without MixUp. Whoever mirrors images has captions that say
            nothing of left and right.
        steps_per_epoch: int, steps after which `fit` reports and validates; all steps
            if `None`.

    Raises:
        ValueError: if a count is not positive, a batch has one pair, `steps_per_epoch`
            does not divide `steps`, there is no augmentation of that name, or it mixes
            images.

    Examples:
        >>> recipe = ksm.training.limoe_pretraining(
        ...     steps=2, warmup_steps=1, batch_size=4, image_size=32
        ... )
        >>> scenes = ksm.datasets.captioned_shapes(8)
        >>> recipe.compile(limoe)
        >>> pairs = recipe.training_data((scenes.images, scenes.captions))
        >>> limoe.fit(pairs, **recipe.fit_arguments)
    """

    loss: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        check_whole_numbers(2, batch_size=self.batch_size)
        if self.augmentation.mixup_alpha:
            raise ValueError(
                "MixUp mixes labels as it mixes images, and captions cannot be mixed. "
                f"Received: augmentation={self.augmentation!r}. Leave it out: "
                "`training.Augmentation(num_operations=2, magnitude=10)`."
            )

    def compile(self, model: keras.Model, **kwargs) -> None:
        """Compile a model with the optimizer and the loss.

        Args:
            model: `models.LIMoEContrastive` or `models.TwoTowerContrastive`.
            **kwargs: further arguments of its `compile`.

        Raises:
            ValueError: if the model is another one.
        """
        # Not at the top: it loads KerasHub and TensorFlow.
        from keras_softmoe.models import LIMoEContrastive, TwoTowerContrastive

        if not isinstance(model, LIMoEContrastive | TwoTowerContrastive):
            raise ValueError(
                "Pairs are learned by a `models.LIMoEContrastive` or a "
                f"`models.TwoTowerContrastive`. Received: {type(model).__name__}. Make "
                "one of its backbone."
            )
        model.compile(optimizer=_copy(self.optimizer), loss=self.loss, **kwargs)

    def training_data(
        self, data: Data, shuffle_buffer: int = 10_000, seed: int = 0
    ) -> Any:
        """Shuffled batches without end, the images augmented.

        Args:
            data: `(images, captions)`, or a `tf.data.Dataset` of single `(image,
                caption)` pairs, whose images may differ in size. Images: `(height,
                width, 3)`, 0 to 255. Captions: str, or `(S,)` int token ids.
            shuffle_buffer: int, pairs among which the next one is drawn. They are kept
                in memory, the images at their original size.
            seed: int, see `Recipe.training_data`.

        Returns:
            `tf.data.Dataset` of `(batch_size, image_size, image_size, 3)` float32
            images, 0 to 255, and `batch_size` captions: what a model with a
            preprocessor takes.

        Raises:
            ValueError: if the data have another form, or images are not finite.
        """
        return training_pairs(
            data,
            self.image_size,
            self.batch_size,
            self.augmentation,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        )

    def evaluation_data(self, data: Data) -> Any:
        """All pairs once, as they are, in batches for `evaluate` or validation.

        Args:
            data: as in `training_data`.

        Returns:
            `tf.data.Dataset` as from `training_data`. Pairs that do not fill the last
            batch are left out: accuracies depend on how many captions are compared.

        Raises:
            ValueError: as `training_data`.
        """
        return evaluation_pairs(data, self.image_size, self.batch_size)


def _copy(part):
    """A new Keras object with the configuration of another."""
    return keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(part)
    )
