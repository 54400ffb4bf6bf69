"""`fit`, `evaluate` and `predict` of all tasks.

Plain functions that a task assigns in its class body: a mixin in front of KerasHub's
class would become the kind of task that KerasHub looks for, and one behind it cannot
override the methods of Keras. They call these methods of the task:

- `batches(x, y, sample_weight, *, batch_size, shuffle, class_weight)`: data for
  `keras.Model.fit`, from `_data.prepare`;
- `checked_class_weight(class_weight)`: the weights of all classes;
- those that `_data.prepare` names.
"""

import contextlib
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import keras
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_numbers
from keras_softmoe.keras_adapter.data import BatchesOf, number_of
from keras_softmoe.keras_adapter.runs import batches_of_length, kept_weights
from keras_softmoe.models.balance import DropWarning, may_drop
from keras_softmoe.models.data import (
    as_arrays,
    gives_batches,
    is_empty,
    no_outputs,
    num_rows,
    prepare,
)


def fit(  # noqa: D417
    self,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    sample_weight: ArrayLike | None = None,
    validation_data: Any = None,
    validation_split: float | None = None,
    shuffle: bool = True,
    **kwargs,
) -> keras.callbacks.History:
    """Train on images and labels, or on pairs of image and caption.

    As `keras.Model.fit`, with preprocessing. Arrays are shuffled before each epoch.
    A contrastive task compares the pairs of a batch with each other: of arrays, the
    last incomplete batch is dropped in each epoch.

    The metric `routing_loss` is what the routers add to `loss`, their balancing losses.
    If a router drops more than 30 % of the tokens of a batch after the first epoch or
    the last, there is a warning (not for `tf.data`, and not under a distribution).

    Args:
        x: `(N, height, width, channels)` images from 0 to 255, an array or a list of
            arrays or PIL images; grey ones have their channel repeated. Or an iterable
            of batches `(x, y)`: a `tf.data` or grain dataset, a PyTorch `DataLoader`, a
            `keras.utils.PyDataset`, a generator. Without a preprocessor, images from -1
            to 1. A contrastive task also takes a dict of `"images"` and `"captions"`.
        y: `(N,)` int labels; of a contrastive task `N` captions, a list or array of
            str, or `(N, sequence_length)` int token ids. `None` with batches.
        batch_size: int. Defaults to 32. `None` with batches.
        sample_weight: optional `(N,)` array of finite numbers. Pairs have no weights.
        validation_data: optional `(x, y)` or batches.
        validation_split: optional float, the fraction at the end of the arrays that is
            kept for validation.
        shuffle: bool, whether arrays, and the batches of a `PyDataset`, are shuffled
            before each epoch.
        **kwargs: as in `keras.Model.fit`. `validation_batch_size` defaults to
            `batch_size`.

    Returns:
        `keras.callbacks.History`.

    Raises:
        ValueError: if arrays are empty or differ in length, a number is not finite,
            images have another shape than the model's and nothing resizes them, or
            labels or captions are not those of the model. Nothing is trained then.
            (Elements of `tf.data` are not checked.)
    """
    _check_compiled(self, "fit")
    if validation_split and validation_data is None and x is not None:
        (x, y, sample_weight), validation_data = _split(
            x, y, sample_weight, validation_split
        )
    validation_size = kwargs.pop("validation_batch_size", None) or batch_size
    class_weight = self.checked_class_weight(kwargs.pop("class_weight", None))
    rows = x, y
    x = self.batches(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        shuffle=shuffle,
        class_weight=class_weight,
    )
    kwargs["callbacks"] = _with_drop_warning(
        self, rows, x, batch_size or 32, kwargs.get("callbacks")
    )
    if isinstance(validation_data, (tuple, list)):
        validation_data = self.batches(*validation_data, batch_size=validation_size)
    elif validation_data is not None:
        validation_data = self.batches(validation_data)
    with run_scope(self, trains=True), batches_of_length(number_of(x)):
        # KerasHub's `fit` would preprocess the data again, or refuse them.
        return keras.Model.fit(
            self,
            x,
            validation_data=validation_data,
            shuffle=False,
            class_weight=class_weight,
            **kwargs,
        )


