"""Vision Transformers with mixtures of experts: V-MoE, Soft MoE and dense twins."""

import keras
from keras import ops

from keras_softmoe.layers.attention import check_num_heads, layer_norm
from keras_softmoe.layers.embedding import (
    POSITION_EMBEDDINGS,
    ClassToken,
    PatchEmbedding,
    PositionEmbedding,
)
from keras_softmoe.layers.encoder_block import EncoderBlock
from keras_softmoe.layers.pooling import POOLINGS, AttentionPooling, pool
from keras_softmoe.models.arguments import (
    check_choice,
    check_images,
    pair,
    patch_grid,
    router_of_block,
)
from keras_softmoe.models.backbone import MoEBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEBackbone(MoEBackbone):
    """Vision Transformer in which some blocks are mixtures of experts.

    With `moe_layers=()` it is a dense ViT. Images are expected in `[-1, 1]`, which is
    what `ViTMoEImageConverter` makes of pixels from 0 to 255.

    Args:
        image_shape: `(height, width, channels)` of the images, in pixels.
        patch_size: int or `(height, width)` of a patch. Must divide the image.
        num_layers: int, number of encoder blocks.
        num_heads: int, number of attention heads. Must divide `hidden_dim`.
        hidden_dim: int, width `D` of a token.
        mlp_dim: int, hidden width of MLPs and experts.
        moe_layers: tuple of int, the blocks (counted from 0) whose MLP is a mixture of
            experts.
        router: the router of those blocks, a template: each block makes its own with
            the same configuration. Or a list of routers, one for each of those blocks.
            Required exactly if there are any.
        pooling: what `pooled_output` is made of: `"token"` (a class token), `"first"`
            (the first patch), `"gap"` (the mean of all tokens) or `"map"` (multi-head
            attention pooling).
        position_embedding: `"learned"`, `"sincos2d"` or `"none"`.
        use_qk_norm: bool, whether attention normalizes queries and keys.
        representation_dim: int or `None`. If given, `pooled_output` goes through one
            more dense layer of that width with a tanh (the "pre-logits").
        dropout_rate: float, dropout in the encoder blocks.
        group_images: int or `None`, images whose tokens are routed together, see
            `layers.MoE`.
        dispatcher: how tokens reach their slots, see `layers.MoE`.
        equal_experts: bool, whether all experts of a block start with the same weights.
        expert_dropout_rate: float, dropout inside the experts.
        remat_experts: bool, whether the experts' hidden activations are computed again
            in the backward pass instead of kept, see `layers.Experts`.
        dispatch_dtype: `None` or `"bfloat16"`, the dtype of tokens on their way to the
            experts and back, see `layers.MoE`.
        dtype: dtype or policy of all layers but the routers, which stay in float32.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.

    Returns, when called on `(B, height, width, channels)` images: dict of
        `"sequence_output"` `(B, S, D)`, the normalized tokens (class token first), and
        `"pooled_output"` `(B, D)` (or `(B, representation_dim)`).

    Raises:
        ValueError: if the patch does not divide the image, the heads do not divide the
            width, `moe_layers` and `router` do not fit, or another argument is not
            among the accepted values.

    Source: V-MoE, section 2; Soft MoE, section 2.

    Example:

    >>> backbone = ksm.models.ViTMoEBackbone(
    ...     image_shape=(32, 32, 3), patch_size=4, num_layers=4, num_heads=4,
    ...     hidden_dim=64, mlp_dim=128, moe_layers=(2, 3),
    ...     router=ksm.routers.SoftRouter(num_experts=16, slots_per_expert=4),
    ...     pooling="gap",
    ... )
    >>> backbone.predict(np.zeros((2, 32, 32, 3)))["pooled_output"].shape
    (2, 64)
    """

    def __init__(
        self,
        image_shape,
        patch_size,
        num_layers,
        num_heads,
        hidden_dim,
        mlp_dim,
        moe_layers=(),
        router=None,
        pooling="token",
        position_embedding="learned",
        use_qk_norm=False,
        representation_dim=None,
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
        patch_size = pair(patch_size)
        moe_layers = tuple(sorted(moe_layers))
        grid = patch_grid(image_shape, patch_size)
        check_num_heads(num_heads, hidden_dim)
        routers = router_of_block(moe_layers, router, num_layers)
        check_choice("pooling", pooling, POOLINGS)
        check_choice("position_embedding", position_embedding, POSITION_EMBEDDINGS)

        # === Layers ===
        patch_embedding = PatchEmbedding(
            patch_size, hidden_dim, dtype=dtype, name="patch_embedding"
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
        encoder_norm = layer_norm(dtype, "encoder_norm")

        # === Functional Model ===
        images = keras.Input(shape=image_shape, name="images")
        x = patch_embedding(images)
        if pooling == "token":
            x = ClassToken(dtype=dtype, name="class_token")(x)
        if position_embedding != "none":
            x = PositionEmbedding(
                grid,
                kind=position_embedding,
                has_class_token=pooling == "token",
                dtype=dtype,
                name="position_embedding",
            )(x)
        for block in blocks:
            x = block(x)
        x = sequence = encoder_norm(x)
        attention_pooling = None
        if pooling == "map":
            attention_pooling = AttentionPooling(
                num_heads,
                mlp_dim,
                use_qk_norm=use_qk_norm,
                dtype=dtype,
                name="attention_pooling",
            )
        x = pool(x, pooling, attention_pooling)
        if representation_dim is not None:
            x = keras.layers.Dense(
                representation_dim,
                activation="tanh",
                kernel_initializer="lecun_normal",
                dtype=dtype,
                name="pre_logits",
            )(x)
        super().__init__(
            inputs=images,
            outputs={"sequence_output": sequence, "pooled_output": x},
            dtype=dtype,
            name=name,
            trainable=trainable,
        )

        # === Config ===
        self.image_shape = tuple(image_shape)
        self.patch_size = patch_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.mlp_dim = mlp_dim
        self.moe_layers = moe_layers
        self.pooling = pooling
        self.position_embedding = position_embedding
        self.use_qk_norm = use_qk_norm
        self.representation_dim = representation_dim
        self.dropout_rate = dropout_rate
        self.group_images = group_images
        self.dispatcher = dispatcher
        self.equal_experts = equal_experts
        self.expert_dropout_rate = expert_dropout_rate
        self.remat_experts = remat_experts
        self.dispatch_dtype = dispatch_dtype
        self.patch_grid = grid

    def route(self, images):
        """What the routers decide for a batch of images.

        Args:
            images: `(B, height, width, channels)` float array or tensor in `[-1, 1]`.

        Returns:
            dict from the index of each MoE block to its `routers.Decision`.

        Raises:
            ValueError: if the images have another shape than the model's.

        Example:

        >>> decisions = backbone.route(images)
        >>> decisions[3].routing.dispatch  # (B, S, E, C) in a soft router's block
        """
        check_images(images, self.image_shape)
        x = ops.convert_to_tensor(images, self.input.dtype)
        names = [layer.name for layer in self.layers]
        for layer in self.layers[1 : names.index("block_0")]:
            x = layer(x)
        decisions = {}
        for index, block in enumerate(self.blocks):
            x, decision = block(x, return_decision=True, training=False)
            if decision is not None:
                decisions[index] = decision
        return decisions

    def predict(self, x, *args, **kwargs):
        check_images(x, self.image_shape)
        return super().predict(x, *args, **kwargs)

    def get_config(self):
        return {
            **super().get_config(),
            "image_shape": self.image_shape,
            "patch_size": self.patch_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "hidden_dim": self.hidden_dim,
            "mlp_dim": self.mlp_dim,
            "moe_layers": self.moe_layers,
            "router": self.serialized_routers(),
            "pooling": self.pooling,
            "position_embedding": self.position_embedding,
            "use_qk_norm": self.use_qk_norm,
            "representation_dim": self.representation_dim,
            "dropout_rate": self.dropout_rate,
            "group_images": self.group_images,
            "dispatcher": self.dispatcher,
            "equal_experts": self.equal_experts,
            "expert_dropout_rate": self.expert_dropout_rate,
            "remat_experts": self.remat_experts,
            "dispatch_dtype": self.dispatch_dtype,
        }
