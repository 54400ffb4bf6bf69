"""Models: backbones, tasks and their preprocessing, on KerasHub's classes."""

from keras_softmoe.models.limoe_backbone import LIMoEBackbone as LIMoEBackbone
from keras_softmoe.models.placement import every_n as every_n
from keras_softmoe.models.placement import last_n as last_n
from keras_softmoe.models.placement import second_half as second_half
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
