"""From tokens to one vector per image or text."""

import keras
from keras import ops

from keras_softmoe import costs
from keras_softmoe.layers._attention import Attention, layer_norm
from keras_softmoe.layers.feedforward import MLP

POOLINGS = ("token", "first", "gap", "map")
# Of what has no class token.
TEXT_POOLINGS = ("last", "first", "gap", "gmp", "map")


def pool(tokens, pooling, attention_pooling=None):
    """`(B, S, D)` tokens to `(B, D)`.

    Args:
        tokens: `(B, S, D)` tensor.
        pooling: `"token"` or `"first"` (the first), `"last"`, `"gap"` (their mean),
            `"gmp"` (their maximum) or `"map"` (attention).
        attention_pooling: `AttentionPooling` layer for `"map"`.
    """
    if pooling == "map":
        return attention_pooling(tokens)
    if pooling == "gap":
        return ops.mean(tokens, axis=1)
    if pooling == "gmp":
        return ops.max(tokens, axis=1)
    return tokens[:, -1] if pooling == "last" else tokens[:, 0]


@keras.saving.register_keras_serializable(package="keras_softmoe")
class AttentionPooling(keras.layers.Layer):
    """Multi-head attention pooling: one learned query looks at all tokens.

    With `y` the attention's result, the output is `y + MLP(LayerNorm(y))`.

    Args:
        num_heads: int, number of attention heads.
        mlp_dim: int, hidden width of the MLP.
        use_qk_norm: bool, whether query and keys are normalized.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps `(B, S, D)` tokens to `(B, D)`.

    Raises:
        ValueError: if a size is not a positive integer, or the heads do not divide the
            width.

    Source: Zhai et al. 2022 (Scaling Vision Transformers), section 3.3.
    """

    def __init__(self, num_heads, mlp_dim, use_qk_norm=False, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.use_qk_norm = use_qk_norm
        dtype = self.dtype_policy
        self.attention = Attention(
            num_heads, use_qk_norm=use_qk_norm, dtype=dtype, name="attention"
        )
        self.mlp_norm = layer_norm(dtype, "mlp_norm")
        self.mlp = MLP(mlp_dim, dtype=dtype, name="mlp")

    def build(self, tokens_shape):
        width = tokens_shape[-1]
        self.probe = self.add_weight(
            shape=(1, 1, width), initializer="glorot_uniform", name="probe"
        )
        self.attention.build((None, 1, width), tokens_shape)
        self.mlp_norm.build((None, 1, width))
        self.mlp.build((None, 1, width))

    def call(self, tokens):
        # (B, 1, D)
        probe = ops.cast(self.probe, tokens.dtype) + ops.zeros_like(tokens[:, :1])
        y = self.attention(probe, tokens)
        return (y + self.mlp(self.mlp_norm(y)))[:, 0]

    def compute_output_shape(self, tokens_shape):
        return (tokens_shape[0], tokens_shape[2])

    def cost(self, tokens_shape, training=False):
        batch, num_tokens, width = tokens_shape
        queries_shape = (batch, 1, width)
        total = costs.LayerCost(weights=width)
        total += self.attention.cost(queries_shape, tokens_shape)
        total += costs.normalization(queries_shape) + self.mlp.cost(queries_shape)
        # Of what has a token axis: keys and values, each also in another order of axes
        kept = 4 * batch * num_tokens * width
        return total._replace(kept=kept, kept_float32=0)

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "use_qk_norm": self.use_qk_norm,
        }
