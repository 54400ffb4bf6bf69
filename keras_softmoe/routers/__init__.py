"""Routers: tokens -> `Decision`, one class per algorithm, always in float32."""

from keras_softmoe import moved
from keras_softmoe.routers._identity import IdentityRouter as IdentityRouter
from keras_softmoe.routers._limoe import LIMoERouter as LIMoERouter
from keras_softmoe.routers._limoe import classic_losses as classic_losses
from keras_softmoe.routers._limoe import entropy_losses as entropy_losses
from keras_softmoe.routers._losses import RoutingLoss as RoutingLoss
from keras_softmoe.routers._named import (
    SinkhornExpertChoiceRouter as SinkhornExpertChoiceRouter,
)
from keras_softmoe.routers._named import (
    SinkhornTokenChoiceRouter as SinkhornTokenChoiceRouter,
)
from keras_softmoe.routers._named import (
    SoftmaxExpertChoiceRouter as SoftmaxExpertChoiceRouter,
)
from keras_softmoe.routers._named import (
    SoftmaxTokenChoiceRouter as SoftmaxTokenChoiceRouter,
)
from keras_softmoe.routers._named import (
    SparseTransportExpertChoiceRouter as SparseTransportExpertChoiceRouter,
)
from keras_softmoe.routers._race import ExpertRaceRouter as ExpertRaceRouter
from keras_softmoe.routers._router import Decision as Decision
from keras_softmoe.routers._router import Router as Router
from keras_softmoe.routers._soft import SoftRouter as SoftRouter
from keras_softmoe.routers.recording import record as record

__getattr__ = moved.attribute(__name__)
