"""The study on icons and characters: train what is missing, or answer `PLAN.md`.

    python -m experiments.icons.study --bracket      # dense models alone, for the plan
    python -m experiments.icons.study                # all trainings that are missing
    python -m experiments.icons.study --only dense vmoe --seeds 60
    python -m experiments.icons.study --answers      # tables and a figure

Trainings are resumable: each is a file of results in `build/icons/study`, and the
running one is backed up after each epoch. `--scale full` is for an accelerator,
`characters` and `characters_longer` are the second task. Each call writes all that is
finished to `experiments/icons/study_SCALE.json`.
"""

import argparse
import dataclasses
from pathlib import Path

import keras
import numpy as np

from experiments.icons import bank as banks, characters
from experiments.icons.pictures import Icons, plain
from experiments.lib.runs import (
    RESULTS,
    Run,
    adamw,
    check_before,
    dropped,
    finish,
    one_thread,
    processor,
    read_json,
    result_file,
    router_config,
    write_json,
)
from keras_softmoe import models, routers

BANK = Path("build", "icons", "bank.npz")
WORK = Path("build", "icons", "study")
HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Scale:
    """What all models have in common.

    Attributes:
        patch_size, hidden_dim, num_layers, num_heads: int, of `ViTMoEBackbone`.
        batch_size: int.
        epochs: int, after each of which accuracy is measured. Each icon once.
        learning_rate: float, the peak.
        longer: float, seconds of a step of `vmoe` over those of `dense`.
        seeds: tuple of int.
        concepts: int or `None`, so many of the trained concepts, those most drawn.
        watched: int, icons of each point of a curve.
        models: tuple of str, of `MODELS`, or `None` for all.
        bank: str, path of the bank.
        rates: tuple of float, peaks that are tried.
    """

    patch_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    batch_size: int
    epochs: int
    learning_rate: float
    longer: float
    seeds: tuple
    concepts: int | None = None
    watched: int = 2048
    models: tuple | None = None
    bank: str = str(BANK)
    rates: tuple = (1e-3, 2e-3, 4e-3)


