"""Vision Transformers with mixtures of experts: V-MoE, Soft MoE and dense twins."""

import keras
import keras_hub
from keras import ops

from keras_softmoe import presets
from keras_softmoe.layers.attention import check_num_heads, layer_norm
from keras_softmoe.layers.embedding import (
    POSITION_EMBEDDINGS,
    ClassToken,
    PatchEmbedding,
    PositionEmbedding,
)
from keras_softmoe.layers.encoder_block import EncoderBlock
from keras_softmoe.layers.pooling import POOLINGS, AttentionPooling
from keras_softmoe.models.arguments import (
    check_choice,
    check_images,
    pair,
    patch_grid,
    router_of_block,
)
from keras_softmoe.models.live_routing import LiveRouting, pop_live_settings


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEBackbone(keras_hub.models.Backbone, LiveRouting):
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
        if pooling == "map":
            x = AttentionPooling(
                num_heads,
                mlp_dim,
                use_qk_norm=use_qk_norm,
                dtype=dtype,
                name="attention_pooling",
            )(x)
        elif pooling == "gap":
            x = ops.mean(x, axis=1)
        else:
            x = x[:, 0]
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
        self.dispatch_dtype = dispatch_dtype
        self.patch_grid = grid

    @property
    def blocks(self):
        """The encoder blocks, a list of `layers.EncoderBlock`."""
        return [self.get_layer(f"block_{index}") for index in range(self.num_layers)]

    @property
    def routers(self):
        """Dict from the index of each MoE block to its router."""
        blocks = self.blocks
        return {index: blocks[index].moe.router for index in self.moe_layers}

    @property
    def router(self):
        """The router of the first MoE block, `None` in a dense model."""
        return next(iter(self.routers.values()), None)

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

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """Load a backbone from a preset.

        Args:
            preset: str: a name from `keras_softmoe.presets.names()`, the path of a
                preset directory, or a KerasHub handle (`"hf://user/model"`).
            load_weights: bool, whether to load weights or start from random ones.
            **kwargs: arguments of the class to change (with another `image_shape` the
                position embeddings are resampled), and settings of the routers, see
                `set_routing`.

        Returns:
            `ViTMoEBackbone`.

        Raises:
            ValueError: if the name is unknown (the message offers the nearest), the
                preset has no weights, or a file is missing, damaged or foreign.

        Example:

        >>> name = "soft_moe_small_patch16_128e_224"
        >>> backbone = ksm.models.ViTMoEBackbone.from_preset(name, load_weights=False)
        """
        settings = pop_live_settings(kwargs)
        with presets.opened(preset, load_weights) as directory:
            backbone = super().from_preset(
                directory, load_weights=load_weights, **kwargs
            )
        backbone.set_routing(**settings)
        return backbone

    def save_to_preset(self, preset_dir, max_shard_size=10):
        """Save as a preset directory. If that fails, an existing one stays intact.

        Args:
            preset_dir: str, the directory.
            max_shard_size: int or float, the size in GB over which weights are split
                into several files, or `None`.
        """
        with presets.replaced_directory(preset_dir) as directory:
            super().save_to_preset(directory, max_shard_size=max_shard_size)

    # Keras asks for these before each `fit`, `evaluate` and `predict`. (Not `super()`:
    # AutoGraph would look for its class among the callers.)

    def make_train_function(self, force=False):
        force = force or self.rerouted("train")
        return keras_hub.models.Backbone.make_train_function(self, force)

    def make_test_function(self, force=False):
        force = force or self.rerouted("test")
        return keras_hub.models.Backbone.make_test_function(self, force)

    def make_predict_function(self, force=False):
        force = force or self.rerouted("predict")
        return keras_hub.models.Backbone.make_predict_function(self, force)

    def predict(self, x, *args, **kwargs):
        check_images(x, self.image_shape)
        return super().predict(x, *args, **kwargs)

    def default_lora_layer_names(self):
        """Layers that `enable_lora` adapts: attention, MLPs and expert banks."""
        return [
            *super().default_lora_layer_names(),
            "intermediate_dense",
            "output_dense",
        ]

    def get_config(self):
        routers = [
            keras.saving.serialize_keras_object(router)
            for router in self.routers.values()
        ]
        if all(router == routers[0] for router in routers):
            routers = routers[0] if routers else None
        return {
            **super().get_config(),
            "image_shape": self.image_shape,
            "patch_size": self.patch_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "hidden_dim": self.hidden_dim,
            "mlp_dim": self.mlp_dim,
            "moe_layers": self.moe_layers,
            "router": routers,
            "pooling": self.pooling,
            "position_embedding": self.position_embedding,
            "use_qk_norm": self.use_qk_norm,
            "representation_dim": self.representation_dim,
            "dropout_rate": self.dropout_rate,
            "group_images": self.group_images,
            "dispatcher": self.dispatcher,
            "equal_experts": self.equal_experts,
            "expert_dropout_rate": self.expert_dropout_rate,
            "dispatch_dtype": self.dispatch_dtype,
        }

    @classmethod
    def from_config(cls, config):
        router = config["router"]
        if isinstance(router, dict | list | tuple):
            router = keras.saving.deserialize_keras_object(router)
        return super().from_config({**config, "router": router})
