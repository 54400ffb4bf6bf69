"""Reading and writing variables that are sharded over devices and processes.

A file holds whole variables: all processes together gather one after the other for the
process that writes. A process reads only the shards of its devices.
"""

import contextlib
import contextvars
import math
import tempfile
from pathlib import Path

import h5py
import keras
import ml_dtypes
import numpy as np

from keras_softmoe.keras_adapter.layers import is_initialized

# True where variables are read through a `_Reader`.
_IS_READING = contextvars.ContextVar("variables_are_read", default=False)


def num_processes():
    """Return the number of processes that share the devices."""
    return _processes()[0]


def process_index():
    """Return the index of this process; process 0 writes files."""
    return _processes()[1]


def failed_processes(is_well):
    """Return the indices of processes with `is_well=False`; all must call this."""
    answers = answers_of_all(float(is_well))
    return [index for index, answer in enumerate(answers) if not answer]


def answers_of_all(answer):
    """Return a list of the answers of all processes; all must call this."""
    count = num_processes()
    if count == 1:
        return [answer]
    if keras.backend.backend() == "torch":
        import torch.distributed

        answers = [None] * count
        torch.distributed.all_gather_object(answers, answer)
        return answers
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.array(answer)).tolist()


def is_sharded(variable):
    """Return whether no device has the whole variable."""
    # `value` would initialize a variable without a value.
    if not is_initialized(variable):
        return False
    value = variable.value
    if hasattr(value, "placements"):
        return _needs_others(value)
    sharding = getattr(value, "sharding", None)
    return sharding is not None and not sharding.is_fully_replicated


def gather(value):
    """Return a tensor as an array in every process; all processes must call this."""
    if keras.backend.backend() == "torch":
        # This gathers the shards.
        return keras.ops.convert_to_numpy(value)
    if not _needs_others(value):
        return np.asarray(value)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value, tiled=True)


def gather_rows(rows):
    """Return the rows of a step of `predict` of all processes; all must call this."""
    if keras.backend.backend() != "torch":
        return gather(rows)
    import torch

    counts = [int(count) for count in answers_of_all(len(rows))]
    # Of equal length, as the processes exchange them.
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded)
    return torch.cat([x[:n] for x, n in zip(parts, counts, strict=True)])


def room_for(variables):
    """Return the approximate size in bytes of an HDF5 file of variables, an int."""
    total = 1 << 14  # HDF5 needs some bytes besides the numbers.
    for variable in variables:
        dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
        total += (1 << 12) + math.prod(variable.shape) * dtype.itemsize
    return total


def save_in_one_process(save, target):
    """Write variables to files in process 0, gathering shards from all processes.

    Every process calls this; if the writer fails, all raise. `save` takes a path and
    reads variables in a fixed order, `target` returns a context manager that yields the
    path.
    """
    if num_processes() == 1 or _IS_READING.get():
        with target() as path:
            save(str(path))
        return
    # A rehearsal with numbers in place of arrays records the order of reading.
    order = []
    with tempfile.TemporaryDirectory() as aside, _Reader(_numbers(order)):
        save(str(Path(aside, "rehearsal")))
    pending = iter(order)
    failure = None
    if process_index() == 0:
        try:
            with target() as path, _Reader(_gathered(pending)):
                save(str(path))
        except Exception as error:
            # The other processes wait for this one, so gather the rest first.
            failure = error
    for variable in pending:
        gather(variable.value)
    failed = failed_processes(failure is None)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"Process {failed[0]} could not write, see its error.")


def load_shards(model, filepath, layers, load):
    """Load the weights of a model; of some layers, only the shards of this process.

    `layers` may have sharded variables, `load` loads all weights but those of
    `objects_to_skip`.
    """
    variables = [variable for layer in layers for variable in layer.variables]
    if any(map(is_sharded, variables)):
        with _find_datasets(model, filepath, variables) as datasets:
            # If a dataset is missing, let Keras report it.
            if all(dataset is not None for dataset in datasets):
                for variable, dataset in zip(variables, datasets, strict=True):
                    assign_shards(variable, dataset)
                load(objects_to_skip=layers)
                return
    load()


