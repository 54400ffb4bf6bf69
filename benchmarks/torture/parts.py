"""The parts of the campaign, with as many cases as the long and the short form take."""

import keras

from benchmarks.torture import (
    arguments,
    checkpoints,
    faults,
    foreign,
    long_runs,
    numerics,
    presets,
    routings,
    targets,
)

BACKENDS = ("torch", "jax", "tensorflow")
SEED = 1


def _each(on_torch, on_others=None):
    """Numbers of cases by backend; PyTorch, the quickest, has most."""
    on_others = on_torch if on_others is None else on_others
    return {"torch": on_torch, "jax": on_others, "tensorflow": on_others}


# Name -> callable `(tally, cases, seed)`, how many cases there are on each backend in
# the long form, and how many in the short one, which the tests run on one backend.
PARTS = {
    "routings": (routings.routings, _each(3400), 140),
    "numbers in padding": (numerics.masked_tokens, _each(1026, 342), 57),
    "small dtypes": (numerics.small_dtypes, _each(1026, 171), 57),
    "large logits": (numerics.large_logits, _each(1026, 342), 57),
    # PyTorch's compiler wants a C compiler, and takes a minute for each.
    "compiled steps": (numerics.compiled, {"jax": 171, "tensorflow": 171}, 0),
    "calls with a bad argument": (arguments.bad_calls, _each(1200, 300), 200),
    "damaged presets": (presets.damaged_presets, _each(500, 200), 30),
    "damaged routers": (presets.damaged_routers, _each(400, 60), 10),
    "damaged preprocessing": (presets.damaged_preprocessors, _each(100, 20), 10),
    "damaged .keras files": (presets.damaged_keras_files, _each(150, 30), 12),
    "damaged checkpoints": (checkpoints.damaged_own_checkpoints, {"torch": 2000}, 0),
    "kills": (faults.kills, _each(120, 40), 2),
    "full disks": (faults.full_disks, _each(36, 9), 9),
    "places that cannot be written": (faults.unwritable_places, _each(10), 10),
    "targets that are something else": (
        targets.odd_targets,
        {"torch": 128, "jax": 112, "tensorflow": 128},
        0,
    ),
    "three processes at once": (faults.three_at_once, _each(9, 3), 0),
    "graphs over models": (foreign.graphs, _each(176, 44), 8),
    "modules of PyTorch": (foreign.torch_modules, {"torch": 44}, 6),
    "killed trainings": (long_runs.killed_trainings, _each(8), 0),
    "memory of 1,000 calls": (long_runs.flat_memory, _each(1000), 0),
    "two threads": (long_runs.two_threads, _each(50, 10), 2),
}


def cases_of(part, is_short):
    """How many cases of a part there are on this backend; 0 for none."""
    _, long, short = PARTS[part]
    return short if is_short else long.get(keras.backend.backend(), 0)
