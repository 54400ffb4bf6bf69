"""Models: backbones, tasks and their preprocessing, on KerasHub's classes.

The examples of this module start with:

    >>> name = "soft_moe_tiny_patch4_16e_32_glyphs"
    >>> images, labels, *_ = ksm.datasets.sample("glyphs", 8)
    >>> scenes, _, _, captions = ksm.datasets.sample("shapes", 8)
    >>> limoe = ksm.models.LIMoEContrastive.from_preset(
    ...     "limoe_tiny_patch4_8e_32_shapes"
    ... )
"""

from keras_softmoe import backbones, exporting, moved
from keras_softmoe.backbones import LIMoEBackbone as LIMoEBackbone
from keras_softmoe.backbones import LIMoEContrastive as LIMoEContrastive
from keras_softmoe.backbones import LIMoEPreprocessor as LIMoEPreprocessor
from keras_softmoe.backbones import LIMoETokenizer as LIMoETokenizer
from keras_softmoe.backbones import TextMoEBackbone as TextMoEBackbone
from keras_softmoe.backbones import TwoTowerBackbone as TwoTowerBackbone
from keras_softmoe.backbones import TwoTowerContrastive as TwoTowerContrastive
from keras_softmoe.backbones import TwoTowerPreprocessor as TwoTowerPreprocessor
from keras_softmoe.backbones import ViTMoEBackbone as ViTMoEBackbone
from keras_softmoe.backbones import ViTMoEImageClassifier as ViTMoEImageClassifier
from keras_softmoe.backbones import (
    ViTMoEImageClassifierPreprocessor as ViTMoEImageClassifierPreprocessor,
)
from keras_softmoe.backbones import ViTMoEImageConverter as ViTMoEImageConverter
from keras_softmoe.backbones import merge_lora as merge_lora
from keras_softmoe.backbones import prune_experts as prune_experts
from keras_softmoe.catalogue import moe_blocks as moe_blocks
from keras_softmoe.models import _loading

# Files of models from `converters.add_experts` name its classes.
from keras_softmoe.models import _model_with_experts as _model_with_experts

# Subclasses inherit the methods of their base class.
_loading.attach(backbones.MoEBackbone)
_loading.attach(ViTMoEImageClassifier, _loading.load_classifier)
_loading.attach(backbones.ContrastiveTask, _loading.load_contrastive)
for _cls in (
    ViTMoEImageConverter,
    ViTMoEImageClassifierPreprocessor,
    LIMoETokenizer,
    backbones.ContrastivePreprocessor,
):
    _loading.attach_without_weights(_cls)
for _cls in (
    backbones.MoEBackbone,
    backbones.ModalityEncoder,
    ViTMoEImageClassifier,
    backbones.ContrastiveTask,
):
    _cls.export = exporting.export_model

__getattr__ = moved.attribute(__name__)
