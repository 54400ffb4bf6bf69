"""Training from scratch as in the papers, as plain functions that return a `Recipe`.

The defaults are the papers' numbers, and all are arguments. Where a paper is silent,
the docstring says so and what was chosen.
"""

import functools

from keras_softmoe.training._adafactor import Adafactor
from keras_softmoe.training._losses import SigmoidCrossentropy
from keras_softmoe.training._metrics import PrecisionAt1
from keras_softmoe.training._optimizers import Adam
from keras_softmoe.training._paths import HEAD_KERNEL, KERNELS, SOFT_ROUTER_SCALE
from keras_softmoe.training._pipeline import Augmentation
from keras_softmoe.training._recipe import Recipe, scheduled
from keras_softmoe.training._schedules import WarmupPolynomialDecay, WarmupRsqrtDecay

# For evaluation: the middle square of 224 of 256 pixels.
CENTRAL_CROP = 224 / 256


def vmoe_pretraining(
    num_classes: int,
    steps: int,
    peak_learning_rate: float = 8e-4,
    end_learning_rate: float = 1e-5,
    warmup_steps: int = 10_000,
    weight_decay: float = 0.1,
    clip_norm: float | None = None,
    image_size: int = 224,
    batch_size: int = 4096,
    augmentation: Augmentation | str = "light0",
    steps_per_epoch: int | None = None,
) -> Recipe:
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
    `augmentation="strong1"`, which adds MixUp. For V-MoE-15B see
    `vmoe_15b_pretraining`.

    Batch prioritized routing and a small capacity save compute in training, too:
    V-MoE-S/32, B/32 and L/32 with `priority="max"` reach the precision of their dense
    twins with 70 to 80 % of the FLOPs (appendix C.3). By the priority alone S/16 with
    32 experts goes from 64.5 to 68.9 % on ImageNet 10-shot with `K = 1`, from 71.0 to
    71.4 % with `K = 2` (Soft MoE, table 8). Both are settings of the router:
    `SoftmaxTokenChoiceRouter(32, priority="max", capacity_factor=0.5)`.

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

    Source: V-MoE, appendices B.2 and C.3, tables 6 and 8.

    Examples:
        >>> recipe = ksm.training.vmoe_pretraining(num_classes=1_000, steps=1_000_000)
        >>> recipe.compile(make_classifier(1_000))  # and `fit`, see `Recipe`
    """
    schedule = functools.partial(
        WarmupPolynomialDecay,
        peak_learning_rate,
        warmup_steps=warmup_steps,
        end_learning_rate=end_learning_rate,
    )
    return Recipe(
        num_classes=num_classes,
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=scheduled(
            Adam, schedule, weight_decay=weight_decay, global_clipnorm=clip_norm
        ),
        loss=SigmoidCrossentropy(),
        metrics=(PrecisionAt1(),),
        augmentation=augmentation,
        central_crop=CENTRAL_CROP,
    )


def soft_moe_pretraining(
    num_classes: int,
    steps: int = 300_000,
    peak_learning_rate: float = 1e-3,
    timescale: float = 10_000,
    warmup_steps: int = 10_000,
    cooldown_steps: int = 50_000,
    weight_decay: float = 0.03,
    head_weight_decay: float = 3.0,
    clip_norm: float | None = 1.0,
    image_size: int = 224,
    batch_size: int = 4096,
    augmentation: Augmentation | str = "light0",
    steps_per_epoch: int | None = None,
) -> Recipe:
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
    nothing for biases, norms, embeddings and slot parameters.

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

    Examples:
        >>> recipe = ksm.training.soft_moe_pretraining(num_classes=1_000)
        >>> recipe.compile(make_classifier(1_000))  # and `fit`, see `Recipe`
    """
    schedule = functools.partial(
        WarmupRsqrtDecay,
        peak_learning_rate,
        timescale=timescale,
        warmup_steps=warmup_steps,
        cooldown_steps=cooldown_steps,
    )
    decay = _kernel_decay(weight_decay, head_weight_decay)
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


