"""Train the presets `*_icons`: models that learned from icons of open sets.

    python -m experiments.icons                                   # first, the bank
    python -m experiments.icons.presets                           # all five
    python -m experiments.icons.presets --only limoe --seeds 1 --size full

A dense Vision Transformer, V-MoE and Soft MoE learn to name the concept of an icon;
a LIMoE and its dense twin learn from icons and their names. `small` is for processors,
half an hour of one core each, `full` for an accelerator. The first seed is written with
a card to `--output`, in float16, and measured so. After an interruption the same
command goes on where it stopped. On PyTorch it computes in one thread; elsewhere set
`OMP_NUM_THREADS` and the like.
"""

import argparse
from functools import partial
from pathlib import Path

import keras

from experiments.icons import bank as banks, measures
from experiments.icons.__main__ import WORK
from experiments.icons.models import SIZES, build, kinds
from experiments.icons.pictures import Icons
from experiments.lib.cards import (
    RECORDS,
    in_half_precision,
    machine,
    means,
    publish,
    save_weights,
    spread,
    write_card,
    write_metadata,
)
from experiments.lib.runs import (
    Run,
    adamw,
    check_before,
    finish,
    one_thread,
    router_config,
)

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
WARMUP, WEIGHT_DECAY = 0.05, 0.05
_METRICS = {"metrics": ["accuracy"]}


def training_run(kind, size, bank, seed, epochs, work, steps_per_epoch=None):
    """The training of a preset, a `Run`. That of the first seed has its weights kept.

    Args:
        kind: `Kind`.
        size: `Size`.
        bank: `Bank`.
        seed: int, of `SEEDS`.
        epochs: int.
        work: path, where weights are kept.
        steps_per_epoch: int, or `None` for as many as there are icons.
    """
    icons = Icons(bank, seed, size.batch_size)
    steps_per_epoch = steps_per_epoch or icons.steps_per_epoch
    steps = epochs * steps_per_epoch
    name = f"{kind.name}_{epochs}_{seed}"

    def build_and_compile():
        model = build(kind, size, bank)
        rate, warmup = size.learning_rate, round(WARMUP * steps)
        optimizer = adamw(rate, steps, warmup, WEIGHT_DECAY, clip_norm=1.0)
        model.compile(optimizer, **({} if kind.learns_names else _METRICS))
        return model

    def measure_saved(model):
        """Results of the weights as they are kept, in float16."""
        directory = save_weights(model, work, name)
        for file in directory.glob("*.weights.h5"):
            in_half_precision(file)
        saved = type(model).from_preset(str(directory))
        return measure(saved, kind, bank)

    settings = {
        "router": router_config(kind.router),
        **size._asdict(),
        "icons": len(icons.rows),
        "steps": steps,
        "weight_decay": WEIGHT_DECAY,
    }
    return Run(
        name,
        seed,
        build_and_compile,
        icons.named if kind.learns_names else icons.labelled,
        epochs,
        steps_per_epoch,
        measure_saved,
        settings=settings,
    )


def measure(model, kind, bank):
    """What a trained model brings on styles and concepts never seen, a dict."""
    keras.utils.set_random_seed(0)
    if kind.learns_names:
        found = {"found_by_word": measures.found_by_word(model, bank)}
        if kind.router is not None:
            found["experts"] = measures.experts_by_modality(model, bank)
        return found
    return {
        "new_styles": measures.style_accuracy(model, bank),
        "new_concepts": {
            "model": measures.few_shot(model, bank),
            "raw pixels": measures.few_shot(None, bank),
        },
    }


# === Cards ===


def describe(kind, size, bank, epochs, directory, runs):
    """Write the metadata and the card of a preset.

    Args:
        kind, size, bank, epochs: as in `training_run`.
        directory: path of the preset.
        runs: list of dicts, the results of each seed.
    """
    run, *_ = runs
    icons = Icons(bank, run["seed"], size.batch_size)
    learned = "icons and their names" if kind.learns_names else "icons"
    metadata = write_metadata(
        directory,
        kind="trained",
        description=f"{kind.title}, {size.hidden_dim} wide, {size.num_layers} blocks, "
        f"trained on {learned} of open sets at 32 x 32.",
        source="experiments/icons/presets.py",
        licence="Apache-2.0",
        training={
            "seed": run["seed"],
            "images": epochs * icons.steps_per_epoch * size.batch_size,
            "learning_rate": size.learning_rate,
            **machine(),
        },
        **accuracies(run),
    )
    write_card(directory, kind.name, card(metadata, kind, size, epochs, bank, runs))


