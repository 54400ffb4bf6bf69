"""The Transformer encoder: blocks, some of them mixtures of experts."""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from keras_softmoe.architecture.settings import Settings, record
from keras_softmoe.checks import (
    check_num_heads,
    check_whole_numbers,
    is_whole_number,
    quote,
)
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.layer_cost import LayerCost, cost_of, sum_costs
from keras_softmoe.layers import MLP, EncoderBlock, MoE
from keras_softmoe.layers.pooling import AttentionPooling
from keras_softmoe.routers import Router
from keras_softmoe.types import DType


@record
class Mixture(Settings):
    """Settings of all mixtures of experts in a model, see `layers.MoE`."""

    group_images: int | None = 1
    dispatcher: str = "auto"
    equal_experts: bool = False
    expert_dropout_rate: float = 0.0
    remat_experts: bool = False
    dispatch_dtype: str | None = None
    shared_mlp_dim: int | None = None

    def __post_init__(self):
        super().__post_init__()
        # Also of a dense model: with other `moe_layers` it is a mixture of experts.
        MoE.check_settings(**self.mixture())

    def mixture(self) -> dict[str, Any]:
        """Return these settings alone, arguments of `layers.MoE`."""
        return {name: getattr(self, name) for name in Mixture.names()}


@record
class Encoder(Mixture):
    """Settings of encoder blocks, see `models.ViTMoEBackbone`."""

    num_layers: int
    num_heads: int
    hidden_dim: int
    mlp_dim: int
    moe_layers: Sequence = ()
    router: Router | Sequence[Router] | None = None
    use_qk_norm: bool = False
    dropout_rate: float = 0.0
    expert_mlp_dim: int | None = None
    dtype: DType = None

    # Constants of encoders that have no such settings.
    activation: ClassVar[str] = "gelu_tanh"
    layer_norm_epsilon: ClassVar[float] = 1e-6
    layer_scale: ClassVar[float | None] = None

    def __post_init__(self):
        super().__post_init__()
        check_whole_numbers(
            1,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            hidden_dim=self.hidden_dim,
            mlp_dim=self.mlp_dim,
        )
        check_num_heads(self.num_heads, self.hidden_dim)
        if self.expert_mlp_dim is not None:
            check_whole_numbers(1, expert_mlp_dim=self.expert_mlp_dim)
        self._set(moe_layers=_block_indices(self.moe_layers, self.num_layers))
        _check_routers(self.moe_layers, self.router)

    @property
    def routers(self) -> dict[int, Router]:
        """Dict from the index of each MoE block to its (template of a) router."""
        if isinstance(self.router, list | tuple):
            return dict(zip(self.moe_layers, self.router, strict=True))
        return dict.fromkeys(self.moe_layers, self.router)

    @property
    def group_size(self) -> int:
        """Images (or pairs) of a group, one where it is the whole batch."""
        return self.group_images or 1

    def cost(self, batch_size: int | None = None, training: bool = False) -> LayerCost:
        """Return the cost of all layers for a batch, of one group by default."""
        # One block of each kind: there may be a hundred.
        kinds = {}
        for index in range(self.num_layers):
            kinds.setdefault(id(self.routers.get(index)), []).append(index)
        firsts = [indices[0] for indices in kinds.values()]
        routed = [i for i, index in enumerate(firsts) if index in self.routers]
        settings = self.replace(
            num_layers=len(firsts),
            moe_layers=routed,
            router=[self.routers[firsts[i]] for i in routed] or None,
        )
        # Layers that are never used draw no seeds from those of the program.
        state = random.getstate()
        try:
            layers = settings.layers()
        finally:
            random.setstate(state)
        layers.encoder.counts = [len(indices) for indices in kinds.values()]
        return layers.cost(batch_size or self.group_size, training)

    def attention_pooling(self, name: str) -> AttentionPooling:
        """Make a layer that pools tokens with the settings of the blocks."""
        return AttentionPooling(
            self.num_heads,
            self.mlp_dim,
            use_qk_norm=self.use_qk_norm,
            activation=self.activation,
            layer_norm_epsilon=self.layer_norm_epsilon,
            dtype=self.dtype,
            name=name,
        )


class EncoderLayers:
    """Blocks `block_0`, `block_1`, ... and the normalization `encoder_norm`, not built.

    Args:
        settings: `Encoder`.
        block: the class of the blocks: `EncoderBlock` or a subclass.
    """

    def __init__(self, settings, block=EncoderBlock):
        routers = settings.routers

        def mlp(index):
            known = {"activation": settings.activation, "dtype": settings.dtype}
            if index not in routers:
                return MLP(settings.mlp_dim, name="mlp", **known)
            return MoE(
                routers[index],
                settings.expert_mlp_dim or settings.mlp_dim,
                name="moe",
                **known,
                **settings.mixture(),
            )

        self.blocks = [
            block(
                settings.num_heads,
                mlp(index),
                use_qk_norm=settings.use_qk_norm,
                dropout_rate=settings.dropout_rate,
                layer_norm_epsilon=settings.layer_norm_epsilon,
                layer_scale=settings.layer_scale,
                dtype=settings.dtype,
                name=f"block_{index}",
            )
            for index in range(settings.num_layers)
        ]
        # Of a model that is only counted, how often it has each block
        self.counts = [1] * settings.num_layers
        self.norm = keras.layers.LayerNormalization(
            epsilon=settings.layer_norm_epsilon,
            dtype=settings.dtype,
            name="encoder_norm",
        )

    def __call__(self, tokens, training=None, mask=None):
        """Encode tokens, or a dict from modalities to tokens."""
        # An explicit `None` would override the context of Keras' calls.
        known = {"training": training, "mask": mask}
        known = {name: value for name, value in known.items() if value is not None}
        for block in self.blocks:
            tokens = block(tokens, **known)
        if isinstance(tokens, dict):
            return {name: self.norm(x) for name, x in tokens.items()}
        return self.norm(tokens)

    def cost(self, tokens_shape, training=False) -> LayerCost:
        """Return the cost for tokens of a shape, or a dict of shapes."""
        total = sum_costs(lambda shape: cost_of(self.norm, shape), tokens_shape)
        for block, count in zip(self.blocks, self.counts, strict=True):
            total += block.cost(tokens_shape, training) * count
        return total


def moe_layers_of(model: keras.Model) -> list[MoE]:
    """Return all `layers.MoE` in a model."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, MoE)]


def chain_cost(layers, shape):
    """Return the cost of layers in sequence, and the shape of their output."""
    total = LayerCost()
    for layer in layers:
        total += layer.cost(shape)
        shape = layer.compute_output_shape(shape)
    return total, shape


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


def _check_routers(moe_layers, router):
    """Raise unless there is a router for each MoE block."""
    if not isinstance(router, list | tuple):
        if bool(moe_layers) != (router is not None):
            raise ValueError(
                "`moe_layers` and `router` go together: give both for mixtures of "
                "experts, neither for a dense model. Received: "
                f"moe_layers={moe_layers}, router={quote(router)}."
            )
    elif len(router) != len(moe_layers):
        raise ValueError(
            "A list of routers has one for each MoE block. Received: "
            f"{len(router)} routers for moe_layers={moe_layers}. Give as "
            "many, or one for all."
        )
