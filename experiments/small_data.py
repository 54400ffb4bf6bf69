"""What sparse routers drop on small data: V-MoE from scratch on a few thousand images.

    python -m experiments.small_data              # all that is missing, 85 trainings
    python -m experiments.small_data --seeds 0    # one seed of five
    python -m experiments.small_data --data icons # one of the three tasks

Each setting of the router is trained with each seed, for eight epochs: on the
901 digits of scikit-learn, on 2,048 letters of 18 classes, and on icons of 24 concepts
(`experiments.icons` makes their bank first). Measured are the accuracy on other images,
as trained and with predictions without a capacity, and the share of tokens that the
blocks drop: in training, in predictions of a batch, and in those of one image. The
results are in `small_data.json`; the last lines are the table of `docs/small_data.md`.
"""

import argparse
import functools
import itertools
import string
from pathlib import Path

import keras
import numpy as np

import keras_softmoe as ksm
from experiments.icons import bank as icons_bank
from experiments.letters import bank as letters_bank, pictures
from experiments.lib.runs import (
    Run,
    adamw,
    batches_of,
    check_before,
    dropped,
    finish,
    processor,
    read_json,
    router_config,
    write_json,
)
from keras_softmoe import models
from keras_softmoe.routers import SoftmaxTokenChoiceRouter

WORK = Path("build/small_data")
BANKS = Path("build")
OUTPUT = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2, 3, 4)
EPOCHS, BATCH_SIZE = 8, 32
SIZES = {
    "patch_size": 4,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 64,
    "mlp_dim": 128,
    "pooling": "gap",
}
MOE_LAYERS = (1, 3)
# The settings of `ViTMoEBackbone` and of its router that differ
SETTINGS = {
    "dense": None,
    "groups of one image": {"group_images": 1},
    "defaults": {},
    "capacity of 2": {
        "group_images": 32,
        "capacity_factor": 2.0,
        "eval_capacity_factor": "dropless",
    },
    "without capacity": {"group_images": 1, "capacity_factor": None},
}
NUM_EXPERTS = (8, 25)
# Settings that are trained on each task; on digits all of them.
COMPARED = ("groups of one image", "defaults")


# === Data: `(images, labels)` to train with, and others ===


def digits():
    """8 x 8 pixels at 32 x 32: 901 to train with, and 896 others."""
    return tuple(ksm.datasets.digits(split=split) for split in ("train", "test"))


def letters():
    """2,048 pictures of 20 x 20 pixels of small Latin letters, and 512 others."""
    bank = letters_bank.load_bank(BANKS, string.ascii_lowercase)
    drawn = pictures.Letters(bank, "anywhere")
    return drawn.take(2048, seed=0, split="train"), drawn.take(512, seed=0)


def icons():
    """Icons of the 24 concepts most drawn, at most 2,048; others in styles held out."""
    bank = icons_bank.load(BANKS / "icons" / "bank.npz")
    split = {name: bank.rows(name) for name in ("train", "held_out_styles")}
    counts = np.bincount(split["train"][1])
    concepts = np.sort(np.argsort(-counts, kind="stable")[:24])
    found, rng = [], np.random.default_rng(0)
    for (rows, labels), most in zip(split.values(), (2048, 512), strict=True):
        chosen = rng.permutation(np.flatnonzero(np.isin(labels, concepts)))[:most]
        images = np.repeat(bank.pictures[rows[chosen]][..., None], 3, axis=-1)
        found.append((images, np.searchsorted(concepts, labels[chosen])))
    return tuple(found)


DATA = {"digits": digits, "letters": letters, "icons": icons}


# === Trainings ===


