"""Models: backbones, tasks and their preprocessing, on KerasHub's classes."""

from keras_softmoe.catalogue import every_n as every_n
from keras_softmoe.catalogue import last_n as last_n
from keras_softmoe.catalogue import second_half as second_half
from keras_softmoe.models._adaptation import merge_lora as merge_lora
from keras_softmoe.models._contrastive import LIMoEContrastive as LIMoEContrastive
from keras_softmoe.models._contrastive import TwoTowerContrastive as TwoTowerContrastive
from keras_softmoe.models._contrastive_preprocessor import (
    LIMoEImageConverter as LIMoEImageConverter,
)
from keras_softmoe.models._contrastive_preprocessor import (
    LIMoEPreprocessor as LIMoEPreprocessor,
)
from keras_softmoe.models._contrastive_preprocessor import (
    LIMoETokenizer as LIMoETokenizer,
)
from keras_softmoe.models._contrastive_preprocessor import (
    TwoTowerPreprocessor as TwoTowerPreprocessor,
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
from keras_softmoe.models._vit_moe_image_classifier import (
    ViTMoEImageClassifierPreprocessor as ViTMoEImageClassifierPreprocessor,
)
from keras_softmoe.models._vit_moe_image_classifier import (
    ViTMoEImageConverter as ViTMoEImageConverter,
)
