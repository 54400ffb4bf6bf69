"""Runs a study cell by cell; what is finished is kept."""

import platform
import shutil
from pathlib import Path

import keras

from experiments.lib.runs import (
    RESULTS,
    backup_directory,
    check_before,
    finish,
    keep,
    processor,
    read_json,
    result_file,
    write_json,
)
from experiments.router_study.cells import cell, cell_name, count, describe
from experiments.router_study.configurations import STUDIES, configurations
from experiments.router_study.models import Stopwatch
from experiments.router_study.tasks import upstream_task

_DENSE = "dense"
_SEEDS = ("seeds", "more_seeds", "rate_seeds")


def run_study(
    scale, directory, studies=tuple(STUDIES), seeds=None, models=None, verbose=1
):
    """Train and measure the models of a study, and gather the results.

    Each cell (a configuration and a seed) is written to a file of its own when it is
    finished, aside and then renamed. Started again with the same directory, the runner
    goes on with the first cell that is missing, and within it after the last finished
    epoch, with the results that an uninterrupted run would have had (on the same
    machine and backend: nothing is promised of the last digits elsewhere). Cells of
    one seed come before those of the next, so that an unfinished study is a smaller
    one. Several processes can share a directory if they are given other seeds or other
    models. A scale with more seeds takes up the directory of one with fewer.

    Args:
        scale: `Scale`.
        directory: path, where cells, images and backups are kept.
        studies: sequence of names, see `configurations`.
        seeds: sequence of ints, those of the scale that are to be trained now; all of
            them if `None`. A study trains those of them that it has.
        models: sequence of names of configurations, those of the studies that are to be
            trained now; all of them if `None`.
        verbose: 0 for silence, 1 for a progress bar over the steps of all cells with
            the time that is left, 2 for one line.

    Returns:
        dict that can be written as JSON, of all cells in the directory, in which
        everything but `"times"` follows from scale and seeds:

        - `"scale"`: the settings of the scale.
        - `"studies"`: dict from studies to names of configurations.
        - `"configurations"`: dict from names to what is known without training and,
          once all cells were trained, `"parameters"`, `"gflop_per_image"` and
          `"training_gflop"` (three times the operations of a prediction for each
          image).
        - `"cells"`: dict from names to dicts from seeds (strings) to results:
          `"upstream_accuracy"`, `"few_shot"` (dict from shots to mean accuracy),
          `"fine_tuned_accuracy"`; per block with experts `"dropped"` and `"imbalance"`
          (see `analysis.BlockStatistics`), `"position_share"` and `"label_share"` (see
          its `information`) and, of a soft router, `"sharpness"` (that of
          dispatch and of combine, see `analysis.SoftStatistics`); `"curve"`, for each
          epoch `"loss"`, `"accuracy"` and `"sharpness"`; and `"diverged"`, with which
          a cell has no other results but the curve.
        - `"times"`: the machine; `"steps"`, a step of each model and of the dense one
          in turn, and their ratio; `"cells"`, seconds, see `runs.finish`.

    Raises:
        ValueError: if there is no such study, the directory is of another scale or
            backend or holds a damaged file, the scale lacks a seed, or the studies lack
            a model.

    Source: router study, section 3; Soft MoE, sections 3.4 to 3.6 and appendices A, C
    and D.

    Example:

    >>> results = run_study(SMALL, "build/study")
    >>> print(report(results))
    """
    chosen = configurations(scale, studies)
    known = (*scale.rate_seeds, *scale.all_seeds)
    seeds = known if seeds is None else tuple(seeds)
    check_before([directory], seeds, known)
    every = {name: c for study in chosen.values() for name, c in study.items()}
    if models is not None and (not models or any(name not in every for name in models)):
        raise ValueError(
            f"The models of these studies are {', '.join(every)}; name one at least. "
            f"Received: models={models}."
        )
    models = {n: c for n, c in every.items() if models is None or n in models}
    files = _Files(directory, scale)
    cells = [
        (name, seed)
        for seed in seeds
        for name in models
        if any(
            name in of_study and seed in scale.seeds_of(study)
            for study, of_study in chosen.items()
        )
    ]
    # What is damaged is found now, not after the training of the others.
    gather(scale, directory, studies)
    files.keep_to_one_backend()
    missing = [cell for cell in cells if not files.cell(*cell).exists()]
    for name, seed in set(cells) - set(missing):
        # Left by a process that was stopped when its cell was written.
        backup = backup_directory(directory, cell_name(name, seed))
        shutil.rmtree(backup, ignore_errors=True)
    uncounted = [name for name in models if not files.configuration(name).exists()]
    if missing or uncounted:
        task = upstream_task(scale, files.images)
        _train(scale, missing, models, task, files, verbose)
        # At the end: where several processes train, they would time each other.
        _count_and_time(scale, uncounted, models, task, files)
    return gather(scale, directory, studies)