_SMALL = Scale(8, 64, 4, 2, 128, 10, 4e-3, 1.25, (60, 61, 62), 200)
# 572 characters of seven faces are 250 steps an epoch: 8,000 and 16,000 steps.
_CHARACTERS = dataclasses.replace(
    _SMALL,
    batch_size=16,
    epochs=32,
    learning_rate=1e-3,
    longer=1.0,
    seeds=(70, 71, 72),
    concepts=572,
    watched=572,
    models=("dense", "wide", "vmoe", "random", "position"),
    bank=str(characters.BANK),
    rates=(5e-4, 1e-3, 2e-3, 4e-3),
)
SCALES = {
    "small": _SMALL,
    "full": Scale(4, 128, 6, 4, 512, 100, 1e-3, 1.25, (60, 61, 62, 63, 64)),
    "characters": _CHARACTERS,
    "characters_longer": dataclasses.replace(_CHARACTERS, epochs=64),
    "smoke": Scale(16, 16, 2, 2, 64, 2, 2e-3, 1.5, (0, 1), 20, 64),
}
BRACKET_SEED = 1060


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the study: its title, its router, and the width of its MLPs."""

    title: str
    router: object = None
    ratio: int = 4
    is_longer: bool = False


def _tokens(scale):
    return (32 // scale.patch_size) ** 2


def _token_choice(num_experts=16, **settings):
    return lambda scale: routers.SoftmaxTokenChoiceRouter(num_experts, **settings)


MODELS = {
    "dense": Model("Dense"),
    "wide": Model("Dense, MLPs four times as wide", ratio=16),
    "longer": Model("Dense, as many seconds as the V-MoE", is_longer=True),
    "vmoe": Model("V-MoE, 16 experts", _token_choice()),
    "vmoe_4": Model("V-MoE, 4 experts", _token_choice(4)),
    "vmoe_64": Model("V-MoE, 64 experts", _token_choice(64)),
    "soft": Model(
        "Soft MoE, 16 experts",
        lambda scale: routers.SoftRouter(
            16, _tokens(scale) // 16 or 1, initial_scale="unit_variance"
        ),
    ),
    "expert": Model(
        "Expert choice, 16 experts", lambda scale: routers.SoftmaxExpertChoiceRouter(16)
    ),
    "random": Model(
        "V-MoE, random logits", _token_choice(random_logits=True, trainable=False)
    ),
    "position": Model(
        "Fixed by position", lambda scale: routers.IdentityRouter(_tokens(scale))
    ),
}


def build(scale, model, num_classes):
    """A classifier with new weights, not compiled."""
    router = model.router and model.router(scale)
    every_second = models.moe_blocks(scale.num_layers, every=2)
    backbone = models.ViTMoEBackbone(
        (32, 32, 3),
        scale.patch_size,
        scale.num_layers,
        scale.num_heads,
        scale.hidden_dim,
        model.ratio * scale.hidden_dim,
        moe_layers=every_second if router else (),
        router=router,
        pooling="gap",
    )
    converter = models.ViTMoEImageConverter(image_size=(32, 32))
    return models.ViTMoEImageClassifier(
        backbone,
        num_classes,
        preprocessor=models.ViTMoEImageClassifierPreprocessor(converter),
        compile=False,
    )


def training(scale, bank, key, seed):
    """The `Run` of a model with a seed; results are the accuracies in both styles."""
    model = MODELS[key]
    icons = Icons(bank, seed, scale.batch_size)
    epochs = round(scale.epochs * (scale.longer if model.is_longer else 1))
    steps = epochs * icons.steps_per_epoch

    def build_and_compile():
        classifier = build(scale, model, bank.num_concepts)
        optimizer = adamw(scale.learning_rate, steps, steps // 10, 0.05, clip_norm=1.0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        classifier.compile(optimizer, loss=loss)
        return classifier

    def measure(classifier):
        known = some(bank, "train", scale.watched)
        found = {
            "accuracy": accuracy(classifier, *some(bank, "held_out_styles")),
            "trained_styles": accuracy(classifier, *known),
            "parameters": classifier.count_params(),
        }
        if classifier.routers and "random" not in key:
            found["dropped"] = dropped(classifier, known[0][:256], 256, training=True)
        return found

    def watch(classifier):
        watched = some(bank, "held_out_styles", scale.watched)
        return {"accuracy": accuracy(classifier, *watched)}

    router = router_config(model.router and model.router(scale))
    return Run(
        f"{key}_{epochs}_{scale.learning_rate:g}_{seed}",
        seed,
        build_and_compile,
        icons.labelled,
        epochs,
        icons.steps_per_epoch,
        measure,
        watch=watch,
        settings={**dataclasses.asdict(scale), "router": router, "ratio": model.ratio},
    )


def most_drawn(bank, count):
    """A bank with the `count` most drawn of its trained concepts, `None` for all."""
    if count is None:
        return bank
    trained = bank.label[bank.split == banks.SPLITS.index("train")]
    counts = np.bincount(trained, minlength=len(bank.concepts))
    others = np.ones(len(counts), bool)
    others[np.argsort(-counts, kind="stable")[:count]] = False
    gone = others[bank.label] & ~bank.held_out[bank.label]
    split = np.where(gone, -1, bank.split).astype("int8")
    return bank._replace(split=split, held_out=others)


def some(bank, split, count=None):
    """Pictures of a split, all or some, and their labels."""
    rows, labels = bank.rows(split)
    chosen = np.random.default_rng(0).permutation(len(rows))[:count]
    return plain(bank.pictures[rows[chosen]]), labels[chosen]


def accuracy(classifier, images, labels):
    """Share of the images that are put into their class, a float; 0 with NaN."""
    logits = classifier.predict(images, batch_size=256, verbose=0)
    right = np.argmax(logits, axis=-1) == labels
    return float(np.mean(right & np.isfinite(logits).all(-1)))


def bracket(scale, bank, directory, chosen):
    """Train dense models alone: yield the names of trainings, and their results.

    The `"rate"` is chosen by `dense` after half the length. To choose the `"length"`,
    too, `wide` is trained as long, then both at the best rate of `dense` for the whole
    length, and `dense` for twice that, which tells what time is worth.
    """

    def tried(key, part, rate):
        epochs = round(part * scale.epochs)
        changed = dataclasses.replace(scale, epochs=epochs, learning_rate=rate)
        run = training(changed, bank, key, BRACKET_SEED)
        return run.name, finish(run, directory, verbose=2)["results"]

    reached = {}
    for rate in scale.rates:
        for key in ("dense",) if chosen == "rate" else ("dense", "wide"):
            name, results = tried(key, 0.5, rate)
            yield name, results
            if key == "dense":
                reached[rate] = results["accuracy"]
    if chosen == "rate":
        return
    best = max(reached, key=reached.get)
    for key, part in (("dense", 1), ("wide", 1), ("dense", 2)):
        yield tried(key, part, best)


def results_file(scale, directory=HERE):
    """Path of what is gathered of a scale, given by its name."""
    return Path(directory, f"study_{scale}.json")


def read_results(scale, directory=HERE):
    """What is gathered of a scale: dict from models to lists of results."""
    return read_json(results_file(scale, directory), ["models"])["models"]


def gather(scale, bank, directory):
    """All that is finished: dict from models to lists of results with their seeds."""
    found = {}
    for key in MODELS:
        for seed in scale.seeds:
            file = result_file(directory, training(scale, bank, key, seed).name)
            if file.exists():
                kept = read_json(file, RESULTS)
                seconds = kept["times"]["training_seconds"]
                row = {"seed": seed, "seconds": seconds, **kept["results"]}
                found.setdefault(key, []).append(row)
    return found


def main(arguments=None):
    """Train what is missing, or answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--only", nargs="+", choices=MODELS)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument(
        "--bracket",
        nargs="?",
        const="length",
        choices=("rate", "length"),
        help="dense models alone, to choose the rate, and the length unless told",
    )
    parser.add_argument("--answers", action="store_true", help="tables and a figure")
    parser.add_argument("--bank", type=Path, help="[that of the scale]")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--output", type=Path, default=HERE)
    chosen = parser.parse_args(arguments)
    scale, file = SCALES[chosen.scale], results_file(chosen.scale, chosen.output)
    if chosen.answers:
        from experiments.icons.answers import write_answers

        write_answers(read_results(chosen.scale, chosen.output), chosen.work)
        return
    seeds = chosen.seeds or scale.seeds
    check_before([chosen.work, chosen.output], seeds, scale.seeds)
    bank = most_drawn(banks.load(chosen.bank or scale.bank), scale.concepts)
    if chosen.scale != "full":
        one_thread()
    if chosen.bracket:
        found, file = {}, chosen.output / f"bracket_{chosen.scale}.json"
        for name, results in bracket(
            scale, bank, chosen.work / "bracket", chosen.bracket
        ):
            print(name, results["accuracy"], flush=True)
            found[name] = results
            write_json(file, found)
        return
    for seed in seeds:
        for key in chosen.only or scale.models or MODELS:
            run = training(scale, bank, key, seed)
            print(run.name, flush=True)
            print(finish(run, chosen.work, verbose=2)["results"]["accuracy"])
            known = {"backend": keras.config.backend(), "machine": processor()}
            found = gather(scale, bank, chosen.work)
            write_json(file, {**known, "scale": chosen.scale, "models": found})


if __name__ == "__main__":
    main()
