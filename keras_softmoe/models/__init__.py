"""Models: backbones, tasks and their preprocessing, on KerasHub's classes."""

from keras_softmoe.models.vit_moe_backbone import ViTMoEBackbone as ViTMoEBackbone
from keras_softmoe.models.vit_moe_image_classifier import (
    ViTMoEImageClassifier as ViTMoEImageClassifier,
)
from keras_softmoe.models.vit_moe_image_classifier import (
    ViTMoEImageClassifierPreprocessor as ViTMoEImageClassifierPreprocessor,
)
from keras_softmoe.models.vit_moe_image_classifier import (
    ViTMoEImageConverter as ViTMoEImageConverter,
)
