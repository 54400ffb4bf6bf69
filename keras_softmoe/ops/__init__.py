"""Pure functions on tensors: routing, assignment, capacity, transport, losses."""

from keras_softmoe.ops.assignment import expert_choice as expert_choice
from keras_softmoe.ops.assignment import token_choice as token_choice
from keras_softmoe.ops.capacity import expert_capacity as expert_capacity
from keras_softmoe.ops.router_losses import global_entropy_loss as global_entropy_loss
from keras_softmoe.ops.router_losses import gshard_loss as gshard_loss
from keras_softmoe.ops.router_losses import importance_loss as importance_loss
from keras_softmoe.ops.router_losses import load_loss as load_loss
from keras_softmoe.ops.router_losses import local_entropy_loss as local_entropy_loss
from keras_softmoe.ops.router_losses import merged_entropy_loss as merged_entropy_loss
from keras_softmoe.ops.router_losses import (
    mutual_information_loss as mutual_information_loss,
)
from keras_softmoe.ops.router_losses import (
    router_similarity_loss as router_similarity_loss,
)
from keras_softmoe.ops.router_losses import target_entropy_loss as target_entropy_loss
from keras_softmoe.ops.router_losses import z_loss as z_loss
from keras_softmoe.ops.routing import ChoiceRouting as ChoiceRouting
from keras_softmoe.ops.routing import DenseRouting as DenseRouting
from keras_softmoe.ops.routing import SlotRouting as SlotRouting
from keras_softmoe.ops.routing import combine as combine
from keras_softmoe.ops.routing import dispatch as dispatch
from keras_softmoe.ops.routing import to_dense as to_dense
from keras_softmoe.ops.transport import sinkhorn_plan as sinkhorn_plan
from keras_softmoe.ops.transport import (
    sparse_transport_plan as sparse_transport_plan,
)
