"""Upcycling from the command line: `python -m experiments.upcycling`."""

import argparse
from pathlib import Path

import keras

from experiments.lib.runs import (
    RESULTS,
    check_before,
    finish,
    keep,
    processor,
    read_json,
    result_file,
    write_json,
)
from experiments.upcycling.cells import (
    Cell,
    continued_run,
    cost_of,
    measured_start,
    start_name,
    start_run,
    task_of,
)
from experiments.upcycling.plans import (
    CONTROLS,
    DENSE,
    PLANS,
    VARIANTS,
    soft_starts,
    variants,
)
from experiments.upcycling.tables import report
from keras_softmoe.files import atomic_file


def main(arguments=None):
    """Run the experiment, or go on with it, and write its JSON and tables."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.upcycling",
        description="Train dense models, and then each of them further: as it is, and "
        "as mixtures of experts of the same cost. Writes results.json and README.md. "
        "The backend is Keras': set KERAS_BACKEND. Called again, it goes on.",
    )
    parser.add_argument("--plan", choices=PLANS, default="small")
    parser.add_argument(
        "--seeds", type=int, nargs="*", help="train these of the plan's seeds only"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS + CONTROLS,
        help="train these only [all that cost the same; for --rates the dense model]",
    )
    parser.add_argument(
        "--rates",
        action="store_true",
        help="train with each learning rate that is tried, for one to be chosen",
    )
    parser.add_argument(
        "--work", type=Path, help="where cells are kept [build/upcycling/PLAN]"
    )
    parser.add_argument(
        "--output", type=Path, help="where results are written [that directory]"
    )
    arguments = parser.parse_args(arguments)
    plan = PLANS[arguments.plan]
    work = arguments.work or Path("build", "upcycling", plan.name)
    output = arguments.output or work
    known = plan.scale.seeds
    check_before([work, output], arguments.seeds or known, known)
    # What is damaged is found now, not after the training of the others.
    gather(plan, work)
    print(f"{plan.name} on {keras.backend.backend()}, kept in {work}")
    if arguments.rates:
        seeds, cells = (), rate_cells(plan, arguments.variants or [DENSE])
    else:
        seeds = plan.scale.seeds if arguments.seeds is None else arguments.seeds
        names = arguments.variants or VARIANTS
        cells = [Cell(n, s, plan.learning_rate) for s in seeds for n in names]
    train(plan, cells, work)
    measure_starts(plan, seeds, work)
    results = gather(plan, work)
    write_json(output / "results.json", results)
    with atomic_file(output / "README.md") as file:
        file.write_text(report(results), encoding="utf-8")
    print(f"\n{report(results)}\nWritten to {output}")


def rate_cells(plan, names):
    """Variants with each learning rate, a list of `Cell`."""
    return [
        Cell(name, seed, rate)
        for name in names
        for seed in plan.scale.rate_seeds
        for rate in plan.learning_rates
    ]


def train(plan, cells, directory):
    """Train and measure what is not finished yet, the dense starts first.

    Args:
        plan: `Plan`.
        cells: sequence of `Cell`.
        directory: path, where everything is kept.
    """
    _keep_to(directory, plan)
    task = task_of(plan, Path(directory, "images"))
    for cell in cells:
        weights = Path(directory, "starts", f"{start_name(cell.seed)}.npz")
        _finish(start_run(plan, cell.seed, task, weights), directory)
        _finish(continued_run(plan, cell, task, weights), directory)


def measure_starts(plan, seeds, directory):
    """Measure the ways into a Soft MoE, from the dense starts that are trained.

    Args:
        plan: `Plan`.
        seeds: sequence of int.
        directory: path, where everything is kept.
    """
    task = task_of(plan, Path(directory, "images"))
    for seed in seeds:
        weights = Path(directory, "starts", f"{start_name(seed)}.npz")
        for name, variant in soft_starts(plan.scale).items():
            file = _before_file(directory, name, seed)
            if not file.exists():
                found = measured_start(plan, variant, seed, task, weights)
                write_json(file, found)


def gather(plan, directory):
    """All that is finished, a dict that can be written as JSON.

    Everything in it but `"times"` follows from plan and seeds: `"plan"`, its settings;
    `"variants"`, what each is and costs; by seed the results (see `cells`) of the dense
    `"starts"`, of the `"cells"` of each variant, and of the `"rates"` that were tried
    with each; and `"soft_starts"`, what ways into a Soft MoE keep without training.
    """
    num_classes = task_of(plan, Path(directory, "images")).num_classes
    times = {}

    def results(name):
        file = result_file(directory, name)
        if not file.exists():
            return None
        found = read_json(file, RESULTS)
        times[name] = found["times"]
        return found["results"]

    def by_seed(seeds, name_of):
        found = {str(seed): results(name_of(seed)) for seed in seeds}
        return {seed: cell for seed, cell in found.items() if cell is not None}

    scale, chosen = plan.scale, plan.learning_rate
    return {
        "plan": plan.settings,
        "variants": {
            name: {
                "title": variant.title,
                "router": variant.router and variant.router.get_config(),
                "start": variant.start,
                **cost_of(plan, variant, num_classes),
            }
            for name, variant in variants(scale).items()
        },
        "starts": by_seed((*scale.rate_seeds, *scale.seeds), start_name),
        "cells": {
            name: by_seed(scale.seeds, lambda seed, n=name: Cell(n, seed, chosen).name)
            for name in variants(scale)
        },
        "rates": {
            name: {
                f"{rate:g}": by_seed(
                    scale.rate_seeds, lambda seed, n=name, r=rate: Cell(n, seed, r).name
                )
                for rate in plan.learning_rates
            }
            for name in variants(scale)
        },
        "soft_starts": {
            variant.title: {
                str(seed): read_json(file, ())
                for seed in scale.seeds
                if (file := _before_file(directory, name, seed)).exists()
            }
            for name, variant in soft_starts(scale).items()
        },
        "times": {
            "machine": {
                "backend": keras.backend.backend(),
                "keras": keras.__version__,
                "processor": processor(),
            },
            "cells": times,
        },
    }


def _before_file(directory, name, seed):
    return Path(directory, "before", f"{name}_seed{seed}.json")


def _finish(run, directory):
    if not result_file(directory, run.name).exists():
        print(f"{run.name}: {run.epochs} epochs", flush=True)
    finish(run, directory)


def _keep_to(directory, plan):
    """Refuse to mix plans or backends in one directory."""
    here = plan.settings
    # The rate is chosen on the way, and part of the names of the cells.
    here = {name: here[name] for name in here if "learning_rate" not in name}
    here["backend"] = keras.backend.backend()
    differ = keep(Path(directory, "plan.json"), here)
    if differ is not None:
        raise ValueError(
            "A directory holds the cells of one plan and backend. Name another one, or "
            f"delete this. Received: directory='{directory}', which differs in {differ}"
            "."
        )


if __name__ == "__main__":
    main()
