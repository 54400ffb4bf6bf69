"""Tiny models of the families that `add_experts` knows, and of others."""

import keras
import keras_hub
import numpy as np

from keras_softmoe import routers

# With room for all choices
ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=2, capacity_factor=None, normalize_gates=True
)
_IMAGE = (32, 32, 3)
_VISION = {
    "image_shape": _IMAGE,
    "patch_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
}
TEXT = {
    "vocabulary_size": 20,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
    "max_sequence_length": 8,
}
_SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}


def _vision_encoder(family, name):
    # They are not public by themselves.
    folder = getattr(keras_hub.src.models, family)
    module = getattr(folder, f"{family}_vision_encoder")
    return getattr(module, f"{name}VisionEncoder")(**_VISION)


def _vit():
    rest = {k: v for k, v in _VISION.items() if k != "intermediate_dim"}
    return keras_hub.models.ViTBackbone(**rest, mlp_dim=12)


def _dinov2(**arguments):
    return keras_hub.models.DINOV2Backbone(
        **_VISION, position_embedding_shape=_IMAGE, **arguments
    )


def _swin():
    return keras_hub.models.SwinTransformerBackbone(
        image_shape=_IMAGE, patch_size=4, **_SWIN
    )


def _video_prism():
    return keras_hub.models.VideoPrismBackbone(
        num_frames=2,
        patch_size=16,
        hidden_dim=8,
        intermediate_dim=12,
        num_heads=2,
        num_spatial_layers=1,
        num_temporal_layers=1,
        num_auxiliary_layers=0,
        image_shape=_IMAGE,
    )


def _vit_det():
    return keras_hub.models.ViTDetBackbone(
        hidden_size=8,
        num_layers=2,
        intermediate_dim=12,
        num_heads=2,
        global_attention_layer_indices=[1],
        image_shape=(64, 64, 3),
        patch_size=16,
        num_output_channels=4,
        window_size=2,
    )


def _mit():
    return keras_hub.models.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=_IMAGE,
        hidden_dims=[8, 16],
    )


def gpt2():
    return keras_hub.models.GPT2Backbone(**TEXT)


# Constructors of models with two MLPs.
FAMILIES = {
    "ViT": _vit,
    "DeiT": lambda: keras_hub.models.DeiTBackbone(**_VISION),
    "DINOv2": _dinov2,
    "DINOv2, SwiGLU": lambda: _dinov2(use_swiglu_ffn=True),
    "DINOv3": lambda: keras_hub.models.DINOV3Backbone(**_VISION),
    "SigLIP": lambda: _vision_encoder("siglip", "SigLIP"),
    "CLIP": lambda: _vision_encoder("clip", "CLIP"),
    "MetaCLIP 2": lambda: _vision_encoder("metaclip_2", "MetaCLIP2"),
    "Swin": _swin,
    "VideoPrism": _video_prism,
    "ViTDet (SAM)": _vit_det,
    "BERT": lambda: keras_hub.models.BertBackbone(**TEXT),
    "GPT-2": gpt2,
    "MiT": _mit,
}


def inputs_of(model, batch_size=2):
    """Return inputs of a model, of the structure that it takes."""
    rng = np.random.default_rng(0)

    def one(x):
        shape = [batch_size, *(8 if size is None else size for size in x.shape[1:])]
        if "int" in keras.backend.standardize_dtype(x.dtype):
            # Also a mask of padding
            return np.ones(shape, "int32")
        return rng.normal(size=shape).astype("float32")

    return keras.tree.map_structure(one, model.input)
