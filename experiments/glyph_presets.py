"""Train the small presets `*_glyphs` that ship with the library.

A dense Vision Transformer and mixtures of experts of the same width, depth and compute
learn to tell 179 rendered letters and signs apart (`synthetic.glyphs`, no digits among
them): half of them fill the image, half lie anywhere in it among pieces of others. Each
image is seen once: every epoch draws new ones.

    python -m experiments.glyph_presets --only soft --output build/presets

Needs the extras of one backend and `datasets`. A training takes half an hour of a core.
After an interruption the same command goes on where it stopped. The presets in
`presets/` were trained by an earlier form of this program, which also measured and
wrote what their cards say.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import synthetic
from experiments.lib.cards import save_trained
from experiments.lib.runs import Run, adamw, batches_of, finish, router_config
from keras_softmoe import models, routers

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "training"

IMAGE_SIZE = 32
BATCH_SIZE = 64
EPOCH_IMAGES = 8192
EPOCHS = 64
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.01
# No model is trained on the images of this seed.
VALIDATION_SEED = 10_000
VALIDATION_IMAGES = 4096
# Where glyphs lie, half of the images each.
LAYOUTS = {
    "center": {},
    "anywhere": {"placement": "anywhere", "distractors": 2},
}


class Twin(NamedTuple):
    """A model that is trained here.

    Attributes:
        name: str, of the preset.
        title: str, what to call it.
        router: its router, or `None`.
        learning_rate: float, the peak.
        group_images: int.
    """

    name: str
    title: str
    router: Any = None
    learning_rate: float = 1.5e-3
    group_images: int = 1


TWINS = {
    "dense": Twin("vit_tiny_patch4_32_glyphs", "Dense ViT"),
    "soft": Twin(
        "soft_moe_tiny_patch4_16e_32_glyphs",
        "Soft MoE",
        routers.SoftRouter(16, slots_per_expert=4, initial_scale="unit_variance"),
    ),
    "token_choice": Twin(
        "vmoe_tiny_patch4_16e_32_glyphs",
        "V-MoE (token choice, K = 1, C = 1.05, batch priority)",
        routers.SoftmaxTokenChoiceRouter(16, priority="max"),
    ),
    "expert_choice": Twin(
        "expert_choice_tiny_patch4_16e_32_glyphs",
        "Expert choice (c = 1)",
        routers.SoftmaxExpertChoiceRouter(16),
    ),
    "token_choice_k2": Twin(
        "vmoe_tiny_patch4_16e_k2_32_glyphs",
        "V-MoE (token choice, K = 2, C = 1.05, groups of 8 images)",
        # As V-MoE is released: no batch priority in training, groups of eight images.
        routers.SoftmaxTokenChoiceRouter(16, num_selected_experts=2),
        group_images=8,
    ),
}


def main(arguments=None):
    """Train presets that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=TWINS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=WORK / "presets")
    options = parser.parse_args(arguments)
    for name in options.only or TWINS:
        twin = TWINS[name]
        run = training_run(twin, options.seed, options.epochs, options.output)
        print(f"{twin.name}: {finish(run, WORK, verbose=2)['results']}")


def training_run(twin, seed, epochs, output):
    """The training of a `Twin`, which is saved as a preset in a directory.

    Image `i` of epoch `e` depends on the seed, `e` and `i` alone, so a run that is
    taken up again sees what an uninterrupted one would have seen.
    """
    steps_per_epoch = EPOCH_IMAGES // BATCH_SIZE

    def build():
        classifier = models.ViTMoEImageClassifier(
            build_backbone(twin.router, twin.group_images),
            num_classes=len(synthetic.GLYPH_CLASSES),
            preprocessor=models.ViTMoEImageClassifierPreprocessor(
                models.ViTMoEImageConverter(image_size=(IMAGE_SIZE, IMAGE_SIZE))
            ),
        )
        steps = epochs * steps_per_epoch
        classifier.compile(
            adamw(twin.learning_rate, steps, WARMUP_STEPS, WEIGHT_DECAY, clip_norm=1.0),
            metrics=["accuracy"],
        )
        return classifier

    def draw(epoch):
        images, labels = draw_glyphs(EPOCH_IMAGES, seed, epoch * EPOCH_IMAGES)
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))
        return batches_of(images[order], labels[order], BATCH_SIZE)

    settings = {
        "router": router_config(twin.router),
        "group_images": twin.group_images,
        "learning_rate": twin.learning_rate,
        "warmup_steps": WARMUP_STEPS,
        "weight_decay": WEIGHT_DECAY,
        "batch_size": BATCH_SIZE,
        "epoch_images": EPOCH_IMAGES,
    }

    def save_and_measure(classifier):
        accuracy = upstream(classifier)
        save_trained(
            classifier,
            output / twin.name,
            description=f"{twin.title}, 96 wide, 6 blocks, trained on synthetic glyphs "
            "at 32 x 32.",
            source="experiments/glyph_presets.py",
            seed=seed,
            accuracy={f"glyphs, {layout}": found for layout, found in accuracy.items()},
        )
        return {"upstream_accuracy_by_layout": accuracy}

    return Run(
        f"{twin.name}_{epochs}_{seed}",
        seed,
        build,
        draw,
        epochs,
        steps_per_epoch,
        save_and_measure,
        settings=settings,
    )


def draw_glyphs(number, seed, start=0):
    """Images and labels, half of them of each layout, one layout after the other."""
    each = number // len(LAYOUTS)
    parts = [
        synthetic.glyphs(each, IMAGE_SIZE, seed, start // len(LAYOUTS), **layout)
        for layout in LAYOUTS.values()
    ]
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def build_backbone(router, group_images):
    return models.ViTMoEBackbone(
        image_shape=(IMAGE_SIZE, IMAGE_SIZE, 3),
        patch_size=4,
        num_layers=6,
        num_heads=3,
        hidden_dim=96,
        mlp_dim=192,
        moe_layers=() if router is None else (3, 4, 5),
        router=router,
        group_images=group_images,
        pooling="gap",
        position_embedding="sincos2d",
    )


def upstream(classifier):
    """Accuracy on new glyphs of each layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        images, labels = synthetic.glyphs(
            VALIDATION_IMAGES, IMAGE_SIZE, VALIDATION_SEED, **layout
        )
        predicted = classifier.predict(images, batch_size=BATCH_SIZE, verbose=0)
        found[name] = float(np.mean(predicted.argmax(-1) == labels))
    return found


if __name__ == "__main__":
    main()
