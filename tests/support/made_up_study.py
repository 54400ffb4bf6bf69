"""Results of a study that was never run: numbers by formula, for tables and claims."""

from experiments.router_study.cells import count, describe
from experiments.router_study.configurations import STUDIES, configurations

# To count a model it is built, which many results of one scale need not repeat.
_COUNTS = {}


def results(scale, accuracy, studies=tuple(STUDIES)):
    """What `run_study` would return.

    Args:
        scale: `Scale`.
        accuracy: callable from the name of a configuration and a seed to its upstream
            accuracy, or `None` for a cell that is missing. 5-shot accuracy is half of
            it.
        studies: names of studies.
    """
    chosen = configurations(scale, studies)
    models = {name: c for study in chosen.values() for name, c in study.items()}
    found = {
        "scale": scale.settings,
        "studies": {study: list(models) for study, models in chosen.items()},
        "configurations": {},
        "cells": {},
        "times": {"machine": {"backend": "torch 0"}, "steps": {}, "cells": {}},
    }
    for name, configuration in models.items():
        found["configurations"][name] = {
            **describe(scale, configuration),
            **_counted(scale, configuration),
        }
        seeds = {
            seed
            for study, of_study in chosen.items()
            for seed in scale.seeds_of(study)
            if name in of_study
        }
        cells = {
            str(seed): cell(accuracy(name, seed), configuration)
            for seed in sorted(seeds)
            if accuracy(name, seed) is not None
        }
        found["cells"][name] = cells
        found["times"]["steps"][name] = {"ms": 3.0, "dense_ms": 2.0, "ratio": 1.5}
        found["times"]["cells"][name] = {
            seed: {"training_seconds": 1800.0, "seconds": 3600.0} for seed in cells
        }
    return found


def _counted(scale, configuration):
    key = (str(scale.settings), configuration.name)
    if key not in _COUNTS:
        _COUNTS[key] = count(scale, configuration, num_classes=179)
    return _COUNTS[key]


def cell(accuracy, configuration):
    """Results of one cell."""
    layers = len(configuration.moe_layers)
    sharpness = [[3.0, 2.0]] * layers if configuration.family == "soft" else None
    return {
        "diverged": False,
        "upstream_accuracy": accuracy,
        "few_shot": {"1": accuracy / 10, "5": accuracy / 2, "10": accuracy / 1.25},
        "fine_tuned_accuracy": 0.9,
        # Grows with the experts.
        "dropped": [(configuration.num_experts or 0) / 64] * layers or None,
        "imbalance": [2.0] * layers or None,
        "position_share": [0.5] * layers or None,
        "label_share": [0.1] * layers or None,
        "sharpness": sharpness,
        "curve": [
            {"loss": 2.0, "accuracy": accuracy * part, "sharpness": sharpness}
            for part in (0.5, 1.0)
        ],
    }
