"""Layer scale: a learned factor per channel for the outputs of a block."""

import math
from collections.abc import Sequence

import keras
from keras import ops

from keras_softmoe.checks import check_numbers
from keras_softmoe.costs import LayerCost
from keras_softmoe.keras_adapter import Layer


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LayerScale(Layer):
    """Multiply each channel by a learned factor.

    Args:
        initial_value: float over 0, initial value of the factors.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps `(..., D)` to `(..., D)`.

    Raises:
        ValueError: if `initial_value` is not a positive number.

    Source: Touvron et al. 2021 (CaiT), section 2.1.

    Examples:
        >>> ksm.layers.LayerScale(initial_value=0.1)(np.ones((2, 16, 32))).shape
        (2, 16, 32)
    """

    def __init__(self, initial_value: float = 1e-5, **kwargs):
        check_numbers(over=0, initial_value=initial_value)
        super().__init__(**kwargs)
        self.initial_value = initial_value
        self.supports_masking = True

    def build(self, inputs_shape):
        self.gamma = self.add_weight(
            shape=(inputs_shape[-1],),
            initializer=keras.initializers.Constant(self.initial_value),
            name="gamma",
        )

    def call(self, inputs):
        return inputs * ops.cast(self.gamma, inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def cost(self, inputs_shape: Sequence[int], training: bool = False) -> LayerCost:
        return LayerCost(weights=inputs_shape[-1], kept=math.prod(inputs_shape))

    def get_config(self):
        return {**super().get_config(), "initial_value": self.initial_value}
