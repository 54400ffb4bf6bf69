"""The one description of a model: its settings, its layers, and their cost.

A record (`ViT`, `TextTower`, `LIMoE`, `TwoTowers`) has a field for each argument of the
backbone of its kind. Backbones, checks, counting, presets and readers of checkpoints
share it. `layers()` makes the layers, not built; `cost()` counts them.
"""

from keras_softmoe.architecture._encoder import Encoder as Encoder
from keras_softmoe.architecture._encoder import Mixture as Mixture
from keras_softmoe.architecture._encoder import moe_layers_of as moe_layers_of
from keras_softmoe.architecture._pairs import LIMoE as LIMoE
from keras_softmoe.architecture._pairs import TwoTowers as TwoTowers
from keras_softmoe.architecture._reading import BY_NAME as BY_NAME
from keras_softmoe.architecture._reading import kind_of as kind_of
from keras_softmoe.architecture._reading import read as read
from keras_softmoe.architecture._reading import revive_router as revive_router
from keras_softmoe.architecture._settings import Settings as Settings
from keras_softmoe.architecture._towers import TextTower as TextTower
from keras_softmoe.architecture._towers import ViT as ViT
