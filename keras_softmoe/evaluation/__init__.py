"""How good a frozen model's features are, and what its routers do."""

from keras_softmoe.evaluation.concentration import Concentration as Concentration
from keras_softmoe.evaluation.cost import Cost as Cost
from keras_softmoe.evaluation.cost import cost as cost
from keras_softmoe.evaluation.few_shot import FewShotResult as FewShotResult
from keras_softmoe.evaluation.few_shot import ShotResult as ShotResult
from keras_softmoe.evaluation.few_shot import few_shot_probe as few_shot_probe
from keras_softmoe.evaluation.load import ExpertLoad as ExpertLoad
from keras_softmoe.evaluation.load import expert_load as expert_load
from keras_softmoe.evaluation.metrics import PrecisionAt1 as PrecisionAt1
from keras_softmoe.evaluation.modalities import (
    ModalityStatistics as ModalityStatistics,
)
from keras_softmoe.evaluation.modalities import (
    modality_statistics as modality_statistics,
)
from keras_softmoe.evaluation.modality_examples import ExpertExamples as ExpertExamples
from keras_softmoe.evaluation.modality_examples import PairRouting as PairRouting
from keras_softmoe.evaluation.modality_examples import (
    expert_examples as expert_examples,
)
from keras_softmoe.evaluation.modality_examples import pair_routing as pair_routing
from keras_softmoe.evaluation.peaks import PeakSweep as PeakSweep
from keras_softmoe.evaluation.peaks import peak_sweep as peak_sweep
from keras_softmoe.evaluation.retrieval import Retrieval as Retrieval
from keras_softmoe.evaluation.retrieval import retrieval as retrieval
from keras_softmoe.evaluation.ridge import L2_GRID as L2_GRID
from keras_softmoe.evaluation.ridge import RidgeProbe as RidgeProbe
from keras_softmoe.evaluation.ridge import best_l2 as best_l2
from keras_softmoe.evaluation.ridge import ridge_probe as ridge_probe
from keras_softmoe.evaluation.ridge import sample_support as sample_support
from keras_softmoe.evaluation.routing import RoutingMaps as RoutingMaps
from keras_softmoe.evaluation.routing import main_experts as main_experts
from keras_softmoe.evaluation.routing import routing_maps as routing_maps
from keras_softmoe.evaluation.slots import SlotCorrelation as SlotCorrelation
from keras_softmoe.evaluation.slots import slot_correlation as slot_correlation
from keras_softmoe.evaluation.soft_statistics import SoftStatistics as SoftStatistics
from keras_softmoe.evaluation.soft_statistics import soft_statistics as soft_statistics
from keras_softmoe.evaluation.statistics import (
    RoutingStatistics as RoutingStatistics,
)
from keras_softmoe.evaluation.statistics import (
    routing_statistics as routing_statistics,
)
from keras_softmoe.evaluation.sweeps import RouterAblation as RouterAblation
from keras_softmoe.evaluation.sweeps import SweepRow as SweepRow
from keras_softmoe.evaluation.sweeps import random_routers as random_routers
from keras_softmoe.evaluation.sweeps import routing_sweep as routing_sweep
from keras_softmoe.evaluation.zero_shot import ZeroShot as ZeroShot
from keras_softmoe.evaluation.zero_shot import class_embeddings as class_embeddings
from keras_softmoe.evaluation.zero_shot import classify as classify
from keras_softmoe.evaluation.zero_shot import zero_shot as zero_shot
