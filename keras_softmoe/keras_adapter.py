"""All use of private parts of Keras and PyTorch, each with its reason.

No other file imports `keras.src`, uses an attribute of theirs whose name begins with an
underscore, or replaces a function that Keras has compiled. (It is not in `models`,
since `distribution` serves models without KerasHub.)
"""

import contextlib
import contextvars
import functools
import gc
import itertools
import re
import sys

import keras
import numpy as np
from keras.src.backend import compute_output_spec
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

# === Layers and variables ===


def flatten_layers(model):
    """Return a list of a model or layer and all layers inside it, at any depth.

    `Model.layers` are those of the first level, and `keras.Layer` has no such list.
    Would be replaced by: a public `keras.Layer.flatten_layers()`.
    """
    return list(model._flatten_layers())


class Layer(keras.layers.Layer):
    """Base class of layers whose `trainable` also applies to parts created later.

    Keras freezes the sublayers that exist when `trainable` is set, and none for an
    argument of the constructor; those created in `build` are trained. A file has one
    flag for a layer with all its parts: here it also has the flags of parts that
    differ.
    Would be replaced by: Keras freezing sublayers of a frozen layer as it does weights,
    and saving the flag of each.
    """

    def _post_build(self):
        super()._post_build()
        if not self.trainable:
            set_trainable(self, False)

    def get_build_config(self):
        config = super().get_build_config()
        parts = trainable_parts(self) if config else {}
        return {**config, "trainable": parts} if parts else config

    def build_from_config(self, config):
        super().build_from_config(config)
        set_trainable(self, (config or {}).get("trainable", {}))


def trainable_parts(layer):
    """Return the `trainable` flags of parts that differ from their layer's.

    Empty for a layer with factors of LoRA: they freeze the rest, and a file has their
    sum with the kernels instead.
    Would be replaced by: public lists of the sublayers and weights of a layer.

    Args:
        layer: built `keras.Layer`. Models inside it are left out, as they have a
            separate configuration.

    Returns:
        dict from paths (of names, below the layer) to bools.
    """
    found = {}
    for path, part, parent in _parts(layer):
        if getattr(part, "lora_enabled", False):
            return {}
        if parent is not None and part.trainable != parent.trainable:
            found[path] = part.trainable
    return found


def set_trainable(layer, value):
    """Freeze or unfreeze a layer with all its parts.

    Unlike the setter of Keras this also works if `trainable` has the value already:
    parts of the layer may differ, and TensorFlow ignores an unchanged value.
    Would be replaced by: the setter, and public lists as in `trainable_parts`.

    Args:
        layer: `keras.Layer`.
        value: bool; or dict of changes, as `trainable_parts` returns it. Paths that the
            layer does not have are ignored.
    """
    if not isinstance(value, dict):
        for part in layer._flatten_layers():
            part._trainable = value
            for variable in part._trainable_variables:
                variable.trainable = value
        return
    parts = {path: part for path, part, _ in _parts(layer)} if value else {}
    # Layers come before their parts.
    for path in sorted(value):
        part = parts.get(path)
        if isinstance(part, keras.Layer):
            set_trainable(part, value[path])
        elif part is not None:
            part.trainable = value[path]


def _parts(layer, path="", parent=None):
    """Yield `(path, part, parent)` of a layer, all layers in it and their weights."""
    yield path, layer, parent
    prefix = f"{path}/" if path else ""
    for variable in layer._trainable_variables:
        yield prefix + variable.name, variable, layer
    for child in layer._layers:
        # The flag of a layer without weights has no meaning.
        if child.weights and not isinstance(child, keras.Model):
            yield from _parts(child, prefix + child.name, layer)


def is_initialized(variable):
    """Return whether a variable has a value.

    It has none while the first batch builds its model, and on JAX during a step. Then
    `variable.value` would draw initial values, on one device.
    Would be replaced by: a public `keras.Variable.is_initialized`.
    """
    return variable._value is not None


