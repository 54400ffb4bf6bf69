"""Models: backbones, tasks and their preprocessing, on KerasHub's classes.

What the examples of this module go on from:

    >>> name = "soft_moe_tiny_patch4_16e_32_glyphs"
    >>> images, labels, *_ = ksm.datasets.sample("glyphs", 8)
    >>> scenes, _, _, captions = ksm.datasets.sample("shapes", 8)
    >>> limoe = ksm.models.LIMoEContrastive.from_preset(
    ...     "limoe_tiny_patch4_8e_32_shapes"
    ... )
"""

from keras_softmoe import moved
from keras_softmoe.catalogue import moe_blocks as moe_blocks
from keras_softmoe.models._adaptation import merge_lora as merge_lora
from keras_softmoe.models._contrastive import LIMoEContrastive as LIMoEContrastive
from keras_softmoe.models._contrastive import TwoTowerContrastive as TwoTowerContrastive
from keras_softmoe.models._contrastive_preprocessor import (
    LIMoEPreprocessor as LIMoEPreprocessor,
)
from keras_softmoe.models._contrastive_preprocessor import (
    LIMoETokenizer as LIMoETokenizer,
)
from keras_softmoe.models._contrastive_preprocessor import (
    TwoTowerPreprocessor as TwoTowerPreprocessor,
)
from keras_softmoe.models._image_preprocessor import (
    ViTMoEImageClassifierPreprocessor as ViTMoEImageClassifierPreprocessor,
)
from keras_softmoe.models._image_preprocessor import (
    ViTMoEImageConverter as ViTMoEImageConverter,
)
from keras_softmoe.models._limoe_backbone import LIMoEBackbone as LIMoEBackbone
from keras_softmoe.models._pruning import prune_experts as prune_experts
from keras_softmoe.models._text_moe_backbone import TextMoEBackbone as TextMoEBackbone
from keras_softmoe.models._two_tower_backbone import (
    TwoTowerBackbone as TwoTowerBackbone,
)
from keras_softmoe.models._vit_moe_backbone import ViTMoEBackbone as ViTMoEBackbone
from keras_softmoe.models._vit_moe_image_classifier import (
    ViTMoEImageClassifier as ViTMoEImageClassifier,
)

__getattr__ = moved.attribute(__name__)
