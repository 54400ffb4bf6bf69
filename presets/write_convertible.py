"""Write the presets that are converted from released V-MoE checkpoints.

    python presets/write_convertible.py

A preset holds all but the weights, which stay where they were released: `from_preset`
downloads and converts them when the preset is first loaded (`presets.convert`).

Facts are from the repository of the released code, google-research/vmoe: the list of
checkpoints from its README, settings and accuracies from the configuration files that
are named below.
"""

import json
from pathlib import Path
from typing import NamedTuple

import keras

from keras_softmoe import evaluation, models, presets, routers

PRESETS = Path(__file__).resolve().parent
BUCKET = "gs://vmoe_checkpoints"
CONFIGS = "google-research/vmoe, vmoe/configs/vmoe_paper"
LICENCE = (
    "Apache-2.0, of the repository that releases it; none is stated for the "
    "checkpoint itself"
)

SMALL = {"num_layers": 8, "num_heads": 8, "hidden_dim": 512, "mlp_dim": 2048}
BASE = {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}

THREE_SEEDS = "mean of 3 runs with different seeds"
THREE_FINE_TUNINGS = "mean of 3 runs with different fine-tuning seeds"
VALIDATION = "ImageNet, validation images"
HELD_OUT = "ImageNet, last 1 % of the training images"
REAL, V2 = "ImageNet ReaL", "ImageNet V2"


class Released(NamedTuple):
    """A released checkpoint.

    Attributes:
        name: str, of the preset.
        checkpoint: str, name in the bucket.
        description: str, one sentence.
        config: dict, arguments of the backbone.
        num_classes: int.
        accuracy: dict from data set to share, empty if none was found.
        measured: str, how accuracies were averaged.
        settings_file: str or `None`, the configuration file that was published.
        squeezed: bool, whether the released code resizes images without regard to
            their proportions, in place of cropping them.
        note: str, more about it, in the card.
    """

    name: str
    checkpoint: str
    description: str
    config: dict
    num_classes: int
    accuracy: dict
    measured: str
    settings_file: str | None
    squeezed: bool
    note: str


def model(size, patch_size, image_size, moe_layers, representation_dim, **router):
    """Arguments of the backbone, with what all released models share."""
    return {
        "image_shape": (image_size, image_size, 3),
        "patch_size": (patch_size, patch_size),
        **size,
        "moe_layers": moe_layers,
        "router": routers.SoftmaxTokenChoiceRouter(
            8, num_selected_experts=2, name="router", **router
        ),
        "representation_dim": representation_dim,
        "group_images": 8,
        "dispatch_dtype": "bfloat16",
    }


CROPPED = (
    "The released code evaluates at this size on the central 224 x 224 pixels of an "
    "image whose shorter side was resized to 256. The preset's converter resizes the "
    "largest central square, which shows more of the image. To compare accuracies, "
    "crop as the released code does."
)
SQUEEZED = (
    "Images are resized to 384 x 384 without regard to their proportions, as in the "
    "released code."
)

