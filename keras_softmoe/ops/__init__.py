"""Pure functions on tensors: routing, assignment, capacity, transport, losses."""

from keras_softmoe import moved
from keras_softmoe.ops.assignment import (
    expert_choice as expert_choice,
    token_choice as token_choice,
)
from keras_softmoe.ops.capacity import expert_capacity as expert_capacity
from keras_softmoe.ops.router_losses import (
    global_entropy_loss as global_entropy_loss,
    gshard_loss as gshard_loss,
    importance_loss as importance_loss,
    load_loss as load_loss,
    local_entropy_loss as local_entropy_loss,
    merged_entropy_loss as merged_entropy_loss,
    mutual_information_loss as mutual_information_loss,
    router_similarity_loss as router_similarity_loss,
    target_entropy_loss as target_entropy_loss,
    z_loss as z_loss,
)
from keras_softmoe.ops.routing import (
    ChoiceRouting as ChoiceRouting,
    DenseRouting as DenseRouting,
    SlotRouting as SlotRouting,
    combine as combine,
    dispatch as dispatch,
    to_dense as to_dense,
)
from keras_softmoe.ops.transport import (
    sinkhorn_plan as sinkhorn_plan,
    sparse_transport_plan as sparse_transport_plan,
)

__getattr__ = moved.attribute(__name__)
