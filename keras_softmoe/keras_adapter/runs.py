"""Runs of a model, `fit`, `evaluate` and `predict`, and its optimizer."""

import contextlib
import contextvars
import functools
from types import SimpleNamespace

import keras
from keras.src.backend import compute_output_spec

from keras_softmoe.keras_adapter.layers import during, is_initialized


def wrap_compilation(cls, around):
    """Enter a context at the start of each `fit`, `evaluate` or `predict` of a class.

    Keras compiles a step once, with the settings of the layers as constants. `around`
    maps model and step (`"train"`, `"test"` or `"predict"`) to the context in which the
    step is made, whose value is whether to make it even if it exists.
    Would be replaced by: a method of `keras.Model` called before each run.
    """
    for step in ("train", "test", "predict"):
        name = f"make_{step}_function"
        setattr(cls, name, _wrapped(getattr(cls, name), step, around))


def _wrapped(make_function, step, around):
    @functools.wraps(make_function)
    def make(self, force=False):
        with around(self, step) as again:
            before = getattr(self, f"{step}_function")
            made = make_function(self, force or again)
            is_new = getattr(self, f"{step}_function") is not before
            if is_new and step != "predict" and keras.backend.backend() == "tensorflow":
                _end_with_the_data(self, step)
                _trace_once(self, step)
        return made

    return make


_LENGTH_IS_UNKNOWN = contextvars.ContextVar("length_is_unknown", default=False)


def batches_of_length(length):
    """Enter a run over so many batches, `None` if their number is unknown.

    Would be replaced by: a step of Keras on TensorFlow that waits for its batch.
    """
    return during(_LENGTH_IS_UNKNOWN, length is None)


def _end_with_the_data(model, step):
    """Let a compiled step on TensorFlow draw its batch first, see above."""
    if model.steps_per_execution != 1:
        return
    import tensorflow as tf

    name = f"{step}_function"
    run = getattr(model, name)

    def take_and_run(iterator):
        if _LENGTH_IS_UNKNOWN.get() and isinstance(iterator, tf.data.Iterator):
            iterator = iter([next(iterator)])
        return run(iterator)

    setattr(model, name, take_and_run)


def _trace_once(model, step):
    """Let the next call of a compiled step be traced once, on TensorFlow."""
    if model.run_eagerly:
        return
    name = f"{step}_function"
    run = getattr(model, name)

    def prepare_and_run(iterator):
        setattr(model, name, run)
        if step == "train":
            model.optimizer.build(model.trainable_variables)
        # Other batches than `tf.data` have no specification: two traces are correct.
        if hasattr(iterator, "element_spec") and not has_metrics(model):
            batch = keras.tree.map_structure(
                lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name),
                iterator.element_spec,
            )
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                update = functools.partial(model.compute_metrics, sample_weight=weight)
                compute_output_spec(update, x, y, model.output)
        return run(iterator)

    setattr(model, name, prepare_and_run)


def map_predictions(model, function):
    """Apply a function to each tensor returned by a step of `predict`.

    Where processes share a model, each gets the rows of its own devices.
    Would be replaced by: `predict` that gathers the rows of all processes.
    """
    predict = model.predict_function
    if getattr(predict, "is_mapped", False):
        return

    @functools.wraps(predict)
    def mapped(*arguments):
        if keras.backend.backend() == "torch":
            # One batch after the other: Keras joins those of a step.
            parts = [predict([batch]) for batch in arguments[0]]
            parts = [keras.tree.map_structure(function, part) for part in parts]
            join = keras.ops.concatenate
            return keras.tree.map_structure(lambda *x: join(x), *parts)
        outputs, state = predict(*arguments)
        return keras.tree.map_structure(function, outputs), state

    mapped.is_mapped = True
    model.predict_function = mapped


@contextlib.contextmanager
def kept_weights(model, trains):
    """Let a model keep its weights if its data raise an error in this context.

    On JAX Keras moves them out of the model for its steps.
    Would be replaced by: `JAXTrainer` restoring its state in a `finally`.
    """
    if keras.backend.backend() != "jax" or not model.compiled:
        yield
        return
    variables = [*model.variables, *model.metrics_variables]
    if trains:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables += model.optimizer.variables
    values = [variable.value for variable in variables]
    try:
        yield
    except BaseException:
        # The results of steps; then weights that no step has donated.
        model.jax_state_sync()
        model._jax_state = None
        for variable, value in zip(variables, values, strict=True):
            if not is_initialized(variable) and not value.is_deleted():
                variable.assign(value)
        raise


