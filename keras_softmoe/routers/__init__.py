"""Routers: tokens -> `Decision`, one class per algorithm, always in float32."""

from keras_softmoe.routers._expert_choice import (
    SinkhornExpertChoiceRouter as SinkhornExpertChoiceRouter,
)
from keras_softmoe.routers._expert_choice import (
    SoftmaxExpertChoiceRouter as SoftmaxExpertChoiceRouter,
)
from keras_softmoe.routers._expert_choice import (
    SparseTransportExpertChoiceRouter as SparseTransportExpertChoiceRouter,
)
from keras_softmoe.routers._identity import IdentityRouter as IdentityRouter
from keras_softmoe.routers._limoe import MUTABLE_SETTINGS as MUTABLE_SETTINGS
from keras_softmoe.routers._limoe import LIMoERouter as LIMoERouter
from keras_softmoe.routers._limoe import PrunedLIMoERouter as PrunedLIMoERouter
from keras_softmoe.routers._router import Decision as Decision
from keras_softmoe.routers._router import Router as Router
from keras_softmoe.routers._routing_losses import GlobalEntropyLoss as GlobalEntropyLoss
from keras_softmoe.routers._routing_losses import GShardLoss as GShardLoss
from keras_softmoe.routers._routing_losses import ImportanceLoss as ImportanceLoss
from keras_softmoe.routers._routing_losses import LoadLoss as LoadLoss
from keras_softmoe.routers._routing_losses import LocalEntropyLoss as LocalEntropyLoss
from keras_softmoe.routers._routing_losses import MergedEntropyLoss as MergedEntropyLoss
from keras_softmoe.routers._routing_losses import (
    MutualInformationLoss as MutualInformationLoss,
)
from keras_softmoe.routers._routing_losses import RoutingLoss as RoutingLoss
from keras_softmoe.routers._routing_losses import TargetEntropyLoss as TargetEntropyLoss
from keras_softmoe.routers._routing_losses import ZLoss as ZLoss
from keras_softmoe.routers._routing_losses import classic_losses as classic_losses
from keras_softmoe.routers._routing_losses import entropy_losses as entropy_losses
from keras_softmoe.routers._soft import SoftRouter as SoftRouter
from keras_softmoe.routers._token_choice import (
    SinkhornTokenChoiceRouter as SinkhornTokenChoiceRouter,
)
from keras_softmoe.routers._token_choice import (
    SoftmaxTokenChoiceRouter as SoftmaxTokenChoiceRouter,
)
from keras_softmoe.routers.recording import record as record
