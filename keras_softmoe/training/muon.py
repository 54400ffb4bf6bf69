"""Muon for banks of experts."""

import re
from typing import Any

import keras

from keras_softmoe.keras_adapter.optimizers import MuonByShape


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Muon(MuonByShape, keras.optimizers.Muon):
    """`keras.optimizers.Muon` that orthogonalizes the update of each expert.

    The class of Keras uses AdamW for all that is no matrix, also for the experts'
    kernels `(E, D, H)`. Here each expert is updated as a matrix `(D, H)`. Biases of
    experts are left to AdamW, like other biases.

    Args:
        learning_rate: float or schedule.
        expert_layers: str, regular expression for the paths of variables with a first
            axis of experts.
        **kwargs: as in `keras.optimizers.Muon`. Name the layers to be left to AdamW,
            such as the last one: `exclude_layers=["predictions"]`.

    Source: Liu et al. 2025 (Muon is Scalable), section 2, for one matrix.

    Examples:
        >>> optimizer = ksm.training.Muon(1e-3, exclude_layers=["predictions"])
        >>> classifier.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        expert_layers: str = r"(^|/)experts(_\d+)?/",
        **kwargs,
    ):
        super().__init__(learning_rate, **kwargs)
        self.expert_layers = expert_layers

    def shape_of(self, variable: keras.Variable) -> tuple:
        """Return the shape that decides whether a variable is a matrix."""
        shape = tuple(variable.shape)
        if not re.search(self.expert_layers, variable.path):
            return shape
        # A bank of biases is (E, 1, H), or (E, H) where a template is stacked.
        return tuple(size for size in shape[1:] if size > 1)

    def lr_adjust(self, x):
        if self.rms_rate is None:
            return x
        # Of the last two axes; Keras uses the first two.
        return x * max(x.shape[-2:]) ** 0.5 * self.rms_rate

    def get_config(self):
        return {**super().get_config(), "expert_layers": self.expert_layers}