def register_parameters(model):
    """Register the weights of a KerasHub model as parameters of its PyTorch module.

    The constructor of such models bypasses PyTorch's `__setattr__`, so that no
    parameters are registered: an optimizer of `model.parameters()` would train nothing.
    Would be replaced by: KerasHub registering them, as Keras does.
    """
    if keras.backend.backend() == "torch":
        model._track_variables()


_STARTS_AS_ZEROS = contextvars.ContextVar("starts_as_zeros", default=False)


@contextlib.contextmanager
def zero_initialization(enabled=True):
    """Scope in which new weights start as zeros, because others will be loaded.

    Drawing initial values would take a multiple of their memory, and on JAX seconds of
    compilation.
    Would be replaced by: an option of Keras to build a model without initial values.

    Args:
        enabled: bool, `False` for a scope that changes nothing.
    """
    _let_variables_start_as_zeros()
    token = _STARTS_AS_ZEROS.set(enabled)
    try:
        yield
    finally:
        _STARTS_AS_ZEROS.reset(token)


@functools.cache
def _let_variables_start_as_zeros():
    """Replace the initialization of variables, once, for the scope above."""
    initialize = keras.Variable._initialize_with_initializer

    def initialize_with(variable, initializer):
        # Seeds are integers, and not weights.
        if _STARTS_AS_ZEROS.get() and keras.backend.is_float_dtype(variable.dtype):
            initializer = keras.initializers.Zeros() if _is_distributed() else _zeros
        initialize(variable, initializer)

    keras.Variable._initialize_with_initializer = initialize_with


def _is_distributed():
    return keras.distribution.distribution() is not None


def _zeros(shape, dtype):
    # From NumPy, as JAX would compile a program for the zeros of each shape.
    return keras.ops.convert_to_tensor(np.zeros(shape, "float32"), dtype=dtype)


# === Presets ===


def has_preset_file(preset, file):
    """Return whether a preset has a file, fetching it for a handle.

    Would be replaced by: a public function of KerasHub that finds files by a handle.

    Args:
        preset: str or path of a directory, or a handle.
        file: str, name of the file.
    """
    from keras_hub.src.utils.preset_utils import check_file_exists

    return check_file_exists(str(preset), file)


# === LoRA and quantization ===


def forget_adapted_layers(layer):
    """Clear KerasHub's list of the layers of a backbone with LoRA factors.

    `enable_lora` fills the list, and the factors of these layers are saved.
    Would be replaced by: a `Backbone.merge_lora` of KerasHub.
    """
    if getattr(layer, "_lora_enabled_layers", None):
        layer._lora_enabled_layers = []


def is_quantized_under(filters, layer):
    """Return whether `Model.quantize(..., filters=filters)` quantizes a layer.

    Would be replaced by: a public `keras.quantizers.should_quantize_layer`.
    """
    from keras.src.quantizers.utils import should_quantize_layer

    return should_quantize_layer(layer, filters)


@contextlib.contextmanager
def quick_garbage_collection():
    """Scope in which removing a variable does not search all objects of the program.

    Keras collects garbage whenever a layer removes a variable, which takes a second
    with millions of objects of other libraries. In the scope only objects created in it
    are searched.
    Would be replaced by: a single collection after the last layer of a model.
    """
    if gc.get_freeze_count():
        # The user has frozen objects, which our `unfreeze` would unfreeze.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# === `fit`, `evaluate` and `predict` ===


def wrap_compilation(cls, around):
    """Call a function at the start of each `fit`, `evaluate` or `predict` of a class.

    Keras compiles a step once, with the settings of the layers as constants. The only
    methods of a model that it calls at the start of a run are those that make the step.
    Would be replaced by: a method of `keras.Model` that is called before each run and
    returns whether to compile again.

    Args:
        cls: subclass of `keras.Model`.
        around: callable `(model, step, make)`, where `step` is `"train"`, `"test"` or
            `"predict"`, and `make(again)` makes the step, with `again=True` even if it
            exists.
    """
    for step in ("train", "test", "predict"):
        name = f"make_{step}_function"
        setattr(cls, name, _wrapped(getattr(cls, name), step, around))


