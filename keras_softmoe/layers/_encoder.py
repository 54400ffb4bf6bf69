"""The Transformer encoder: its block, dense or with experts, and the stack of them."""

import inspect
import math

import keras
import numpy as np

from keras_softmoe.checks import (
    check_bools,
    check_names,
    check_numbers,
    check_whole_numbers,
    is_whole_number,
    quote,
)
from keras_softmoe.costs import LayerCost, cost_of, normalization
from keras_softmoe.layers._attention import Attention, check_num_heads, layer_norm
from keras_softmoe.layers._modalities import (
    add,
    check_tokens_shape,
    each,
    masks_like,
    sum_costs,
)
from keras_softmoe.layers._moe import MoE
from keras_softmoe.layers.feedforward import MLP


@keras.saving.register_keras_serializable(package="keras_softmoe")
class EncoderBlock(keras.layers.Layer):
    """Pre-norm Transformer block: attention, then an MLP or a mixture of experts.

    Args:
        num_heads: int, number of attention heads.
        mlp: the layer after attention: `MLP`, `MoE` or any other that maps `(B, S, D)`
            to `(B, S, D)`. It becomes a part of the block and keeps its own dtype. (For
            `cost` it needs a method `cost`, see `costs.cost_of`.)
        use_qk_norm: bool, whether queries and keys are normalized.
        dropout_rate: float, dropout after attention and after the MLP or experts.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Call arguments:
        inputs: `(B, S, D)` float tensor; or a dict from modalities (`"image"`,
            `"text"`) to such tensors. Attention and an MLP see each of them apart; a
            `MoE` is given all of them together.
        mask: optional `(B, S)` bool tensor, or a dict of them; `False` for tokens that
            get no attention and that experts leave out, see `MoE`.

    Returns: `(B, S, D)` tensor, or a dict like the input.

    Raises:
        ValueError: if `mlp` is no layer, `num_heads` does not divide the width, or the
            input has not rank 3.

    Source: V-MoE, section 2.1 and figure 1; several modalities: LIMoE, section 2.

    Example:

    >>> router = ksm.routers.SoftRouter(num_experts=16)
    >>> moe = ksm.layers.MoE(router, mlp_dim=128)
    >>> block = ksm.layers.EncoderBlock(num_heads=4, mlp=moe)
    >>> block(np.random.normal(size=(2, 16, 32))).shape
    (2, 16, 32)
    """

    def __init__(self, num_heads, mlp, use_qk_norm=False, dropout_rate=0.0, **kwargs):
        super().__init__(**kwargs)
        if not isinstance(mlp, keras.layers.Layer):
            raise ValueError(
                "`mlp` is a layer, for example `layers.MLP(mlp_dim=128)` or "
                "`layers.MoE(router, mlp_dim=128)`. "
                f"Received: mlp={mlp!r}."
            )
        check_numbers(least=0, under=1, dropout_rate=dropout_rate)
        check_bools(use_qk_norm=use_qk_norm)
        self.num_heads = num_heads
        self.use_qk_norm = use_qk_norm
        self.dropout_rate = dropout_rate
        dtype = self.dtype_policy
        self.attention_norm = layer_norm(dtype, "attention_norm")
        self.attention = Attention(
            num_heads, use_qk_norm=use_qk_norm, dtype=dtype, name="attention"
        )
        self.mlp_norm = layer_norm(dtype, "mlp_norm")
        # Files of weights have mixtures of experts under a name of their own.
        self.mlp = self.moe = None
        if isinstance(mlp, MoE):
            self.moe = mlp
        else:
            self.mlp = mlp
        if dropout_rate:
            self.dropout = keras.layers.Dropout(
                dropout_rate, dtype=dtype, name="dropout"
            )
        self.supports_masking = True
        # An MLP needs no mask: it looks at each token by itself.
        self._masks_mlp = "mask" in inspect.signature(mlp.call).parameters

    def build(self, inputs_shape):
        check_tokens_shape(inputs_shape)
        # Modalities differ in the number of tokens, which only the experts look at.
        is_dict = isinstance(inputs_shape, dict)
        shape = next(iter(inputs_shape.values())) if is_dict else inputs_shape
        self.attention_norm.build(shape)
        self.attention.build(shape, shape)
        self.mlp_norm.build(shape)
        if self.moe is not None:
            self.moe.build(inputs_shape)
        else:
            self.mlp.build(shape)
        if self.dropout_rate:
            self.dropout.build(shape)

    def call(self, inputs, mask=None, training=None):
        x = add(inputs, each(lambda x, m: self._attend(x, m, training), inputs, mask))
        tokens = each(self.mlp_norm, x)
        if self.moe is not None:
            outputs = self.moe(tokens, mask=mask, training=training)
        elif self._masks_mlp:
            outputs = each(lambda x, m: self.mlp(x, mask=m), tokens, mask)
        else:
            outputs = each(self.mlp, tokens)
        return add(x, each(lambda x: self._drop(x, training), outputs))

    def _attend(self, x, mask, training):
        tokens = self.attention_norm(x)
        means = self.attention(tokens, tokens, tokens_mask=mask)
        return self._drop(means, training)

    def _drop(self, x, training):
        return self.dropout(x, training=training) if self.dropout_rate else x

    def compute_mask(self, inputs, previous_mask=None):
        return masks_like(inputs, previous_mask)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def cost(self, inputs_shape, training=False):
        def cost_of_modality(shape):
            part = normalization(shape) * 2 + self.attention.cost(shape, shape)
            if self.moe is None:
                part += cost_of(self.mlp, shape, training)
            if self.dropout_rate:
                part += LayerCost(kept_bytes=2 * math.prod(shape))
            return part

        total = sum_costs(cost_of_modality, inputs_shape)
        if self.moe is not None:
            total += self.moe.cost(inputs_shape, training)
        mixtures = (m._replace(name=f"{self.name}/{m.name}") for m in total.mixtures)
        return total._replace(mixtures=tuple(mixtures))

    def get_config(self):
        mlp = keras.saving.serialize_keras_object(self.moe or self.mlp)
        # It is built with the block.
        mlp.pop("build_config", None)
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "mlp": mlp,
            "use_qk_norm": self.use_qk_norm,
            "dropout_rate": self.dropout_rate,
        }

    @classmethod
    def from_config(cls, config):
        if "mlp" not in config:
            return cls(**_as_saved_now(config))
        mlp = keras.saving.deserialize_keras_object(config["mlp"])
        return cls(**{**config, "mlp": mlp})


