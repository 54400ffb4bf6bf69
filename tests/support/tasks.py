"""Tiny tasks of KerasHub around Transformers: segmenters, detectors and depth."""

import keras_hub

from keras_softmoe import models
from tests.support import tiny
from tests.support.families import FAMILIES

hub, layers = keras_hub.models, keras_hub.layers
SHAPE = (64, 64, 3)


def same(value, names):
    """Arguments with one value."""
    return dict.fromkeys(names.split(), value)


def mit(strides=(4, 2, 2, 2)):
    fixed = ([1] * 4, 4, [1] * 4, [2, 1, 1, 1], 0.0, [7, 3, 3, 3], list(strides))
    return hub.MiTBackbone(*fixed, image_shape=SHAPE, hidden_dims=[8, 12, 16, 20])


def segformer():
    backbone = hub.SegFormerBackbone(mit(), projection_filters=8)
    return hub.SegFormerImageSegmenter(backbone, num_classes=2)


def deeplab(image_encoder):
    maps = {"low_level_feature_key": "P2", "projection_filters": 4}
    maps |= {"image_shape": SHAPE}
    backbone = hub.DeepLabV3Backbone(image_encoder, "P4", 4, [1], **maps)
    return hub.DeepLabV3ImageSegmenter(backbone, num_classes=2)


def depth_anything():
    encoder = hub.DINOV2Backbone(
        8, 4, 8, 2, 12, **same(SHAPE, "image_shape position_embedding_shape")
    )
    keys = [f"stage{index}" for index in range(1, 5)]
    sizes = {"fusion_hidden_dim": 4, "head_hidden_dim": 4, "head_in_index": -1}
    backbone = hub.DepthAnythingBackbone(
        encoder, [4, 2, 1, 0.5], [4] * 4, **sizes, feature_keys=keys
    )
    return hub.DepthAnythingDepthEstimator(backbone, depth_estimation_type="relative")


def sam():
    sizes = {"hidden_size": 8, "num_layers": 2, "intermediate_dim": 12, "num_heads": 2}
    encoder = hub.ViTDetBackbone(
        **sizes,
        global_attention_layer_indices=[1],
        image_shape=SHAPE,
        patch_size=16,
        num_output_channels=8,
        window_size=2,
    )
    heads = {"num_multimask_outputs": 3, "iou_head_depth": 3, "iou_head_hidden_dim": 8}
    decoder = layers.SAMMaskDecoder(**sizes, embedding_dim=8, **heads)
    prompts = {"hidden_size": 8, "image_embedding_size": (4, 4), "mask_in_channels": 4}
    prompts = layers.SAMPromptEncoder(**prompts, input_image_size=SHAPE[:2])
    return hub.SAMImageSegmenter(hub.SAMBackbone(encoder, prompts, decoder))


def retinanet(image_encoder):
    backbone = hub.RetinaNetBackbone(image_encoder, 3, 4, False, image_shape=SHAPE)
    return hub.RetinaNetObjectDetector(backbone, num_classes=3)


def d_fine():
    stage = [8, 8, 16, 1, 3, 3]
    encoder = hub.HGNetV2Backbone(
        **{"depths": [1] * 4, "embedding_size": 8, "hidden_sizes": [16] * 4},
        **{"stem_channels": [3, 8, 8], "hidden_act": "relu"},
        use_learnable_affine_block=True,
        stackwise_stage_filters=[stage, *[[16, *stage[1:]]] * 3],
        apply_downsample=[False, True, True, True],
        use_lightweight_conv_block=[False, False, True, True],
        out_features=["stage3", "stage4"],
    )
    backbone = hub.DFineBackbone(
        encoder,
        **same(16, "encoder_hidden_dim hidden_dim encoder_ffn_dim decoder_ffn_dim"),
        **same([16, 16], "decoder_in_channels encoder_in_channels"),
        **same(1, "num_encoder_layers num_decoder_layers"),
        **same(2, "num_attention_heads decoder_attention_heads num_feature_levels"),
        **same(8, "lqe_hidden_dim num_queries"),
        **{"num_labels": 4, "num_denoising": 0, "learn_initial_query": False},
        **{"anchor_image_size": SHAPE[:2], "feat_strides": [16, 32], "eval_idx": -1},
        **{"encode_proj_layers": [0, 1], "decoder_n_points": [2, 2]},
        **{"hidden_expansion": 0.34, "depth_multiplier": 0.5, "num_lqe_layers": 2},
        **{"out_features": ["stage3", "stage4"], "image_shape": SHAPE, "seed": 0},
    )
    return hub.DFineObjectDetector(backbone, 4, "yxyx", preprocessor=None)


def ours():
    backbone = tiny.backbone(image_shape=SHAPE, patch_size=16, **tiny.DENSE)
    return models.ViTMoEImageSegmenter(backbone, num_classes=3, decoder_dim=4)


# Constructors, by names for the table of families.
TASKS = {
    "ViTMoEImageSegmenter": ours,
    "ViT, classifier": lambda: hub.ViTImageClassifier(FAMILIES["ViT"](), num_classes=3),
    "SegFormer (MiT)": segformer,
    "DeepLabV3 (MiT)": lambda: deeplab(mit()),
    "DepthAnything (DINOv2)": depth_anything,
    "SAM (ViTDet)": sam,
    # Maps of the strides that its anchors have
    "RetinaNet (MiT)": lambda: retinanet(mit((2, 2, 2, 2))),
    "D-FINE (its encoder)": d_fine,
}
