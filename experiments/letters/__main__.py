"""Train the models of the study on letters, or go on with them.

    python -m experiments.letters                               # all that is missing
    python -m experiments.letters --only anywhere_dense anywhere_vmoe --seeds 40
    python -m experiments.letters --rates 1e-3 2e-3 --epochs 4  # the bracket of rates
    python -m experiments.letters --times                       # steps of all models

Each finished training is a file of results and one of weights in `build/letters`. The
running one is backed up after each epoch, and the same command goes on. All together
are in `results.json` there. The program has the lowest priority and waits between two
steps while there is a file `build/pause`. On PyTorch it computes in one thread;
elsewhere set `OMP_NUM_THREADS` and the like. Several processes may train other models
or seeds in the same directory. `PLAN.md` says what is asked;
`experiments.letters.answers` writes the answers.
"""

import argparse
import dataclasses
import os
import time
from pathlib import Path

from experiments.letters.bank import load_bank
from experiments.letters.models import SCALES
from experiments.letters.pictures import PLACEMENTS, Letters
from experiments.letters.trainings import (
    gather,
    keeping_weights,
    names_of,
    seeds_of,
    time_steps,
    training,
)
from experiments.lib.runs import (
    check_before,
    finish,
    one_thread,
    result_file,
    write_json,
)

WORK = Path("build", "letters")
PAUSE = Path("build", "pause")
_NICENESS = 19


def main(arguments=None):
    """Train what is missing, and write what all has brought."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.letters",
        description="Train the models of the study on letters, or go on with them. The "
        "backend is Keras': set KERAS_BACKEND (torch is the fastest on one core).",
    )
    parser.add_argument("--scale", choices=SCALES, default="study")
    parser.add_argument("--only", nargs="+", choices=names_of(), help="these models")
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        help="try these peaks, with a seed of its own, on anywhere_dense or --only",
    )
    parser.add_argument("--epochs", type=int, help="length, with --rates")
    parser.add_argument("--warmup", type=int, help="steps, with --rates")
    parser.add_argument("--layer-scale", type=float, help="with --rates")
    parser.add_argument("--times", action="store_true", help="time steps of training")
    parser.add_argument("--work", type=Path, default=WORK, help=f"[{WORK}]")
    arguments = parser.parse_args(arguments)
    lower_priority()
    scale = SCALES[arguments.scale]
    work = arguments.work
    seeds = arguments.seeds or scale.seeds
    check_before([work], seeds, scale.seeds)
    bank = load_bank(work, scale.candidates)
    letters = {name: Letters(bank, name) for name in PLACEMENTS}
    if arguments.rates:
        try_rates(scale, letters, arguments, Path(work, "bracket"))
        return
    names = arguments.only or names_of()
    if arguments.times:
        write_json(work / "steps.json", time_steps(scale, letters, names))
    else:
        train(scale, letters, names, seeds, work)
    write_json(work / "results.json", gather(scale, work, bank.num_classes))


def lower_priority():
    """Compute when nobody else wants to, on PyTorch in one thread."""
    os.nice(max(_NICENESS - os.nice(0), 0))
    one_thread()


def train(scale, letters, names, seeds, directory):
    """Train and measure what is not finished yet, seed by seed.

    Args:
        scale: `Scale`.
        letters: dict from placements to `Letters`.
        names: sequence of str, of `names_of`.
        seeds: sequence of ints.
        directory: path, where everything is kept.
    """
    runs = [
        keeping_weights(training(scale, letters, name, seed), directory)
        for seed in seeds
        for name in names
        if seed in seeds_of(name, scale)
    ]
    missing = [r for r in runs if not result_file(directory, r.name).exists()]
    for number, run in enumerate(missing):
        print(f"{run.name}: {number + 1} of {len(missing)}", flush=True)
        finish(run, directory, on_step=wait_while_paused, verbose=1)


def try_rates(scale, letters, arguments, directory):
    """Train with each rate, and write all that was tried there so far."""
    (name,) = arguments.only or ["anywhere_dense"]
    for rate in arguments.rates:
        tried = dataclasses.replace(
            scale,
            learning_rate=rate,
            epochs=arguments.epochs or scale.epochs,
            warmup_steps=arguments.warmup or scale.warmup_steps,
            layer_scale=arguments.layer_scale,
        )
        run = training(tried, letters, name, scale.rate_seed)
        words = [f"{key}{value:g}" for key, value in run.settings.items() if value]
        run = dataclasses.replace(run, name="_".join([name, *words]))
        print(run.name, flush=True)
        found = finish(run, directory, on_step=wait_while_paused, verbose=2)
        print(f"accuracy {found['results']['accuracy']:.4f}", flush=True)


def wait_while_paused(file=PAUSE):
    """Wait until there is no such file."""
    while file.exists():
        time.sleep(5)


if __name__ == "__main__":
    main()