def _as_saved_now(config):
    """The arguments of a block from a file that is older than its `mlp`."""
    config = dict(config)
    settings = {name: config.pop(name) for name in MoE.settings() if name in config}
    mlp_dim, router = config.pop("mlp_dim"), config.pop("router")
    dtype = config.get("dtype")
    if router is None:
        mlp = MLP(mlp_dim, dtype=dtype, name="mlp")
    else:
        router = keras.saving.deserialize_keras_object(router)
        mlp = MoE(router, mlp_dim, dtype=dtype, name="moe", **settings)
    return {**config, "mlp": mlp}


class Encoder:
    """Encoder blocks, some of them mixtures of experts, and the last normalization.

    It is no layer itself: called while a model is put together, it makes its blocks
    (`block_0`, `block_1`, ...) and the normalization (`encoder_norm`) layers of the
    model.

    Args:
        num_layers: int, number of blocks.
        num_heads: int, number of attention heads. Must divide `hidden_dim`.
        hidden_dim: int, width `D` of a token.
        mlp_dim: int, hidden width of MLPs and experts.
        moe_layers: sequence of int, the blocks (counted from 0) whose MLP is a mixture
            of experts.
        router: the router of those blocks, a template: each block makes its own with
            the same configuration. Or a list of routers, one for each of those blocks.
            Required exactly if there are any.
        use_qk_norm: bool, whether attention normalizes queries and keys.
        dropout_rate: float, dropout in the blocks.
        dtype: dtype or policy of all layers but the routers.
        **moe_settings: other arguments of `layers.MoE`, the same for all blocks.

    Call arguments:
        inputs: `(B, S, D)` tensor, or a dict from modalities to such tensors.
        mask: optional `(B, S)` bool tensor, or a dict of them, see `EncoderBlock`.

    Returns: normalized tokens, like the input.

    Raises:
        ValueError: if a size is not a positive integer, the heads do not divide the
            width, or `moe_layers` and `router` do not fit.
        TypeError: if `layers.MoE` has no such setting.
    """

    def __init__(
        self,
        num_layers,
        num_heads,
        hidden_dim,
        mlp_dim,
        moe_layers=(),
        router=None,
        use_qk_norm=False,
        dropout_rate=0.0,
        dtype=None,
        **moe_settings,
    ):
        check_whole_numbers(
            1,
            num_layers=num_layers,
            num_heads=num_heads,
            hidden_dim=hidden_dim,
            mlp_dim=mlp_dim,
        )
        check_num_heads(num_heads, hidden_dim)
        self.moe_layers = _block_indices(moe_layers, num_layers)
        self.moe_settings = _complete_settings(moe_settings)
        routers = _router_of_block(self.moe_layers, router)

        def mlp(index):
            if index not in routers:
                return MLP(mlp_dim, dtype=dtype, name="mlp")
            return MoE(
                routers[index], mlp_dim, dtype=dtype, name="moe", **self.moe_settings
            )

        self.blocks = [
            EncoderBlock(
                num_heads,
                mlp(index),
                use_qk_norm=use_qk_norm,
                dropout_rate=dropout_rate,
                dtype=dtype,
                name=f"block_{index}",
            )
            for index in range(num_layers)
        ]
        self.norm = layer_norm(dtype, "encoder_norm")

    def __call__(self, inputs, training=None, mask=None):
        x = inputs
        # Not `None`, which would stand for what surrounds the call.
        known = {"training": training, "mask": mask}
        known = {name: value for name, value in known.items() if value is not None}
        for block in self.blocks:
            x = block(x, **known)
        return each(self.norm, x)

    def cost(self, inputs_shape, training=False):
        """What blocks and normalization cost, a `costs.LayerCost`."""
        total = sum_costs(lambda shape: cost_of(self.norm, shape), inputs_shape)
        for block in self.blocks:
            total += block.cost(inputs_shape, training)
        return total


