"""What the routers of a model decide, counted in one pass over any data."""

from keras_softmoe.analysis.by_modality import (
    ModalityStatistics as ModalityStatistics,
)
from keras_softmoe.analysis.by_modality import (
    modality_statistics as modality_statistics,
)
from keras_softmoe.analysis.concentration import Concentration as Concentration
from keras_softmoe.analysis.load import ExpertLoad as ExpertLoad
from keras_softmoe.analysis.load import LoadReducer as LoadReducer
from keras_softmoe.analysis.load import expert_load as expert_load
from keras_softmoe.analysis.maps import RoutingMaps as RoutingMaps
from keras_softmoe.analysis.maps import main_experts as main_experts
from keras_softmoe.analysis.maps import routing_maps as routing_maps
from keras_softmoe.analysis.modality_examples import ExpertExamples as ExpertExamples
from keras_softmoe.analysis.modality_examples import PairRouting as PairRouting
from keras_softmoe.analysis.modality_examples import expert_examples as expert_examples
from keras_softmoe.analysis.modality_examples import pair_routing as pair_routing
from keras_softmoe.analysis.peaks import PeakSweep as PeakSweep
from keras_softmoe.analysis.peaks import peak_sweep as peak_sweep
from keras_softmoe.analysis.slots import SlotCorrelation as SlotCorrelation
from keras_softmoe.analysis.slots import slot_correlation as slot_correlation
from keras_softmoe.analysis.soft_statistics import SoftReducer as SoftReducer
from keras_softmoe.analysis.soft_statistics import SoftStatistics as SoftStatistics
from keras_softmoe.analysis.soft_statistics import soft_statistics as soft_statistics
from keras_softmoe.analysis.statistics import RoutingReducer as RoutingReducer
from keras_softmoe.analysis.statistics import RoutingStatistics as RoutingStatistics
from keras_softmoe.analysis.statistics import routing_statistics as routing_statistics
from keras_softmoe.analysis.streaming import Reducer as Reducer
from keras_softmoe.analysis.streaming import observe as observe
