"""Shared fixtures: reproducible tests, and saved noise in place of drawn noise."""

import contextlib
import gc
import importlib.metadata
import pathlib
import platform

import hypothesis
import keras
import numpy as np
import pytest

from tests import skips

collect_ignore_glob = [
    pattern
    for pattern, backends in skips.RUNS_ON.items()
    if skips.BACKEND not in backends
]

# `make nightly` has packages of other names.
RELEASES = ("keras", "keras-nightly", "keras-hub", "keras-hub-nightly")
RELEASES += ("numpy", "jax", "tensorflow", "torch")


def pytest_addoption(parser):
    parser.addoption(
        "--all-exports",
        action="store_true",
        help="export every router to every format, and keep it for the site",
    )
    parser.addoption(
        "--all-families",
        action="store_true",
        help="add experts to every family, and keep it for the site",
    )
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run the tests that only PyTorch runs otherwise (see tests/skips.py)",
    )


def pytest_report_header():
    """Say in the log which releases are tested; `experiments/versions.py` reads it."""
    found = [f"backend {skips.BACKEND}", f"python {platform.python_version()}"]
    for name in RELEASES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return f"releases: {', '.join(found)}"


def pytest_collection_modifyitems(config, items):
    """Leave to PyTorch what need not run on each backend (`tests/skips.py`)."""
    if config.option.all_cases or config.option.all_families:
        return
    kept = skips.selected(items, pathlib.Path(__file__).parent)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test is skipped for one of the reasons that are listed, or it fails."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in skips.REASONS.values():
            report.outcome = "failed"
            report.longrepr = f"not a reason of tests/skips.py: {reason}"
    return report


hypothesis.settings.register_profile(
    "reproducible",
    derandomize=True,
    deadline=None,
    # Each example of another shape is compiled anew on JAX.
    max_examples=15 if skips.BACKEND == "torch" else 4,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def reproducible():
    """Same seed before every test, float32 policy again after it."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Same seed before every fixture that several tests share.

    They are made before the seed of their first test, whichever test that is.
    """
    if fixturedef.scope != "function":
        keras.utils.set_random_seed(0)
    return (yield)


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection():
    """What a module leaves behind (traces, mostly) is not searched again and again.

    On JAX it grows to gigabytes, and Keras collects garbage once for each layer that it
    quantizes.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_loops(monkeypatch):
    """Long loops run as a graph on TensorFlow: eagerly a thousand steps take a minute.

    On the other backends nothing changes, and short loops stay as they are.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        from keras_softmoe.ops import transport as _transport

        def quick(loop):
            def run_all(step, count, start):
                def run(start):
                    return loop(step, count, start)

                return (tf.function(run) if count > 50 else run)(start)

            return run_all

        for name in ("repeat", "_trace"):
            loop = getattr(_transport, name)
            monkeypatch.setattr(_transport, name, quick(loop))


@pytest.fixture
def set_noise(monkeypatch):
    """Callable that makes `keras.random.normal` return saved N(0, 1) samples.

    Takes one array per draw, in order. Returns the list of arrays not yet drawn.
    """

    def install(*samples):
        remaining = list(samples)

        def normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
            sample = np.reshape(remaining.pop(0), tuple(shape))
            return keras.ops.convert_to_tensor(
                mean + stddev * sample, dtype or "float32"
            )

        monkeypatch.setattr(keras.random, "normal", normal)
        # On PyTorch noise has a generator of its own.
        from keras_softmoe.ops import numbers

        monkeypatch.setattr(numbers, "_generator", lambda *_: None, raising=False)
        return remaining

    return install