def _complete_settings(settings):
    """All settings of `layers.MoE`, those that are not given with their defaults."""
    accepted = MoE.settings()
    check_names("`layers.MoE`, to which further arguments go,", settings, accepted)
    return {**accepted, **settings}


def _block_indices(moe_layers, num_layers):
    """Ascending tuple of the indices of blocks."""
    indices = tuple(moe_layers) if np.iterable(moe_layers) else (None,)
    indices = indices[: num_layers + 1]
    wrong = not all(is_whole_number(index, 0) for index in indices)
    if (
        wrong
        or len(set(indices)) < len(indices)
        or max(indices, default=0) >= num_layers
    ):
        raise ValueError(
            f"`moe_layers` counts blocks from 0 to {num_layers - 1}, each at most "
            f"once. Received: moe_layers={quote(moe_layers)}, "
            f"num_layers={num_layers}. Pass a tuple of ints, for example "
            f"({num_layers - 1},)."
        )
    return tuple(sorted(indices))


def _router_of_block(moe_layers, router):
    """Dict from the index of each MoE block to its (template of a) router."""
    if not isinstance(router, list | tuple):
        if bool(moe_layers) != (router is not None):
            raise ValueError(
                "`moe_layers` and `router` go together: give both for mixtures of "
                "experts, neither for a dense model. Received: "
                f"moe_layers={moe_layers}, router={quote(router)}."
            )
        return dict.fromkeys(moe_layers, router)
    if len(router) != len(moe_layers):
        raise ValueError(
            "A list of routers has one for each MoE block. Received: "
            f"{len(router)} routers for moe_layers={moe_layers}. Give as "
            "many, or one for all."
        )
    return dict(zip(moe_layers, router, strict=True))
