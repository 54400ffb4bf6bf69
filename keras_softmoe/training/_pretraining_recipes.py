"""Training from scratch as in the papers, as plain functions that return a `Recipe`.

The defaults are the papers' numbers, and all are arguments. Where a paper is silent,
the docstring says so and what was chosen.
"""

from keras_softmoe.evaluation import PrecisionAt1
from keras_softmoe.training._losses import SigmoidCrossentropy
from keras_softmoe.training._optimizers import Adam
from keras_softmoe.training._recipe import Recipe
from keras_softmoe.training._schedules import WarmupPolynomialDecay, WarmupRsqrtDecay

# Paths of our models' variables. Kernels are those of attention, MLPs, experts, sparse
# routers, patches and head.
_KERNELS = "kernel$"
_HEAD_KERNEL = "predictions/kernel$"
_SOFT_ROUTER_SCALE = "router/scale$"

# For evaluation: the middle square of 224 of 256 pixels.
_CENTRAL_CROP = 224 / 256


def vmoe_pretraining(
    num_classes,
    steps,
    peak_learning_rate=8e-4,
    end_learning_rate=1e-5,
    warmup_steps=10_000,
    weight_decay=0.1,
    clip_norm=None,
    image_size=224,
    batch_size=4096,
    augmentation="light0",
    steps_per_epoch=None,
):
    """Pretraining as in V-MoE: Adam, linear decay, weight decay on all parameters.

    *Data*: JFT-300M, 305 million images with any number of 18,291 classes, which was
    never released; ImageNet-21k is the public stand-in (appendix E.6).
    *Cost and result* of the models with experts in every second block (table 8; TPUv3
    core-days, ImageNet 10-shot): S/32: 5 epochs, 17.6 days, 54.97 %; B/16: 7 epochs,
    201.4 days, 72.50 %; L/16: 14 epochs, 1,206 days, 79.01 %; H/14: 14 epochs, 3,477
    days, 80.33 %.

    Table 6 gives epochs, Adam, the peak (S/32 1e-3; B/32 and B/16 8e-4; L/32 6e-4; L/16
    4e-4; H/14 3e-4), linear decay, and a weight decay of 0.1 "on all model parameters
    (including biases)". The paper leaves the rest to "the original setup" of the Vision
    Transformer: batches of 4,096 images of 224 pixels, moments 0.9 and 0.999, 10,000
    steps of warmup. From the released code: the sigmoid loss, the end at 1e-5, random
    crops and flips, and for H/14 alone gradients clipped to 10. Start the bias of the
    head at `-log(num_classes)`, see `SigmoidCrossentropy`. For ImageNet-21k, appendix
    E.6 applies RandAugment with N = 2 and M = 10; the released B/16 was made with
    `augmentation="strong1"`, which adds MixUp.

    Args:
        num_classes: int, number of classes.
        steps: int, `epochs * images / batch_size` (for B/16 on JFT-300M 521,000).
        peak_learning_rate: float, the learning rate at the end of the warmup.
        end_learning_rate: float, the learning rate at the end.
        warmup_steps: int, steps over which the learning rate rises from 0.
        weight_decay: float, rate of decay of all parameters.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.
        image_size: int, side of the images in pixels.
        batch_size: int, images per step.
        augmentation: `Augmentation` or a name in `AUGMENTATIONS`.
        steps_per_epoch: int, steps after which `fit` reports; all steps if `None`.

    Returns:
        `Recipe`.

    Raises:
        ValueError: if a number is out of range or the augmentation unknown.

    Source: V-MoE, appendix B.2, tables 6 and 8.

    Example:

    >>> recipe = ksm.training.vmoe_pretraining(num_classes=21_843, steps=1_000_000)
    >>> recipe.compile(classifier)
    >>> classifier.fit(recipe.training_data(dataset), **recipe.fit_arguments)
    """
    schedule = WarmupPolynomialDecay(
        peak_learning_rate, steps, warmup_steps, end_learning_rate
    )
    return Recipe(
        num_classes=num_classes,
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=Adam(schedule, weight_decay=weight_decay, global_clipnorm=clip_norm),
        loss=SigmoidCrossentropy(),
        metrics=(PrecisionAt1(),),
        augmentation=augmentation,
        central_crop=_CENTRAL_CROP,
    )