def evaluate(  # noqa: D417
    self,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    sample_weight: ArrayLike | None = None,
    **kwargs,
):
    """Compute the loss (without balancing losses) and the metrics.

    Those of a contrastive task depend on the batch size, since a caption is compared
    with those of its batch; `evaluation.retrieval` compares it with all.

    Args:
        x: as in `fit`.
        y: as in `fit`.
        batch_size: int. Defaults to 32.
        sample_weight: optional `(N,)` array of finite numbers.
        **kwargs: as in `keras.Model.evaluate`.

    Returns:
        As `keras.Model.evaluate`.

    Raises:
        ValueError: as `fit`.
    """
    _check_compiled(self, "evaluate")
    # `fit` hands on the validation data that it has prepared.
    if not kwargs.get("_use_cached_eval_dataset"):
        x = self.batches(x, y, sample_weight, batch_size=batch_size)
    with run_scope(self, trains=False), batches_of_length(number_of(x)):
        return keras.Model.evaluate(self, x, **kwargs)


def predict(self, x: Any, batch_size: int | None = None, **kwargs):  # noqa: D417
    """Compute the outputs of the model.

    Args:
        x: images as in `fit`, or batches, whose labels are ignored. A contrastive task
            takes a dict of `"images"` and `"captions"` (or `"token_ids"`), or batches
            of pairs.
        batch_size: int. Defaults to 32.
        **kwargs: as in `keras.Model.predict`.

    Returns:
        `(N, num_classes)` array of logits (or activations); of a contrastive task a
        dict of arrays, see its class.

    Raises:
        ValueError: if images have another shape than the model's and nothing resizes
            them, a number is not finite, or captions are not those of the model.
    """
    if is_empty(x):
        return no_outputs(self)
    x = prepare(self, x, batch_size=batch_size)
    with run_scope(self, trains=False):
        return keras.Model.predict(self, x, **kwargs)


def _check_compiled(model, method):
    if not model.compiled:
        raise ValueError(
            f"A model has to be compiled first: call `compile()` before `{method}`. "
            f"Received: {model.name!r}, which is not compiled."
        )


def _with_drop_warning(model, rows, batches, batch_size, callbacks):
    """Return the callbacks of `fit`, with a `DropWarning` where it applies.

    Args:
        model: task.
        rows: pair `(x, y)` of arrays, or of batches and `None`.
        batches: what `model.batches` has made of them.
        batch_size: int, rows in a batch.
        callbacks: as in `keras.Model.fit`.
    """
    is_own_list = isinstance(callbacks, keras.callbacks.CallbackList)
    if is_own_list or keras.distribution.distribution() or not may_drop(model):
        return callbacks
    if isinstance(batches, BatchesOf):

        def first_inputs():
            return batches.first and batches.first[0]

    elif gives_batches(rows[0]):
        # Another pass over `tf.data` would change the order of the next one.
        return callbacks
    else:
        first = [_first_rows(part, batch_size) for part in rows]

        def first_inputs():
            batch = next(iter(model.batches(*first, batch_size=batch_size)))
            inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
            return keras.tree.map_structure(lambda x: x.numpy(), inputs)

    return [*keras.tree.flatten(callbacks or []), DropWarning(first_inputs)]


def _first_rows(x, number):
    if isinstance(x, dict):
        return {name: _first_rows(value, number) for name, value in x.items()}
    return x[:number] if hasattr(x, "__getitem__") else x


def _split(x, y, sample_weight, validation_split):
    """Arrays for training, and those for validation, from the end."""
    if gives_batches(x):
        raise ValueError(
            "`validation_split` cuts arrays in two. Received: validation_split="
            f"{validation_split} with x={type(x).__name__}. Pass other batches as "
            "`validation_data`."
        )
    check_numbers(least=0, under=1, validation_split=validation_split)
    arrays = [None if a is None else as_arrays(a) for a in (x, y, sample_weight)]
    cut = int(num_rows(arrays[0]) * (1.0 - validation_split))

    def part(rows):
        return keras.tree.map_structure(
            lambda a: None if a is None else a[rows], arrays
        )

    return part(slice(cut)), tuple(a for a in part(slice(cut, None)) if a is not None)


# === Runs in several threads ===

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
