"""Tiny tasks of KerasHub around Transformers: segmenters, detectors and depth."""

import keras_hub

from tests.support.families import FAMILIES

hub = keras_hub.models
SHAPE = (64, 64, 3)


def mit(strides=(4, 2, 2, 2)):
    return hub.MiTBackbone(
        layerwise_depths=[1, 1, 1, 1],
        num_layers=4,
        layerwise_num_heads=[1, 1, 1, 1],
        layerwise_sr_ratios=[2, 1, 1, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3, 3, 3],
        layerwise_strides=list(strides),
        image_shape=SHAPE,
        hidden_dims=[8, 12, 16, 20],
    )


def segformer():
    backbone = hub.SegFormerBackbone(image_encoder=mit(), projection_filters=8)
    return hub.SegFormerImageSegmenter(backbone, num_classes=2)


def deeplab(image_encoder):
    backbone = hub.DeepLabV3Backbone(
        image_encoder=image_encoder,
        spatial_pyramid_pooling_key="P4",
        upsampling_size=4,
        dilation_rates=[1],
        low_level_feature_key="P2",
        projection_filters=4,
        image_shape=SHAPE,
    )
    return hub.DeepLabV3ImageSegmenter(backbone, num_classes=2)


def depth_anything():
    encoder = hub.DINOV2Backbone(
        patch_size=8,
        num_layers=4,
        hidden_dim=8,
        num_heads=2,
        intermediate_dim=12,
        image_shape=SHAPE,
        position_embedding_shape=SHAPE,
    )
    backbone = hub.DepthAnythingBackbone(
        image_encoder=encoder,
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[4, 4, 4, 4],
        fusion_hidden_dim=4,
        head_hidden_dim=4,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )
    return hub.DepthAnythingDepthEstimator(backbone, depth_estimation_type="relative")


def sam():
    encoder = hub.ViTDetBackbone(
        hidden_size=8,
        num_layers=2,
        intermediate_dim=12,
        num_heads=2,
        global_attention_layer_indices=[1],
        image_shape=SHAPE,
        patch_size=16,
        num_output_channels=8,
        window_size=2,
    )
    decoder = keras_hub.layers.SAMMaskDecoder(
        num_layers=1,
        hidden_size=8,
        intermediate_dim=8,
        num_heads=2,
        embedding_dim=8,
        num_multimask_outputs=3,
        iou_head_depth=3,
        iou_head_hidden_dim=8,
    )
    prompts = keras_hub.layers.SAMPromptEncoder(
        hidden_size=8,
        image_embedding_size=(4, 4),
        input_image_size=SHAPE[:2],
        mask_in_channels=4,
    )
    backbone = hub.SAMBackbone(encoder, prompts, decoder)
    return hub.SAMImageSegmenter(backbone)


def retinanet(image_encoder):
    backbone = hub.RetinaNetBackbone(
        image_encoder=image_encoder,
        min_level=3,
        max_level=4,
        use_p5=False,
        image_shape=SHAPE,
    )
    return hub.RetinaNetObjectDetector(backbone, num_classes=3)


def d_fine():
    stage = [8, 8, 16, 1, 3, 3]
    encoder = hub.HGNetV2Backbone(
        stem_channels=[3, 8, 8],
        stackwise_stage_filters=[stage, *[[16, *stage[1:]]] * 3],
        apply_downsample=[False, True, True, True],
        use_lightweight_conv_block=[False, False, True, True],
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 16, 16, 16],
        embedding_size=8,
        use_learnable_affine_block=True,
        hidden_act="relu",
        image_shape=(None, None, 3),
        out_features=["stage3", "stage4"],
    )
    backbone = hub.DFineBackbone(
        backbone=encoder,
        decoder_in_channels=[16, 16],
        encoder_hidden_dim=16,
        num_denoising=0,
        num_labels=4,
        hidden_dim=16,
        learn_initial_query=False,
        num_queries=5,
        anchor_image_size=SHAPE[:2],
        feat_strides=[16, 32],
        num_feature_levels=2,
        encoder_in_channels=[16, 16],
        encode_proj_layers=[0, 1],
        num_attention_heads=2,
        encoder_ffn_dim=16,
        num_encoder_layers=1,
        hidden_expansion=0.34,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        decoder_n_points=[2, 2],
        lqe_hidden_dim=8,
        num_lqe_layers=2,
        out_features=["stage3", "stage4"],
        image_shape=SHAPE,
        seed=0,
    )
    return hub.DFineObjectDetector(
        backbone, num_classes=4, bounding_box_format="yxyx", preprocessor=None
    )


# Constructors, by names for the table of families.
TASKS = {
    "ViT, classifier": lambda: hub.ViTImageClassifier(FAMILIES["ViT"](), num_classes=3),
    "SegFormer (MiT)": segformer,
    "DeepLabV3 (MiT)": lambda: deeplab(mit()),
    "DepthAnything (DINOv2)": depth_anything,
    "SAM (ViTDet)": sam,
    # Maps of the strides that its anchors have
    "RetinaNet (MiT)": lambda: retinanet(mit((2, 2, 2, 2))),
    "D-FINE (its encoder)": d_fine,
}
