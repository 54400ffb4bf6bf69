"""Train the small presets `limoe_*_shapes`: a LIMoE and its dense twin.

Both are one tower for images and captions of the same width and depth; in every second
block of the LIMoE eight experts replace the MLP, at the compute of one. They learn from
synthetic scenes of coloured shapes with captions (`synthetic.captioned_shapes`), each
seen once: every epoch draws new ones. A quarter of all combinations of shape and colour
is never shown or named.

    python -m experiments.limoe_presets --only dense --output build/presets

Needs the extras of one backend and `datasets`. A training takes a quarter of an hour of
a core, with `KERAS_BACKEND=torch` the least. After an interruption the same command
goes on where it stopped. The presets in `presets/` were trained by an earlier form of
this program, which also measured and wrote what their cards say.
"""

import argparse
from pathlib import Path

from experiments import synthetic
from experiments.lib.cards import save_trained
from experiments.lib.runs import Run, adamw, batches_of, finish, router_config
from keras_softmoe import datasets, evaluation, models, routers

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "training"

IMAGE_SIZE = 32
PATCH_SIZE = 4
NUM_EXPERTS = 8
# Soft minimum of experts for text, and for images.
TEXT_EXPERTS, IMAGE_EXPERTS = 3, 5
# The paper's. In short trainings it leaves text on more experts than are asked for.
LOSS_WEIGHT = 0.04
VOCABULARY_SIZE = 400
SEQUENCE_LENGTH = 16

BATCH_SIZE = 128
EPOCH_PAIRS = 16384
EPOCHS = 28
WARMUP_STEPS = 200
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-3

# No model is trained on scenes of this seed.
HELD_OUT_SEED = 102
TEMPLATES = ("a {}", "a picture of a {}", "there is a {}")
NUM_CLASSIFIED = 2000

NAMES = {
    "limoe": "limoe_tiny_patch4_8e_32_shapes",
    "dense": "limoe_dense_tiny_patch4_32_shapes",
}
TITLES = {
    "limoe": f"LIMoE, {NUM_EXPERTS} experts in every second block, K = 1",
    "dense": "Dense one-tower model, the twin of the LIMoE",
}


def main(arguments=None):
    """Train presets that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=WORK / "presets")
    options = parser.parse_args(arguments)
    for kind in options.only or NAMES:
        run = training_run(kind, options.seed, options.epochs, options.output)
        print(f"{NAMES[kind]}: {finish(run, WORK, verbose=2)['results']}")


# === Models ===


def build(kind):
    """A task with new weights; `kind` is a key of `NAMES`."""
    tokenizer = models.LIMoETokenizer(vocabulary(), name="tokenizer")
    router = limoe_router() if kind == "limoe" else None
    backbone = models.LIMoEBackbone(
        image_shape=(IMAGE_SIZE, IMAGE_SIZE, 3),
        patch_size=PATCH_SIZE,
        vocabulary_size=tokenizer.vocabulary_size(),
        sequence_length=SEQUENCE_LENGTH,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        moe_layers=models.moe_blocks(4, every=2) if router else (),
        router=router,
        embedding_dim=128,
        name=NAMES[kind],
    )
    preprocessor = models.LIMoEPreprocessor(
        tokenizer,
        models.ViTMoEImageConverter(
            image_size=(IMAGE_SIZE, IMAGE_SIZE), name="image_converter"
        ),
        sequence_length=SEQUENCE_LENGTH,
        name="preprocessor",
    )
    return models.LIMoEContrastive(backbone, preprocessor)


def limoe_router():
    """The router of the LIMoE."""
    losses = routers.classic_losses()
    losses += routers.entropy_losses(NUM_EXPERTS, TEXT_EXPERTS, IMAGE_EXPERTS)
    return routers.LIMoERouter(
        num_experts=NUM_EXPERTS,
        losses=losses,
        loss_weight=LOSS_WEIGHT,
        rounding="ceil",
        multiple_of=4,
    )


def vocabulary():
    """The SentencePiece model of the captions, the same for all runs."""
    captions = synthetic.captioned_shapes(4096, image_size=16, verbose=0).captions
    return datasets.train_vocabulary(captions, VOCABULARY_SIZE)


# === Training ===


def training_run(kind, seed, epochs, output):
    """The training of a model, which is saved as a preset in a directory.

    The data of a seed are the same for every model, image by image.
    """
    steps_per_epoch = EPOCH_PAIRS // BATCH_SIZE

    def build_and_compile():
        model = build(kind)
        steps = epochs * steps_per_epoch
        model.compile(
            adamw(LEARNING_RATE, steps, WARMUP_STEPS, WEIGHT_DECAY, clip_norm=1.0)
        )
        return model

    def draw(epoch):
        start = epoch * EPOCH_PAIRS
        scenes = synthetic.captioned_shapes(
            EPOCH_PAIRS, IMAGE_SIZE, seed, start, verbose=0
        )
        return batches_of(scenes.images, scenes.captions, BATCH_SIZE)

    def save_and_measure(model):
        accuracy = zero_shot(model)
        save_trained(
            model,
            output / NAMES[kind],
            description=f"{TITLES[kind]}, 64 wide, 4 blocks, trained on synthetic "
            f"captioned shapes at {IMAGE_SIZE} x {IMAGE_SIZE}.",
            source="experiments/limoe_presets.py",
            seed=seed,
            accuracy={"scenes, new combinations, of 64 names": accuracy},
        )
        return {"zero_shot_new_of_64": accuracy}

    settings = {
        "router": router_config(limoe_router() if kind == "limoe" else None),
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARMUP_STEPS,
        "weight_decay": WEIGHT_DECAY,
        "batch_size": BATCH_SIZE,
        "epoch_pairs": EPOCH_PAIRS,
    }
    return Run(
        f"{NAMES[kind]}_{epochs}_{seed}",
        seed,
        build_and_compile,
        draw,
        epochs,
        steps_per_epoch,
        save_and_measure,
        settings=settings,
    )


def zero_shot(model):
    """Accuracy on new scenes with combinations that were never shown or named."""
    scenes = synthetic.captioned_shapes(
        NUM_CLASSIFIED, IMAGE_SIZE, HELD_OUT_SEED, combinations="held_out", verbose=0
    )
    names = list(synthetic.SHAPE_COLOR_CLASSES)
    found = evaluation.zero_shot(model, scenes.images, names, TEMPLATES, scenes.labels)
    return found.accuracy


if __name__ == "__main__":
    main()
