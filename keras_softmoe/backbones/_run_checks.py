"""Checks before, and the scope around, each `fit`, `evaluate` and `predict`."""

import contextlib
import threading
import warnings
import weakref
from types import SimpleNamespace

import keras

from keras_softmoe.keras_adapter.runs import kept_weights
from keras_softmoe.routers.recording import is_recording
from keras_softmoe.sharding.constraints import check_model
from keras_softmoe.sharding.variables import is_sharded

# Model -> the lock of its runs, and whether the current one trains.
_runs = weakref.WeakKeyDictionary()
_making = threading.Lock()


@contextlib.contextmanager
def run_scope(model, trains):
    """Scope of a run, after which the model has its weights even if the run fails.

    On JAX runs of one model in several threads take turns: Keras takes the weights out
    of the model while a run lasts.

    Args:
        model: `keras.Model`.
        trains: bool, whether the run is `fit`.

    Raises:
        ValueError: if another thread trains the model, on JAX.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    with _making:
        run = _runs.setdefault(
            model, SimpleNamespace(lock=threading.RLock(), trains=False)
        )
    if not run.lock.acquire(blocking=False):
        if run.trains:
            # Training may take days, and may itself wait for this thread.
            raise ValueError(
                f"The model {model.name!r} is in training in another thread, and Keras "
                "has taken the weights out of it. Use another model in this thread, "
                "or wait until `fit` has returned."
            )
        run.lock.acquire()
    trained = run.trains
    run.trains = trains or trained
    try:
        with kept_weights(model, trains):
            yield
    finally:
        run.trains = trained
        run.lock.release()


def check_run(model, step):
    """Raise, or warn, before a run that would not do as expected.

    Args:
        model: `keras.Model`.
        step: `"train"`, `"test"` or `"predict"`.

    Raises:
        ValueError: if a scope of `routers.record` is open around a compiled step, or
            variables do not lie where the active distribution says.
    """
    _check_recording(model, step)
    check_model(model)
    _warn_if_not_distributed(model)


def _check_recording(model, step):
    if not is_recording() or not _is_traced(model, step):
        return
    method = {"train": "fit", "test": "evaluate", "predict": "predict"}[step]
    raise ValueError(
        f"A scope of `routers.record` records nothing of `{method}`, which runs a "
        f"function compiled by {keras.backend.backend()}. Call the model itself, "
        "`model(inputs)`, in the scope, or compile it with `run_eagerly=True` for "
        f"`evaluate` and `predict`. Received: a scope that is open around `{method}` "
        f"of the model {model.name!r}."
    )


def _is_traced(model, step):
    """Whether a step is traced, so that its tensors do not outlive it."""
    backend = keras.backend.backend()
    if backend == "jax":
        # Gradients are traced in any case.
        return step == "train" or (model.jit_compile and not model.run_eagerly)
    return backend == "tensorflow" and not model.run_eagerly


def _warn_if_not_distributed(model):
    if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return
    sharded = next((v.path for v in model.variables if is_sharded(v)), None)
    if sharded is not None:
        warnings.warn(
            f"{sharded!r} and perhaps more of this model is sharded over devices, but "
            "no distribution that shards models is active: every step gathers the "
            "weights of all experts. Use the model under the distribution that it was "
            "built under: `keras.distribution.set_distribution(distribution)`, or `with"
            " distribution.scope():`. Received: distribution="
            f"{keras.distribution.distribution()}.",
            stacklevel=6,
        )
