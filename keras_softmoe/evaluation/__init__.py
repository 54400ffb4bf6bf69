"""Quality of models and of their features, and their cost.

Names that the examples of this module use:

    >>> name = "vmoe_tiny_patch8_8e_32_icons"
    >>> sparse = ksm.models.ViTMoEImageClassifier.from_preset(name)
    >>> images, labels, _, captions = ksm.datasets.sample("icons", 8)
    >>> name = "limoe_tiny_patch8_8e_32_icons"
    >>> limoe = ksm.models.LIMoEContrastive.from_preset(name)
"""

from keras_softmoe.evaluation.embeddings import (
    retrieval as retrieval,
    zero_shot as zero_shot,
)
from keras_softmoe.evaluation.few_shot import few_shot_probe as few_shot_probe
from keras_softmoe.evaluation.model_cost import cost as cost
from keras_softmoe.evaluation.sweeps import (
    Sweep as Sweep,
    routing_sweep as routing_sweep,
)
