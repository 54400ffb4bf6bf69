"""What the losses on routing do to a small LIMoE, in short training runs.

The model and data are those of `limoe_presets.py`, trained for a part of the time. Two
questions:

- The classic losses alone, the entropy losses alone, or both? (LIMoE, section 4.1 and
  figure 5)
- How many experts does text use, if the soft minimum asks for S? (Figure 10)

    python -m experiments.limoe_losses           # all runs, then table and figure

The results are written to `experiments/limoe_losses.json` after each run, and runs that
are there already are not repeated; the README's table is made of them, and the figure
`guides/limoe_text_experts.png`. Needs the extras of one backend, `datasets` and `viz`.
"""

import argparse
from pathlib import Path

import numpy as np

from experiments.limoe_presets import (
    IMAGE_EXPERTS,
    IMAGE_SIZE,
    NUM_CLASSIFIED,
    NUM_EXPERTS,
    TEST_SEED,
    TEXT_EXPERTS,
    WORK,
    measure,
    training_run,
)
from experiments.runs import finish, read_json, write_json
from keras_softmoe import analysis, datasets, routers
from keras_softmoe.files import replaced_file

RESULTS = Path(__file__).resolve().parent / "limoe_losses.json"
FIGURE = RESULTS.parents[1] / "guides" / "limoe_text_experts.png"

EPOCHS = 2
SEEDS = (0, 1, 2)
SOFT_MINIMA = (1, 4, 6)
THRESHOLD_SEEDS = (0,)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", help="names of sets, such as classic S=4")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name, losses, seeds in loss_sets():
        if arguments.only and name not in arguments.only:
            continue
        for seed in seeds:
            if any((r["losses"], r["seed"]) == (name, seed) for r in runs(arguments)):
                continue
            print(f"\n{name}, seed {seed}")
            result = train_and_measure(name, losses, seed, arguments.epochs)
            print(result)
            # Read again: another process may have added runs meanwhile.
            write_json(arguments.output, [*runs(arguments), result])
    with replaced_file(FIGURE) as file:
        figure(runs(arguments)).savefig(file, dpi=150)


def train_and_measure(name, losses, seed, epochs):
    """Results of one run."""
    run = training_run(
        f"losses_{name}_{epochs}_{seed}",
        "limoe",
        seed,
        epochs,
        lambda model: {**measure(model), **usage(model)},
        losses,
    )
    finished = finish(run, WORK, verbose=2)
    return {
        "losses": name,
        "seed": seed,
        "epochs": epochs,
        "minutes": finished["times"]["training_seconds"] / 60,
        **finished["results"],
    }


def loss_sets():
    """Name, losses and seeds of each run."""
    classic = routers.classic_losses()

    def entropy(text_experts):
        return routers.entropy_losses(NUM_EXPERTS, text_experts, IMAGE_EXPERTS)

    yield "both", classic + entropy(TEXT_EXPERTS), SEEDS
    yield "classic", classic, SEEDS
    yield "entropy", entropy(TEXT_EXPERTS), SEEDS
    for minimum in SOFT_MINIMA:
        yield f"S={minimum}", classic + entropy(minimum), THRESHOLD_SEEDS


def runs(arguments):
    """The runs that are finished."""
    return read_json(arguments.output) if arguments.output.exists() else []


def figure(finished):
    """Experts in use against the soft minimum for text."""
    by_threshold = {}
    for run in finished:
        minimum = {"both": TEXT_EXPERTS}.get(run["losses"])
        if run["losses"].startswith("S="):
            minimum = int(run["losses"][2:])
        if minimum is not None:
            found = by_threshold.setdefault(minimum, {"image": [], "text": []})
            for modality, values in found.items():
                values.append(float(np.mean(run[f"{modality}_experts"])))
    return analysis.plot_experts_in_use(by_threshold)


def usage(model):
    """Experts that serve 90 % of the tokens of a modality, and what is dropped."""
    test = datasets.captioned_shapes(NUM_CLASSIFIED, IMAGE_SIZE, TEST_SEED, verbose=0)
    statistics = analysis.modality_statistics(
        model, test.images, test.captions, verbose=0
    )
    found = {}
    for modality in ("image", "text"):
        needed = [s.experts_needed(0.9)[modality] for s in statistics.values()]
        dropped = [s.dropped[modality] for s in statistics.values()]
        found[f"{modality}_experts"] = needed
        found[f"{modality}_entropy"] = [
            s.entropy[modality] for s in statistics.values()
        ]
        found[f"{modality}_dropped"] = float(np.mean(dropped))
    return found


if __name__ == "__main__":
    main()
