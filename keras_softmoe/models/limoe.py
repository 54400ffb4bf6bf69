"""One sparse tower for images and text: LIMoE and its dense twins."""

from collections.abc import Sequence

import keras
from numpy.typing import ArrayLike

from keras_softmoe.architecture import LIMoE
from keras_softmoe.models.arguments import check_pairs, offer_names
from keras_softmoe.models.backbone import (
    MoEBackbone,
    SingleModality,
    check_size,
    normalized,
)
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
            see `layers.MoE` for this and the following ones.
        dispatcher: `"auto"`, `"gather"` or `"einsum"`.
        equal_experts: bool, whether all experts of a block start with the same weights.
        expert_dropout_rate: float, dropout inside the experts.
        remat_experts: bool, whether the backward pass computes the hidden activations
            of the experts again.
        dispatch_dtype: `None` or `"bfloat16"`, the dtype to which tokens are rounded
            on the way to the experts and back.
        shared_mlp_dim: int or `None`, hidden width of an MLP that computes every token
            besides its experts, see `layers.MoE`.
        expert_mlp_dim: int or `None`, hidden width of an expert; `None` for `mlp_dim`.
        dtype: dtype or policy of all layers but the routers, which stay in float32.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.

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
        architecture = LIMoE.of_arguments(locals())

        # === Layers ===
        layers = architecture.layers()
        check_size(architecture, name)

        # === Functional Model ===
        def encode(inputs, training=None):
            """Sequence outputs and embeddings of the modalities in the inputs."""
            tokens, masks = layers.encode(inputs, training)
            outputs = {f"{m}_sequence_output": x for m, x in tokens.items()}
            for modality, x in tokens.items():
                vectors = layers.embed(modality, x, masks.get(modality))
                outputs[f"{modality}_embedding"] = normalized(vectors)
            return outputs

        images = keras.Input(shape=architecture.image_shape, name="images")
        token_ids = keras.Input(
            shape=(sequence_length,), dtype="int32", name="token_ids"
        )
        outputs = encode({"image": images, "text": token_ids})
        outputs |= layers.scale(outputs["image_embedding"])
        super().__init__(
            architecture,
            inputs={"images": images, "token_ids": token_ids},
            outputs=outputs,
            name=name,
            trainable=trainable,
        )
        self._encode = encode
        self.patch_grid = architecture.patch_grid

    def route(
        self, images: ArrayLike | None = None, token_ids: ArrayLike | None = None
    ) -> dict:
        """Return the decisions of the routers for a batch of pairs, or one modality.

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
