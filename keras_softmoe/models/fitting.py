"""`fit`, `evaluate` and `predict` of all tasks, and the balance of experts in them.

Plain functions that a task assigns in its class body: a mixin in front of KerasHub's
class would become the kind of task that KerasHub looks for, and one behind it cannot
override the methods of Keras. They call these methods of the task:

- `batches(x, y, sample_weight, *, batch_size, shuffle, class_weight)`: data for
  `keras.Model.fit`, from `data.prepare`;
- `checked_class_weight(class_weight)`: the weights of all classes;
- the methods that `data.prepare` names.
"""

import contextlib
import math
import threading
import warnings
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_numbers
from keras_softmoe.keras_adapter import runs
from keras_softmoe.keras_adapter.data import BatchesOf, number_of
from keras_softmoe.keras_adapter.layers import states_of_draws
from keras_softmoe.models import data
from keras_softmoe.routers import record

# The share of tokens without an expert above which `fit` warns, and the tokens for each
# expert from which on it warns of experts that get none: of more than a quarter after
# the first epoch, of any in the end.
_MANY, _ENOUGH, _FEW_IDLE = 0.3, 16, 0.25


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

    As `keras.Model.fit`, with preprocessing. Contrastive tasks drop the last incomplete
    batch of arrays. The metric `routing_loss` is the part of `loss` that routers add.
    There is a warning if they drop more than 30 % of the tokens of a batch, or no token
    of it goes to an expert, after the first epoch or the last (not for `tf.data`, and
    not under a distribution).

    Args:
        x: `(N, height, width, channels)` images from 0 to 255 (without a preprocessor,
            from -1 to 1), an array or a list of arrays or PIL images. Or an iterable of
            batches `(x, y)`: a `tf.data` or grain dataset, a PyTorch `DataLoader`, a
            `keras.utils.PyDataset`, a generator. Or, for pairs, a dict of `"images"`
            and `"captions"`.
        y: `(N,)` int labels; of a contrastive task `N` captions, a list or array of
            str, or `(N, sequence_length)` int token ids. `None` with batches.
        batch_size: int. Defaults to 32. `None` with batches.
        sample_weight: optional `(N,)` array of finite numbers; of masks `(N,)`, or one
            for each pixel, `(N, height, width)`. Pairs have no weights.
        validation_data: optional `(x, y)` or batches.
        validation_split: optional float, the last fraction of the arrays to validate.
        shuffle: bool, whether arrays and batches of a `PyDataset` are shuffled.
        **kwargs: as in `keras.Model.fit`. `validation_batch_size` defaults to
            `batch_size`.

    Raises:
        ValueError: if arrays are empty or differ in length, a number is not finite,
            images have a shape that the model does not accept, or labels or
            captions are not among the model's. (Elements of `tf.data` are not
            checked.)
    """
    if not self.compiled:
        raise _not_compiled(self, "fit")
    if validation_split and validation_data is None and x is not None:
        (x, y, sample_weight), validation_data = _split(
            x, y, sample_weight, validation_split
        )
    validation_size = kwargs.pop("validation_batch_size", None) or batch_size
    class_weight = kwargs.pop("class_weight", None)
    if class_weight is not None:
        class_weight = self.checked_class_weight(class_weight)
    batches = self.batches(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        shuffle=shuffle,
        class_weight=class_weight,
    )
    kwargs["callbacks"] = _with_drop_warning(
        self, (x, y), batches, batch_size or 32, kwargs.get("callbacks")
    )
    if isinstance(validation_data, (tuple, list)):
        validation_data = self.batches(*validation_data, batch_size=validation_size)
    elif validation_data is not None:
        validation_data = self.batches(validation_data)
    with _run(self, batches, trains=True):
        # KerasHub's `fit` would preprocess the data again, or refuse them.
        return keras.Model.fit(
            self,
            batches,
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

    For a contrastive task they depend on the batch size, since a caption is compared
    within its batch; `evaluation.retrieval` compares it with all. Data and errors are
    as in `fit`, other arguments and results as in `keras.Model.evaluate`.
    """
    if not self.compiled:
        raise _not_compiled(self, "evaluate")
    # `fit` hands on the validation data that it has prepared.
    if not kwargs.get("_use_cached_eval_dataset"):
        x = self.batches(x, y, sample_weight, batch_size=batch_size)
    with _run(self, x, trains=False):
        return keras.Model.evaluate(self, x, **kwargs)


