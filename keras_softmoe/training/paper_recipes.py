"""The recipes of the papers, one row each.

A row has the papers' numbers. The comment above it names the numbers that no paper
states. Data, cost and results are in `docs/concepts/recipes.md`.
"""

import dataclasses

from keras_softmoe.checks import check_names, did_you_mean, received
from keras_softmoe.training.recipe_settings import Recipe

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

# Chosen here: all other numbers are Soft MoE's, whose recipe has the same kind of
# schedule and weight decay.
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

# The paper states no number of the training. Chosen here: LIMoE's, with the steps,
# warmup and batch of its ablations.
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
        **changes: settings of `Recipe`. Those of `"finetuning"` and `"vtab"` lack
            `num_classes`.

    Raises:
        ValueError: if the recipe is unknown, or a setting is out of range.
        TypeError: if a setting is unknown.

    Examples:
        >>> recipe = ksm.training.recipe("finetuning", num_classes=10, steps=2_500)
        >>> recipe.compile(classifier)  # and `fit`, see `Recipe`
    """
    if name not in _RECIPES:
        raise ValueError(
            f"`name` must be a recipe.{did_you_mean([name], list(_RECIPES))} "
            f"Accepted: {', '.join(map(repr, _RECIPES))}. {received(name=name)}"
        )
    fields = [field.name for field in dataclasses.fields(Recipe)]
    check_names(f"`recipe({name!r})`", changes, fields)
    return dataclasses.replace(_RECIPES[name], **changes)
