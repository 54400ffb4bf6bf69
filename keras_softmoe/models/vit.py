"""Vision Transformers with mixtures of experts: V-MoE, Soft MoE and dense twins."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_softmoe.architecture import ViT
from keras_softmoe.layers.pooling import FeatureMap
from keras_softmoe.models.arguments import check_images, offer_names
from keras_softmoe.models.backbone import MoEBackbone, check_size
from keras_softmoe.routers import Router
from keras_softmoe.types import DType, Tensor


@keras.saving.register_keras_serializable(package="keras_softmoe")
@offer_names
class ViTMoEBackbone(MoEBackbone):
    """Vision Transformer in which some blocks are mixtures of experts.

    With `moe_layers=()` it is a dense ViT. KerasHub's segmenters and detectors on a
    `FeaturePyramidBackbone` take it, see `pyramid_outputs`.

    Args:
        image_shape: `(height, width, channels)` of the images, in pixels.
        patch_size: int or `(height, width)` of a patch. Must divide the image.
        num_layers: int, number of encoder blocks.
        num_heads: int, number of attention heads. Must divide `hidden_dim`.
        hidden_dim: int, width `D` of a token.
        mlp_dim: int, hidden width of MLPs and experts.
        moe_layers: tuple of int, the blocks (from 0) whose MLP is a mixture of experts.
        router: a router, of which each of those blocks makes a copy, or a list with one
            for each. Required exactly if there are such blocks.
        pooling: how tokens become `pooled_output`: `"token"` (a class token), `"first"`
            (the first patch), `"gap"` (the mean of all tokens but registers) or
            `"map"` (multi-head attention pooling).
        position_embedding: `"learned"`, `"sincos2d"` or `"none"`.
        use_qk_norm: bool, whether attention normalizes queries and keys.
        representation_dim: int or `None`, width of a dense layer with a tanh on the
            `pooled_output` (the "pre-logits").
        dropout_rate: float, dropout in the encoder blocks.
        position_resampling: `"bilinear"`, `"bicubic"` or `"bicubic_antialias"`, how
            learned positions are resized, see `layers.PositionEmbedding`.
        num_registers: int, learned tokens between class token and patches (registers,
            DeiT's distillation token).
        activation: of MLPs and experts: `"gelu_tanh"` (GELU in the tanh approximation,
            as in the papers' code) or `"gelu"` (exact).
        layer_norm_epsilon: float, added to the variance in layer normalizations.
        layer_scale: float or `None`, initial value of learned factors of the outputs of
            attention and MLPs.
        group_images: int or `None`, images whose tokens are routed together. `"auto"`
            is 1; and where each token chooses alone and the router has the default
            capacity, 32 in training and predictions without a capacity
            (`eval_capacity_factor="dropless"`), so that fewer tokens are dropped. This
            and `dispatcher`, `equal_experts`, `expert_dropout_rate`, `remat_experts`,
            `dispatch_dtype` and `shared_mlp_dim` are arguments of `layers.MoE`.
        expert_mlp_dim: int or `None`, hidden width of an expert; `None` for `mlp_dim`.
        pyramid_blocks: the blocks (from 0) of the maps P2, P3, ... of
            `pyramid_outputs`, or `None` for P2 to P5 of the last block.
        dtype: dtype or policy of all layers but the routers, which stay in float32.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.

    Returns, when called on `(B, height, width, channels)` images in `[-1, 1]`, channels
        last for any `keras.config.image_data_format()`: dict of `"sequence_output"`
        `(B, S, D)`, the normalized tokens (class token, registers, patches), and
        `"pooled_output"` `(B, D)` (or `(B, representation_dim)`).

    Raises:
        ValueError: if the patch does not divide the image, the heads do not divide the
            width, or another argument is not among the accepted values.

    Source: V-MoE, section 2; Soft MoE, section 2.

    Examples:
        >>> router = ksm.routers.SoftRouter(num_experts=4, slots_per_expert=4)
        >>> backbone = ksm.models.ViTMoEBackbone(
        ...     (32, 32, 3), 8, 2, 2, 32, 64, moe_layers=(1,), router=router
        ... )
        >>> backbone(np.zeros((2, 32, 32, 3)))["pooled_output"].shape
        (2, 32)
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        patch_size: int | Sequence[int],
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        moe_layers: tuple = (),
        router: Router | Sequence[Router] | None = None,
        pooling: str = "token",
        position_embedding: str = "learned",
        use_qk_norm: bool = False,
        representation_dim: int | None = None,
        dropout_rate: float = 0.0,
        position_resampling: str = "bilinear",
        num_registers: int = 0,
        activation: str = "gelu_tanh",
        layer_norm_epsilon: float = 1e-6,
        layer_scale: float | None = None,
        group_images: int | str | None = "auto",
        dispatcher: str = "auto",
        equal_experts: bool = False,
        expert_dropout_rate: float = 0.0,
        remat_experts: bool = False,
        dispatch_dtype: str | None = None,
        shared_mlp_dim: int | None = None,
        expert_mlp_dim: int | None = None,
        pyramid_blocks: Sequence | None = None,
        dtype: DType = None,
        name: str | None = None,
        trainable: bool = True,
    ):
        # Each setting of the record is an argument of this constructor.
        architecture = ViT.of_arguments(locals())

        # === Layers ===
        layers = architecture.layers()
        check_size(architecture, name)

        # === Functional Model ===
        images = keras.Input(shape=architecture.image_shape, name="images")
        super().__init__(architecture, images, layers(images), name, trainable)

    @property
    def pyramid_outputs(self) -> dict:
        """Maps of the patches at several scales, a dict of Keras tensors.

        `"P2"` is `(B, height / 4, width / 4, D)`, `"P3"` half as high and wide, and so
        on: the normalized patches of the blocks in `pyramid_blocks`, resized without
        weights. Class token and registers are left out.

        Source: Li et al. 2022 (ViTDet), section 3: the last block is enough.

        Examples:
            >>> maps = keras.Model(backbone.inputs, backbone.pyramid_outputs)
            >>> maps(np.zeros((2, 32, 32, 3)))["P3"].shape
            (2, 4, 4, 32)
        """
        if not hasattr(self, "_pyramid_outputs"):
            vit, last = self._architecture, self.num_layers - 1
            norm, found = self.get_layer("encoder_norm"), {}
            for level, block in enumerate(vit.pyramid_blocks or [last] * 4, start=2):
                tokens = self.output["sequence_output"]
                if block != last:
                    tokens = norm(self.get_layer(f"block_{block}").output)
                name, sizes = f"P{level}", self.image_shape[:2]
                layer = FeatureMap(
                    vit.patch_grid,
                    [-(-size // 2**level) for size in sizes],
                    vit.num_registers + (vit.pooling == "token"),
                    dtype=tokens.dtype,
                    name=f"pyramid_{name}",
                )
                found[name] = layer(tokens)
            self._pyramid_outputs = found
        return self._pyramid_outputs

    def route(self, images: Tensor) -> dict:
        """Return the decisions of the routers for a batch of images.

        Args:
            images: `(B, height, width, channels)` float array or tensor in `[-1, 1]`.

        Returns:
            dict from the index of each MoE block to its `routers.Decision`.

        Raises:
            ValueError: if the images have another shape than the model's.

        Examples:
            >>> decisions = backbone.route(np.zeros((2, 32, 32, 3)))
            >>> decisions[1].routing.dispatch.shape  # (B, S, E, C)
            (2, 17, 4, 4)
        """
        check_images(images, self.image_shape)
        images = ops.convert_to_tensor(images, self.input.dtype)
        return self.decisions_of(lambda: self(images, training=False))

    def check_inputs(self, x: Any) -> None:
        check_images(x, self.image_shape)
