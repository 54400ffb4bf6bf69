"""One sparse tower for images and text: LIMoE and its dense twins."""

from collections.abc import Sequence

import keras
from numpy.typing import ArrayLike

from keras_softmoe.layers.embedding import checked_image_shape, pair, patch_grid
from keras_softmoe.layers.parts import PairParts
from keras_softmoe.layers.pooling import pool
from keras_softmoe.models._backbone import MoEBackbone
from keras_softmoe.models._encoders import SingleModality, normalized
from keras_softmoe.models._size import check_size
from keras_softmoe.models.arguments import check_pairs, offer_names
from keras_softmoe.routers import Router
from keras_softmoe.types import DType


@keras.saving.register_keras_serializable(package="keras_softmoe")
@offer_names
class LIMoEBackbone(MoEBackbone, SingleModality):
    """One Transformer for images and text, some of whose blocks mix experts.

    Patches and text tokens are embedded apart and then pass through the same blocks.
    They never attend to each other, but in a mixture of experts they are routed
    together and compete for the same slots. The outputs are embeddings of image and
    caption in one space.

    With `moe_layers=()` it is a dense one-tower model. Images are expected in
    `[-1, 1]`, with their channels last whatever `keras.config.image_data_format()`
    says. A text that is shorter than the sequence ends in padding, tokens like any
    others unless they are masked.

    Args:
        image_shape: `(height, width, channels)` of the images, in pixels.
        patch_size: int or `(height, width)` of a patch. Must divide the image.
        vocabulary_size: int, number of different text tokens.
        sequence_length: int, tokens of a text, padding included.
        num_layers: int, number of encoder blocks.
        num_heads: int, number of attention heads. Must divide `hidden_dim`.
        hidden_dim: int, width `D` of a token.
        mlp_dim: int, hidden width of MLPs and experts.
        moe_layers: tuple of int, the blocks (counted from 0) whose MLP is a mixture of
            experts; `moe_blocks(num_layers, every=2)` in the
            paper.
        router: the router of those blocks, a template: each block makes its own with
            the same configuration. Or a list of routers, one for each of those blocks.
            Required exactly if there are any; a `routers.LIMoERouter` in the paper.
        embedding_dim: int, width of the embeddings.
        image_pooling: how patches become one vector: `"gap"` (their mean), `"gmp"`
            (maximum), `"first"`, `"last"` or `"map"` (attention pooling).
        text_pooling: the same for text tokens.
        logit_scale: float, initial value of the learned scale of similarities.
        logit_bias: float or `None`, initial value of a learned bias of similarities,
            which the sigmoid loss wants (-10); `None` for none.
        mask_padding: bool, whether padding (id 0) gets no attention and no slot, and
            counts neither in the losses of routers nor in the pooling; a text is then
            encoded as if the sequence ended with it. The paper routes it
            like any other token.
        use_qk_norm: bool, whether attention normalizes queries and keys.
        dropout_rate: float, dropout in the encoder blocks.
        group_images: int or `None`, pairs of image and text that are routed together,
            see `layers.MoE`.
        dtype: dtype or policy of all layers but the routers, which stay in float32.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.
        **moe_settings: further arguments of `layers.MoE` for all mixtures of experts:
            `dispatcher`, `equal_experts`, `expert_dropout_rate`,
            `remat_experts`, `dispatch_dtype`.

    Returns, when called on a dict of `"images"` `(B, height, width, channels)` and
        `"token_ids"` `(B, sequence_length)` int32: dict of `"image_sequence_output"`
        `(B, S_image, D)` and `"text_sequence_output"` `(B, sequence_length, D)`, the
        normalized tokens; `"image_embedding"` and `"text_embedding"`
        `(B, embedding_dim)` float32 of length one; `"logit_scale"` `(B,)` and, if there
        is one, `"logit_bias"` `(B,)`, the same number in each row.

    Raises:
        ValueError: if the patch does not divide the image, the heads do not divide the
            width, `moe_layers` and `router` do not fit, or another argument is not
            among the accepted values.

    Source: LIMoE, section 2 and appendix A. Groups of 32 pairs are as good as the whole
    batch, smaller ones are not (appendix E.5).

    Examples:
        >>> backbone = ksm.models.LIMoEBackbone(
        ...     image_shape=(32, 32, 3),
        ...     patch_size=8,
        ...     vocabulary_size=500,
        ...     sequence_length=16,
        ...     num_layers=2,
        ...     num_heads=2,
        ...     hidden_dim=32,
        ...     mlp_dim=64,
        ...     moe_layers=(1,),
        ...     router=ksm.routers.LIMoERouter(num_experts=8),
        ... )
        >>> pairs = {
        ...     "images": np.zeros((2, 32, 32, 3)),
        ...     "token_ids": np.ones((2, 16), "int32"),
        ... }
        >>> backbone(pairs)["image_embedding"].shape
        (2, 512)
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        patch_size: int | Sequence[int],
        vocabulary_size: int,
        sequence_length: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        moe_layers: tuple = (),
        router: Router | Sequence[Router] | None = None,
        embedding_dim: int = 512,
        image_pooling: str = "gap",
        text_pooling: str = "gap",
        logit_scale: float = 10.0,
        logit_bias: float | None = None,
        mask_padding: bool = False,
        use_qk_norm: bool = False,
        dropout_rate: float = 0.0,
        group_images: int | None = 32,
        dtype: DType = None,
        name: str | None = None,
        trainable: bool = True,
        **moe_settings,
    ):
        arguments = {
            "image_shape": checked_image_shape(image_shape),
            "patch_size": pair(patch_size),
            "vocabulary_size": vocabulary_size,
            "sequence_length": sequence_length,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "hidden_dim": hidden_dim,
            "mlp_dim": mlp_dim,
            "embedding_dim": embedding_dim,
            "image_pooling": image_pooling,
            "text_pooling": text_pooling,
            "logit_scale": logit_scale,
            "logit_bias": logit_bias,
            "mask_padding": mask_padding,
            "use_qk_norm": use_qk_norm,
            "dropout_rate": dropout_rate,
        }

        # === Layers ===
        parts = PairParts.make(
            **arguments,
            moe_layers=moe_layers,
            router=router,
            group_images=group_images,
            dtype=dtype,
            **moe_settings,
        )
        shapes = {"image": (1, *arguments["image_shape"]), "text": (1, sequence_length)}
        check_size(lambda: parts.cost(shapes), name)
        poolings = {"image": image_pooling, "text": text_pooling}

        # === Functional Model ===
        def encode(inputs, training=None):
            """Sequence outputs and embeddings of the modalities that are there."""
            x, mask = {}, None
            for modality, value in inputs.items():
                for layer in parts.embedding[modality]:
                    value = layer(value)
                x[modality] = value
            if mask_padding and "text" in inputs:
                (embedding,) = parts.embedding["text"]
                mask = {"text": embedding.compute_mask(inputs["text"])}
            x = parts.encoder(x, training, mask)
            outputs = {f"{m}_sequence_output": tokens for m, tokens in x.items()}
            for modality, tokens in x.items():
                tokens = pool(
                    tokens,
                    poolings[modality],
                    parts.attention_pooling.get(modality),
                    (mask or {}).get(modality),
                )
                outputs[f"{modality}_embedding"] = normalized(
                    parts.projection[modality](tokens)
                )
            return outputs

        images = keras.Input(shape=arguments["image_shape"], name="images")
        token_ids = keras.Input(
            shape=(sequence_length,), dtype="int32", name="token_ids"
        )
        outputs = encode({"image": images, "text": token_ids})
        outputs |= parts.scale(outputs["image_embedding"])
        super().__init__(
            inputs={"images": images, "token_ids": token_ids},
            outputs=outputs,
            dtype=dtype,
            name=name,
            trainable=trainable,
        )
        self._encode = encode

        # === Config ===
        self.keep_arguments(parts.encoder, **arguments)
        self.patch_grid = patch_grid(self.image_shape, self.patch_size)

    def route(
        self, images: ArrayLike | None = None, token_ids: ArrayLike | None = None
    ) -> dict:
        """What the routers decide for a batch of pairs, or for one modality alone.

        Args:
            images: optional `(B, height, width, channels)` float array in `[-1, 1]`.
            token_ids: optional `(B, sequence_length)` int array.

        Returns:
            dict from the index of each MoE block to its `routers.Decision`. A group has
            `group_images` times the tokens of a pair, first the image's, then the
            text's.

        Raises:
            ValueError: if both are missing or of another shape than the model's.

        Examples:
            >>> decisions = backbone.route(pairs["images"], pairs["token_ids"])
            >>> decisions[1].summary["load"].shape  # (G, E)
        """
        check_pairs(self, images, token_ids)
        inputs = {"image": images, "text": token_ids}
        inputs = {name: x for name, x in inputs.items() if x is not None}
        return self.decisions_of(lambda: self._encode(inputs, training=False))

    def predict(self, x, *args, **kwargs):
        if isinstance(x, dict):
            check_pairs(self, x.get("images"), x.get("token_ids"))
        return super().predict(x, *args, **kwargs)