def soft_moe_pretraining(
    num_classes,
    steps=300_000,
    peak_learning_rate=1e-3,
    timescale=10_000,
    warmup_steps=10_000,
    cooldown_steps=50_000,
    weight_decay=0.03,
    head_weight_decay=3.0,
    clip_norm=1.0,
    image_size=224,
    batch_size=4096,
    augmentation="light0",
    steps_per_epoch=None,
):
    """Pretraining as in Soft MoE: reciprocal square root, then a linear cooldown.

    *Data*: JFT-4B, 4 billion images with any number of 29,593 classes, never released.
    *Cost and result* (table 2; TPUv3-days, ImageNet 10-shot): S/14 with 256 experts: 10
    million steps, 495 days, 80.6 %; B/16 with 128: 9 million steps, 1,011 days, 82.9 %;
    L/16 with 128: 4 million steps, 1,355 days, 84.3 %. The 106 models of section 3.3
    took 300,000 steps each; their costs are in appendix J.

    Section 3.3 gives 300,000 steps, batches of 4,096, 224 pixels and a reciprocal
    square root; appendix J the cooldown of 50,000 steps. Long runs do well with a
    longer one, 500,000 (section 3.4). The paper does not name the optimizer, peak,
    warmup, timescale, weight decay or loss of these runs: they are from released code
    (appendix E alone has others: a timescale and a warmup of 100,000). Decay: 3 for the
    kernel of the head, 0.03 for the other kernels and for the scale of the routers,
    nothing for biases, norms, embeddings and slot parameters. V-MoE-15B was trained
    with such a schedule and the same decay (V-MoE, table 6 and appendix B.3), but with
    Adafactor.

    Args:
        num_classes: int, number of classes.
        steps: int, steps of the whole training, cooldown included.
        peak_learning_rate: float, the learning rate at the end of the warmup.
        timescale: float, see `WarmupRsqrtDecay`.
        warmup_steps: int, steps over which the learning rate rises from 0.
        cooldown_steps: int, steps at the end over which it falls to 0.
        weight_decay: float, rate of decay of kernels and of the scale of soft routers.
        head_weight_decay: float, rate of decay of the kernel of the head.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.
        image_size: int, side of the images in pixels.
        batch_size: int, images per step.
        augmentation: `Augmentation` or a name in `AUGMENTATIONS`.
        steps_per_epoch: int, steps after which `fit` reports; all steps if `None`.

    Returns:
        `Recipe`.

    Raises:
        ValueError: if a number is out of range or the augmentation unknown.

    Source: Soft MoE, sections 3.3 and 3.4, appendices E and J.

    Example:

    >>> recipe = ksm.training.soft_moe_pretraining(num_classes=29_593)
    >>> recipe.compile(classifier)
    >>> classifier.fit(recipe.training_data(dataset), **recipe.fit_arguments)
    """
    schedule = WarmupRsqrtDecay(
        peak_learning_rate, steps, timescale, warmup_steps, cooldown_steps
    )
    decay = [
        (_HEAD_KERNEL, head_weight_decay),
        (_KERNELS, weight_decay),
        (_SOFT_ROUTER_SCALE, weight_decay),
    ]
    return Recipe(
        num_classes=num_classes,
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=Adam(schedule, weight_decay_rules=decay, global_clipnorm=clip_norm),
        loss=SigmoidCrossentropy(),
        metrics=(PrecisionAt1(),),
        augmentation=augmentation,
        central_crop=_CENTRAL_CROP,
    )


def imagenet_from_scratch(
    augmentation="light1",
    num_classes=1_000,
    steps=46_448,
    peak_learning_rate=3e-3,
    end_learning_rate=1e-5,
    warmup_steps=10_000,
    weight_decay=0.1,
    clip_norm=1.0,
    image_size=224,
    batch_size=8192,
    steps_per_epoch=None,
):
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

    Example:

    >>> recipe = ksm.training.imagenet_from_scratch("strong1", steps_per_epoch=2_903)
    >>> recipe.compile(classifier)
    >>> classifier.fit(recipe.training_data(dataset), **recipe.fit_arguments)
    """
    schedule = WarmupPolynomialDecay(
        peak_learning_rate, steps, warmup_steps, end_learning_rate
    )
    decay = [(_KERNELS, weight_decay)]
    return Recipe(
        num_classes=num_classes,
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=Adam(schedule, weight_decay_rules=decay, global_clipnorm=clip_norm),
        loss=SigmoidCrossentropy(),
        metrics=(PrecisionAt1(),),
        augmentation=augmentation,
        central_crop=_CENTRAL_CROP,
    )
