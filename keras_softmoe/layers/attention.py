"""Multi-head attention with the query and key normalization of ViTs."""

import math

import keras

from keras_softmoe.checks import check_num_heads, check_numbers, check_whole_numbers
from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.ops.kernels import affine, attend, layer_norm, reshape
from keras_softmoe.ops.selection import zero_padding


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Attention(Layer):
    """Multi-head attention of `(B, Q, D)` queries over `(B, S, D)` tokens.

    Unlike `keras.layers.MultiHeadAttention` it can normalize queries and keys (scales,
    no offset). `num_heads` must divide the width. A mask of the tokens is `(B, S)`
    bool, `False` for no attention.

    Source: Dosovitskiy et al. 2021, appendix A; Dehghani et al. 2023, section 2 (norm).
    """

    config_arguments = ("num_heads", "use_qk_norm")

    def __init__(self, num_heads: int, use_qk_norm: bool = False, **kwargs):
        check_whole_numbers(1, num_heads=num_heads)
        super().__init__(**kwargs)
        self.keep_arguments(locals())
        self.supports_masking = True

    def build(self, queries_shape, tokens_shape):
        width = queries_shape[-1]
        check_num_heads(self.num_heads, width)
        head_dim = width // self.num_heads
        # The fans of Glorot are those of the (D, D) matrices before reshaping.
        project = {
            name: keras.layers.EinsumDense(
                "bsd,dhk->bshk",
                output_shape=(None, self.num_heads, head_dim),
                bias_axes="hk",
                kernel_initializer=_glorot([0], [1, 2]),
                dtype=self.dtype_policy,
                name=name,
            )
            for name in ("query", "key", "value")
        }
        self.query, self.key, self.value = project.values()
        self.query.build(queries_shape)
        self.key.build(tokens_shape)
        self.value.build(tokens_shape)
        self.attention_output = keras.layers.EinsumDense(
            "bshk,hkd->bsd",
            output_shape=(None, width),
            bias_axes="d",
            kernel_initializer=_glorot([0, 1], [2]),
            dtype=self.dtype_policy,
            name="attention_output",
        )
        heads_shape = (None, None, self.num_heads, head_dim)
        self.attention_output.build(heads_shape)
        if self.use_qk_norm:
            known = {"center": False, "dtype": self.dtype_policy}
            self.query_norm = LayerNormalization(name="query_norm", **known)
            self.query_norm.build(heads_shape)
            self.key_norm = LayerNormalization(name="key_norm", **known)
            self.key_norm.build(heads_shape)

    def call(self, queries, tokens, tokens_mask=None):
        if tokens_mask is not None:
            # A NaN in padding would pass its weight of zero.
            tokens = zero_padding(tokens, tokens_mask)
        width = queries.shape[-1]
        heads = (self.num_heads, width // self.num_heads)
        # (B, Q, heads, head_dim) and twice (B, S, heads, head_dim)
        query = _project(self.query, queries, *heads)
        key = _project(self.key, tokens, *heads)
        value = _project(self.value, tokens, *heads)
        if self.use_qk_norm:
            # Their products then stay small in large models, and training is stable.
            query, key = self.query_norm(query), self.key_norm(key)
        # Each head averages the values by its own weights, (B, Q, heads, head_dim)
        means = attend(query, key, value, tokens_mask)
        return _project(self.attention_output, means, width)

    def compute_output_shape(self, queries_shape, tokens_shape):
        return queries_shape


def _project(dense, x, *outputs):
    """Return the output of an `EinsumDense`, `(B, S, *outputs)`, as a plain product."""
    if dense.quantization_mode:
        return dense(x)
    # Heads side by side are one matrix: a single product of all tokens
    num_tokens, width = x.shape[1], math.prod(outputs)
    if len(x.shape) == 4:
        x = reshape(x, (-1, num_tokens, width))
    kernel = reshape(dense.kernel, (width, width))
    projected = affine(x, kernel, reshape(dense.bias, (width,)))
    if len(outputs) == 1:
        return projected
    return reshape(projected, (-1, num_tokens, *outputs))


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LayerNormalization(keras.layers.LayerNormalization):
    """Layer normalization, by default with the epsilon of the papers' code.

    Arguments and shapes are those of `keras.layers.LayerNormalization`.
    """

    __call__ = Layer.__call__

    def __init__(self, epsilon: float = 1e-6, **kwargs):
        check_numbers(over=0, layer_norm_epsilon=epsilon)
        super().__init__(epsilon=epsilon, **kwargs)

    def call(self, inputs):
        return layer_norm(inputs, self.gamma, self.beta, self.epsilon)


def _glorot(input_axes, output_axes):
    return keras.initializers.VarianceScaling(
        1.0, "fan_avg", "uniform", input_axes=input_axes, output_axes=output_axes
    )
