"""ImageNet from scratch: a function that returns a `Recipe`.

The defaults are the numbers of the released code, and all are arguments.
"""

import functools

from keras_softmoe.training._losses import SigmoidCrossentropy
from keras_softmoe.training._metrics import PrecisionAt1
from keras_softmoe.training._optimizers import Adam
from keras_softmoe.training._paths import KERNELS
from keras_softmoe.training._pipeline import Augmentation
from keras_softmoe.training._pretraining_recipes import CENTRAL_CROP
from keras_softmoe.training._recipe import Recipe, scheduled
from keras_softmoe.training._schedules import WarmupPolynomialDecay


def imagenet_from_scratch(
    augmentation: Augmentation | str = "light1",
    num_classes: int = 1_000,
    steps: int = 46_448,
    peak_learning_rate: float = 3e-3,
    end_learning_rate: float = 1e-5,
    warmup_steps: int = 10_000,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    image_size: int = 224,
    batch_size: int = 8192,
    steps_per_epoch: int | None = None,
) -> Recipe:
    """ImageNet from scratch, 300 epochs, with RandAugment and MixUp.

    *Data*: ILSVRC2012, 99 % of the 1,281,167 training images (46,448 steps are 300
    epochs); the last 1 % validates. *Cost*: V-MoE-S/32, 8 experts, Last 2: 5 h 50 min
    on a TPUv3-32. *Result*, of the same model: 73.1 % on the 50,000 validation images,
    75.9 % after fine-tuning at 384 pixels (means of three seeds).

    Neither paper trains on ImageNet-1k from scratch: all numbers are those of V-MoE's
    released code. There the experts have 20 % dropout and, in evaluation, a capacity of
    4: build the model with `ViTMoEBackbone(..., expert_dropout_rate=0.2)` and raise the
    router's `capacity_factor` before you evaluate. The bias of the head starts at
    `-log(num_classes)`.

    The released code names eight strengths, of which this training took `"light1"`:
    RandAugment with N operations of magnitude M, and MixUp with Beta(a, a).

    | name | N, M | a | name | N, M | a |
    |---|---|---|---|---|---|
    | light0 | none | none | strong1 | 2, 20 | 0.5 |
    | light1 | 2, 10 | 0.2 | strong2 | 2, 20 | 0.8 |
    | medium1 | 2, 15 | 0.2 | extreme1 | 4, 15 | 0.5 |
    | medium2 | 2, 15 | 0.5 | extreme2 | 4, 20 | 0.8 |

    The operations of RandAugment and MixUp are those of Keras' layers. Keras has other
    operations and scales than the papers' code; M is turned into the `factor` of
    `keras.layers.RandAugment` as M / 40, so that the strongest is Keras' default. An
    image of 224 pixels takes 3 ms on two CPU cores (0.3 ms at `"light0"`).

    Args:
        augmentation: `Augmentation` or a name in `AUGMENTATIONS`.
        num_classes: int, number of classes.
        steps: int, steps of the whole training.
        peak_learning_rate: float, the learning rate at the end of the warmup.
        end_learning_rate: float, the learning rate at the end.
        warmup_steps: int, steps over which the learning rate rises from 0.
        weight_decay: float, rate of decay of kernels.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.
        image_size: int, side of the images in pixels.
        batch_size: int, images per step.
        steps_per_epoch: int, steps after which `fit` reports; all steps if `None`.

    Returns:
        `Recipe`.

    Raises:
        ValueError: if a number is out of range or the augmentation unknown.

    Source: V-MoE's released code ("vmoe_s32_last2_ilsvrc2012_randaug_light1").

    Examples:
        >>> recipe = ksm.training.imagenet_from_scratch(
        ...     "strong1", steps_per_epoch=2_903
        ... )
        >>> recipe.compile(make_classifier(1_000))  # and `fit`, see `Recipe`
    """
    schedule = functools.partial(
        WarmupPolynomialDecay,
        peak_learning_rate,
        warmup_steps=warmup_steps,
        end_learning_rate=end_learning_rate,
    )
    decay = [(KERNELS, weight_decay)]
    return Recipe(
        num_classes=num_classes,
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=scheduled(
            Adam, schedule, weight_decay_rules=decay, global_clipnorm=clip_norm
        ),
        loss=SigmoidCrossentropy(),
        metrics=(PrecisionAt1(),),
        augmentation=augmentation,
        central_crop=CENTRAL_CROP,
    )
