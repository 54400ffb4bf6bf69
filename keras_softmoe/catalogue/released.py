"""Models of checkpoints that others released, converted when they are first loaded."""

import functools

from keras_softmoe import routers
from keras_softmoe.catalogue import row
from keras_softmoe.catalogue.papers import SIZES, VMOE_SIZES
from keras_softmoe.ops.capacity import RELEASED

_SIZES = {**SIZES, "Ti": ("tiny", 192, 12, 3, 768)}
_IMAGENET_21K_CLASSES = 21_843

# By model: end of its address; ImageNet accuracy of one fine-tuned at 384 x 384, in %.
_AUGREG = {
    "B/16": ("aug_medium1-wd_0.1", "85.49"),
    "B/32": ("aug_light1-wd_0.1", "83.59"),
    "L/16": ("aug_strong1-wd_0.1", "85.59"),
    "S/16": ("aug_light1-wd_0.03", "83.73"),
    "S/32": ("aug_none-wd_0.1", "79.58"),
    "Ti/16": ("aug_none-wd_0.03", "78.22"),
}
_AUGREG_TRAINING = (
    "trained on ImageNet-21k for 300 epochs with the augmentation, weight decay and "
    "dropout that its paper recommends for this size"
)
_AUGREG_NOTE = (
    "No accuracy on ImageNet is published of a checkpoint with a head for "
    "ImageNet-21k. Fine-tuned on ImageNet at 384 x 384 such a checkpoint reached {} % "
    "(the repository's README)."
)

_FROM_SCRATCH = {"capacity_factor": 1.05, "eval_capacity_factor": 4.0}
_FINE_TUNED = {"capacity_factor": 1.5}
_MEASURED_ON = (
    "ImageNet, validation images",
    "ImageNet, last 1 % of the training images",
    "ImageNet ReaL",
    "ImageNet V2",
)
_CROP_NOTE = (
    "The released code evaluates at this size on the central 224 x 224 pixels of an "
    "image whose shorter side was resized to 256. The preset's converter resizes the "
    "largest central square, which shows more of the image. To compare accuracies, "
    "crop as the released code does."
)
_NO_CROP_NOTE = (
    "Images are resized to 384 x 384 without regard to their proportions, as in the "
    "released code."
)
_RUNS_NOTE = (
    "The accuracy is the mean of 3 runs with different seeds. Which of the runs was "
    "released is not said."
)


def released():
    """Return a list of `Row` of all released checkpoints."""
    return [*_augreg(), *_vmoe()]


def _augreg():
    for model, (address, fine_tuned) in _AUGREG.items():
        yield row.Row(
            row.preset_name("vit", _SIZES, model) + "_augreg_imagenet21k",
            f"ViT-{model} of AugReg",
            "",
            "Steiner et al. 2021 (How to train your ViT?); "
            "google-research/vision_transformer, README",
            {
                **_arguments(_SIZES, model, 224),
                "moe_layers": (),
                "representation_dim": None,
            },
            note=_AUGREG_NOTE.format(fine_tuned),
            release=row.Release(
                f"gs://vit_models/augreg/{model.replace('/', '_')}-i21k-300ep-lr_0.001-"
                f"{address}-do_0.0-sd_0.0.npz",
                _IMAGENET_21K_CLASSES,
                _AUGREG_TRAINING,
            ),
        )


def _vmoe():
    b16 = functools.partial(_vmoe_model, "B/16", "every2")
    s32 = functools.partial(_vmoe_model, "S/32", "last2")
    yield b16(
        "imagenet21k",
        "b16_imagenet21k_randaug_strong",
        "trained from scratch on ImageNet-21k for 300 epochs with strong RandAugment",
        {"capacity_factor": 1.05},
        num_classes=_IMAGENET_21K_CLASSES,
        notes=[
            "Settings: vmoe/configs/vmoe_paper/pretrain_imagenet21k.py.",
            "Fine-tuned on CIFAR-10 at 128 x 128 for 1,000 steps it reached 98.7 % "
            "(mean of 3 runs). Fine-tuned on ImageNet it is "
            "`vmoe_base_patch16_every2_8e_384_imagenet`.",
        ],
    )
    yield b16(
        "imagenet",
        "b16_imagenet21k_randaug_strong_ft_ilsvrc2012",
        "trained on ImageNet-21k for 300 epochs with strong RandAugment and fine-tuned "
        "on ImageNet (ILSVRC2012)",
        _FINE_TUNED,
        image_size=384,
        accuracy=(0.856, 0.892, 0.841, 0.761),
    )
    yield s32(
        "imagenet_light",
        "s32_last2_ilsvrc2012_randaug_light1",
        "trained from scratch on ImageNet (ILSVRC2012) for 300 epochs with light "
        "RandAugment",
        _FROM_SCRATCH,
        representation_dim=512,
        accuracy=(0.731, 0.768, 0.744, 0.592),
    )
    yield s32(
        "imagenet_medium",
        "s32_last2_ilsvrc2012_randaug_medium",
        "trained from scratch on ImageNet (ILSVRC2012) for 1,000 epochs with medium "
        "RandAugment",
        _FROM_SCRATCH,
        representation_dim=512,
        notes=[
            "No configuration file was published for this checkpoint. The settings are "
            "those of the one that was trained for 300 epochs."
        ],
    )
    yield s32(
        "imagenet_light",
        "s32_last2_ilsvrc2012_randaug_light1_ft_ilsvrc2012",
        "trained on ImageNet (ILSVRC2012) for 300 epochs with light RandAugment and "
        "fine-tuned on it",
        _FINE_TUNED,
        image_size=384,
        accuracy=(0.759, 0.788, 0.771, 0.62),
    )


def _vmoe_model(
    model,
    placement,
    mark,
    address,
    training,
    capacity,
    image_size=224,
    num_classes=1000,
    representation_dim=None,
    accuracy=(),
    notes=(),
):
    arguments = _arguments(VMOE_SIZES, model, image_size)
    layers, where = row.placed(arguments["num_layers"], placement)
    is_fine_tuned = image_size == 384
    notes = [_NO_CROP_NOTE if is_fine_tuned else _CROP_NOTE, *notes]
    if accuracy:
        settings = f"Settings: vmoe/configs/vmoe_paper/vmoe_{address}.py."
        notes = [_RUNS_NOTE, settings, *notes]
    name = row.preset_name(
        "vmoe", VMOE_SIZES, model, placement, "8e", image_size=image_size
    )
    return row.Row(
        f"{name}_{mark}",
        f"V-MoE-{model}",
        f"8 experts in {where}, K = 2",
        "google-research/vmoe, README (released checkpoints)",
        {
            **arguments,
            **row.experts(layers, 8),
            "representation_dim": representation_dim,
            "dispatch_dtype": "bfloat16",
        },
        row.template(
            routers.SoftmaxTokenChoiceRouter,
            8,
            num_selected_experts=2,
            **capacity,
            **RELEASED,
        ),
        note="\n\n".join(notes),
        release=row.Release(
            f"gs://vmoe_checkpoints/vmoe_{address}",
            num_classes,
            training,
            dict(zip(_MEASURED_ON, accuracy, strict=False)),
            crop=not is_fine_tuned,
        ),
    )


def _arguments(sizes, model, image_size):
    arguments = row.vit(sizes, model, image_size)
    return {**arguments, "patch_size": (arguments["patch_size"],) * 2}
