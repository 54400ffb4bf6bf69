"""Variables and files of one process; of several, see `test_two_processes.py`."""

import contextlib
from types import SimpleNamespace

import keras
import numpy as np

from keras_softmoe.sharding import variables


def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])


def test_one_process_has_everything():
    assert (variables.num_processes(), variables.process_index()) == (1, 0)
    assert variables.failed_processes(True) == []
    assert variables.failed_processes(False) == [0]
    (kernel, _) = model().weights
    assert not variables.is_sharded(kernel)
    values = keras.ops.convert_to_numpy(kernel)
    np.testing.assert_array_equal(variables.gather(values), values)


def test_index_of_a_shard():
    def placement(dim):
        return SimpleNamespace(dim=dim, is_shard=lambda: dim is not None)

    # Process (1, 2, 0) of a mesh of 2 x 3 x 2
    mesh = SimpleNamespace(get_coordinate=lambda: (1, 2, 0), size=(2, 3, 2).__getitem__)
    for dims, expected in [
        ((0, 1, None), (slice(12, 24), slice(4, 6))),
        # Several axes of the mesh cut one axis of the tensor, one after the other.
        ((0, 0, 0), (slice(20, 22), slice(0, 6))),
        ((None, 1, 0), (slice(0, 12), slice(4, 6))),
    ]:
        placements = [placement(dim) for dim in dims]
        value = SimpleNamespace(shape=(24, 6), device_mesh=mesh, placements=placements)
        assert variables._index_of_shard(value) == expected


def test_size_of_a_file(tmp_path):
    saved, path = model(), tmp_path / "model.weights.h5"
    saved.save_weights(path)
    assert path.stat().st_size <= variables.room_for(saved.variables)


def test_a_file_is_written_where_the_target_says(tmp_path):
    saved, loaded = model(), model()
    path = tmp_path / "model.weights.h5"

    @contextlib.contextmanager
    def target():
        yield path

    variables.save_in_one_process(saved.save_weights, target)

    def load(objects_to_skip=()):
        assert not objects_to_skip
        loaded.load_weights(path)

    variables.load_shards(loaded, path, loaded.layers, load)
    np.testing.assert_array_equal(loaded.get_weights()[0], saved.get_weights()[0])


def test_files_of_weights(tmp_path):
    one = tmp_path / "model.weights.h5"
    assert variables.weight_files(one) == [one]
    parts = [tmp_path / f"model_0000{i}.weights.h5" for i in range(2)]
    for part in parts:
        part.touch()
    assert variables.weight_files(tmp_path / "model.weights.json") == parts
