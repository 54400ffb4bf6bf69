"""The parts of the campaign, with as many cases as the long and the short form take."""

import keras

from tests.torture import (
    arguments,
    checkpoints,
    downloads,
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
    "routings": (
        routings.routings,
        _each(3400),
        140,
    ),
    "numbers in padding": (numerics.masked_tokens, _each(1026, 342), 57),
    "small dtypes": (numerics.small_dtypes, _each(1026, 171), 57),
    "large logits": (numerics.large_logits, _each(1026, 342), 57),
    # PyTorch's compiler wants a C compiler, and takes a minute for each.
    "compiled steps": (numerics.compiled, {"jax": 171, "tensorflow": 171}, 0),
    "calls with a bad argument": (
        arguments.bad_calls,
        _each(1200, 300),
        200,
    ),
    "damaged presets": (
        presets.damaged_presets,
        _each(500, 200),
        30,
    ),
    "damaged routers": (
        presets.damaged_routers,
        _each(400, 60),
        10,
    ),
    "damaged preprocessing": (
        presets.damaged_preprocessors,
        _each(100, 20),
        10,
    ),
    "damaged .keras files": (
        presets.damaged_keras_files,
        _each(150, 30),
        12,
    ),
    "damaged checkpoints": (
        lambda tally, cases, seed: checkpoints.damaged_checkpoints(
            tally, checkpoints.own_checkpoint(), cases, seed
        ),
        {"torch": 2000},
        0,
    ),
    "kills": (faults.kills, _each(120, 40), 2),
    "full disks": (
        lambda tally, cases, seed: faults.full_disks(tally, -(-cases // 3), seed),
        _each(36, 9),
        9,
    ),
    "places that cannot be written": (
        lambda tally, cases, seed: faults.unwritable_places(tally),
        _each(10),
        10,
    ),
    "targets that are something else": (
        lambda tally, cases, seed: targets.odd_targets(tally),
        {"torch": 128, "jax": 112, "tensorflow": 128},
        0,
    ),
    "three processes at once": (
        lambda tally, cases, seed: faults.three_at_once(tally, -(-cases // 3)),
        _each(9, 3),
        0,
    ),
    "bad downloads": (
        downloads.bad_downloads,
        {"torch": 96},
        8,
    ),
    "graphs over models": (foreign.graphs, _each(176, 44), 8),
    "attributes of families": (foreign.attributes, _each(17), 3),
    "pictures of four sizes": (foreign.pictures, _each(44), 6),
    "modules of PyTorch": (foreign.torch_modules, {"torch": 44}, 6),
    "killed trainings": (
        lambda tally, cases, seed: long_runs.killed_training(
            tally, 250 * cases, min(350, 130 * cases)
        ),
        _each(8),
        0,
    ),
    "memory of 1,000 calls": (
        lambda tally, cases, seed: long_runs.flat_memory(tally, cases),
        _each(1000),
        0,
    ),
    "two threads": (
        lambda tally, cases, seed: long_runs.two_threads(tally, -(-cases // 2)),
        _each(50, 10),
        2,
    ),
}


def cases_of(part, is_short):
    """How many cases of a part there are on this backend; 0 for none."""
    _, long, short = PARTS[part]
    return short if is_short else long.get(keras.backend.backend(), 0)
