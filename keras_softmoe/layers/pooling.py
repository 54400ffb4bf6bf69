"""Pooling of tokens to a vector or a map, and the scale of similarities."""

import math

import keras
from keras import ops

from keras_softmoe.checks import check_numbers
from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.layers.attention import Attention, LayerNormalization
from keras_softmoe.layers.mlp import MLP
from keras_softmoe.ops.kernels import as_mask, reshape
from keras_softmoe.ops.numbers import at_least, positions, where

POOLINGS = ("token", "first", "gap", "map")
# For texts, which have no class token
TEXT_POOLINGS = ("last", "first", "gap", "gmp", "map")


def pool(tokens, pooling, attention_pooling=None, mask=None, num_registers=0):
    """Pool `(B, S, D)` tokens to `(B, D)`.

    Poolings are `"token"`, `"first"`, `"last"`, `"gap"` (mean), `"gmp"` and `"map"`, by
    an `AttentionPooling`. A `(B, S)` bool mask is `False` for tokens to leave out; the
    result is zero if no token is left. `"first"` and `"gap"` leave out registers.
    """
    if pooling == "map":
        return attention_pooling(tokens, mask=mask)
    # With a class token registers come after it, and it is pooled alone.
    if pooling in ("first", "gap"):
        tokens = tokens[:, num_registers:]
    if mask is not None:
        return _MaskedPooling(pooling)(tokens, mask)
    if pooling == "gap":
        return ops.mean(tokens, axis=1)
    if pooling == "gmp":
        return ops.amax(tokens, axis=1)
    return tokens[:, -1] if pooling == "last" else tokens[:, 0]


@keras.saving.register_keras_serializable(package="keras_softmoe")
class _MaskedPooling(keras.Operation):
    """One operation: PyTorch would make tensors of the numbers in a graph."""

    def __init__(self, pooling):
        super().__init__()
        self.pooling = pooling

    def call(self, tokens, mask):
        return _pool_masked(tokens, self.pooling, mask)

    def compute_output_spec(self, tokens, mask):
        return keras.KerasTensor((tokens.shape[0], tokens.shape[2]), tokens.dtype)


