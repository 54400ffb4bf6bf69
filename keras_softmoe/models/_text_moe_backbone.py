"""Text towers, dense or with mixtures of experts."""

from collections.abc import Sequence

import keras

from keras_softmoe.layers.parts import TextParts
from keras_softmoe.layers.pooling import pool
from keras_softmoe.models._backbone import MoEBackbone
from keras_softmoe.models._size import check_size
from keras_softmoe.models.arguments import check_token_ids, offer_names
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
        num_layers: int, number of encoder blocks.
        num_heads: int, number of attention heads. Must divide `hidden_dim`.
        hidden_dim: int, width `D` of a token.
        mlp_dim: int, hidden width of MLPs and experts.
        moe_layers: tuple of int, the blocks (counted from 0) whose MLP is a mixture of
            experts.
        router: the router of those blocks, a template, or a list of routers, one for
            each of those blocks. Required exactly if there are any.
        pooling: what `pooled_output` is made of: `"last"` (the last token), `"first"`,
            `"gap"` (the mean of all tokens), `"gmp"` (their maximum) or `"map"`
            (multi-head attention pooling).
        mask_padding: bool, whether padding (id 0) gets no attention and no slot, and
            counts neither in the losses of routers nor in the pooling; a text is then
            encoded as if the sequence ended with it. The released models do
            not mask it.
        use_qk_norm: bool, whether attention normalizes queries and keys.
        dropout_rate: float, dropout in the encoder blocks.
        dtype: dtype or policy of all layers but the routers, which stay in float32.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.
        **moe_settings: further arguments of `layers.MoE` for all mixtures of experts:
            `group_images`, `dispatcher`, `equal_experts`, `expert_dropout_rate`,
            `remat_experts`, `dispatch_dtype`.

    Returns, when called on `(B, S)` int token ids: dict of `"sequence_output"`
        `(B, S, D)`, the normalized tokens, and `"pooled_output"` `(B, D)`.

    Raises:
        ValueError: if the heads do not divide the width, `moe_layers` and `router` do
            not fit, or another argument is not among the accepted values.

    Source: Soft MoE, section 4 (text tower of the contrastive models).

    Examples:
        >>> text_backbone = ksm.models.TextMoEBackbone(
        ...     vocabulary_size=500,
        ...     sequence_length=16,
        ...     num_layers=2,
        ...     num_heads=2,
        ...     hidden_dim=32,
        ...     mlp_dim=64,
        ... )
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
        dtype: DType = None,
        name: str | None = None,
        trainable: bool = True,
        **moe_settings,
    ):
        arguments = {
            "vocabulary_size": vocabulary_size,
            "sequence_length": sequence_length,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "hidden_dim": hidden_dim,
            "mlp_dim": mlp_dim,
            "pooling": pooling,
            "mask_padding": mask_padding,
            "use_qk_norm": use_qk_norm,
            "dropout_rate": dropout_rate,
        }

        # === Layers ===
        parts = TextParts.make(
            **arguments,
            moe_layers=moe_layers,
            router=router,
            dtype=dtype,
            **moe_settings,
        )
        check_size(lambda: parts.cost((1, sequence_length)), name)

        # === Functional Model ===
        token_ids = keras.Input(
            shape=(sequence_length,), dtype="int32", name="token_ids"
        )
        (embedding,) = parts.embedding
        mask = embedding.compute_mask(token_ids)
        sequence = parts.encoder(embedding(token_ids), mask=mask)
        pooled = pool(sequence, pooling, parts.attention_pooling, mask)
        super().__init__(
            inputs=token_ids,
            outputs={"sequence_output": sequence, "pooled_output": pooled},
            dtype=dtype,
            name=name,
            trainable=trainable,
        )

        # === Config ===
        self.keep_arguments(parts.encoder, **arguments)

    def predict(self, x, *args, **kwargs):
        check_token_ids(x, self.sequence_length)
        return super().predict(x, *args, **kwargs)
