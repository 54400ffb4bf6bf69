"""What both routers with a Sinkhorn plan share."""

from keras import ops

from keras_softmoe.ops import sinkhorn_plan
from keras_softmoe.types import Tensor


class SinkhornSelection:
    """Mixin of sparse routers that choose by `ops.sinkhorn_plan` of the logits.

    The router sets `combine` and `num_iterations`. The plan has a gradient only where
    the gates are made of it.
    """

    def selection_scores(
        self,
        logits: Tensor,
        probabilities: Tensor,
        capacity: int,
        valid: Tensor | None,
        limit: Tensor | None,
    ) -> Tensor:
        if self.combine == "softmax":
            logits = ops.stop_gradient(logits)
        return sinkhorn_plan(logits, self.num_iterations, valid)
