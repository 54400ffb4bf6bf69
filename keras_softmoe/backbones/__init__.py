"""Keras models on KerasHub's classes: backbones, tasks, preprocessors.

Presets, formats of files and export are unknown here: the public room `models` attaches
them to these classes.
"""

from keras_softmoe.backbones._adaptation import enable_lora as enable_lora
from keras_softmoe.backbones._adaptation import merge_lora as merge_lora
from keras_softmoe.backbones._adaptation import quantize as quantize
from keras_softmoe.backbones._base import ModalityEncoder as ModalityEncoder
from keras_softmoe.backbones._base import MoEBackbone as MoEBackbone
from keras_softmoe.backbones._base import weights_follow as weights_follow
from keras_softmoe.backbones._configuration import own_policy as own_policy
from keras_softmoe.backbones._configuration import preset_is_saved as preset_is_saved
from keras_softmoe.backbones._configuration import (
    serialized_routers as serialized_routers,
)
from keras_softmoe.backbones._configuration import (
    set_trainable_argument as set_trainable_argument,
)
from keras_softmoe.backbones._configuration import (
    trainable_argument as trainable_argument,
)
from keras_softmoe.backbones._contrastive import ContrastiveTask as ContrastiveTask
from keras_softmoe.backbones._contrastive import LIMoEContrastive as LIMoEContrastive
from keras_softmoe.backbones._contrastive import (
    TwoTowerContrastive as TwoTowerContrastive,
)
from keras_softmoe.backbones._contrastive_preprocessor import (
    ContrastivePreprocessor as ContrastivePreprocessor,
)
from keras_softmoe.backbones._contrastive_preprocessor import (
    LIMoEPreprocessor as LIMoEPreprocessor,
)
from keras_softmoe.backbones._contrastive_preprocessor import (
    LIMoETokenizer as LIMoETokenizer,
)
from keras_softmoe.backbones._contrastive_preprocessor import (
    TwoTowerPreprocessor as TwoTowerPreprocessor,
)
from keras_softmoe.backbones._contrastive_preprocessor import (
    fit_preprocessor as fit_preprocessor,
)
from keras_softmoe.backbones._image_classifier import (
    ViTMoEImageClassifier as ViTMoEImageClassifier,
)
from keras_softmoe.backbones._image_preprocessor import (
    ViTMoEImageClassifierPreprocessor as ViTMoEImageClassifierPreprocessor,
)
from keras_softmoe.backbones._image_preprocessor import (
    ViTMoEImageConverter as ViTMoEImageConverter,
)
from keras_softmoe.backbones._limoe import LIMoEBackbone as LIMoEBackbone
from keras_softmoe.backbones._mutable_routing import MutableRouting as MutableRouting
from keras_softmoe.backbones._mutable_routing import (
    recompile_on_change as recompile_on_change,
)
from keras_softmoe.backbones._pruning import prune_experts as prune_experts
from keras_softmoe.backbones._text import TextMoEBackbone as TextMoEBackbone
from keras_softmoe.backbones._two_towers import TwoTowerBackbone as TwoTowerBackbone
from keras_softmoe.backbones._vit import ViTMoEBackbone as ViTMoEBackbone
