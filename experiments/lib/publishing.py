"""From finished trainings to a preset: the weights of the first, what all brought."""

import shutil
from pathlib import Path

from experiments.lib.cards import write_runs
from experiments.lib.runs import finish, result_file
from keras_softmoe.catalogue import PRESET_MARKS
from keras_softmoe.files import atomic_directory


def save_weights(task, work, name):
    """Save a trained task where `publish` finds it, and return that directory.

    Args:
        task: trained task.
        work: path of the working directory.
        name: str, of the run.
    """
    directory = _weights(work, name)
    with atomic_directory(directory, PRESET_MARKS) as aside:
        task.save_to_preset(str(aside))
    return directory


def publish(trainings, work, directory, records, describe):
    """Write the weights of the first training, and what is known of all finished ones.

    Nothing is written unless the first is finished.

    Args:
        trainings: sequence of `Run`, of which the first gives the weights.
        work: path of the working directory, which holds what is finished.
        directory: path of the preset, which is replaced in one step.
        records: path of the directory of all results, of which one file is replaced.
        describe: callable from the directory to fill and a list of dicts, the results
            of each finished training, that writes metadata and card.
    """
    first, *others = trainings
    if not result_file(work, first.name).exists():
        print(f"{directory.name}: the first seed is missing, nothing is written yet")
        return
    runs = []
    for run in [first, *(r for r in others if result_file(work, r.name).exists())]:
        finished = finish(run, work)
        minutes = round(finished["times"]["training_seconds"] / 60, 1)
        runs.append({"seed": run.seed, "minutes": minutes, **finished["results"]})
    with atomic_directory(directory, PRESET_MARKS) as aside:
        shutil.copytree(_weights(work, first.name), aside, dirs_exist_ok=True)
        describe(aside, runs)
    write_runs(Path(records, f"{directory.name}.json"), runs)
    print(f"{directory.name}: weights, metadata and card written")


def _weights(work, name):
    return Path(work, "presets", name)
