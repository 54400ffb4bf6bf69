"""Text towers, dense or with mixtures of experts."""

import keras

from keras_softmoe.layers.attention import check_num_heads, layer_norm
from keras_softmoe.layers.embedding import TokenEmbedding
from keras_softmoe.layers.encoder_block import EncoderBlock
from keras_softmoe.layers.pooling import TEXT_POOLINGS, AttentionPooling, pool
from keras_softmoe.models.arguments import (
    check_choice,
    check_token_ids,
    router_of_block,
)
from keras_softmoe.models.backbone import MoEBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TextMoEBackbone(MoEBackbone):
    """Transformer encoder for short texts, the text tower of a two-tower model.

    Every token attends to every other, padding included, as in the released code.

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
        use_qk_norm: bool, whether attention normalizes queries and keys.
        dropout_rate: float, dropout in the encoder blocks.
        group_images: int or `None`, texts whose tokens are routed together, see
            `layers.MoE`.
        dispatcher: how tokens reach their slots, see `layers.MoE`.
        equal_experts: bool, whether all experts of a block start with the same weights.
        expert_dropout_rate: float, dropout inside the experts.
        remat_experts: bool, whether the experts' hidden activations are computed again
            in the backward pass instead of kept, see `layers.Experts`.
        dispatch_dtype: `None` or `"bfloat16"`, see `layers.MoE`.
        dtype: dtype or policy of all layers but the routers, which stay in float32.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.

    Returns, when called on `(B, S)` int token ids: dict of `"sequence_output"`
        `(B, S, D)`, the normalized tokens, and `"pooled_output"` `(B, D)`.

    Raises:
        ValueError: if the heads do not divide the width, `moe_layers` and `router` do
            not fit, or another argument is not among the accepted values.

    Source: Soft MoE, section 4 (text tower of the contrastive models).

    Example:

    >>> text_backbone = ksm.models.TextMoEBackbone(
    ...     vocabulary_size=500, sequence_length=16, num_layers=4, num_heads=4,
    ...     hidden_dim=64, mlp_dim=128,
    ... )
    >>> text_backbone.predict(np.zeros((2, 16), "int32"))["pooled_output"].shape
    (2, 64)
    """

    def __init__(
        self,
        vocabulary_size,
        sequence_length,
        num_layers,
        num_heads,
        hidden_dim,
        mlp_dim,
        moe_layers=(),
        router=None,
        pooling="last",
        use_qk_norm=False,
        dropout_rate=0.0,
        group_images=1,
        dispatcher="auto",
        equal_experts=False,
        expert_dropout_rate=0.0,
        remat_experts=False,
        dispatch_dtype=None,
        dtype=None,
        name=None,
        trainable=True,
    ):
        moe_layers = tuple(sorted(moe_layers))
        check_num_heads(num_heads, hidden_dim)
        routers = router_of_block(moe_layers, router, num_layers)
        check_choice("pooling", pooling, TEXT_POOLINGS)

        # === Layers ===
        token_embedding = TokenEmbedding(
            vocabulary_size,
            sequence_length,
            hidden_dim,
            dtype=dtype,
            name="token_embedding",
        )
        blocks = [
            EncoderBlock(
                num_heads,
                mlp_dim,
                router=routers.get(index),
                use_qk_norm=use_qk_norm,
                dropout_rate=dropout_rate,
                group_images=group_images,
                dispatcher=dispatcher,
                equal_experts=equal_experts,
                expert_dropout_rate=expert_dropout_rate,
                remat_experts=remat_experts,
                dispatch_dtype=dispatch_dtype,
                dtype=dtype,
                name=f"block_{index}",
            )
            for index in range(num_layers)
        ]
        attention_pooling = None
        if pooling == "map":
            attention_pooling = AttentionPooling(
                num_heads,
                mlp_dim,
                use_qk_norm=use_qk_norm,
                dtype=dtype,
                name="attention_pooling",
            )

        # === Functional Model ===
        token_ids = keras.Input(
            shape=(sequence_length,), dtype="int32", name="token_ids"
        )
        x = token_embedding(token_ids)
        for block in blocks:
            x = block(x)
        sequence = layer_norm(dtype, "encoder_norm")(x)
        super().__init__(
            inputs=token_ids,
            outputs={
                "sequence_output": sequence,
                "pooled_output": pool(sequence, pooling, attention_pooling),
            },
            dtype=dtype,
            name=name,
            trainable=trainable,
        )

        # === Config ===
        self.vocabulary_size = vocabulary_size
        self.sequence_length = sequence_length
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.mlp_dim = mlp_dim
        self.moe_layers = moe_layers
        self.pooling = pooling
        self.use_qk_norm = use_qk_norm
        self.dropout_rate = dropout_rate
        self.group_images = group_images
        self.dispatcher = dispatcher
        self.equal_experts = equal_experts
        self.expert_dropout_rate = expert_dropout_rate
        self.remat_experts = remat_experts
        self.dispatch_dtype = dispatch_dtype

    def predict(self, x, *args, **kwargs):
        check_token_ids(x, self.sequence_length)
        return super().predict(x, *args, **kwargs)

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "sequence_length": self.sequence_length,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "hidden_dim": self.hidden_dim,
            "mlp_dim": self.mlp_dim,
            "moe_layers": self.moe_layers,
            "router": self.serialized_routers(),
            "pooling": self.pooling,
            "use_qk_norm": self.use_qk_norm,
            "dropout_rate": self.dropout_rate,
            "group_images": self.group_images,
            "dispatcher": self.dispatcher,
            "equal_experts": self.equal_experts,
            "expert_dropout_rate": self.expert_dropout_rate,
            "remat_experts": self.remat_experts,
            "dispatch_dtype": self.dispatch_dtype,
        }
