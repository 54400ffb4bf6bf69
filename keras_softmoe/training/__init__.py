"""Recipes of the papers' trainings, and the optimizers that Keras lacks for them.

The examples of this module start from:

    >>> def make_classifier(num_classes=10):
    ...     router = ksm.routers.SoftmaxTokenChoiceRouter(num_experts=4)
    ...     sizes = (32, 32, 3), 16, 1, 2, 16, 32, (0,)
    ...     backbone = ksm.models.ViTMoEBackbone(*sizes, router)
    ...     return ksm.models.ViTMoEImageClassifier(backbone, num_classes)
    >>> classifier = make_classifier()
    >>> images, labels = (x[:8] for x in ksm.datasets.digits(image_size=32))
"""

from keras_softmoe.training.objectives import (
    Distiller as Distiller,
    PrecisionAt1 as PrecisionAt1,
    SigmoidCrossentropy as SigmoidCrossentropy,
)
from keras_softmoe.training.optimizers import (
    SGD as SGD,
    Adafactor as Adafactor,
    Adam as Adam,
    Muon as Muon,
)
from keras_softmoe.training.paper_recipes import (
    Recipe as Recipe,
    recipe as recipe,
    recipes as recipes,
)
from keras_softmoe.training.pipeline import Augmentation as Augmentation
from keras_softmoe.training.schedules import WarmupSchedule as WarmupSchedule
from keras_softmoe.training.soups import greedy_soup as greedy_soup