def _wrapped(make_function, step, around):
    @functools.wraps(make_function)
    def make(self, force=False):
        def make_step(again):
            before = getattr(self, f"{step}_function")
            made = make_function(self, force or again)
            if step != "predict" and getattr(self, f"{step}_function") is not before:
                _trace_once(self, step)
            return made

        return around(self, step, make_step)

    return make


def _trace_once(model, step):
    """Let the next call of a compiled step be traced once, on TensorFlow.

    A step that creates variables of the optimizer and the metrics is traced a second
    time without that. On the other backends Keras creates them beforehand.
    Would be replaced by: the same in `keras.Model.fit` on TensorFlow.

    Args:
        model: `keras.Model` with a function of the step.
        step: `"train"` or `"test"`.
    """
    if keras.backend.backend() != "tensorflow" or model.run_eagerly:
        return
    name = f"{step}_function"
    run = getattr(model, name)

    def prepare_and_run(iterator):
        setattr(model, name, run)
        if step == "train":
            model.optimizer.build(model.trainable_variables)
        # Other batches than `tf.data` have no specification: two traces are correct,
        # too.
        if hasattr(iterator, "element_spec") and not has_metrics(model):
            _make_metrics_of(model, iterator.element_spec)
        return run(iterator)

    setattr(model, name, prepare_and_run)


def _make_metrics_of(model, batch):
    """Create the metrics of a functional model from its outputs, see `make_metrics`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
        keras.tree.map_structure(
            lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), batch
        )
    )
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        compute_output_spec(
            model.compute_metrics, x, y, model.output, sample_weight=sample_weight
        )


def map_predictions(model, function):
    """Apply a function to each tensor returned by a step of `predict`, on JAX.

    Where several processes share a model, each gets the rows of its own devices, which
    Keras does not gather.
    Would be replaced by: `predict` on JAX that gathers the rows of all processes.

    Args:
        model: `keras.Model` with a predict function.
        function: callable that takes and returns a tensor.
    """
    predict = model.predict_function
    if getattr(predict, "is_mapped", False):
        return

    @functools.wraps(predict)
    def mapped(*arguments):
        outputs, state = predict(*arguments)
        return keras.tree.map_structure(function, outputs), state

    mapped.is_mapped = True
    model.predict_function = mapped


@contextlib.contextmanager
def kept_weights(model, trains):
    """Scope in which a model keeps its weights if its data raise an error.

    On JAX Keras moves the weights out of the model for its steps. If a pipeline fails
    at the first batch of `fit`, or at any of `evaluate`, they are not moved back.
    Would be replaced by: `JAXTrainer` restoring its state in a `finally`.

    Args:
        model: `keras.Model`.
        trains: bool, whether the steps are those of `fit`.
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


# === Data ===


