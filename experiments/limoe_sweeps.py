"""Settings of LIMoE, one at a time, in short trainings: the paper's sweeps in small.

Each sweep trains the LIMoE of `experiments/limoe_presets.py` with one thing changed,
with a few seeds, and measures what the presets are measured by, and how many experts
each modality uses.

    python -m experiments.limoe_sweeps                       # the losses
    python -m experiments.limoe_sweeps --sweep experts groups

- `losses`: classic losses, entropy losses, both, and the soft minimum of text experts
  with and without the classic losses (appendix B, tables 3 to 5, figure 10)
- `experts`: how many experts there are (appendix E.2, figure 12)
- `choices`: how many experts a token chooses (appendix E.1, table 6)
- `groups`: how many pairs are routed together (appendix E.5, figure 16)
- `priority`: which tokens are assigned first (figure 6)
- `ratio`: how many tokens an image has for one of text (figure 5)

The LIMoE of the presets is one of the variants of every sweep, and is trained once.

The results are written to `experiments/limoe/SWEEP.json` after each run, and runs that
are in it are not repeated. An interrupted run goes on after its last finished epoch.
"""

import argparse
from pathlib import Path

import numpy as np

from experiments.lib.runs import finish, read_json, write_json
from experiments.limoe_presets import (
    IMAGE_EXPERTS,
    NUM_EXPERTS,
    PATCH_SIZE,
    TEXT_EXPERTS,
    WORK,
    measure,
    training_run,
)
from keras_softmoe import evaluation, routers
from keras_softmoe.files import atomic_file

RESULTS = Path(__file__).resolve().parent / "limoe"
FIGURE = RESULTS.parents[1] / "docs" / "images" / "limoe_text_experts.png"

EPOCHS = 7
SEEDS = (0, 1, 2)
SOFT_MINIMA = (1, 4, 6)
# Beside 3, without the classic losses, which keep text on more experts than that.
MINIMA_ALONE = (1, 6)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=["losses"])
    parser.add_argument("--only", nargs="+", help="names of variants, such as classic")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for sweep in arguments.sweep:
        file = arguments.output / f"{sweep}.json"
        if any(run["epochs"] != arguments.epochs for run in runs(file)):
            parser.error(
                f"'{file}' holds runs with other epochs than {arguments.epochs}; name "
                "another directory with --output"
            )
        for name, settings in SWEEPS[sweep]():
            if arguments.only and name not in arguments.only:
                continue
            for seed in SEEDS:
                if any((r["variant"], r["seed"]) == (name, seed) for r in runs(file)):
                    continue
                print(f"\n{sweep}: {name}, seed {seed}")
                result = train_and_measure(
                    sweep, name, settings, seed, arguments.epochs
                )
                print(result)
                # Read again: another process may have added runs meanwhile.
                write_json(file, [*runs(file), result])
    if "losses" in arguments.sweep and arguments.output == RESULTS:
        with atomic_file(FIGURE) as aside:
            figure(runs(RESULTS / "losses.json")).savefig(aside, dpi=150)


def train_and_measure(sweep, name, settings, seed, epochs):
    """Results of one run, which has the preset's settings but for those given."""
    run = training_run(
        f"limoe_{f'{sweep}_{name}' if settings else 'unchanged'}_{epochs}_{seed}",
        "limoe",
        seed,
        epochs,
        measure,
        **settings,
    )
    finished = finish(run, WORK, verbose=2)
    return {
        "variant": name,
        "seed": seed,
        "epochs": epochs,
        "minutes": finished["times"]["training_seconds"] / 60,
        **finished["results"],
    }


# === Sweeps: name and settings of each variant ===


def _losses():
    classic = routers.classic_losses()

    def entropy(text_experts):
        return routers.entropy_losses(NUM_EXPERTS, text_experts, IMAGE_EXPERTS)

    def variant(name, losses):
        return name, {"router_settings": {"losses": losses}}

    yield "both", {}
    yield variant("classic", classic)
    yield variant("entropy", entropy(TEXT_EXPERTS))
    for minimum in SOFT_MINIMA:
        yield variant(f"S={minimum}", classic + entropy(minimum))
    for minimum in MINIMA_ALONE:
        yield variant(f"entropy,S={minimum}", entropy(minimum))


def _of_router(setting, values, unchanged):
    for value in values:
        settings = {} if value == unchanged else {"router_settings": {setting: value}}
        yield f"{setting}={value}", settings


def _of_backbone(setting, values, unchanged):
    for value in values:
        settings = {} if value == unchanged else {setting: value}
        yield f"{setting}={value}", settings


# The last argument is the preset's own value.
SWEEPS = {
    "losses": _losses,
    "experts": lambda: _of_router("num_experts", (2, 4, 8, 16), NUM_EXPERTS),
    "choices": lambda: _of_router("num_selected_experts", (1, 2), 1),
    "groups": lambda: _of_backbone("group_images", (32, 8, 4, 1), 32),
    "priority": lambda: _of_router(
        "priority", ("sum", "position", "random", "image_first", "text_first"), "sum"
    ),
    # 16, 4 and 1 patches for each of 16 tokens of text.
    "ratio": lambda: _of_backbone("patch_size", (2, 4, 8), PATCH_SIZE),
}


# === Results ===

_THRESHOLD = "experts asked for, S = exp(threshold for text)"
_IN_USE = "experts that serve 90%"


def runs(file):
    """The runs that are finished."""
    return read_json(file) if file.exists() else []


def figure(finished):
    """Experts in use against the soft minimum for text, without the classic losses."""
    minima = {f"entropy,S={minimum}": minimum for minimum in MINIMA_ALONE}
    minima["entropy"] = TEXT_EXPERTS
    by_threshold = {}
    for run in finished:
        if run["variant"] in minima:
            for modality in ("text", "image"):
                point = minima[run["variant"]], modality
                found = float(np.mean(run[f"{modality}_experts"]))
                by_threshold.setdefault(point, []).append(found)
    sweep = evaluation.Sweep(
        [
            ({_THRESHOLD: minimum, "modality": modality}, {_IN_USE: found})
            for (minimum, modality), found in by_threshold.items()
        ]
    )
    return sweep.plot(
        *(_THRESHOLD, _IN_USE, "modality"),
        baselines={"as many as\nasked for": lambda minimum: minimum},
    )


if __name__ == "__main__":
    main()
