"""Models: backbones, tasks and their preprocessing, on KerasHub's classes.

The examples of this module start with:

    >>> name = "soft_moe_tiny_patch8_16e_32_icons"
    >>> images, labels, _, captions = ksm.datasets.sample("icons", 8)
    >>> limoe = ksm.models.LIMoEContrastive.from_preset("limoe_tiny_patch8_8e_32_icons")
"""

from keras_softmoe import exporting
from keras_softmoe.catalogue import moe_blocks as moe_blocks

# Files of models from `converters.add_experts` name its classes.
from keras_softmoe.models import (
    backbone,
    contrastive,
    contrastive_preprocessor,
    loading,
    with_experts as with_experts,
)
from keras_softmoe.models.adaptation import merge_lora as merge_lora
from keras_softmoe.models.contrastive import (
    LIMoEContrastive as LIMoEContrastive,
    TwoTowerContrastive as TwoTowerContrastive,
)
from keras_softmoe.models.contrastive_preprocessor import (
    LIMoEPreprocessor as LIMoEPreprocessor,
    LIMoETokenizer as LIMoETokenizer,
    TwoTowerPreprocessor as TwoTowerPreprocessor,
)
from keras_softmoe.models.image_classifier import (
    ViTMoEImageClassifier as ViTMoEImageClassifier,
)
from keras_softmoe.models.image_preprocessor import (
    ViTMoEImageClassifierPreprocessor as ViTMoEImageClassifierPreprocessor,
    ViTMoEImageConverter as ViTMoEImageConverter,
    ViTMoEImageSegmenterPreprocessor as ViTMoEImageSegmenterPreprocessor,
)
from keras_softmoe.models.image_segmenter import (
    ViTMoEImageSegmenter as ViTMoEImageSegmenter,
)
from keras_softmoe.models.limoe import (
    LIMoEBackbone as LIMoEBackbone,
    prune_experts as prune_experts,
)
from keras_softmoe.models.text import TextMoEBackbone as TextMoEBackbone
from keras_softmoe.models.two_towers import TwoTowerBackbone as TwoTowerBackbone
from keras_softmoe.models.vit import ViTMoEBackbone as ViTMoEBackbone

# Subclasses inherit the methods of their base class.
loading.attach(backbone.MoEBackbone)
loading.attach(ViTMoEImageClassifier, loading.load_classifier)
loading.attach(ViTMoEImageSegmenter, loading.load_classifier)
loading.attach(contrastive.ContrastiveTask, loading.load_contrastive)
for _cls in (
    ViTMoEImageConverter,
    ViTMoEImageClassifierPreprocessor,
    ViTMoEImageSegmenterPreprocessor,
    LIMoETokenizer,
    contrastive_preprocessor.ContrastivePreprocessor,
):
    loading.attach_without_weights(_cls)
for _cls in (
    backbone.MoEBackbone,
    backbone.ModalityEncoder,
    ViTMoEImageClassifier,
    ViTMoEImageSegmenter,
    contrastive.ContrastiveTask,
):
    _cls.export = exporting.export_model
