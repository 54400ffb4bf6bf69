"""Routers: tokens -> `Decision`, one class per algorithm, always in float32."""

from keras_softmoe.routers.identity import IdentityRouter as IdentityRouter
from keras_softmoe.routers.limoe import LIMoERouter as LIMoERouter
from keras_softmoe.routers.limoe import classic_losses as classic_losses
from keras_softmoe.routers.limoe import entropy_losses as entropy_losses
from keras_softmoe.routers.losses import RoutingLoss as RoutingLoss
from keras_softmoe.routers.named import (
    SinkhornExpertChoiceRouter as SinkhornExpertChoiceRouter,
)
from keras_softmoe.routers.named import (
    SinkhornTokenChoiceRouter as SinkhornTokenChoiceRouter,
)
from keras_softmoe.routers.named import (
    SoftmaxExpertChoiceRouter as SoftmaxExpertChoiceRouter,
)
from keras_softmoe.routers.named import (
    SoftmaxTokenChoiceRouter as SoftmaxTokenChoiceRouter,
)
from keras_softmoe.routers.named import (
    SparseTransportExpertChoiceRouter as SparseTransportExpertChoiceRouter,
)
from keras_softmoe.routers.race import ExpertRaceRouter as ExpertRaceRouter
from keras_softmoe.routers.recording import record as record
from keras_softmoe.routers.router import Decision as Decision
from keras_softmoe.routers.router import Router as Router
from keras_softmoe.routers.soft import SoftRouter as SoftRouter