RELEASED = (
    Released(
        name="vmoe_small_patch32_last2_8e_224_imagenet_light",
        checkpoint="vmoe_s32_last2_ilsvrc2012_randaug_light1",
        description="V-MoE-S/32: 512 wide, 8 blocks, 8 experts in the last 2 odd "
        "blocks, K = 2, patch 32 at 224 x 224, trained from scratch on ImageNet "
        "(ILSVRC2012) for 300 epochs with light RandAugment.",
        config=model(
            SMALL, 32, 224, (5, 7), 512, capacity_factor=1.05, eval_capacity_factor=4.0
        ),
        num_classes=1000,
        accuracy={VALIDATION: 0.731, HELD_OUT: 0.768, REAL: 0.744, V2: 0.592},
        measured=THREE_SEEDS,
        settings_file="vmoe_s32_last2_ilsvrc2012_randaug_light1.py",
        squeezed=False,
        note="Trained with a capacity factor of 1.05, evaluated with 4.",
    ),
    Released(
        name="vmoe_small_patch32_last2_8e_384_imagenet_light",
        checkpoint="vmoe_s32_last2_ilsvrc2012_randaug_light1_ft_ilsvrc2012",
        description="V-MoE-S/32: 512 wide, 8 blocks, 8 experts in the last 2 odd "
        "blocks, K = 2, patch 32, trained on ImageNet (ILSVRC2012) for 300 epochs "
        "with light RandAugment and fine-tuned on it at 384 x 384.",
        config=model(SMALL, 32, 384, (5, 7), None, capacity_factor=1.5),
        num_classes=1000,
        accuracy={VALIDATION: 0.759, HELD_OUT: 0.788, REAL: 0.771, V2: 0.620},
        measured=THREE_FINE_TUNINGS,
        settings_file="vmoe_s32_last2_ilsvrc2012_randaug_light1_ft_ilsvrc2012.py",
        squeezed=True,
        note="Fine-tuned and evaluated with a capacity factor of 1.5.",
    ),
    Released(
        name="vmoe_small_patch32_last2_8e_224_imagenet_medium",
        checkpoint="vmoe_s32_last2_ilsvrc2012_randaug_medium",
        description="V-MoE-S/32: 512 wide, 8 blocks, 8 experts in the last 2 odd "
        "blocks, K = 2, patch 32 at 224 x 224, trained from scratch on ImageNet "
        "(ILSVRC2012) for 1,000 epochs with medium RandAugment.",
        config=model(
            SMALL, 32, 224, (5, 7), 512, capacity_factor=1.05, eval_capacity_factor=4.0
        ),
        num_classes=1000,
        accuracy={},
        measured="",
        settings_file=None,
        squeezed=False,
        note="No configuration file was published for this checkpoint. The settings "
        "here are those of the one that was trained for 300 epochs.",
    ),
    Released(
        name="vmoe_base_patch16_every2_8e_224_imagenet21k",
        checkpoint="vmoe_b16_imagenet21k_randaug_strong",
        description="V-MoE-B/16: 768 wide, 12 blocks, 8 experts in every second block, "
        "K = 2, patch 16 at 224 x 224, trained from scratch on ImageNet-21k for 300 "
        "epochs with strong RandAugment.",
        config=model(BASE, 16, 224, tuple(range(1, 12, 2)), None, capacity_factor=1.05),
        num_classes=21_843,
        accuracy={},
        measured="",
        settings_file="pretrain_imagenet21k.py",
        squeezed=False,
        note="Fine-tuned on CIFAR-10 at 128 x 128 for 1,000 steps it reached 98.7 % "
        "(mean of 3 runs; vmoe_b16_imagenet21k_randaug_strong_ft_cifar10.py). "
        "Fine-tuned on ImageNet it is `vmoe_base_patch16_every2_8e_384_imagenet`.",
    ),
    Released(
        name="vmoe_base_patch16_every2_8e_384_imagenet",
        checkpoint="vmoe_b16_imagenet21k_randaug_strong_ft_ilsvrc2012",
        description="V-MoE-B/16: 768 wide, 12 blocks, 8 experts in every second block, "
        "K = 2, patch 16, trained on ImageNet-21k for 300 epochs with strong "
        "RandAugment and fine-tuned on ImageNet (ILSVRC2012) at 384 x 384.",
        config=model(BASE, 16, 384, tuple(range(1, 12, 2)), None, capacity_factor=1.5),
        num_classes=1000,
        accuracy={VALIDATION: 0.856, HELD_OUT: 0.892, REAL: 0.841, V2: 0.761},
        measured=THREE_FINE_TUNINGS,
        settings_file="vmoe_b16_imagenet21k_randaug_strong_ft_ilsvrc2012.py",
        squeezed=True,
        note="Fine-tuned and evaluated with a capacity factor of 1.5.",
    ),
)


def main():
    for released in RELEASED:
        write(PRESETS / released.name, released)
        print(released.name)


