"""Quality of models and of their features, and their cost.

Names that the examples of this module use:

    >>> sparse = ksm.models.ViTMoEImageClassifier.from_preset(
    ...     "vmoe_tiny_patch4_16e_32_glyphs"
    ... )
    >>> images, labels, *_ = ksm.datasets.sample("glyphs", 8)
    >>> limoe = ksm.models.LIMoEContrastive.from_preset(
    ...     "limoe_tiny_patch4_8e_32_shapes"
    ... )
    >>> scenes, _, _, captions = ksm.datasets.sample("shapes", 8)
"""

from keras_softmoe import moved
from keras_softmoe.evaluation.embeddings import (
    retrieval as retrieval,
    zero_shot as zero_shot,
)
from keras_softmoe.evaluation.few_shot import few_shot_probe as few_shot_probe
from keras_softmoe.evaluation.model_cost import cost as cost
from keras_softmoe.evaluation.sweep_table import Sweep as Sweep
from keras_softmoe.evaluation.sweeps import (
    pruning_curve as pruning_curve,
    routing_sweep as routing_sweep,
)

__getattr__ = moved.attribute(__name__)