def predict(self, x: Any, batch_size: int | None = None, **kwargs):  # noqa: D417
    """Compute the outputs of the model.

    Args:
        x: images as in `fit`, or batches, whose labels are ignored; of a contrastive
            task a dict of `"images"` and `"captions"` (or `"token_ids"`), or batches of
            pairs.
        batch_size: int. Defaults to 32.
        **kwargs: as in `keras.Model.predict`.

    Returns:
        `(N, num_classes)` array of logits (or activations); of a contrastive task a
        dict of arrays, see its class.
    """
    if data.is_empty(x):
        return keras.tree.map_structure(
            lambda y: ops.convert_to_numpy(ops.zeros((0, *y.shape[1:]), y.dtype)),
            self.output,
        )
    x = data.prepare(self, x, batch_size=batch_size)
    with _run(self, None, trains=False):
        return keras.Model.predict(self, x, **kwargs)


def _not_compiled(model, method):
    return ValueError(
        f"A model has to be compiled first: call `compile()` before `{method}`. "
        f"Received: {model.name!r}, which is not compiled."
    )


def _split(x, y, sample_weight, validation_split):
    """Return arrays for training, and for validation from the end."""
    if data.gives_batches(x):
        raise ValueError(
            "`validation_split` cuts arrays in two. Received: validation_split="
            f"{validation_split} with x={type(x).__name__}. Pass other batches as "
            "`validation_data`."
        )
    check_numbers(least=0, under=1, validation_split=validation_split)
    arrays = [None if a is None else data.as_arrays(a) for a in (x, y, sample_weight)]
    cut = int(len(keras.tree.flatten(arrays[0])[0]) * (1.0 - validation_split))

    def part(rows):
        return keras.tree.map_structure(
            lambda a: None if a is None else a[rows], arrays
        )

    return part(slice(cut)), tuple(a for a in part(slice(cut, None)) if a is not None)


# === Balance of experts ===


class RoutingLoss:
    """The metric `routing_loss` of a task: the part of the loss that its layers add.

    It belongs to training steps of models with such losses; `evaluate` has none. (Not
    tracked by Keras: a second `compile` would keep the first metric.)

    Args:
        model: task with `routers`.
    """

    def __init__(self, model):
        metric = keras.metrics.Mean(name="routing_loss")
        self.metrics = [metric] if model.routers else []
        # Whether the latest step (or the step being traced) has such losses.
        self._has_losses = False

    def count(self, losses):
        """Count the `losses` of a model in a step, none outside of training."""
        self._has_losses = bool(losses and self.metrics)
        if self._has_losses:
            self.metrics[0].update_state(sum(ops.sum(loss) for loss in losses))

    def without(self, results):
        """Return the results of metrics, without this one where it does not apply."""
        if self._has_losses:
            return results
        return {k: v for k, v in results.items() if k != "routing_loss"}


class _DropWarning(keras.callbacks.Callback):
    """Callback that warns once of dropped tokens and idle experts.

    It checks the batch that `first_inputs` returns, after the first and last epoch.
    """

    def __init__(self, first_inputs):
        super().__init__()
        self._first_inputs = first_inputs
        self._epochs = 0
        self._has_warned = False

    def on_epoch_end(self, epoch, logs=None):
        self._epochs += 1
        if self._epochs == 1:
            self._check()

    def on_train_end(self, logs=None):
        if self._epochs > 1:
            self._check()

    def _check(self):
        inputs = None if self._has_warned else self._first_inputs()
        found = {} if inputs is None else balance(self.model, inputs).items()
        many = [f"{x.dropped:.0%} at block {b}" for b, x in found if x.dropped > _MANY]
        # After one epoch a few may still be on their way.
        few = _FEW_IDLE if self._epochs == 1 else 0.0
        idle = [
            f"{x.idle} of them at block {b}" for b, x in found if x.share_idle > few
        ]
        self._has_warned = bool(many or idle)
        batch = f"of a batch of the training data after epoch {self._epochs}"
        if many:
            warnings.warn(
                "Many tokens are dropped: they have no expert and pass the block "
                f"unchanged. Received: {', '.join(many)}, {batch}. Let more images "
                "share the slots of experts (`group_images` of `model.set_routing`), "
                "raise `capacity_factor`, or, where tokens choose, the weight of the "
                "balancing losses, or set `bias_update_rate`.",
                stacklevel=2,
            )
        if idle:
            warnings.warn(
                f"Experts are idle: no token {batch} goes to them. Received: "
                f"{', '.join(idle)}. Raise the weight of the balancing losses, set "
                "`bias_update_rate`, or use fewer experts.",
                stacklevel=2,
            )


