"""Train the models of the glyph presets shortly, with other learning rates and routers.

The learning rates are those that the presets' rate was compared with. The routers say
what sets the Soft MoE and the V-MoE apart, one difference each. Every training is a
quarter as long as a preset's and has a seed that no preset has.

    python -m experiments.glyph_trials                    # all, 17 trainings
    python -m experiments.glyph_trials --only rates       # 9 of them
    python -m experiments.glyph_trials --only routers     # 8

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
    classifier_run,
    upstream,
)
from experiments.runs import finish, write_json
from keras_softmoe import routers

RESULTS = Path(__file__).resolve().parent / "glyphs"

SEED = 100
EPOCHS = 16
LEARNING_RATES = (7.5e-4, 1.5e-3, 3e-3)
# Models with one seed are not compared with others.
COMPARED = {name: twin for name, twin in TWINS.items() if len(twin.seeds) > 1}

ROUTERS = {
    "soft, 64 experts of one slot": routers.SoftRouter(
        64, slots_per_expert=1, initial_scale="unit_variance"
    ),
    "soft, starts at scale 1": routers.SoftRouter(16, slots_per_expert=4),
    "expert choice": routers.SoftmaxExpertChoiceRouter(16),
    "token choice without batch priority": routers.SoftmaxTokenChoiceRouter(16),
    "token choice without noise": routers.SoftmaxTokenChoiceRouter(
        16, priority="max", noise_std=0.0
    ),
    "token choice without losses": routers.SoftmaxTokenChoiceRouter(
        16, priority="max", losses=()
    ),
    "token choice without noise and losses": routers.SoftmaxTokenChoiceRouter(
        16, priority="max", noise_std=0.0, losses=()
    ),
    "token choice without dropped tokens": routers.SoftmaxTokenChoiceRouter(
        16, capacity_factor=None
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=TRIALS)
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else TRIALS:
        found = {"images": EPOCHS * EPOCH_IMAGES, name: TRIALS[name]()}
        write_json(RESULTS / f"{name}.json", found)


def try_rates():
    """What each model reaches with each learning rate."""
    return {
        name: {f"{rate:g}": train(rate_run(twin, rate)) for rate in LEARNING_RATES}
        for name, twin in COMPARED.items()
    }


def try_routers():
    """What the models with other routers reach with the presets' learning rate."""
    return {title: train(router_run(title)) for title in ROUTERS}


TRIALS = {"rates": try_rates, "routers": try_routers}


def train(run):
    print(f"\n{run.name}")
    return finish(run, WORK, verbose=2)["results"]


def router_run(title):
    """The training of a model with one of `ROUTERS`."""
    name = title.replace(" ", "_").replace(",", "")
    twin = TWINS["dense"]._replace(
        name=f"vit_tiny_patch4_32_{name}", router=ROUTERS[title]
    )
    return rate_run(twin, twin.learning_rate)


def rate_run(twin, rate):
    """The training of a model with a learning rate, whose weights are not kept."""
    return classifier_run(
        f"{twin.name}_rate{rate:g}_{EPOCHS}_{SEED}",
        twin._replace(learning_rate=rate),
        SEED,
        EPOCHS,
        lambda classifier: {"upstream_accuracy_by_layout": upstream(classifier)},
    )


if __name__ == "__main__":
    main()
