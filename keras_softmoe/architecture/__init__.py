"""The one description of a model: its settings, its layers, and their counts.

A record (`ViT`, `TextTower`, `LIMoE`, `TwoTowers`) has a field for each argument of the
backbone of its kind. Backbones, checks, counting, presets and readers of checkpoints
share it. `layers()` makes the layers, not built; `counting.count` counts them.
"""

from keras_softmoe.architecture.encoder import (
    Encoder as Encoder,
    Mixture as Mixture,
    moe_layers_of as moe_layers_of,
)
from keras_softmoe.architecture.pairs import LIMoE as LIMoE, TwoTowers as TwoTowers
from keras_softmoe.architecture.reading import (
    BY_NAME as BY_NAME,
    kind_of as kind_of,
    read as read,
    revive_router as revive_router,
)
from keras_softmoe.architecture.settings import Settings as Settings
from keras_softmoe.architecture.towers import TextTower as TextTower, ViT as ViT
