"""The Transformer encoder: blocks, some of them mixtures of experts."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from keras_softmoe import checks
from keras_softmoe.architecture.settings import Settings, record
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.layers import MLP, EncoderBlock, MoE
from keras_softmoe.layers.attention import LayerNormalization
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

    def mixture(self) -> dict[str, Any]:
        """Return these settings alone, arguments of `layers.MoE`."""
        return {name: getattr(self, name) for name in Mixture.__annotations__}


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
        # Dense models, too: with other `moe_layers` they are mixtures of experts.
        MoE.check_settings(**self.mixture())
        names = ("num_layers", "num_heads", "hidden_dim", "mlp_dim")
        checks.check_whole_numbers(1, **{name: getattr(self, name) for name in names})
        checks.check_num_heads(self.num_heads, self.hidden_dim)
        if self.expert_mlp_dim is not None:
            checks.check_whole_numbers(1, expert_mlp_dim=self.expert_mlp_dim)
        given, most = self.moe_layers, self.num_layers
        indices = tuple(given) if np.iterable(given) else (None,)
        # One more than there are blocks is an error already.
        indices = indices[: most + 1]
        if (
            not all(checks.is_whole_number(index, 0) for index in indices)
            or len(set(indices)) < len(indices)
            or max(indices, default=0) >= most
        ):
            raise ValueError(
                f"`moe_layers` must be block indices from 0 to {most - 1}, each at "
                f"most once. {checks.received(moe_layers=given, num_layers=most)}"
            )
        vars(self).update(moe_layers=tuple(sorted(indices)))
        is_list = isinstance(self.router, list | tuple)
        if is_list and len(self.router) != len(self.moe_layers):
            raise ValueError(
                "Pass one router, or a list with one for each MoE block. Received: "
                f"{len(self.router)} routers for moe_layers={self.moe_layers}."
            )
        if not is_list and bool(self.moe_layers) != (self.router is not None):
            raise ValueError(
                "`moe_layers` and `router` go together: give both for mixtures of "
                "experts, neither for a dense model. Received: "
                f"moe_layers={self.moe_layers}, router={checks.quote(self.router)}."
            )

    @property
    def routers(self) -> dict[int, Router]:
        """Dict from the index of each MoE block to its (template of a) router."""
        if isinstance(self.router, list | tuple):
            return dict(zip(self.moe_layers, self.router, strict=True))
        return dict.fromkeys(self.moe_layers, self.router)

    @property
    def group_size(self) -> int:
        """Images (or pairs) per group; 1 if a group is the whole batch."""
        return self.group_images or 1

    @property
    def least_weights(self) -> int:
        """Int, a lower bound of the number of weights: that of the largest matrices."""
        routers = self.routers.values()
        # Columns of kernels with the width of a token, or rows
        columns = 4 * self.num_layers * self.hidden_dim
        columns += 2 * (self.num_layers - len(routers)) * self.mlp_dim
        columns += 2 * len(routers) * (self.shared_mlp_dim or 0)
        for router in routers:
            mlp_dim = self.expert_mlp_dim or self.mlp_dim
            columns += 2 * router.num_experts * mlp_dim + router.num_directions
        if hasattr(self, "patch_size"):
            columns += math.prod(self.patch_size) * self.image_shape[-1]
        if hasattr(self, "vocabulary_size"):
            columns += self.vocabulary_size
        return self.hidden_dim * columns

    def attention_pooling(self, name: str) -> AttentionPooling:
        """Return a pooling layer with the settings of the blocks."""
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
    """The blocks `block_0`, ... of an `Encoder` and `encoder_norm`, not built."""

    def __init__(self, settings, block=EncoderBlock):
        routers, self.blocks = settings.routers, []
        common = {"activation": settings.activation, "dtype": settings.dtype}
        for index in range(settings.num_layers):
            if index in routers:
                mlp_dim = settings.expert_mlp_dim or settings.mlp_dim
                known = {**common, **settings.mixture()}
                mlp = MoE(routers[index], mlp_dim, name="moe", **known)
            else:
                mlp = MLP(settings.mlp_dim, name="mlp", **common)
            self.blocks.append(
                block(
                    settings.num_heads,
                    mlp,
                    use_qk_norm=settings.use_qk_norm,
                    dropout_rate=settings.dropout_rate,
                    layer_norm_epsilon=settings.layer_norm_epsilon,
                    layer_scale=settings.layer_scale,
                    dtype=settings.dtype,
                    name=f"block_{index}",
                )
            )
        self.norm = LayerNormalization(
            settings.layer_norm_epsilon, dtype=settings.dtype, name="encoder_norm"
        )

    def __call__(self, tokens, training=None, mask=None):
        """Encode tokens, or a dict from modalities to tokens."""
        # An explicit `None` would override the context of Keras' calls.
        known = {} if training is None else {"training": training}
        known |= {} if mask is None else {"mask": mask}
        for block in self.blocks:
            tokens = block(tokens, **known)
        if isinstance(tokens, dict):
            return {name: self.norm(x) for name, x in tokens.items()}
        return self.norm(tokens)


def moe_layers_of(model: keras.Model) -> list[MoE]:
    """Return all `layers.MoE` in a model."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, MoE)]