def assign_shards(variable, dataset):
    """Read a sharded variable from an `h5py.Dataset`, one shard for each device."""
    if tuple(dataset.shape) != tuple(variable.shape):
        raise ValueError(
            "A file does not fit the model. Received: shape="
            f"{tuple(dataset.shape)} for {variable.path!r} {tuple(variable.shape)}."
        )
    dtype = keras.backend.standardize_dtype(variable.dtype)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype

    def read(index):
        shard = dataset[index]
        if dataset.attrs.get("dtype") == "bfloat16":
            shard = shard.view(ml_dtypes.bfloat16)
        return shard.astype(dtype, copy=False)

    if keras.backend.backend() == "torch":
        import torch

        shard = keras.ops.convert_to_tensor(read(_index_of_shard(variable.value)))
        with torch.no_grad():
            variable.value.to_local().copy_(shard)
        return
    import jax

    # One shard after the other: one callback for all would hold all in memory twice.
    shape, sharding = tuple(variable.shape), variable.value.sharding
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        shard = jax.device_put(read(index), device)
        shards.append(shard.block_until_ready())
    variable.assign(jax.make_array_from_single_device_arrays(shape, sharding, shards))


def _index_of_shard(value):
    """Return the slices of the shard of this process, of a tensor of PyTorch."""
    index = [slice(0, size) for size in value.shape]
    mesh = value.device_mesh
    # Each axis of the mesh cuts the part that those before it have left.
    for axis, (place, placement) in enumerate(
        zip(mesh.get_coordinate(), value.placements, strict=True)
    ):
        if placement.is_shard():
            whole = index[placement.dim]
            size = (whole.stop - whole.start) // mesh.size(axis)
            start = whole.start + place * size
            index[placement.dim] = slice(start, start + size)
    return tuple(index)


@contextlib.contextmanager
def _find_datasets(model, filepath, variables):
    """Yield the `h5py.Dataset` of each variable in a file of weights, or `None`."""
    # A file of the same structure, with numbers in place of arrays, gives the names.
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "numbers.weights.h5"))
        numbered = []
        with _Reader(_numbers(numbered, every=True)):
            keras.saving.save_weights(model, path)
        name_of = {}

        def note(name, item):
            is_number = isinstance(item, h5py.Dataset) and item.shape == ()
            if is_number and item.dtype == "int64":
                name_of[id(numbered[int(item[()])])] = name

        with h5py.File(path) as file:
            file.visititems(note)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(h5py.File(p)) for p in weight_files(filepath)]
        found = []
        for variable in variables:
            name = name_of.get(id(variable))
            held = [file[name] for file in files if name is not None and name in file]
            found.append(held[0] if held else None)
        yield found


def weight_files(filepath):
    """Return the files of weights: the path itself, or its parts if it is split."""
    filepath = Path(filepath)
    if filepath.suffix != ".json":
        return [filepath]
    # KerasHub and Keras name them after the part before `.weights`.
    return sorted(filepath.parent.glob(f"{filepath.name.split('.')[0]}_*.weights.h5"))


class _Reader(keras.StatelessScope):
    """Context in which `read(variable)` gives the values, or `None` for its own."""

    def __init__(self, read):
        super().__init__()
        self._read = read

    def __enter__(self):
        self._token = _IS_READING.set(True)
        self._is_inside = False
        return super().__enter__()

    def __exit__(self, *exception):
        _IS_READING.reset(self._token)
        super().__exit__(*exception)

    def get_current_value(self, variable):
        # The function may read the variable's own value.
        if self._is_inside:
            return None
        self._is_inside = True
        try:
            return self._read(variable)
        finally:
            self._is_inside = False


def _numbers(order, every=False):
    """Return a function for `_Reader` that collects variables and returns numbers."""

    def read(variable):
        if not every and not _needs_others(variable.value):
            return None
        order.append(variable)
        return np.array(len(order) - 1, "int64")

    return read


def _gathered(pending):
    """Return a function for `_Reader` that gathers in the order of the rehearsal."""

    def read(variable):
        if not _needs_others(variable.value):
            return None
        expected = next(pending)
        value = gather(expected.value)
        if expected is not variable:
            raise RuntimeError(
                "Processes must read variables in the same order. Received: "
                f"{variable.path!r} for {expected.path!r}."
            )
        return value

    return read


def _needs_others(value):
    """Return whether only other processes have some shards of a tensor."""
    if hasattr(value, "placements"):
        # PyTorch, with a device for each process
        sizes = value.device_mesh.shape
        placed = zip(value.placements, sizes, strict=True)
        return any(placement.is_shard() and size > 1 for placement, size in placed)
    if not hasattr(value, "is_fully_addressable"):
        return False
    return not (value.is_fully_addressable or value.is_fully_replicated)


def _processes():
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.process_count(), jax.process_index()
    # On PyTorch processes may also train replicas without a distribution: whole models.
    if backend == "torch" and keras.distribution.distribution() is not None:
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0
