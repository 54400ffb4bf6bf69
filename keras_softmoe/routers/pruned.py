"""The router of a LIMoE that was pruned to a part of its experts."""

import keras
import numpy as np
from keras import ops

from keras_softmoe.routers.limoe import LIMoERouter


@keras.saving.register_keras_serializable(package="keras_softmoe")
class PrunedLIMoERouter(LIMoERouter):
    """The router of a model that has lost experts: it still counts with all of them.

    Probabilities are distributed among all experts that the model was trained with, and
    tokens choose among those that are left, by the probabilities that these have. So
    gates are as large as in training ("router-pred"). Where the pruned experts are to
    be forgotten altogether ("router-drop"), a `LIMoERouter` for fewer experts does.

    Args:
        num_experts: int, number of experts that are left.
        kept_experts: sequence of `num_experts` ints, ascending: which of them are left.
        num_predicted_experts: int, how many there were.
        losses: as in `LIMoERouter`, none by default.
        **kwargs: as in `LIMoERouter`.

    Weights: `kernel` `(D, num_predicted_experts)`, or one for each modality.

    Raises:
        ValueError: if the kept experts are not as many as said, or not all different
            experts of those that there were.

    Source: LIMoE, appendix E.4.
    """

    def __init__(
        self, num_experts, kept_experts, num_predicted_experts, losses=(), **kwargs
    ):
        kept_experts = tuple(int(expert) for expert in kept_experts)
        inside = set(kept_experts) <= set(range(num_predicted_experts))
        if list(kept_experts) != sorted(set(kept_experts)) or not inside:
            raise ValueError(
                "`kept_experts` counts the experts that are left from 0, ascending, "
                f"under {num_predicted_experts}. Received: kept_experts={kept_experts}."
            )
        if len(kept_experts) != num_experts:
            raise ValueError(
                "`num_experts` is the number of experts that are left. Received: "
                f"num_experts={num_experts}, kept_experts={kept_experts}."
            )
        self.kept_experts = kept_experts
        self._num_predicted_experts = num_predicted_experts
        super().__init__(num_experts, losses=losses, **kwargs)

    @property
    def num_predicted_experts(self):
        """Int, the experts among which probabilities are distributed."""
        return self._num_predicted_experts

    def available(self, probabilities):
        """The probabilities of the experts that are left."""
        return ops.take(probabilities, np.array(self.kept_experts), axis=-1)

    def get_config(self):
        return {
            **super().get_config(),
            "kept_experts": self.kept_experts,
            "num_predicted_experts": self.num_predicted_experts,
        }