def _pool_masked(tokens, pooling, mask):
    mask = as_mask(mask)[..., None]
    # Padding may hold NaN, which a product with zero would keep.
    tokens = where(mask, tokens, 0.0)
    if pooling == "gap":
        count = ops.sum(ops.cast(mask, tokens.dtype), axis=1)
        return ops.sum(tokens, axis=1) / at_least(count, 1.0)
    if pooling == "gmp":
        # Zeros of masked tokens would be larger than negative values.
        largest = ops.amax(where(mask, tokens, -float("inf")), axis=1)
        return where(ops.any(mask, axis=1), largest, 0.0)
    # The first or last token without a mask has the largest number, masked 0, (B, S)
    place = positions(tokens.shape[1], tokens)
    place = place + 1 if pooling == "last" else tokens.shape[1] - place
    places = where(mask[..., 0], place, 0)
    is_chosen = places == ops.amax(places, axis=1, keepdims=True)
    return ops.sum(where(is_chosen[..., None] & mask, tokens, 0.0), axis=1)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class FeatureMap(Layer):
    """Map of the patches of an image, resized by a fixed interpolation.

    A smaller map has the maximum of each window, as the coarsest one of ViTDet, if the
    windows have one size. All others are interpolated (bilinear). `(B, S, D)` tokens,
    the first `num_others` of which are no patches, become `(B, height, width, D)`.

    Source: Li et al. 2022 (ViTDet), section 3, where deconvolutions enlarge maps.
    """

    config_arguments = ("grid", "size", "num_others")

    def __init__(self, grid, size, num_others=0, **kwargs):
        super().__init__(**kwargs)
        self.grid, self.size, self.num_others = tuple(grid), tuple(size), num_others

    def call(self, tokens):
        # (B, rows, columns, D)
        patches = tokens[:, self.num_others :]
        maps = reshape(patches, (-1, *self.grid, tokens.shape[-1]))
        if self.grid == self.size:
            return maps
        pairs = list(zip(self.grid, self.size, strict=True))
        if all(old % new == 0 for old, new in pairs):
            window = tuple(old // new for old, new in pairs)
            return ops.max_pool(maps, window, window, data_format="channels_last")
        return ops.image.resize(
            maps, self.size, "bilinear", data_format="channels_last"
        )

    def compute_output_shape(self, tokens_shape):
        return (tokens_shape[0], *self.size, tokens_shape[-1])


@keras.saving.register_keras_serializable(package="keras_softmoe")
class AttentionPooling(Layer):
    """Multi-head attention pooling: one learned query attends to all tokens.

    With `y` the output of the attention, the result is `y + MLP(LayerNorm(y))`.

    Args:
        num_heads: int, number of attention heads.
        mlp_dim: int, hidden width of the MLP.
        use_qk_norm: bool, whether query and keys are normalized.
        activation: activation of the MLP, as in `MLP`.
        layer_norm_epsilon: float, epsilon of the normalizations.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Call arguments:
        - `tokens`: `(B, S, D)` tensor.
        - `mask`: optional `(B, S)` bool tensor, `False` for no attention.

    Returns:
        `(B, D)` tensor.

    Raises:
        ValueError: if a size is no positive integer, or heads do not divide the width.

    Source: Zhai et al. 2022 (Scaling Vision Transformers), section 3.3.

    Examples:
        >>> tokens = np.random.normal(size=(2, 16, 32))
        >>> ksm.layers.AttentionPooling(num_heads=4, mlp_dim=64)(tokens).shape
        (2, 32)
    """

    config_arguments = (
        *("num_heads", "mlp_dim", "use_qk_norm", "activation"),
        "layer_norm_epsilon",
    )

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        use_qk_norm: bool = False,
        activation: str = "gelu_tanh",
        layer_norm_epsilon: float = 1e-6,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.keep_arguments(locals())
        own, epsilon = {"dtype": self.dtype_policy}, layer_norm_epsilon
        self.attention = Attention(num_heads, use_qk_norm, name="attention", **own)
        self.mlp_norm = LayerNormalization(epsilon, name="mlp_norm", **own)
        self.mlp = MLP(mlp_dim, activation, name="mlp", **own)
        self.supports_masking = True

    def build(self, tokens_shape):
        width = tokens_shape[-1]
        self.probe = self.add_weight(
            shape=(1, 1, width), initializer="glorot_uniform", name="probe"
        )
        self.attention.build((None, 1, width), tokens_shape)
        self.mlp_norm.build((None, 1, width))
        self.mlp.build((None, 1, width))

    def call(self, tokens, mask=None):
        # One query for all images, without the batch size, which may be unknown:
        # (B, 1, D)
        probe = ops.cast(self.probe, tokens.dtype) + ops.zeros_like(tokens[:, :1])
        y = self.attention(probe, tokens, tokens_mask=mask)
        return (y + self.mlp(self.mlp_norm(y)))[:, 0]

    def compute_mask(self, tokens, previous_mask=None):
        return None

    def compute_output_shape(self, tokens_shape):
        return (tokens_shape[0], tokens_shape[2])


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ContrastiveScale(Layer):
    """Learned scale (inverse temperature) and optional bias of similarities.

    Both are scalars, repeated for each row of `(B, D)` embeddings so that they can be
    outputs of a model: a dict of `"logit_scale"` and, with a bias, `"logit_bias"`, each
    `(B,)`. The trained weight is the logarithm of the (positive) scale.

    Source: LIMoE, appendix A (scale); Zhai et al. 2023 (SigLIP), section 3.2 (bias).
    """

    config_arguments = ("scale", "bias")

    def __init__(self, scale: float = 10.0, bias: float | None = None, **kwargs):
        check_numbers(over=0, scale=scale)
        if bias is not None:
            check_numbers(bias=bias)
        # Half precision would round its logarithm.
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.keep_arguments(locals())

    def build(self, embeddings_shape):
        self.log_scale = self.add_weight(
            shape=(),
            initializer=keras.initializers.Constant(math.log(self.scale)),
            name="log_scale",
        )
        if self.bias is not None:
            self.logit_bias = self.add_weight(
                shape=(),
                initializer=keras.initializers.Constant(self.bias),
                name="logit_bias",
            )

    def call(self, embeddings):
        zeros = ops.zeros_like(embeddings[:, 0])
        outputs = {"logit_scale": zeros + ops.exp(self.log_scale)}
        if self.bias is not None:
            outputs["logit_bias"] = zeros + self.logit_bias
        return outputs

    def compute_output_shape(self, embeddings_shape):
        names = ("logit_scale", "logit_bias")[: 1 + (self.bias is not None)]
        return {name: (embeddings_shape[0],) for name in names}

    def get_config(self):
        config = super().get_config()
        del config["dtype"]
        return config
