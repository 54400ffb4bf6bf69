"""Routers: tokens -> `Decision`, one class per algorithm, always in float32."""

from keras_softmoe.routers.expert_choice import (
    SinkhornExpertChoiceRouter as SinkhornExpertChoiceRouter,
)
from keras_softmoe.routers.expert_choice import (
    SoftmaxExpertChoiceRouter as SoftmaxExpertChoiceRouter,
)
from keras_softmoe.routers.expert_choice import (
    SparseTransportExpertChoiceRouter as SparseTransportExpertChoiceRouter,
)
from keras_softmoe.routers.identity import IdentityRouter as IdentityRouter
from keras_softmoe.routers.router import Decision as Decision
from keras_softmoe.routers.router import Router as Router
from keras_softmoe.routers.soft import SoftRouter as SoftRouter
from keras_softmoe.routers.token_choice import (
    SinkhornTokenChoiceRouter as SinkhornTokenChoiceRouter,
)
from keras_softmoe.routers.token_choice import (
    SoftmaxTokenChoiceRouter as SoftmaxTokenChoiceRouter,
)
