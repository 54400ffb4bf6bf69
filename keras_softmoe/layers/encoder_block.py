"""Transformer encoder block, dense or with experts, and its layer scale."""

import inspect

import keras
from keras import ops

from keras_softmoe.checks import check_bools, check_numbers, received
from keras_softmoe.keras_adapter.layers import Layer, serialized
from keras_softmoe.layers.attention import Attention, LayerNormalization
from keras_softmoe.layers.groups import check_mask, check_tokens_shape
from keras_softmoe.layers.moe import MoE
from keras_softmoe.ops.selection import zero_padding
from keras_softmoe.types import Tensor


@keras.saving.register_keras_serializable(package="keras_softmoe")
class EncoderBlock(Layer):
    """Pre-norm Transformer block: attention, then an MLP or a mixture of experts.

    Args:
        num_heads: int, number of attention heads.
        mlp: the layer after attention: `MLP`, `MoE` or any other that maps `(B, S, D)`
            to `(B, S, D)`. It becomes a sublayer of the block and keeps its own dtype.
        use_qk_norm: bool, whether queries and keys are normalized.
        dropout_rate: float, dropout after attention and after the MLP or experts.
        layer_norm_epsilon: float, epsilon of the normalizations.
        layer_scale: float, initial value of a `LayerScale` of the outputs of attention
            and of the MLP or experts, or `None` for no such factor.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Call arguments:
        - `inputs`: `(B, S, D)` float tensor.
        - `mask`: optional `(B, S)` bool tensor, `False` for no attention and no expert.

    Returns:
        `(B, S, D)` tensor.

    Raises:
        ValueError: if `mlp` is not a layer, `num_heads` does not divide the width, a
            number is out of range, or the input does not have rank 3.

    Source: V-MoE, section 2.1 and figure 1.

    Examples:
        >>> router = ksm.routers.SoftRouter(num_experts=16)
        >>> moe = ksm.layers.MoE(router, mlp_dim=128)
        >>> block = ksm.layers.EncoderBlock(num_heads=4, mlp=moe)
        >>> block(np.random.normal(size=(2, 16, 32))).shape
        (2, 16, 32)
    """

    config_arguments = (
        *("num_heads", "use_qk_norm", "dropout_rate", "layer_norm_epsilon"),
        "layer_scale",
    )
    layer_arguments = ("mlp",)

    def __init__(
        self,
        num_heads: int,
        mlp: keras.layers.Layer,
        use_qk_norm: bool = False,
        dropout_rate: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        layer_scale: float | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not isinstance(mlp, keras.layers.Layer):
            raise ValueError(
                "`mlp` must be a layer, such as `layers.MLP(mlp_dim=128)`. "
                + received(mlp=mlp)
            )
        check_numbers(least=0, under=1, dropout_rate=dropout_rate)
        check_bools(use_qk_norm=use_qk_norm)
        self.keep_arguments(locals())
        own, epsilon = {"dtype": self.dtype_policy}, layer_norm_epsilon
        self.attention_norm = LayerNormalization(epsilon, name="attention_norm", **own)
        self.attention = Attention(num_heads, use_qk_norm, name="attention", **own)
        self.mlp_norm = LayerNormalization(epsilon, name="mlp_norm", **own)
        # In files of weights mixtures of experts have a separate name.
        self.mlp, self.moe = (None, mlp) if isinstance(mlp, MoE) else (mlp, None)
        if dropout_rate:
            self.dropout = keras.layers.Dropout(dropout_rate, name="dropout", **own)
        if layer_scale is not None:
            check_numbers(over=0, layer_scale=layer_scale)
            self.attention_scale = LayerScale(
                layer_scale, name="attention_scale", **own
            )
            self.mlp_scale = LayerScale(layer_scale, name="mlp_scale", **own)
        self.supports_masking = True
        # An MLP needs no mask, as it is applied to each token independently.
        self._masks_mlp = "mask" in inspect.signature(mlp.call).parameters

    def build(self, inputs_shape):
        check_tokens_shape(inputs_shape)
        self.attention_norm.build(inputs_shape)
        self.attention.build(inputs_shape, inputs_shape)
        self.mlp_norm.build(inputs_shape)
        (self.moe or self.mlp).build(inputs_shape)
        if self.dropout_rate:
            self.dropout.build(inputs_shape)
        if self.layer_scale is not None:
            self.attention_scale.build(inputs_shape)
            self.mlp_scale.build(inputs_shape)

    def call(self, inputs, mask=None, training=None):
        x, tokens = self.before_mlp(inputs, mask, training)
        # Padding occupies no slots of experts.
        if self.moe is not None:
            outputs = self.moe(tokens, mask=mask, training=training)
        else:
            outputs = self.mlp(tokens, **({"mask": mask} if self._masks_mlp else {}))
        return self._sum(x, outputs, training)

    def before_mlp(
        self, inputs: Tensor, mask: Tensor | None = None, training: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum after attention, and the normalized input of the MLP."""
        # All checks only for shapes that look wrong, as each call passes here
        shape = tuple(getattr(inputs, "shape", ()))
        if len(shape) != 3 or None in shape[1:]:
            check_tokens_shape(shape)
        if mask is not None:
            check_mask(mask, shape)
            # Masked values would enter the gradients of all weights.
            inputs = zero_padding(inputs, mask)
        # Normalized before attention and not after: sums keep the inputs unchanged.
        tokens = self.attention_norm(inputs)
        # (B, S, D), for each token a mean of those that are not masked
        means = self.attention(tokens, tokens, tokens_mask=mask)
        if self.layer_scale is not None:
            means = self.attention_scale(means)
        if self.dropout_rate:
            means = self.dropout(means, training=training)
        x = inputs + means
        return x, self.mlp_norm(x)

    def _sum(self, x, outputs, training):
        """Return the residual sum of a block."""
        # Tokens without an expert have zeros here and pass the block unchanged.
        if self.layer_scale is not None:
            outputs = self.mlp_scale(outputs)
        if self.dropout_rate:
            outputs = self.dropout(outputs, training=training)
        return x + outputs

    def get_config(self):
        return {**super().get_config(), "mlp": serialized(self.moe or self.mlp)}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LayerScale(Layer):
    """Multiply each channel of `(..., D)` by a learned factor.

    Source: Touvron et al. 2021 (CaiT), section 2.1.
    """

    config_arguments = ("initial_value",)

    def __init__(self, initial_value: float = 1e-5, **kwargs):
        check_numbers(over=0, initial_value=initial_value)
        super().__init__(**kwargs)
        self.keep_arguments(locals())
        self.supports_masking = True

    def build(self, inputs_shape):
        self.gamma = self.add_weight(
            shape=(inputs_shape[-1],),
            initializer=keras.initializers.Constant(self.initial_value),
            name="gamma",
        )

    def call(self, inputs):
        return inputs * ops.cast(self.gamma, inputs.dtype)