def _with_drop_warning(model, rows, batches, batch_size, callbacks):
    """Return the callbacks of `fit`, with a `_DropWarning` where it applies.

    `rows` are the arguments `(x, y)` of `fit`, `batches` the result of `model.batches`.
    """
    is_own_list = isinstance(callbacks, keras.callbacks.CallbackList)
    may_drop = any(not router.mixes_tokens for router in model.routers.values())
    if is_own_list or keras.distribution.distribution() or not may_drop:
        return callbacks
    if isinstance(batches, BatchesOf):

        def first_inputs():
            return batches.first and batches.first[0]

    elif data.gives_batches(rows[0]):
        # Another pass over `tf.data` would change the order of the next one.
        return callbacks
    else:
        first = [_first_rows(part, batch_size) for part in rows]

        def first_inputs():
            batch = next(iter(model.batches(*first, batch_size=batch_size)))
            inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
            return keras.tree.map_structure(lambda x: x.numpy(), inputs)

    return [*keras.tree.flatten(callbacks or []), _DropWarning(first_inputs)]


def _first_rows(x, number):
    if isinstance(x, dict):
        return {name: _first_rows(value, number) for name, value in x.items()}
    return x[:number] if hasattr(x, "__getitem__") else x


class Balance(NamedTuple):
    """How the experts of a block share the tokens of a batch.

    Attributes:
        dropped: float, the share of tokens without an expert. Tokens in excess of all
            slots do not count: a capacity below the number of tokens is a choice.
        idle: int, the number of experts without a token, 0 in small batches.
        share_idle: float, their share of all experts.
    """

    dropped: float
    idle: int
    share_idle: float


def balance(model, inputs):
    """Return a dict from the blocks that route a batch sparsely to their `Balance`.

    The model and its random numbers stay the same.
    """
    # Copies: an array of a PyTorch tensor shares its memory.
    draws = [(s, np.array(ops.convert_to_numpy(s))) for s in states_of_draws(model)]
    inputs = keras.tree.map_structure(ops.convert_to_tensor, inputs)
    names = {id(router): block for block, router in model.routers.items()}
    routers = [r for r in model.routers.values() if hasattr(r, "eval_capacity_factor")]
    factors = [router.eval_capacity_factor for router in routers]
    try:
        # With the capacity of training
        for router in routers:
            router.eval_capacity_factor = None
        with runs.without_gradients(), record(lambda r: names.get(id(r))) as decisions:
            model(inputs, training=False)
    finally:
        for router, factor in zip(routers, factors, strict=True):
            router.eval_capacity_factor = factor
        for state, value in draws:
            state.assign(value)
    found = {}
    for block, (routing, summary) in decisions.items():
        if "dropped" in summary:
            tokens = float(ops.sum(ops.cast(summary["valid"], "float32")))
            dropped = float(ops.sum(ops.cast(summary["dropped"], "float32")))
            if hasattr(routing, "filled"):
                dropped -= max(tokens - math.prod(routing.filled.shape), 0.0)
            # Tokens of each expert in all groups, (E,)
            load = ops.convert_to_numpy(ops.sum(summary["load"], axis=0))
            idle = np.sum(load == 0) if tokens >= _ENOUGH * len(load) else 0
            dropped /= max(tokens, 1.0)
            found[block] = Balance(dropped, int(idle), idle / len(load))
    return found


# === Runs in several threads ===

# Model -> the lock of its runs, and whether the current one trains.
_runs = weakref.WeakKeyDictionary()
_making = threading.Lock()


@contextlib.contextmanager
def _run(model, batches, trains):
    """Open the scope of a run, after which the model has its weights also after errors.

    On JAX runs of one model in several threads take turns, and fail while another
    thread trains it: during a run Keras moves the weights out of the model.
    """
    if keras.backend.backend() == "torch":
        yield
        return
    if keras.backend.backend() == "tensorflow":
        counted = batches is not None
        with runs.batches_of_length(number_of(batches) if counted else 0):
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
                "On JAX a model in training in another thread has no weights. "
                f"Received: {model.name!r}. Wait until `fit` has returned."
            )
        run.lock.acquire()
    trained = run.trains
    run.trains = trains or trained
    try:
        with runs.kept_weights(model, trains):
            yield
    finally:
        run.trains = trained
        run.lock.release()