class BatchesOf(DataAdapter):
    """Data adapter for preprocessed batches of any iterable.

    A `PyDataset` keeps its workers and its `on_epoch_end`. An iterable with a length
    (`len`) has a progress bar. An iterator gives one epoch, or several of
    `steps_per_epoch`.
    Would be replaced by: `keras.Model.fit` with a public hook for each batch.

    Args:
        data: iterable of batches.
        preprocess: callable that takes a batch, a tuple, and returns a tuple of NumPy
            arrays.
        shuffle: bool, whether the batches of a `PyDataset` are shuffled.
    """

    def __init__(self, data, preprocess, shuffle):
        self._data, self._preprocess = data, preprocess
        self._py_dataset = self._iterator = self._signature = None
        if isinstance(data, keras.utils.PyDataset):
            self._py_dataset = PyDatasetAdapter(data, shuffle=shuffle)
        elif iter(data) is data:
            self._iterator = data
            # Drawn but not yet used: Keras inspects a batch before it begins.
            self._drawn = []

    def get_numpy_iterator(self):
        return map(self._preprocessed, self._batches())

    def _preprocessed(self, batch):
        is_packed = isinstance(batch, (tuple, list))
        return self._preprocess(tuple(batch) if is_packed else (batch,))

    def _batches(self):
        if self._py_dataset is not None:
            return self._py_dataset.get_numpy_iterator()
        return self._data if self._iterator is None else self._rest()

    def _rest(self):
        if not self._drawn:
            self._drawn = list(itertools.islice(self._iterator, 1))
        if not self._drawn:
            raise ValueError(
                "There are no batches left: a generator gives its batches once. "
                f"Received: {self._iterator!r}. Pass data that can be iterated again, "
                "such as a `keras.utils.PyDataset`, or for several epochs an infinite "
                "generator and `steps_per_epoch`."
            )
        yield self._drawn[0]
        self._drawn = []
        yield from self._iterator

    def get_jax_iterator(self):
        return self.get_numpy_iterator()

    def get_torch_dataloader(self):
        return data_adapter_utils.get_torch_dataloader(self.get_numpy_iterator())

    def get_tf_dataset(self):
        import tensorflow as tf

        if self._signature is None:
            # Not from an iterator, which would start the workers.
            is_py_dataset = self._py_dataset is not None
            first = self._data[0] if is_py_dataset else next(iter(self._batches()))
            self._signature = keras.tree.map_structure(
                lambda x: tf.TensorSpec((None, *x.shape[1:]), x.dtype),
                self._preprocessed(first),
            )
        batches = tf.data.Dataset.from_generator(
            self.get_numpy_iterator, output_signature=self._signature
        )
        return batches.prefetch(tf.data.AUTOTUNE)

    @property
    def num_batches(self):
        if self._py_dataset is not None:
            return self._py_dataset.num_batches
        try:
            length = len(self._data)
        except TypeError:
            return None
        # The length of infinite datasets of grain
        return None if length >= sys.maxsize else length

    @property
    def batch_size(self):
        return None

    def on_epoch_begin(self):
        if self._py_dataset is not None:
            self._py_dataset.on_epoch_begin()

    def on_epoch_end(self):
        if self._py_dataset is not None:
            self._py_dataset.on_epoch_end()


# === Resuming an interrupted `fit` ===


def set_first_epoch(model, epoch):
    """Start the current `fit` at a later epoch.

    For a callback's `on_train_begin`, as in Keras' `BackupAndRestore`: the argument
    `initial_epoch` is the user's.
    Would be replaced by: a public `Model.initial_epoch` that each `fit` resets.

    Args:
        model: `keras.Model`.
        epoch: int, counted from 0, or `None` to reset it when the `fit` has begun.
    """
    if epoch is not None:
        model._initial_epoch = _FirstEpoch(epoch, model)
    elif isinstance(model._initial_epoch, _FirstEpoch):
        model._initial_epoch = None


class _FirstEpoch(int):
    """Initial epoch that is true only in the `fit` for which it was set.

    Keras never resets it, and has no callback for an interrupted `fit`. So it must be
    harmless to the next one, which has another `History`.
    """

    def __new__(cls, epoch, model):
        self = super().__new__(cls, epoch)
        self._model, self._fit = model, model.history
        return self

    def __bool__(self):
        return int(self) > 0 and self._model.history is self._fit


def replace_next_step(model, step):
    """Replace the next training step of the current `fit` with a callable.

    For a callback's `on_train_batch_begin`: callbacks can neither draw a batch nor skip
    a step.
    Would be replaced by: `fit(..., initial_step=...)`.

    Args:
        model: `keras.Model` that trains.
        step: callable that takes the model and the iterator over batches (on PyTorch
            the batch itself), and returns the logs of the step, or `None` to run the
            step after it. (A callback's own `model` would sync JAX's state back.)
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


def has_metrics(model):
    """Return whether the metrics of a compiled model are built.

    Would be replaced by: a public `Model.metrics_built`.
    """
    return model._compile_metrics is None or model._compile_metrics.built


def make_metrics(model, batch):
    """Build the metrics of a compiled model, which TensorFlow does in its first step.

    A model that cannot be traced symbolically is left unchanged.
    Would be replaced by: a public `Model.build_metrics(batch)`.

    Args:
        model: `keras.Model`.
        batch: a batch as `fit` takes it: `x`, `(x, y)` or `(x, y, sample_weight)`.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        model._symbolic_build(data_batch=batch)


