"""Learning from images and captions as in the papers: functions, `ContrastiveRecipe`.

The defaults are the papers' numbers, and all are arguments. Where a paper is silent,
the docstring says so and what was chosen.
"""

import dataclasses
import functools

from keras_softmoe.training._adafactor import Adafactor
from keras_softmoe.training._paths import KERNELS
from keras_softmoe.training._pipeline import Augmentation
from keras_softmoe.training._recipe import ContrastiveRecipe, scheduled
from keras_softmoe.training._schedules import (
    WarmupRsqrtDecay,
    check_positive,
    warmup_cosine_decay,
)


def limoe_pretraining(
    steps: int = 781_250,
    peak_learning_rate: float = 1e-3,
    warmup_steps: int = 40_000,
    timescale: float | None = None,
    cooldown_steps: int = 0,
    weight_decay: float = 1e-5,
    momentum_dtype: str = "bfloat16",
    clip_norm: float | None = None,
    image_size: int = 224,
    batch_size: int = 16_384,
    augmentation: Augmentation | str = "none",
    steps_per_epoch: int | None = None,
) -> ContrastiveRecipe:
    """Contrastive training as in LIMoE: Adafactor, cosine, small decoupled decay.

    *Data*: 12.8 billion pairs of image and caption are seen (H/14: JFT-4B as well, its
    class names as captions, one pair in four), never released. *Result* (table 4;
    zero-shot on ImageNet, LIMoE and its dense twin): S/32 57.9 and 44.4 %, B/32 67.5
    and 58.8 %, B/16 73.7 and 64.3 %, L/16 78.6 and 73.5 %; LIMoE-H/14 84.1 %.

    The paper has three such trainings, of which the first is the default:

    | appendix | `steps` | `warmup_steps` | `batch_size` | `image_size` |
    |---|---|---|---|---|
    | A.1, scaling study | 781,250 | 40,000 | 16,384 | 224 |
    | A.2, ablations | 100,000 | 10,000 | 8,192 | 224 |
    | A.3, LIMoE-H/14 | 825,000 | not said | 21,502 | 288 |

    H/14 has a reciprocal square root in place of the cosine, and a linear cooldown of
    125,000 steps after 700,000 others: `timescale=10_000, cooldown_steps=125_000`. The
    paper does not state the timescale; this one is Soft MoE's. Three more cooldowns of
    40,000 steps start from step 650,000; `greedy_soup` averages checkpoints of all of
    them. To start one, load the model that was saved there, give its optimizer the
    schedule that ends earlier, and go on with `fit`:

    >>> limoe.compile(ksm.training.Adafactor(1e-3))
    >>> limoe.optimizer.learning_rate = ksm.training.WarmupRsqrtDecay(
    ...     1e-3, 690_000, timescale=10_000, warmup_steps=40_000, cooldown_steps=40_000
    ... )

    All have Adafactor as ViT-G has it, a peak of 1e-3 and a decoupled weight decay of
    1e-5. Decoupled is read as in its paper (Loshchilov and Hutter 2019): each step
    subtracts `weight_decay` times the variable, times the share of the peak that the
    learning rate has reached, and not times the learning rate. (Times the learning rate
    it would be 0.4 % in a whole training.) Not said, and chosen here: only kernels
    decay, as in what V-MoE takes over from ViT-G (its appendix B.3); no clipping of
    gradients; a cosine that ends at 0; images without augmentation.

    Of the model and not of the recipe are 32 experts in every second block, thresholds
    of the entropy losses (`routers.LIMoERouter`), embeddings 512 wide, a scale of
    similarities that starts at 10, and texts of 16 tokens.

    Args:
        steps: int, steps of the whole training.
        peak_learning_rate: float, the learning rate at the end of the warmup.
        warmup_steps: int, steps over which the learning rate rises from 0.
        timescale: float or `None`. If given, the learning rate falls as a reciprocal
            square root, see `WarmupRsqrtDecay`, in place of a cosine.
        cooldown_steps: int, steps at the end over which it then falls to 0.
        weight_decay: float, decoupled rate of decay of kernels.
        momentum_dtype: `"bfloat16"` or `"float32"`, see `Adafactor`.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.
        image_size: int, side of the images in pixels.
        batch_size: int, pairs per step.
        augmentation: `Augmentation` or a name in `AUGMENTATIONS`, without MixUp.
        steps_per_epoch: int, steps after which `fit` reports; all steps if `None`.

    Returns:
        `ContrastiveRecipe`.

    Raises:
        ValueError: if a number is out of range, a cooldown has no timescale, or the
            augmentation is unknown or mixes images.

    Source: LIMoE, appendices A and A.1 to A.3, table 4.

    Examples:
        >>> recipe = ksm.training.limoe_pretraining(
        ...     steps=2, warmup_steps=1, batch_size=4, image_size=32
        ... )
        >>> recipe.compile(limoe)  # and `fit`, see `ContrastiveRecipe`
    """
    check_positive(peak_learning_rate=peak_learning_rate)
    if timescale is not None:
        schedule = functools.partial(
            WarmupRsqrtDecay,
            peak_learning_rate,
            timescale=timescale,
            warmup_steps=warmup_steps,
            cooldown_steps=cooldown_steps,
        )
    elif cooldown_steps:
        raise ValueError(
            "A cosine falls to 0 by itself; a cooldown ends a reciprocal square root. "
            "Pass its `timescale` too, for example 10_000, or leave the cooldown out. "
            f"Received: cooldown_steps={cooldown_steps}, timescale=None."
        )
    else:
        schedule = functools.partial(
            warmup_cosine_decay, peak_learning_rate, warmup_steps=warmup_steps
        )
    # The optimizer's rates are multiplied with the learning rate.
    decay = [(KERNELS, weight_decay / peak_learning_rate)]
    return ContrastiveRecipe(
        image_size=image_size,
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        optimizer=scheduled(
            Adafactor,
            schedule,
            momentum_dtype=momentum_dtype,
            weight_decay_rules=decay,
            global_clipnorm=clip_norm,
        ),
        loss="softmax",
        augmentation=augmentation,
    )


