"""Routing decisions: counted in one pass over any data, and drawn.

`analyze` returns a `Routing`. Its parts, dicts from the blocks of the model, hold the
numbers; `routing.plot(figure)` returns a `matplotlib.figure.Figure`, and `routing.save`
writes all figures on one page. Both need matplotlib (the extra `viz`).

Names that the examples of this module use:

    >>> from_preset = ksm.models.ViTMoEImageClassifier.from_preset
    >>> soft = from_preset("soft_moe_tiny_patch8_16e_32_icons")
    >>> sparse = from_preset("vmoe_tiny_patch8_8e_32_icons")
    >>> images, labels, _, captions = ksm.datasets.sample("icons", 8)
    >>> name = "limoe_tiny_patch8_8e_32_icons"
    >>> limoe = ksm.models.LIMoEContrastive.from_preset(name)
"""

from keras_softmoe.analysis.blocks import BlockStatistics as BlockStatistics
from keras_softmoe.analysis.maps import RoutingMaps as RoutingMaps
from keras_softmoe.analysis.modalities import ModalityStatistics as ModalityStatistics
from keras_softmoe.analysis.routing import (
    Routing as Routing,
    RoutingMonitor as RoutingMonitor,
    analyze as analyze,
)
from keras_softmoe.analysis.soft import SoftStatistics as SoftStatistics
from keras_softmoe.analysis.streaming import Reducer as Reducer, observe as observe
