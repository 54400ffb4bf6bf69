"""The stack of encoder blocks that all models of the library share."""

from keras_softmoe.costs import LayerCost, cost_of
from keras_softmoe.layers.attention import check_num_heads, layer_norm
from keras_softmoe.layers.encoder_block import EncoderBlock
from keras_softmoe.layers.feedforward import MLP
from keras_softmoe.layers.modalities import each
from keras_softmoe.layers.moe import MoE


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

    Returns: normalized tokens, like the input.

    Raises:
        ValueError: if the heads do not divide the width, or `moe_layers` and `router`
            do not fit.
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
        check_num_heads(num_heads, hidden_dim)
        self.moe_layers = tuple(sorted(moe_layers))
        self.moe_settings = _complete_settings(moe_settings)
        routers = _router_of_block(self.moe_layers, router, num_layers)

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

    def __call__(self, inputs):
        x = inputs
        for block in self.blocks:
            x = block(x)
        return each(self.norm, x)

    def cost(self, inputs_shape, training=False):
        """What blocks and normalization cost, a `costs.LayerCost`."""
        total = LayerCost()
        for block in self.blocks:
            total += block.cost(inputs_shape, training)
        is_dict = isinstance(inputs_shape, dict)
        for number, shape in enumerate(
            inputs_shape.values() if is_dict else [inputs_shape]
        ):
            norm = cost_of(self.norm, shape)
            # Modalities share the weights.
            total += norm if number == 0 else norm.without_weights()
        return total


def _complete_settings(settings):
    """All settings of `layers.MoE`, those that are not given with their defaults."""
    accepted = MoE.settings()
    unknown = sorted(settings.keys() - accepted.keys())
    if unknown:
        raise TypeError(
            "Unknown arguments. Beside its own, a model takes those of `layers.MoE`: "
            f"{', '.join(accepted)}. Received: {', '.join(unknown)}."
        )
    return {**accepted, **settings}


def _router_of_block(moe_layers, router, num_layers):
    """Dict from the index of each MoE block to its (template of a) router."""
    wrong = [index for index in moe_layers if index not in range(num_layers)]
    if wrong or len(set(moe_layers)) < len(moe_layers):
        raise ValueError(
            f"`moe_layers` counts blocks from 0 to {num_layers - 1}, each at most "
            "once. "
            f"Received: moe_layers={moe_layers}, num_layers={num_layers}."
        )
    if not isinstance(router, list | tuple):
        if bool(moe_layers) != (router is not None):
            raise ValueError(
                "`moe_layers` and `router` go together: give both for mixtures of "
                "experts, neither for a dense model. Received: "
                f"moe_layers={moe_layers}, router={router!r}."
            )
        return dict.fromkeys(moe_layers, router)
    if len(router) != len(moe_layers):
        raise ValueError(
            "A list of routers has one for each MoE block. Received: "
            f"{len(router)} routers for moe_layers={moe_layers}."
        )
    return dict(zip(moe_layers, router, strict=True))
