"""Two processes of four devices train together as one process of eight does."""

import filecmp
import json
import pathlib
import socket

import h5py
import numpy as np
import pytest

from keras_softmoe import models
from tests.distribution.conftest import jax_only, start
from tests.support.close import assert_near

pytestmark = jax_only

# In the second of three epochs of four steps. There is a backup after the sixth step.
KILLED_AFTER, KEPT, STEPS = 7, 6, 12


def train(results, count, kill_after=0):
    """Run the program in some processes of eight devices together; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={8 // count}"
    programs = [
        start("two_processes", results, port, count, index, kill_after, flags=flags)
        for index in range(count)
    ]
    codes, outputs = zip(*(program.wait() for program in programs), strict=True)
    if not kill_after:
        assert not any(codes), "\n".join(outputs)
    return codes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process found and saved."""
    results = tmp_path_factory.mktemp("one_process")
    train(results, 1)
    return results


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What two processes left behind that died while they trained."""
    results = tmp_path_factory.mktemp("two_processes")
    codes = train(results, 2, kill_after=KILLED_AFTER)
    assert all(code < 0 for code in codes)
    assert [path.name for path in (results / "backup").iterdir()] == ["training.h5"]
    return results


@pytest.fixture(scope="module")
def resumed(killed):
    """What they found and saved when they were started again."""
    train(killed, 2)
    return killed


def read(path):
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def test_losses_until_the_end_of_a_process(alone, killed):
    expected = read(alone / "results_0.json")["steps"]
    assert len(expected) == STEPS
    for index in range(2):
        steps = read(killed / f"steps_{index}_killed_after_{KILLED_AFTER}.json")
        assert_near(steps, expected[:KILLED_AFTER], rtol=0, atol=1e-5)


def test_training_goes_on_from_the_backup(alone, resumed):
    expected = read(alone / "results_0.json")
    for index in range(2):
        told = read(resumed / f"results_{index}.json")
        steps = told["steps"]
        # Two steps of this epoch were done before: of them the mean is known.
        assert len(steps) == 2 + STEPS - KEPT
        assert_near(
            steps[:2], np.mean(expected["steps"][KEPT - 2 : KEPT]), rtol=0, atol=1e-5
        )
        assert_near(steps[2:], expected["steps"][KEPT:], rtol=0, atol=1e-5)
        for name in ("epochs", "evaluated"):
            size = len(told[name])
            assert_near(told[name], expected[name][-size:], rtol=0, atol=1e-5)


def test_each_process_has_all_predictions(alone, resumed):
    expected = read(alone / "results_0.json")["predictions"]
    assert len(expected) == 29
    for index in range(2):
        predictions = read(resumed / f"results_{index}.json")["predictions"]
        assert_near(predictions, expected, rtol=0, atol=1e-4)


def arrays(preset):
    found = {}
    with h5py.File(preset / "model.weights.h5") as file:
        file.visititems(
            lambda name, item: (
                found.update({name: np.asarray(item)})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


def test_presets_are_those_of_one_process(alone, resumed):
    one, two = (arrays(results / "untrained") for results in (alone, resumed))
    assert one.keys() == two.keys() and len(one) > 10
    for name in one:
        assert np.array_equal(one[name], two[name]), name
    for name in ("config.json", "task.json"):
        assert filecmp.cmp(alone / "untrained" / name, resumed / "untrained" / name)


def test_a_preset_of_two_processes_is_whole(resumed, tmp_path):
    preset = resumed / "trained"
    model = models.ViTMoEImageClassifier.from_preset(str(preset))
    model.save_to_preset(str(tmp_path / "again"))
    one, two = arrays(preset), arrays(tmp_path / "again")
    assert one.keys() == two.keys()
    for name in one:
        assert np.array_equal(one[name], two[name]), name
