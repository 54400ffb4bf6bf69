"""The soft mixture of experts as one layer."""

import keras

from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.layers.moe import MoE
from keras_softmoe.routers import SoftRouter


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SoftMoE(Layer):
    """Soft mixture of expert MLPs, in place of a Transformer's MLP.

    Short for `MoE(SoftRouter(num_experts, slots_per_expert), mlp_dim)`, with its call
    arguments `inputs` and `mask`. With `num_experts * slots_per_expert` slots for the
    same number of tokens it costs as much as the dense MLP; one slot per expert is
    usually best (section 3.5). For training runs of less than about ten thousand steps
    set `initial_scale="unit_variance"`.

    Args:
        num_experts: int, number of experts.
        mlp_dim: int, hidden width of an expert.
        slots_per_expert: int, slots of each expert.
        equal_experts: bool, whether all experts start with the same weights.
        remat_experts: bool, see `MoE`.
        initial_scale: float, or `"unit_variance"`, see `SoftRouter`.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Raises:
        ValueError: if an argument is not positive, or the input has no axis of tokens.

    Source: Soft MoE, section 2 (algorithm 1).

    Examples:
        >>> layer = ksm.layers.SoftMoE(num_experts=16, mlp_dim=128)
        >>> layer(np.random.normal(size=(2, 16, 32))).shape
        (2, 16, 32)
    """

    config_arguments = (
        *("num_experts", "mlp_dim", "slots_per_expert", "equal_experts"),
        *("remat_experts", "initial_scale"),
    )

    def __init__(
        self,
        num_experts: int,
        mlp_dim: int,
        slots_per_expert: int = 1,
        equal_experts: bool = False,
        remat_experts: bool = False,
        initial_scale: float | str = 1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.keep_arguments(locals())
        self.moe = MoE(
            SoftRouter(num_experts, slots_per_expert, initial_scale=initial_scale),
            mlp_dim,
            equal_experts=equal_experts,
            remat_experts=remat_experts,
            dtype=self.dtype_policy,
            name="moe",
        )
        self.supports_masking = True

    def build(self, inputs_shape):
        self.moe.build(inputs_shape)

    def call(self, inputs, mask=None, training=None):
        return self.moe(inputs, mask=mask, training=training)
