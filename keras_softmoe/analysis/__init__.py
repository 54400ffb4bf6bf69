"""What the routers of a model decide: counted in one pass over any data, and drawn.

Every `plot_` function returns a `matplotlib.figure.Figure`: a notebook shows it, and
`figure.savefig("routing.png")` keeps it. `routing_report` writes all that applies to a
model on one page. Both need matplotlib (the extra `viz`): without it they raise an
`ImportError` that says how to install it.

What the examples of this module go on from:

    >>> soft = ksm.models.ViTMoEImageClassifier.from_preset(
    ...     "soft_moe_tiny_patch4_16e_32_glyphs"
    ... )
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
from keras_softmoe.analysis._by_modality import (
    modality_statistics as modality_statistics,
)
from keras_softmoe.analysis._information import InformationReducer as InformationReducer
from keras_softmoe.analysis._information import expert_information as expert_information
from keras_softmoe.analysis._load import LoadReducer as LoadReducer
from keras_softmoe.analysis._load import expert_load as expert_load
from keras_softmoe.analysis._maps import main_experts as main_experts
from keras_softmoe.analysis._maps import routing_maps as routing_maps
from keras_softmoe.analysis._modality_examples import expert_examples as expert_examples
from keras_softmoe.analysis._modality_examples import pair_routing as pair_routing
from keras_softmoe.analysis._monitor import RoutingMonitor as RoutingMonitor
from keras_softmoe.analysis._monitor import UsageMonitor as UsageMonitor
from keras_softmoe.analysis._plot_dropped import (
    plot_discarded_patches as plot_discarded_patches,
)
from keras_softmoe.analysis._plot_expert_patches import (
    plot_expert_patches as plot_expert_patches,
)
from keras_softmoe.analysis._plot_heat_maps import (
    plot_experts_by_class as plot_experts_by_class,
)
from keras_softmoe.analysis._plot_heat_maps import (
    plot_experts_by_position as plot_experts_by_position,
)
from keras_softmoe.analysis._plot_heat_maps import (
    plot_slot_correlation as plot_slot_correlation,
)
from keras_softmoe.analysis._plot_images import plot_experts as plot_experts
from keras_softmoe.analysis._plot_images import plot_slots as plot_slots
from keras_softmoe.analysis._plot_modalities import plot_coverage as plot_coverage
from keras_softmoe.analysis._plot_modalities import (
    plot_modality_load as plot_modality_load,
)
from keras_softmoe.analysis._plot_modalities import (
    plot_routing_confidence as plot_routing_confidence,
)
from keras_softmoe.analysis._plot_modality_examples import (
    plot_expert_examples as plot_expert_examples,
)
from keras_softmoe.analysis._plot_modality_examples import plot_pair as plot_pair
from keras_softmoe.analysis._plot_modality_queues import (
    plot_priorities as plot_priorities,
)
from keras_softmoe.analysis._plot_modality_queues import (
    plot_trajectories as plot_trajectories,
)
from keras_softmoe.analysis._plot_soft import plot_concentration as plot_concentration
from keras_softmoe.analysis._plot_soft import (
    plot_expert_contributions as plot_expert_contributions,
)
from keras_softmoe.analysis._plot_soft import plot_token_weights as plot_token_weights
from keras_softmoe.analysis._plot_soft import (
    plot_tokens_per_slot as plot_tokens_per_slot,
)
from keras_softmoe.analysis._plot_statistics import (
    plot_choice_weights as plot_choice_weights,
)
from keras_softmoe.analysis._plot_statistics import plot_expert_load as plot_expert_load
from keras_softmoe.analysis._plot_statistics import (
    plot_experts_per_image as plot_experts_per_image,
)
from keras_softmoe.analysis._plot_tags import plot_tags as plot_tags
from keras_softmoe.analysis._report import routing_report as routing_report
from keras_softmoe.analysis._slots import slot_correlation as slot_correlation
from keras_softmoe.analysis._soft_statistics import SoftReducer as SoftReducer
from keras_softmoe.analysis._soft_statistics import soft_statistics as soft_statistics
from keras_softmoe.analysis._statistics import RoutingReducer as RoutingReducer
from keras_softmoe.analysis._statistics import routing_statistics as routing_statistics
from keras_softmoe.analysis._streaming import Reducer as Reducer
from keras_softmoe.analysis._streaming import observe as observe
from keras_softmoe.analysis._tags import tag_statistics as tag_statistics

__getattr__ = moved.attribute(__name__)
