"""Reading and writing variables that are spread over devices and processes.

A file holds whole variables. Where each process has only pieces of them, all processes
together put one after the other together for the one that writes; where a file is read,
each device is given its piece, and no more is read than the process needs.
"""

import contextlib
import tempfile
from pathlib import Path

import h5py
import keras
import ml_dtypes
import numpy as np

from keras_softmoe.layers.feedforward import Experts


def num_processes():
    """How many processes share the devices."""
    return _processes()[0]


def process_index():
    """Which of the processes this one is; 0 is the one that writes."""
    return _processes()[1]


def save_by_one(save, opened):
    """Write variables to files in one of several processes, with the help of all.

    Every process has to call this with the same model. If the writer fails, all of
    them raise.

    Args:
        save: callable that takes a directory (str) and writes files to it. It may read
            any variables, in an order that does not depend on their values.
        opened: callable that returns a context manager, which yields the directory. It
            is called in the process that writes.
    """
    if num_processes() == 1 or isinstance(_scope(), _Reading):
        with opened() as directory:
            save(directory)
        return
    # A rehearsal with numbers in place of arrays tells in which order they are read.
    order = []
    with tempfile.TemporaryDirectory() as directory, _Reading(_number(order)):
        save(directory)
    pending = iter(order)
    failure = None
    if process_index() == 0:
        try:
            with opened() as directory, _Reading(_gather_next(pending)):
                save(directory)
        except Exception as error:
            # The others wait for this process, so first help them to the end.
            failure = error
    for variable in pending:
        whole(variable)
    failed = agree(failure is None)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(
            f"Process {failed[0]} could not write the files, see its error. Nothing "
            "was changed on the disk."
        )


def whole(variable):
    """The value of a variable as an array, in every process; all have to ask for it."""
    return whole_value(variable._value)


def whole_value(value):
    """A tensor as an array, in every process; all have to ask for it."""
    if not _is_elsewhere(value):
        return np.asarray(value)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value, tiled=True)


def agree(is_well):
    """The processes that are not well, a list of int; all have to take part."""
    if num_processes() == 1:
        return [] if is_well else [0]
    from jax.experimental import multihost_utils

    answers = multihost_utils.process_allgather(np.array(bool(is_well)))
    return [index for index, answer in enumerate(answers) if not answer]


def assign_pieces(variable, dataset):
    """Read a variable from a file, to each device its piece.

    Args:
        variable: `keras.Variable` whose value lies on several devices of JAX.
        dataset: `h5py.Dataset` of its shape.
    """
    import jax

    if tuple(dataset.shape) != tuple(variable.shape):
        raise ValueError(
            "A file does not fit the model. Received: shape="
            f"{tuple(dataset.shape)} for {variable.path!r} {tuple(variable.shape)}."
        )
    dtype = keras.backend.standardize_dtype(variable.dtype)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype

    # One piece after the other: a callback for all would have all in memory twice.
    shape, sharding = tuple(variable.shape), variable.value.sharding
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        piece = dataset[index]
        if dataset.attrs.get("dtype") == "bfloat16":
            piece = piece.view(ml_dtypes.bfloat16)
        piece = jax.device_put(piece.astype(dtype, copy=False), device)
        pieces.append(piece.block_until_ready())
    variable.assign(jax.make_array_from_single_device_arrays(shape, sharding, pieces))


def load_in_pieces(model, filepath, load):
    """Load a model's weights, those of experts in pieces if they are spread.

    Args:
        model: `keras.Model`.
        filepath: str or path, `*.weights.h5` or `*.weights.json`.
        load: callable that loads all weights. It takes `objects_to_skip`, a list of
            layers that it leaves out.
    """
    banks = [
        bank
        for experts in model._flatten_layers()
        if isinstance(experts, Experts)
        for bank in (experts.intermediate_dense, experts.output_dense)
        if not bank.lora_enabled and bank.quantization_mode is None
    ]
    variables = [v for bank in banks for v in bank.variables]
    if any(map(is_spread, variables)):
        with datasets_of(model, filepath, variables) as datasets:
            # With one missing, Keras has the words for what is wrong with the file.
            if all(dataset is not None for dataset in datasets):
                for variable, dataset in zip(variables, datasets, strict=True):
                    assign_pieces(variable, dataset)
                load(objects_to_skip=banks)
                return
    load()


def is_spread(variable):
    """Whether each device has only a piece of a variable."""
    sharding = getattr(variable._value, "sharding", None)
    return sharding is not None and not sharding.is_fully_replicated


@contextlib.contextmanager
def datasets_of(model, filepath, variables):
    """Find variables of a model in a file of weights.

    Args:
        model: `keras.Model`.
        filepath: str or path, `*.weights.h5`, or `*.weights.json` of several such
            files.
        variables: list of `keras.Variable`.

    Yields:
        list with the `h5py.Dataset` of each variable, `None` for one that is missing.
    """
    # A file of the same structure, in which numbers stand in for arrays, tells where.
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "numbers.weights.h5"))
        numbered = []
        with _Reading(_number(numbered, every=True)):
            keras.saving.save_weights(model, path)
        places = {}
        with h5py.File(path) as file:
            file.visititems(lambda name, item: _note(places, name, item))
    place_of = {id(numbered[number]): name for number, name in places.items()}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(h5py.File(p)) for p in _files(filepath)]
        found = []
        for variable in variables:
            name = place_of.get(id(variable))
            held = [file[name] for file in files if name is not None and name in file]
            found.append(held[0] if held else None)
        yield found


def _files(filepath):
    filepath = Path(filepath)
    if filepath.suffix != ".json":
        return [filepath]
    # KerasHub and Keras name them after the part before `.weights`.
    return sorted(filepath.parent.glob(f"{filepath.name.split('.')[0]}_*.weights.h5"))


def _note(places, name, item):
    if isinstance(item, h5py.Dataset) and item.shape == () and item.dtype == "int64":
        places[int(item[()])] = name


class _Reading(keras.StatelessScope):
    """Within this scope the value of a variable is what a function makes of it."""

    def __init__(self, read):
        super().__init__()
        self._read = read

    def get_current_value(self, variable):
        return self._read(variable)


def _number(order, every=False):
    """A reader that collects variables and gives their numbers for values."""

    def read(variable):
        if not every and not _is_elsewhere(variable._value):
            return None
        order.append(variable)
        return np.array(len(order) - 1, "int64")

    return read


def _gather_next(pending):
    """A reader for the writer: whole values, in the order of the rehearsal."""

    def read(variable):
        if not _is_elsewhere(variable._value):
            return None
        expected = next(pending)
        value = whole(expected)
        if expected is not variable:
            raise RuntimeError(
                "Variables were read in another order than before, so processes cannot "
                f"work together. Received: {variable.path!r} for {expected.path!r}."
            )
        return value

    return read


def _is_elsewhere(value):
    """Whether another process has pieces that this one has not."""
    if not hasattr(value, "is_fully_addressable"):
        return False
    return not (value.is_fully_addressable or value.is_fully_replicated)


def _scope():
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


def _processes():
    if keras.backend.backend() != "jax":
        return 1, 0
    import jax

    return jax.process_count(), jax.process_index()