def vmoe_15b_pretraining(
    num_classes: int,
    steps: int,
    peak_learning_rate: float = 8e-4,
    timescale: float = 10_000,
    warmup_steps: int = 10_000,
    cooldown_steps: int = 50_000,
    weight_decay: float = 0.03,
    head_weight_decay: float = 3.0,
    momentum_dtype: str = "bfloat16",
    clip_norm: float | None = 1.0,
    image_size: int = 224,
    batch_size: int = 4096,
    augmentation: Augmentation | str = "light0",
    steps_per_epoch: int | None = None,
) -> Recipe:
    """Pretraining as of V-MoE-15B: Adafactor, reciprocal square root, cooldown.

    *Data*: JFT-3B, almost 3 billion images of 30,000 classes, never released; just
    under 4 epochs. *Cost and result* (section 3.6): 16,800 TPUv3 core-days; ImageNet
    5-shot 82.78 %, and 90.35 % after `finetuning(1_000, steps=30_000, image_size=560,
    peak_learning_rate=0.006, average_momentum=0.999999)`.

    Table 6 and appendix B.3 give Adafactor with its average of gradients in bfloat16,
    the peak, a reciprocal square root with a linear cooldown, and a weight decay of 3
    for the kernel of the head and 0.03 for the other kernels, without biases. All else
    is not said: chosen here as in `soft_moe_pretraining`, a training with such a
    schedule and the same decay. The model pools by attention in place of a class token
    (`ViTMoEBackbone(..., pooling="map")`).

    Args:
        num_classes: int, number of classes.
        steps: int, steps of the whole training, cooldown included.
        peak_learning_rate: float, the learning rate at the end of the warmup.
        timescale: float, see `WarmupRsqrtDecay`.
        warmup_steps: int, steps over which the learning rate rises from 0.
        cooldown_steps: int, steps at the end over which it falls to 0.
        weight_decay: float, rate of decay of kernels and of the scale of soft routers.
        head_weight_decay: float, rate of decay of the kernel of the head.
        momentum_dtype: `"bfloat16"` or `"float32"`, see `Adafactor`.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.
        image_size: int, side of the images in pixels.
        batch_size: int, images per step.
        augmentation: `Augmentation` or a name in `AUGMENTATIONS`.
        steps_per_epoch: int, steps after which `fit` reports; all steps if `None`.

    Returns:
        `Recipe`.

    Raises:
        ValueError: if a number is out of range or the augmentation unknown.

    Source: V-MoE, section 3.6, table 6 and appendix B.3.

    Examples:
        >>> recipe = ksm.training.vmoe_15b_pretraining(
        ...     num_classes=1_000, steps=2_900_000
        ... )
        >>> recipe.compile(make_classifier(1_000))  # and `fit`, see `Recipe`
    """
    schedule = functools.partial(
        WarmupRsqrtDecay,
        peak_learning_rate,
        timescale=timescale,
        warmup_steps=warmup_steps,
        cooldown_steps=cooldown_steps,
    )
    return Recipe(
        num_classes=num_classes,
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=scheduled(
            Adafactor,
            schedule,
            momentum_dtype=momentum_dtype,
            weight_decay_rules=_kernel_decay(weight_decay, head_weight_decay),
            global_clipnorm=clip_norm,
        ),
        loss=SigmoidCrossentropy(),
        metrics=(PrecisionAt1(),),
        augmentation=augmentation,
        central_crop=CENTRAL_CROP,
    )


def _kernel_decay(weight_decay, head_weight_decay):
    """Rules: one rate for the kernel of the head, one for what else is multiplied."""
    return [
        (HEAD_KERNEL, head_weight_decay),
        (KERNELS, weight_decay),
        (SOFT_ROUTER_SCALE, weight_decay),
    ]