def accuracies(run):
    """Entries of the metadata with what was measured, of one training."""
    found = {}
    if "found_by_word" in run:
        for places, value in run["found_by_word"]["found"].items():
            found[f"icons, found by a word among 1,000, in {places}"] = value
    else:
        found["icons, new styles"] = run["new_styles"]
        for shots, values in run["new_concepts"]["model"].items():
            found[f"icons, few-shot, new concepts, {shots} of a class"] = values
    return means(found)


def card(metadata, kind, size, epochs, bank, runs):
    """Text of the card of a preset."""
    run, *_ = runs
    of = bank.summary()
    train, styles = of["train"], of["held_out_styles"]
    task = "LIMoEContrastive" if kind.learns_names else "ViTMoEImageClassifier"
    measured = _words(runs) if kind.learns_names else _classes(runs, bank)
    return f"""# {kind.name}

{metadata["description"]} {metadata["parameter_count"]:,} parameters.

```python
import keras_softmoe as ksm

name = "{kind.name}"
model = ksm.models.{task}.from_preset(name)
```

**Data.** {train["icons"]:,} icons of {bank.num_concepts:,} concepts from
{train["sets"]} sets under open licences (`experiments/icons`; authors and licences are
in `docs/results/icons.md`), turned, moved and scaled at random, in random contrast,
some of them light on dark. {styles["families"]} families of sets with
{styles["icons"]:,} icons, and {of["concepts_held_out"]} other concepts, were held out,
and no icon of theirs has a copy among those that were trained.

**Training.** `experiments/icons/presets.py`: {epochs} epochs, AdamW, peak learning rate
{size.learning_rate:g}, cosine decay, {size.batch_size} icons a step.
{run["minutes"]:.0f} minutes by the clock with the backend
`{metadata["training"]["backend"]}` on {metadata["training"]["processor"]}. The file
holds the weights in float16; all that follows was measured on them.

{measured}

**Limits.** A small model for trying the library out, not for photographs.

**Licence.** Apache-2.0.
"""


def _classes(runs, bank):
    run, *_ = runs
    by_seed = ", ".join(f"{r['new_styles']:.3f} (seed {r['seed']})" for r in runs)
    rows = "\n".join(
        f"| {shots} | {spread(values)} "
        f"| {spread(run['new_concepts']['raw pixels'][shots])} |"
        for shots, values in run["new_concepts"]["model"].items()
    )
    return f"""\
**Styles never seen**: accuracy among {bank.num_concepts:,} concepts: {by_seed}.

**Concepts never seen**: a linear probe, mean ± standard deviation over draws of icons
to learn from; icons to test come from other families of sets.

| icons of a concept | this model | raw pixels |
|---|---|---|
{rows}"""


def _words(runs):
    rows = "\n".join(
        f"| {run['seed']} | {places} | {value:.3f} "
        f"| {run['found_by_word']['chance'][places]:.3f} |"
        for run in runs
        for places, value in run["found_by_word"]["found"].items()
    )
    return f"""\
**Found by a word**: {runs[0]["found_by_word"]["queries"]} names are searched for among
1,000 icons in styles never seen; how often one of its concept is in the first places.

| seed | places | this model | chance |
|---|---|---|---|
{rows}"""


def main(arguments=None):
    """Train and write what is missing."""
    known = kinds(SIZES["small"])
    parser = argparse.ArgumentParser(
        prog="python -m experiments.icons.presets",
        description="Train the presets of icons.",
    )
    parser.add_argument("--only", choices=known, nargs="+", default=tuple(known))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS[:1])
    parser.add_argument("--epochs", type=int, help="instead of those of the size")
    parser.add_argument("--steps", type=int, help="of an epoch, for trials")
    parser.add_argument("--bank", type=Path, default=WORK / "bank.npz")
    parser.add_argument("--work", type=Path, default=WORK / "presets")
    parser.add_argument("--output", type=Path, default=ROOT / "presets")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args(arguments)
    if arguments.size == "small":
        one_thread()
    check_before([arguments.work, arguments.output], arguments.seeds, SEEDS)
    bank, size = banks.load(arguments.bank), SIZES[arguments.size]
    for key in arguments.only:
        kind = kinds(size)[key]
        epochs = size.limoe_epochs if kind.learns_names else size.epochs
        epochs = arguments.epochs or epochs
        runs = [
            training_run(
                kind, size, bank, seed, epochs, arguments.work, arguments.steps
            )
            for seed in SEEDS
        ]
        for run in runs:
            if run.seed in arguments.seeds:
                print(run.name, flush=True)
                print(finish(run, arguments.work, verbose=2)["results"], flush=True)
        publish(
            runs,
            arguments.work,
            arguments.output / kind.name,
            arguments.records,
            partial(describe, kind, size, bank, epochs),
        )


if __name__ == "__main__":
    main()
