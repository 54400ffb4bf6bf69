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


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEBackbone(keras_hub.models.Backbone):
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
            the same configuration. Required exactly if there are any.
        pooling: what `pooled_output` is made of: `"token"` (a class token), `"first"`
            (the first patch), `"gap"` (the mean of all tokens) or `"map"` (multi-head
            attention pooling).
        position_embedding: `"learned"`, `"sincos2d"` or `"none"`.
        use_qk_norm: bool, whether attention normalizes queries and keys.
        representation_dim: int or `None`. If given, `pooled_output` goes through one
            more dense layer of that width with a tanh (the "pre-logits").
        dropout_rate: float, dropout in the encoder blocks.
        group_images: int, images whose tokens are routed together, see `layers.MoE`.
        dispatcher: how tokens reach their slots, see `layers.MoE`.
        equal_experts: bool, whether all experts of a block start with the same weights.
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
        dtype=None,
        name=None,
        trainable=True,
    ):
        patch_size = _pair(patch_size)
        moe_layers = tuple(sorted(moe_layers))
        grid = _patch_grid(image_shape, patch_size)
        check_num_heads(num_heads, hidden_dim)
        _check_moe_layers(moe_layers, router, num_layers)
        _check_choice("pooling", pooling, POOLINGS)
        _check_choice("position_embedding", position_embedding, POSITION_EMBEDDINGS)

        # === Layers ===
        patch_embedding = PatchEmbedding(
            patch_size, hidden_dim, dtype=dtype, name="patch_embedding"
        )
        blocks = [
            EncoderBlock(
                num_heads,
                mlp_dim,
                router=router if index in moe_layers else None,
                use_qk_norm=use_qk_norm,
                dropout_rate=dropout_rate,
                group_images=group_images,
                dispatcher=dispatcher,
                equal_experts=equal_experts,
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
        self.patch_grid = grid

    @property
    def blocks(self):
        """The encoder blocks, a list of `layers.EncoderBlock`."""
        return [self.get_layer(f"block_{index}") for index in range(self.num_layers)]

    @property
    def router(self):
        """The router of the first MoE block, `None` in a dense model."""
        return self.blocks[self.moe_layers[0]].moe.router if self.moe_layers else None

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
            **kwargs: arguments of the class to change. With another `image_shape` the
                position embeddings are resampled.

        Returns:
            `ViTMoEBackbone`.

        Raises:
            ValueError: if the name is unknown (the message offers the nearest), the
                preset has no weights, or a file is missing, damaged or foreign.

        Example:

        >>> name = "soft_moe_small_patch16_128e_224"
        >>> backbone = ksm.models.ViTMoEBackbone.from_preset(name, load_weights=False)
        """
        with presets.opened(preset, load_weights) as directory:
            return super().from_preset(directory, load_weights=load_weights, **kwargs)

    def save_to_preset(self, preset_dir, max_shard_size=10):
        """Save as a preset directory. If that fails, an existing one stays intact.

        Args:
            preset_dir: str, the directory.
            max_shard_size: int or float, the size in GB over which weights are split
                into several files, or `None`.
        """
        with presets.replaced_directory(preset_dir) as directory:
            super().save_to_preset(directory, max_shard_size=max_shard_size)

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
        return {
            **super().get_config(),
            "image_shape": self.image_shape,
            "patch_size": self.patch_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "hidden_dim": self.hidden_dim,
            "mlp_dim": self.mlp_dim,
            "moe_layers": self.moe_layers,
            "router": keras.saving.serialize_keras_object(self.router),
            "pooling": self.pooling,
            "position_embedding": self.position_embedding,
            "use_qk_norm": self.use_qk_norm,
            "representation_dim": self.representation_dim,
            "dropout_rate": self.dropout_rate,
            "group_images": self.group_images,
            "dispatcher": self.dispatcher,
            "equal_experts": self.equal_experts,
        }

    @classmethod
    def from_config(cls, config):
        router = config["router"]
        if isinstance(router, dict):
            router = keras.saving.deserialize_keras_object(router)
        return super().from_config({**config, "router": router})


def check_images(images, image_shape):
    """Raise unless a batch of images has the shape that a model takes.

    Keras finds out as well, but on JAX in the middle of a step, when it has taken the
    weights out of the model and does not put them back. What has no shape (a dataset)
    and dimensions that are not known yet pass.
    """
    shape = getattr(images, "shape", None)
    if shape is None or getattr(shape, "rank", 0) is None:
        return
    expected = (None, *image_shape)
    if len(shape) != 4 or any(
        None not in sizes and sizes[0] != sizes[1]
        for sizes in zip(shape, expected, strict=True)
    ):
        raise ValueError(
            "The model takes images of shape (batch, height, width, channels) = "
            f"{expected}. Received: images of shape {tuple(shape)}. Resize them, "
            "repeat a grey channel, or put a single image into a batch of one."
        )


def _pair(size):
    return (size, size) if isinstance(size, int) else tuple(size)


def _patch_grid(image_shape, patch_size):
    """`(rows, columns)` of patches."""
    if len(image_shape) != 3 or None in tuple(image_shape):
        raise ValueError(
            "`image_shape` must be (height, width, channels), all known. "
            f"Received: image_shape={image_shape}."
        )
    height, width, _ = image_shape
    if height % patch_size[0] or width % patch_size[1]:
        raise ValueError(
            "The patches must cover the image exactly: the patch size has to divide "
            "height and width. Received: "
            f"image_shape={tuple(image_shape)}, patch_size={patch_size}. Resize the "
            "images or choose another patch size."
        )
    return height // patch_size[0], width // patch_size[1]


def _check_moe_layers(moe_layers, router, num_layers):
    wrong = [index for index in moe_layers if index not in range(num_layers)]
    if wrong or len(set(moe_layers)) < len(moe_layers):
        raise ValueError(
            f"`moe_layers` counts blocks from 0 to {num_layers - 1}, each at most "
            "once. "
            f"Received: moe_layers={moe_layers}, num_layers={num_layers}."
        )
    if bool(moe_layers) != (router is not None):
        raise ValueError(
            "`moe_layers` and `router` go together: give both for mixtures of experts, "
            f"neither for a dense model. Received: moe_layers={moe_layers}, "
            f"router={router!r}."
        )


def _check_choice(argument, value, accepted):
    if value not in accepted:
        raise ValueError(
            f"Unknown `{argument}`. Accepted: {', '.join(map(repr, accepted))}. "
            f"Received: {argument}={value!r}."
        )