def without_gradients():
    """Return a context. Would be replaced by: a public `keras.no_gradient_scope()`."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def has_metrics(model):
    """Return whether metrics are built. Would be replaced by: `Model.metrics_built`."""
    return model._compile_metrics is None or model._compile_metrics.built


def make_metrics(model, batch):
    """Build the metrics of a compiled model, unless it cannot be traced.

    Would be replaced by: a public `Model.build_metrics(batch)`.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        model._symbolic_build(data_batch=batch)


def set_first_epoch(model, epoch):
    """Start the current `fit` at a later epoch, from a callback; `None` resets it.

    Would be replaced by: a public `Model.initial_epoch` that each `fit` resets.
    """
    if epoch is not None:
        model._initial_epoch = _FirstEpoch(epoch, model)
    elif isinstance(model._initial_epoch, _FirstEpoch):
        model._initial_epoch = None


class _FirstEpoch(int):
    """Initial epoch that is true only in the `fit` for which it was set."""

    def __new__(cls, epoch, model):
        self = super().__new__(cls, epoch)
        self._model, self._fit = model, model.history
        return self

    def __bool__(self):
        return int(self) > 0 and self._model.history is self._fit


def replace_next_step(model, step):
    """Replace the next training step, from a callback's `on_train_batch_begin`.

    `step` takes the model and the iterator over batches (on PyTorch the batch), and
    returns the logs of the step, or `None` to run the step after it.
    Would be replaced by: `fit(..., initial_step=...)`.
    """
    model.train_function = _ReplacedStep(model, step)


class _ReplacedStep:
    """Train function with another callable in place of its next step."""

    def __init__(self, model, step):
        train = model.train_function
        # One may be left from an interruption just before its step.
        self._train = train._train if isinstance(train, _ReplacedStep) else train
        self._model, self._fit, self._step = model, model.history, step

    def __call__(self, *arguments):
        # First, in case of an error
        self._model.train_function = self._train
        logs = None
        if self._model.history is self._fit:
            logs = self._step(self._model, arguments[-1])
        if logs is None:
            return self._train(*arguments)
        # On JAX a step takes and returns the state of the model.
        return (logs, arguments[0]) if len(arguments) > 1 else logs


def is_traced_for_xla():
    """Return whether TensorFlow traces a function that XLA will compile.

    Would be replaced by: a public property of a graph.
    """
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def before_compiling_distillers(check):
    """Call `check` with each `keras.distillation.Distiller` before it compiles.

    Its training leaves out the losses of a student's layers.
    Would be replaced by: `Distiller.compute_loss` that adds `losses`.
    """
    compile_ = keras.distillation.Distiller.compile

    @functools.wraps(compile_)
    def checked(self, *args, **kwargs):
        # Not one that has another loss
        if type(self).compute_loss is keras.distillation.Distiller.compute_loss:
            check(self)
        return compile_(self, *args, **kwargs)

    keras.distillation.Distiller.compile = checked


class InOnePass:
    """Mixin for an optimizer that on PyTorch updates variables in one pass.

    `update_together(gradients, variables, learning_rate)` returns pairs that are left.
    Would be replaced by: a public `Optimizer.update_steps` of all variables.
    """

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if keras.backend.backend() == "torch":
            left = self.update_together(grads, trainable_variables, learning_rate)
            grads, trainable_variables = zip(*left, strict=True) if left else ((), ())
        super()._backend_update_step(grads, trainable_variables, learning_rate)


class OwnAverages:
    """Mixin for an optimizer that calls `update_averages` after every step.

    Would be replaced by: a public `Optimizer.update_averages`.
    """

    def _update_model_variables_moving_average(self, trainable_variables):
        self.update_averages(trainable_variables)


def averages_of(optimizer):
    """Return the averages of an optimizer with `use_ema=True`, variables or `None`.

    Would be replaced by: a public `Optimizer.averages`.
    """
    return optimizer._model_variables_moving_average


def variables_of(optimizer):
    """Return a list. Would be replaced by: a public `Optimizer.trainable_variables`."""
    return optimizer._trainable_variables


def index_of(optimizer, variable):
    """Return an int. Would be replaced by: a public `Optimizer.get_variable_index`."""
    return optimizer._get_variable_index(variable)


def num_gradients(optimizer):
    """Return an int tensor. Would be replaced by: a public count of all gradients."""
    return optimizer._iterations + 0


class MuonByShape:
    """Mixin, in front of `keras.optimizers.Muon`, for shapes other than the variables'.

    `shape_of(variable)` returns the shape by which Muon or AdamW is chosen.
    Would be replaced by: a public method of `Muon` that chooses.
    """

    def _should_use_adamw(self, variable):
        like = SimpleNamespace(path=variable.path, shape=self.shape_of(variable))
        return super()._should_use_adamw(like)
