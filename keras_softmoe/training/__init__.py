"""Recipes of the papers' trainings, and what Keras lacks for them.

What the examples of this module go on from:

    >>> def make_classifier(num_classes=10):
    ...     router = ksm.routers.SoftmaxTokenChoiceRouter(num_experts=4)
    ...     backbone = ksm.models.ViTMoEBackbone(
    ...         (32, 32, 3),
    ...         patch_size=16,
    ...         num_layers=1,
    ...         num_heads=2,
    ...         hidden_dim=16,
    ...         mlp_dim=32,
    ...         moe_layers=(0,),
    ...         router=router,
    ...     )
    ...     return ksm.models.ViTMoEImageClassifier(backbone, num_classes)
    >>> classifier = make_classifier()
    >>> limoe = ksm.models.LIMoEContrastive.from_preset(
    ...     "limoe_tiny_patch4_8e_32_shapes"
    ... )
    >>> images, labels = (x[:8] for x in ksm.datasets.digits(image_size=32))
"""

from keras_softmoe.training._adafactor import Adafactor as Adafactor
from keras_softmoe.training._contrastive_recipes import (
    limoe_pretraining as limoe_pretraining,
)
from keras_softmoe.training._contrastive_recipes import (
    soft_moe_contrastive as soft_moe_contrastive,
)
from keras_softmoe.training._imagenet_recipe import (
    imagenet_from_scratch as imagenet_from_scratch,
)
from keras_softmoe.training._losses import SigmoidCrossentropy as SigmoidCrossentropy
from keras_softmoe.training._metrics import PrecisionAt1 as PrecisionAt1
from keras_softmoe.training._optimizers import SGD as SGD
from keras_softmoe.training._optimizers import Adam as Adam
from keras_softmoe.training._pipeline import Augmentation as Augmentation
from keras_softmoe.training._pretraining_recipes import (
    soft_moe_pretraining as soft_moe_pretraining,
)
from keras_softmoe.training._pretraining_recipes import (
    vmoe_15b_pretraining as vmoe_15b_pretraining,
)
from keras_softmoe.training._pretraining_recipes import (
    vmoe_pretraining as vmoe_pretraining,
)
from keras_softmoe.training._recipe import ContrastiveRecipe as ContrastiveRecipe
from keras_softmoe.training._recipe import Recipe as Recipe
from keras_softmoe.training._schedules import (
    WarmupPolynomialDecay as WarmupPolynomialDecay,
)
from keras_softmoe.training._schedules import WarmupRsqrtDecay as WarmupRsqrtDecay
from keras_softmoe.training._soups import greedy_soup as greedy_soup
from keras_softmoe.training._transfer_recipes import finetuning as finetuning
from keras_softmoe.training._transfer_recipes import vtab as vtab