def soft_moe_contrastive(
    steps: int = 100_000, warmup_steps: int = 10_000, batch_size: int = 8_192, **kwargs
) -> ContrastiveRecipe:
    """Contrastive training of two towers, as in Soft MoE, with a Soft MoE for images.

    The paper has two such trainings:

    - Both towers from scratch on LAION-400M, of which 275 million pairs could be
      downloaded (appendix F.1). The image tower is a B/16: dense, or with 128 experts
      in each block of the second half, under a soft or an expert-choice router. All
      have the same dense text tower. Soft MoE is the best, and the only one that gains
      by augmentation of the images (figure 15).
    - An image tower pretrained on JFT-4B and frozen, and a text tower from scratch on
      WebLI (section 4): `TwoTowerBackbone(..., freeze_image=True)`. *Result* (table 4;
      zero-shot on ImageNet, Soft MoE and ViT): S/16 81.2 and 74.2 %, B/16 82.5 and
      79.6 %, L/16 83.8 and 82.7 %.

    The paper states no number of the training itself, neither steps nor rates nor the
    kind of augmentation, and points to its released code, whose numbers these are not.
    Chosen here: all as in `limoe_pretraining`, with steps, warmup and batch of LIMoE's
    ablations, whose models are of the size of F.1's; images without augmentation. The
    loss is the sigmoid loss, as in the released code of two towers, if the backbone has
    a `logit_bias` (which may start at -10), else the softmax loss.

    Args:
        steps: int, steps of the whole training.
        warmup_steps: int, steps over which the learning rate rises from 0.
        batch_size: int, pairs per step.
        **kwargs: the other arguments of `limoe_pretraining`.

    Returns:
        `ContrastiveRecipe`.

    Raises:
        ValueError: as `limoe_pretraining`.

    Source: Soft MoE, section 4, appendix F.1, figure 15.

    Examples:
        >>> soft = ksm.routers.SoftRouter(4)
        >>> towers = ksm.models.TwoTowerBackbone(
        ...     ksm.models.ViTMoEBackbone(
        ...         (32, 32, 3), 8, 2, 2, 32, 64, (1,), soft, pooling="map"
        ...     ),
        ...     ksm.models.TextMoEBackbone(400, 16, 2, 2, 32, 64),
        ...     logit_bias=-10.0,
        ... )
        >>> model = ksm.models.TwoTowerContrastive(towers)
        >>> recipe = ksm.training.soft_moe_contrastive(augmentation="light0")
        >>> recipe.compile(model)  # and `fit`, see `ContrastiveRecipe`
    """
    recipe = limoe_pretraining(
        steps, warmup_steps=warmup_steps, batch_size=batch_size, **kwargs
    )
    return dataclasses.replace(recipe, loss="auto")
