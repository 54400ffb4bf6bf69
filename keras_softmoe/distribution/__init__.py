"""Sharding experts and batches over many devices, through `keras.distribution`.

The examples of this module start with:

    >>> name = "soft_moe_tiny_patch8_16e_32_icons"
    >>> classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
    >>> images, labels, *_ = ksm.datasets.sample("icons", 8)
"""

from keras_softmoe.distribution.backup import Backup as Backup
from keras_softmoe.distribution.layouts import (
    PlacementError as PlacementError,
    layout_map as layout_map,
)
from keras_softmoe.distribution.mesh_plan import plan as plan
from keras_softmoe.distribution.parallel import (
    data_parallel as data_parallel,
    expert_parallel as expert_parallel,
)
from keras_softmoe.distribution.sharding_audit import audit as audit