def write(directory, released):
    """Write all files of a preset."""
    directory.mkdir(exist_ok=True)
    converter = models.ViTMoEImageConverter(
        image_size=released.config["image_shape"][:2],
        crop_to_aspect_ratio=not released.squeezed,
        name="image_converter",
    )
    preprocessor = models.ViTMoEImageClassifierPreprocessor(
        converter, name="preprocessor"
    )
    preprocessor.save_to_preset(str(directory))
    backbone = serialized(
        models.ViTMoEBackbone,
        {
            "name": released.name,
            "trainable": True,
            **released.config,
            "router": keras.saving.serialize_keras_object(released.config["router"]),
        },
    )
    classifier = serialized(
        models.ViTMoEImageClassifier,
        {
            "name": f"{released.name}_classifier",
            "backbone": backbone,
            "preprocessor": keras.saving.serialize_keras_object(preprocessor),
            "num_classes": released.num_classes,
            "activation": None,
            "dropout": 0.0,
            "head_dtype": None,
        },
    )
    about = metadata(released)
    for file, content in (
        (presets.CONFIG_FILE, backbone),
        (presets.TASK_FILE, classifier),
        (presets.METADATA_FILE, about),
    ):
        save(directory / file, json.dumps(content, indent=4) + "\n")
    save(directory / "README.md", card(released, about))


def serialized(cls, config):
    return {
        "module": cls.__module__,
        "class_name": cls.__name__,
        "config": config,
        "registered_name": keras.saving.get_registered_name(cls),
    }


def metadata(released):
    cost = evaluation.cost(released.config)
    with_head = evaluation.cost(released.config, released.num_classes)
    return {
        "parameter_count": cost.parameters,
        "parameter_count_with_head": with_head.parameters,
        "gflop_per_image": round(cost.gflop_per_image, 2),
        "tasks": ["ImageClassifier"],
        "kind": "convertible",
        "description": released.description,
        "source": "google-research/vmoe, README (released checkpoints)",
        "licence": LICENCE,
        "checkpoint": f"{BUCKET}/{released.checkpoint}",
        "accuracy": released.accuracy,
    }


def card(released, about):
    router = released.config["router"]
    gigabytes = 4 * about["parameter_count_with_head"] / 1e9
    settings = "none was published"
    if released.settings_file:
        settings = f"{CONFIGS}/{released.settings_file}"
    rows = [
        ("checkpoint", f"`{about['checkpoint']}`"),
        ("parameters of the backbone", f"{about['parameter_count']:,}"),
        ("with the head", f"{about['parameter_count_with_head']:,}"),
        ("to download and to keep, each", f"about {gigabytes:.1f} GB"),
        ("GFLOP per image", f"{about['gflop_per_image']:,}"),
        ("classes", f"{released.num_classes:,}"),
        ("experts chosen per token", router.num_selected_experts),
        ("capacity factor", router.capacity_factor),
        ("the same in evaluation", router.eval_capacity_factor or "the same"),
        ("settings", settings),
    ]
    accuracy = "No accuracy of this checkpoint was found in what was published."
    if released.accuracy:
        accuracy = "\n\n".join(
            [
                f"Published accuracy, {released.measured} ({settings}). Which of the "
                "runs was released is not said.",
                table(
                    ("images", "accuracy"),
                    [(k, f"{100 * v:.1f} %") for k, v in released.accuracy.items()],
                ),
            ]
        )
    parts = [
        f"# {released.name}",
        about["description"],
        f"""```python
import keras_softmoe as ksm

name = "{released.name}"
classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
```""",
        "The weights are not in this directory. When the preset is first loaded they "
        "are downloaded from where they were released, converted, and kept in the "
        "directory of Keras (`~/.keras/keras_softmoe`). Where that bucket is out of "
        "reach, fetch the files elsewhere and convert them, once:",
        f"""```bash
gcloud storage cp "{about["checkpoint"]}.index" "{about["checkpoint"]}.data-*" FOLDER
```""",
        f"""```python
ksm.presets.convert(
    "{released.name}",
    prefix="FOLDER/{released.checkpoint}",
)
```""",
        table(("", ""), rows),
        accuracy,
        SQUEEZED if released.squeezed else CROPPED,
        released.note,
        "The converter is tested on checkpoints that the released code has written. "
        "This one was not at hand: neither its size nor its accuracy after conversion "
        "has been measured here.",
        f"Licence: {about['licence']}.",
    ]
    return "\n\n".join(parts) + "\n"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def save(file, text):
    aside = file.with_name(f".{file.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


if __name__ == "__main__":
    main()