def gather(scale, directory, studies=tuple(STUDIES)):
    """The results of all finished cells; nothing is trained.

    Args:
        scale: `Scale`.
        directory: path, as of `run_study`.
        studies: sequence of names, see `configurations`.

    Returns:
        dict, as from `run_study`.

    Raises:
        ValueError: if there is no such study, or the directory is of another scale.

    Example:

    >>> results = gather(SMALL, "build/study")
    """
    files = _Files(directory, scale)
    found = {
        "scale": scale.settings,
        "studies": {},
        "configurations": {},
        "cells": {},
        "times": {"machine": {}, "steps": {}, "cells": {}},
    }
    for study, models in configurations(scale, studies).items():
        found["studies"][study] = list(models)
        for name in models:
            found["configurations"][name] = describe(scale, models[name])
            known = files.configuration(name)
            if known.exists():
                known = read_json(known, ("cost", "times", "machine"))
                found["configurations"][name] |= known["cost"]
                found["times"]["steps"][name] = known["times"]
                found["times"]["machine"] = known["machine"]
            seeds = (*scale.rate_seeds, *scale.all_seeds)
            cells = {str(s): files.cell(name, s) for s in seeds}
            cells = {
                s: read_json(file, RESULTS)
                for s, file in cells.items()
                if file.exists()
            }
            for part in ("results", "times"):
                of_seeds = {seed: cell[part] for seed, cell in cells.items()}
                place = found["cells"] if part == "results" else found["times"]["cells"]
                place[name] = of_seeds
    return found


def _train(scale, cells, models, task, files, verbose):
    progress = _Progress(scale.steps, len(cells), verbose)
    for name, seed in cells:
        # Unless another process was faster.
        if not files.cell(name, seed).exists():
            run = cell(scale, models[name], seed, task)
            finish(run, files.directory, progress.step)
        progress.end_of_cell()


def _count_and_time(scale, names, models, task, files):
    """What models cost, and the time of their training steps beside the dense one."""
    dense = configurations(scale, ("headline",))["headline"][_DENSE]
    stopwatch = Stopwatch(scale, task, dense)
    for name in names:
        content = {
            "cost": count(scale, models[name], task.num_classes),
            "times": stopwatch.measure(models[name]),
            "machine": _machine(),
        }
        write_json(files.configuration(name), content)


class _Progress:
    """A bar over the steps of all cells."""

    def __init__(self, steps, cells, verbose):
        self.bar = keras.utils.Progbar(steps * cells, verbose=verbose, unit_name="step")
        self.steps = steps
        self.shown = self.cells = 0

    def step(self):
        # The last step of a cell counts when the cell is measured, too.
        last = (self.cells + 1) * self.steps - 1
        self.shown = min(self.shown + 1, last)
        self.bar.update(self.shown)

    def end_of_cell(self):
        self.cells += 1
        # Steps of an interrupted cell were done before.
        self.shown = self.cells * self.steps
        self.bar.update(self.shown)


class _Files:
    """Where everything is kept."""

    def __init__(self, directory, scale):
        self.directory = Path(directory)
        self.images = self.directory / "images"
        # Which seeds there are changes nothing of a cell: more can be added later.
        settings = {n: v for n, v in scale.settings.items() if n not in _SEEDS}
        differ = keep(self.directory / "scale.json", settings)
        if differ is not None:
            raise ValueError(
                "A directory holds the cells of one scale. Name another directory, or "
                f"delete this one. Received: directory='{directory}', whose scale "
                f"differs in {differ}."
            )

    def keep_to_one_backend(self):
        """Refuse to go on with another backend: last digits would differ."""
        backend = keras.backend.backend()
        known = self.directory / "backend.json"
        if not known.exists():
            write_json(known, backend)
        kept = read_json(known)
        if kept != backend:
            raise ValueError(
                "A directory holds the cells of one backend. Name another directory, "
                f"or set KERAS_BACKEND={kept}. Received: "
                f"directory='{self.directory}', backend '{backend}'."
            )

    def configuration(self, name):
        return self.directory / "configurations" / f"{name}.json"

    def cell(self, name, seed):
        return result_file(self.directory, cell_name(name, seed))


def _machine():
    backend = keras.backend.backend()
    module = __import__("tensorflow" if backend == "tensorflow" else backend)
    return {
        "backend": f"{backend} {module.__version__}",
        "keras": keras.__version__,
        "processor": processor(),
        "python": platform.python_version(),
    }