def classifier(settings, num_experts, steps, size=32, num_classes=10):
    """A compiled classifier; a dense one if the settings are `None`."""
    experts = {}
    if settings is not None:
        routing = dict(settings)
        groups = {n: routing.pop(n) for n in ("group_images",) if n in routing}
        router = SoftmaxTokenChoiceRouter(num_experts, **routing)
        experts = {"moe_layers": MOE_LAYERS, "router": router, **groups}
    converter = models.ViTMoEImageConverter(image_size=(size, size))
    model = models.ViTMoEImageClassifier(
        models.ViTMoEBackbone((size, size, 3), **SIZES, **experts),
        num_classes=num_classes,
        preprocessor=models.ViTMoEImageClassifierPreprocessor(converter),
    )
    optimizer = adamw(2e-3, steps, steps // 10, weight_decay=0.05)
    model.compile(optimizer, metrics=["accuracy"])
    return model


def measure(model, train, test):
    """Accuracy, and the shares of dropped tokens."""

    def accuracy():
        return model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]

    found = {"accuracy": accuracy()}
    if model.routers:
        found["training"] = dropped(model, train[0][:256], BATCH_SIZE, training=True)
        found["batch"] = dropped(model, test[0][:256], BATCH_SIZE)
        found["alone"] = dropped(model, test[0][:32], 1)
        model.set_routing(eval_capacity_factor="dropless")
        found["dropless"] = accuracy()
    return found


def runs(seeds, names=tuple(DATA)):
    """The `Run`s of all settings, those of a seed one after the other."""
    found = {name: DATA[name]() for name in names}
    for seed in seeds:
        for name, (train, test) in found.items():
            steps_per_epoch = len(train[0]) // BATCH_SIZE
            make = functools.partial(
                classifier,
                steps=EPOCHS * steps_per_epoch,
                size=train[0].shape[1],
                num_classes=int(train[1].max()) + 1,
            )

            def draw(epoch, train=train, seed=seed):
                order = np.random.default_rng((seed, epoch)).permutation(len(train[0]))
                return batches_of(*(part[order] for part in train), BATCH_SIZE)

            for setting, settings in SETTINGS.items():
                if name != "digits" and setting not in COMPARED:
                    continue
                for num_experts in NUM_EXPERTS if settings is not None else (0,):
                    build = functools.partial(make, settings, num_experts)
                    router = build().backbone.routers.get(MOE_LAYERS[0])
                    yield Run(
                        f"{name}_{setting.replace(' ', '_')}_{num_experts}_{seed}",
                        seed,
                        build,
                        draw,
                        EPOCHS,
                        steps_per_epoch,
                        functools.partial(measure, train=train, test=test),
                        settings={"sizes": SIZES, "router": router_config(router)},
                    )


def table(results):
    """The rows of the page, in Markdown, from the results of runs by name."""
    lines = [
        "| images | experts | router | accuracy | without a capacity in predictions "
        "| dropped in training | predicting 32 | one |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for data, num_experts, name in itertools.product(DATA, (0, *NUM_EXPERTS), SETTINGS):
        stem = f"{data}_{name.replace(' ', '_')}_{num_experts}_"
        found = [r for key, r in results.items() if key.startswith(stem)]
        if not found:
            continue
        cells = []
        for kind in ("accuracy", "dropless"):
            values = [100 * r[kind] for r in found if kind in r]
            spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
            cells.append(f"{np.mean(values):.1f} ± {spread:.1f}" if values else "")
        for kind in ("training", "batch", "alone"):
            shares = [np.mean(r[kind]) for r in found if kind in r]
            cells.append(f"{100 * np.mean(shares):.0f} %" if shares else "")
        lines.append(f"| {' | '.join([data, str(num_experts or ''), name, *cells])} |")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--data", nargs="+", choices=DATA, default=tuple(DATA))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args(arguments)
    check_before([WORK, chosen.output.parent], chosen.seeds, SEEDS)
    # Those of other data and seeds stay.
    kept = chosen.output.exists() and read_json(chosen.output, ["results"])["results"]
    results = kept or {}
    for run in runs(chosen.seeds, chosen.data):
        results[run.name] = finish(run, WORK)["results"]
        print(run.name, results[run.name], flush=True)
    known = {"backend": keras.config.backend(), "machine": processor()}
    write_json(chosen.output, {**known, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
