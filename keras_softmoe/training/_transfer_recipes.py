"""Fine-tuning as in the papers, as plain functions that return a `Recipe`.

The defaults are the papers' numbers, and all are arguments. Where a paper is silent,
the docstring says so and what was chosen.
"""

import functools

import keras

from keras_softmoe.training._optimizers import SGD
from keras_softmoe.training._pipeline import Augmentation
from keras_softmoe.training._recipe import Recipe, scheduled
from keras_softmoe.training._schedules import warmup_cosine_decay


def finetuning(
    num_classes: int,
    steps: int = 10_000,
    peak_learning_rate: float = 0.003,
    end_learning_rate: float = 1e-5,
    warmup_steps: int | None = None,
    clip_norm: float | None = 10.0,
    average_momentum: float | None = None,
    image_size: int = 384,
    batch_size: int = 1024,
    augmentation: Augmentation | str = "light0",
    steps_per_epoch: int | None = None,
) -> Recipe:
    """Fine-tuning as in V-MoE: SGD with momentum, cosine, a larger image size.

    *Data*, steps and peaks (tables 5 and 7): ImageNet 10,000 steps at 0.0024, 0.003,
    0.01 or 0.03; CIFAR-10 2,500, CIFAR-100 5,000, Oxford-IIIT Pets and Flowers-102 250
    steps each, at 0.001, 0.003, 0.01 or 0.03, whichever is best on held-out images.
    *Result* on ImageNet (table 8, experts in every second block): S/32 77.08 %, B/16
    85.26 %, L/16 87.41 %, H/14 88.36 %; the released B/16 from ImageNet-21k 85.6 %.
    *Cost*: V-MoE-S/32 takes 48 minutes on a TPUv3-8 (released code).

    The paper follows the Vision Transformer, with 384 pixels, momentum 0.9, no weight
    decay, gradients clipped. It applies dropout of 0.1 to the experts and keeps the
    balancing losses (section 3.5):

    >>> name = "vmoe_tiny_patch4_16e_32_glyphs"
    >>> classifier = ksm.models.ViTMoEImageClassifier.from_preset(
    ...     name, num_classes=10, image_shape=(48, 48, 3), expert_dropout_rate=0.1
    ... )

    K, capacity and priority may be others than in the pretraining, and so may the
    number of images that are routed together. Give them to `from_preset` or to the
    loaded model, whose next `fit` obeys:

    >>> classifier = ksm.models.ViTMoEImageClassifier.from_preset(
    ...     name, num_classes=10, num_selected_experts=1, priority="max"
    ... )
    >>> classifier.set_routing(capacity_factor=0.5, group_images=8)

    Mostly a larger K in fine-tuning is better, whatever it was in the pretraining; with
    1 a larger one in the pretraining does not help (V-MoE-S/32, appendix E.5). At a
    capacity of 0.1 V-MoE-S/32 falls from 77.4 to 68.6 %, with `priority="max"` in both
    trainings to 71.8 %. In fine-tuning it is needed more: with the priority 0.1 in the
    pretraining and 1.05 in fine-tuning give 74.1 %, the reverse 71.7 % (appendix C.4).
    For another kind of router `from_preset(name, router=...)` takes over the weights,
    if it has the same.

    The paper does not state batch, warmup, limit of the norm and end of the schedule:
    1,024, 500, 10 and 1e-5 are those of the released code, which has no dropout and
    `capacity_factor=1.5`. (The Vision Transformer took 512 images and a limit of 1.)
    Chosen here: short trainings warm up for a fifth of their steps. Training images are
    cropped at random and flipped, others squeezed into the square.

    Args:
        num_classes: int, number of classes.
        steps: int, steps of the whole training.
        peak_learning_rate: float, the learning rate at the end of the warmup.
        end_learning_rate: float, the learning rate at the end.
        warmup_steps: int, steps over which the learning rate rises from 0; 500 or a
            fifth of `steps`, what is less, if `None`.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.
        average_momentum: float or `None`. If given, the model ends with the debiased
            average of its parameters over all steps (Polyak averaging; 0.999999 for
            V-MoE-15B, appendix B.4). Add `keras.callbacks.SwapEMAWeights()` to validate
            with it on the way.
        image_size: int, side of the images in pixels.
        batch_size: int, images per step.
        augmentation: `Augmentation` or a name in `AUGMENTATIONS`.
        steps_per_epoch: int, steps after which `fit` reports; all steps if `None`.

    Returns:
        `Recipe`.

    Raises:
        ValueError: if a number is out of range or the augmentation unknown.

    Source: V-MoE, section 3.5, appendices B.4, C.4 and E.5, tables 5, 7 and 8.

    Examples:
        >>> recipe = ksm.training.finetuning(num_classes=10, steps=2_500)
        >>> recipe.compile(classifier)  # and `fit`, see `Recipe`
    """
    schedule = functools.partial(
        _schedule, peak_learning_rate, warmup_steps, end_learning_rate
    )
    average = {}
    if average_momentum is not None:
        average = {"use_ema": True, "ema_momentum": average_momentum}
    return Recipe(
        num_classes=num_classes,
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=scheduled(
            SGD, schedule, momentum=0.9, global_clipnorm=clip_norm, **average
        ),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=(keras.metrics.CategoricalAccuracy(name="accuracy"),),
        augmentation=augmentation,
    )


def _schedule(peak_learning_rate, warmup_steps, end_learning_rate, steps):
    if warmup_steps is None:
        warmup_steps = min(500, steps // 5)
    return warmup_cosine_decay(
        peak_learning_rate, steps, warmup_steps, end_learning_rate
    )


def vtab(
    num_classes: int, peak_learning_rate: float = 0.001, batch_size: int = 512, **kwargs
) -> Recipe:
    """Fine-tuning on 1,000 images, as in V-MoE's VTAB results.

    *Data*: each of the 19 tasks of the Visual Task Adaptation Benchmark, 1,000 training
    images. *Cost*: 1,250 steps. *Result*, mean over the tasks (table 1): V-MoE-L/16
    77.2 % (dense 76.3 %), V-MoE-H/14 77.8 % (dense 77.6 %).

    Table 7 gives 1,250 steps, a peak of 0.001 and expert dropout of 0.1 (see
    `finetuning`, which this is with other defaults). The paper says no more than that
    it halves the steps of the Vision Transformer, which took batches of 512. Chosen
    here: a warmup of 250 steps, and images as they are, without crops and flips, since
    many of the tasks ask for position, distance or orientation.

    Args:
        num_classes: int, number of classes.
        peak_learning_rate: float, the learning rate at the end of the warmup.
        batch_size: int, images per step.
        **kwargs: the other arguments of `finetuning`, among them `steps` and
            `augmentation`.

    Returns:
        `Recipe`.

    Raises:
        ValueError: if a number is out of range or the augmentation unknown.

    Source: V-MoE, section 3.5, appendices B.1 and B.4, tables 1 and 7.

    Examples:
        >>> recipe = ksm.training.vtab(num_classes=102)
        >>> recipe.compile(make_classifier(102))  # and `fit`, see `Recipe`
    """
    return finetuning(
        num_classes,
        peak_learning_rate=peak_learning_rate,
        batch_size=batch_size,
        **{"steps": 1_250, "augmentation": "none", **kwargs},
    )
