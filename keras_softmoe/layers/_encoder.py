"""The Transformer encoder: a stack of blocks, some of them mixtures of experts."""

from collections.abc import Sequence

import numpy as np

from keras_softmoe.checks import (
    check_names,
    check_whole_numbers,
    is_whole_number,
    quote,
)
from keras_softmoe.costs import LayerCost, cost_of
from keras_softmoe.layers._attention import check_num_heads, layer_norm
from keras_softmoe.layers._encoder_block import EncoderBlock
from keras_softmoe.layers._feedforward import MLP
from keras_softmoe.layers._modalities import (
    each,
    sum_costs,
)
from keras_softmoe.layers._moe import MoE, check_settings
from keras_softmoe.routers import Router
from keras_softmoe.types import DType


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
        activation: of MLPs and experts, as in `MLP`.
        layer_norm_epsilon: float, what normalizations add to the variance.
        layer_scale: float or `None`, see `EncoderBlock`.
        dtype: dtype or policy of all layers but the routers.
        **moe_settings: other arguments of `layers.MoE`, the same for all blocks.

    Call arguments:
        - `inputs`: `(B, S, D)` tensor, or a dict from modalities to such tensors.
        - `mask`: optional `(B, S)` bool tensor, or a dict of them, see `EncoderBlock`.

    Returns:
        normalized tokens, like the input.

    Raises:
        ValueError: if a size is not a positive integer, the heads do not divide the
            width, `moe_layers` and `router` do not fit, or `layers.MoE` does not
            accept a setting.
        TypeError: if `layers.MoE` has no such setting.

    Examples:
        >>> encoder = ksm.layers.Encoder(
        ...     num_layers=2,
        ...     num_heads=4,
        ...     hidden_dim=32,
        ...     mlp_dim=64,
        ...     moe_layers=(1,),
        ...     router=ksm.routers.SoftRouter(num_experts=4),
        ... )
        >>> encoder(np.random.normal(size=(2, 16, 32))).shape
        (2, 16, 32)
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        moe_layers: Sequence = (),
        router: Router | Sequence[Router] | None = None,
        use_qk_norm: bool = False,
        dropout_rate: float = 0.0,
        activation: str = "gelu_tanh",
        layer_norm_epsilon: float = 1e-6,
        layer_scale: float | None = None,
        dtype: DType = None,
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
            known = {"activation": activation, "dtype": dtype}
            if index not in routers:
                return MLP(mlp_dim, name="mlp", **known)
            return MoE(
                routers[index], mlp_dim, name="moe", **known, **self.moe_settings
            )

        self.blocks = [
            EncoderBlock(
                num_heads,
                mlp(index),
                use_qk_norm=use_qk_norm,
                dropout_rate=dropout_rate,
                layer_norm_epsilon=layer_norm_epsilon,
                layer_scale=layer_scale,
                dtype=dtype,
                name=f"block_{index}",
            )
            for index in range(num_layers)
        ]
        self.norm = layer_norm(dtype, "encoder_norm", epsilon=layer_norm_epsilon)

    def __call__(self, inputs, training=None, mask=None):
        x = inputs
        # Not `None`, which would stand for what surrounds the call.
        known = {"training": training, "mask": mask}
        known = {name: value for name, value in known.items() if value is not None}
        for block in self.blocks:
            x = block(x, **known)
        return each(self.norm, x)

    def cost(self, inputs_shape: Sequence[int], training: bool = False) -> LayerCost:
        """What blocks and normalization cost, a `costs.LayerCost`."""
        total = sum_costs(lambda shape: cost_of(self.norm, shape), inputs_shape)
        for block in self.blocks:
            total += block.cost(inputs_shape, training)
        return total


def _complete_settings(settings):
    """All settings of `layers.MoE`, those that are not given with their defaults."""
    accepted = MoE.settings()
    check_names("`layers.MoE`, to which further arguments go,", settings, accepted)
    settings = {**accepted, **settings}
    # Also of a dense model, which is a mixture of experts with other `moe_layers`.
    check_settings(**settings)
    return settings


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
