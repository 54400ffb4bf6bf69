"""Routers: tokens -> `Decision`, one class per algorithm, always in float32."""

from keras_softmoe import moved
from keras_softmoe.routers.expert_choice import (
    SinkhornExpertChoiceRouter as SinkhornExpertChoiceRouter,
    SoftmaxExpertChoiceRouter as SoftmaxExpertChoiceRouter,
    SparseTransportExpertChoiceRouter as SparseTransportExpertChoiceRouter,
)
from keras_softmoe.routers.identity import IdentityRouter as IdentityRouter
from keras_softmoe.routers.limoe import (
    LIMoERouter as LIMoERouter,
    classic_losses as classic_losses,
    entropy_losses as entropy_losses,
)
from keras_softmoe.routers.losses import RoutingLoss as RoutingLoss
from keras_softmoe.routers.race import ExpertRaceRouter as ExpertRaceRouter
from keras_softmoe.routers.recording import record as record
from keras_softmoe.routers.router import Decision as Decision, Router as Router
from keras_softmoe.routers.soft import SoftRouter as SoftRouter
from keras_softmoe.routers.token_choice import (
    SinkhornTokenChoiceRouter as SinkhornTokenChoiceRouter,
    SoftmaxTokenChoiceRouter as SoftmaxTokenChoiceRouter,
)

__getattr__ = moved.attribute(__name__)
