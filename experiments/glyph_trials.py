"""Train the models of the glyph presets shortly, with other learning rates and routers.

The learning rates are those that the presets' rate was compared with. The routers say
what sets the Soft MoE and the V-MoE apart, one difference each. Every training is a
quarter as long as a preset's and has a seed that no preset has.

    python -m experiments.glyph_trials                    # all, 29 trainings
    python -m experiments.glyph_trials --only rates       # 9 of them
    python -m experiments.glyph_trials --only routers     # 23, three of those too

A training takes seven minutes of a core. After an interruption the same command goes on
where it stopped, as `experiments.glyph_presets` does, with the same files in
`build/training/`.
"""

import argparse
from pathlib import Path

from experiments.glyph_presets import (
    EPOCH_IMAGES,
    TWINS,
    WORK,
    Twin,
    classifier_run,
    upstream,
)
from experiments.lib.runs import finish, write_json
from keras_softmoe import routers

RESULTS = Path(__file__).resolve().parent / "glyphs"

SEEDS = (100, 101, 102)
EPOCHS = 16
LEARNING_RATES = (7.5e-4, 1.5e-3, 3e-3)
# Models with one seed are not compared with others.
COMPARED = {
    name: twin._replace(seeds=SEEDS)
    for name, twin in TWINS.items()
    if len(twin.seeds) > 1
}


def other(title, router, seeds=SEEDS[:1]):
    """A model that no preset has, with the name of its files made of its title."""
    name = title.replace(" ", "_").replace(",", "")
    return Twin(f"vit_tiny_patch4_32_{name}", title, seeds, router)


OTHERS = [
    other(
        "soft, 64 experts of one slot",
        routers.SoftRouter(64, slots_per_expert=1, initial_scale="unit_variance"),
    ),
    other("soft, starts at scale 1", routers.SoftRouter(16, slots_per_expert=4)),
    other("expert choice", routers.SoftmaxExpertChoiceRouter(16)),
    other("token choice without batch priority", routers.SoftmaxTokenChoiceRouter(16)),
    other(
        "token choice without dropped tokens",
        routers.SoftmaxTokenChoiceRouter(16, capacity_factor=None),
    ),
    other(
        "token choice without noise and load loss",
        routers.SoftmaxTokenChoiceRouter(16, priority="max", noise_std=0.0),
        SEEDS,
    ),
    other(
        "token choice without losses",
        routers.SoftmaxTokenChoiceRouter(16, priority="max", losses=()),
        SEEDS,
    ),
    other(
        "token choice without noise and losses",
        routers.SoftmaxTokenChoiceRouter(16, priority="max", noise_std=0.0, losses=()),
        SEEDS,
    ),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=TRIALS)
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else TRIALS:
        found = {"images": EPOCHS * EPOCH_IMAGES, name: TRIALS[name]()}
        write_json(RESULTS / f"{name}.json", found)


def try_rates():
    """What each model reaches with each learning rate, with the first seed."""
    return {
        name: {
            f"{rate:g}": train(twin._replace(learning_rate=rate), SEEDS[0])
            for rate in LEARNING_RATES
        }
        for name, twin in COMPARED.items()
    }


def try_routers():
    """What the presets' models and others reach with each of their seeds."""
    return {
        twin.title: [train(twin, seed) for seed in twin.seeds]
        for twin in (*COMPARED.values(), *OTHERS)
    }


TRIALS = {"rates": try_rates, "routers": try_routers}


def train(twin, seed):
    run = trial_run(twin, seed)
    print(f"\n{run.name}")
    results = finish(run, WORK, verbose=2)["results"]
    # The rest of the curve stays in the working directory.
    return {**results, "curve": results["curve"][-1:]}


def trial_run(twin, seed):
    """A short training, whose weights are not kept."""
    return classifier_run(
        f"{twin.name}_rate{twin.learning_rate:g}_{EPOCHS}_{seed}",
        twin,
        seed,
        EPOCHS,
        lambda classifier: {"upstream_accuracy_by_layout": upstream(classifier)},
    )


if __name__ == "__main__":
    main()