# === Optimizers ===


class OwnAverages:
    """Mixin for an optimizer that calls `update_averages` after every step.

    With `use_ema=True` Keras updates the averages by a fixed rule; overwriting weights
    and saving use the same list, so a second list would not work.
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
    """Return the list of variables that an optimizer was built for.

    Would be replaced by: a public `Optimizer.trainable_variables`.
    """
    return optimizer._trainable_variables


def index_of(optimizer, variable):
    """Return the index of a variable among those that an optimizer was built for.

    Optimizers of Keras find the moments of a variable by it.
    Would be replaced by: a public `Optimizer.get_variable_index`.
    """
    return optimizer._get_variable_index(variable)


def num_gradients(optimizer):
    """Return the number of gradients applied to an optimizer, an int tensor.

    `Optimizer.iterations` counts several accumulated gradients as one.
    Would be replaced by: a public counterpart of `Optimizer.iterations`.
    """
    return optimizer._iterations + 0


# === Distributions ===


def backend_distributes():
    """Return whether Keras distributes tensors on the backend in use.

    Otherwise `keras.distribution` silently does nothing or fails.
    Would be replaced by: a public `keras.distribution.is_supported()`.
    """
    from keras.src.backend import distribution_lib

    # `None` for a backend without it
    return hasattr(distribution_lib, "distribute_tensor")


def layout_map_of(distribution):
    """Return the `LayoutMap` of any `keras.distribution.ModelParallel`, else `None`.

    Would be replaced by: a public `ModelParallel.layout_map`.
    """
    return getattr(distribution, "_layout_map", None)


def lay_out_each_batch(layout_of):
    """Let distributions choose the layout of every batch, instead of the first only.

    On JAX Keras reuses the layout of the first batch of an epoch for all, which fails
    at the last one if its size is not divisible by the devices. No public method can
    intervene. Only the first call has an effect.
    Would be replaced by: Keras calling `Distribution.get_data_layout` for each batch.

    Args:
        layout_of: callable that takes the shape of a process' rows of a batch and
            returns a `keras.distribution.TensorLayout`, or `None` for that of Keras.
    """
    from keras.src.backend import distribution_lib

    distribute = distribution_lib.distribute_data_input
    if getattr(distribute, "lays_out_each_batch", False):
        return

    def distribute_data_input(per_process_batch, layout, batch_dim_name):
        if per_process_batch is not None:
            layout = layout_of(per_process_batch.shape) or layout
        return distribute(per_process_batch, layout, batch_dim_name)

    distribute_data_input.lays_out_each_batch = True
    distribution_lib.distribute_data_input = distribute_data_input


# === PyTorch's export ===


def sizes_may_be_one():
    """Scope in which `torch.export` does not assume that open sizes exceed one.

    A batch may consist of one image, and of one group.
    Would be replaced by: `torch.export.Dim` for sizes that follow from others.
    """
    from torch.fx.experimental import _config

    return _config.patch(backed_size_oblivious=True)


def drop_assertions_of_more_than_one(graph):
    """Remove the assertions of an exported graph that an open size is not one.

    PyTorch adds them when it inspects memory layouts, which differ for a single row. No
    result depends on them.
    Would be replaced by: `torch.export` without unnecessary assertions.

    Args:
        graph: `torch.fx.Graph`.
    """
    import torch

    for node in list(graph.nodes):
        is_assertion = node.target is torch.ops.aten._assert_scalar.default
        if is_assertion and re.search(r"expression Ne\(.*, 1\) on", node.args[1]):
            graph.erase_node(node)
    graph.eliminate_dead_code()
