"""Text towers, dense or with mixtures of experts."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_softmoe.architecture import TextTower
from keras_softmoe.models.arguments import check_token_ids, offer_names
from keras_softmoe.models.backbone import MoEBackbone, check_size
from keras_softmoe.routers import Router
from keras_softmoe.types import DType


@keras.saving.register_keras_serializable(package="keras_softmoe")
@offer_names
class TextMoEBackbone(MoEBackbone):
    """Transformer encoder for short texts, the text tower of a two-tower model.

    Every token attends to every other, padding included unless it is masked.

    Args:
        vocabulary_size: int, number of different tokens.
        sequence_length: int `S`, tokens of a text, padding included.
        num_layers: int, number of encoder blocks. This and all arguments that are not
            listed here are those of `ViTMoEBackbone`.
        pooling: how tokens become `pooled_output`: `"last"` (the last one), `"first"`,
            `"gap"` (mean), `"gmp"` (maximum) or `"map"` (attention pooling).
        mask_padding: bool, whether padding (id 0) has no part in attention, slots,
            losses of routers and pooling. In the released models it is not masked.
        group_images: int or `None`, texts whose tokens are routed together.

    Returns, when called on `(B, S)` int token ids: dict of `"sequence_output"`
        `(B, S, D)`, the normalized tokens, and `"pooled_output"` `(B, D)`.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: Soft MoE, section 4 (text tower of the contrastive models).

    Examples:
        >>> text_backbone = ksm.models.TextMoEBackbone(500, 16, 2, 2, 32, 64)
        >>> text_backbone(np.ones((2, 16), "int32"))["pooled_output"].shape
        (2, 32)
    """

    def __init__(
        self,
        vocabulary_size: int,
        sequence_length: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        moe_layers: tuple = (),
        router: Router | Sequence[Router] | None = None,
        pooling: str = "last",
        mask_padding: bool = False,
        use_qk_norm: bool = False,
        dropout_rate: float = 0.0,
        group_images: int | None = 1,
        dispatcher: str = "auto",
        equal_experts: bool = False,
        expert_dropout_rate: float = 0.0,
        remat_experts: bool = False,
        dispatch_dtype: str | None = None,
        shared_mlp_dim: int | None = None,
        expert_mlp_dim: int | None = None,
        dtype: DType = None,
        name: str | None = None,
        trainable: bool = True,
    ):
        architecture = TextTower.of_arguments(locals())

        # === Layers ===
        layers = architecture.layers()
        check_size(architecture, name)

        # === Functional Model ===
        token_ids = keras.Input((sequence_length,), dtype="int32", name="token_ids")
        super().__init__(architecture, token_ids, layers(token_ids), name, trainable)

    def check_inputs(self, x: Any) -> None:
        check_token_ids(x, self.sequence_length)
