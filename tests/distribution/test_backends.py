"""What can be asked for on which backend, and which arguments are refused."""

import keras
import pytest

from keras_softmoe import distribution, layers
from keras_softmoe.keras_adapter.data import backend_distributes
from tests.distribution.conftest import jax_only
from tests.skips import only_on


@only_on("tensorflow", "torch", because="refusal")
@pytest.mark.parametrize(
    "ask", [distribution.expert_parallel, distribution.data_parallel]
)
def test_what_keras_cannot_do_is_refused_with_what_it_can(ask):
    backend = keras.backend.backend()
    is_for_torch = backend == "torch" and ask is distribution.expert_parallel
    if is_for_torch and backend_distributes():
        # Here the processes have not found each other.
        with pytest.raises(ValueError, match=r"distribution\.init.*no process group"):
            ask()
        return
    with pytest.raises(NotImplementedError) as caught:
        ask()
    message = str(caught.value)
    assert ("or on PyTorch Keras 3.16" in message) == is_for_torch
    assert f"backend={backend!r}" in message
    assert "KERAS_BACKEND=jax" in message
    remedy = {"tensorflow": "MirroredStrategy", "torch": "DistributedDataParallel"}
    assert remedy[backend] in message


@jax_only
@pytest.mark.parametrize(
    "mesh_shape", [(2, 4), (0, 1), (1,), "11", 1, (1, 1, 1), (1.0, 1.0), (True, 1)]
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(mesh_shape):
    with pytest.raises(ValueError, match=r"Accepted: \(1, 1\).*Received: mesh_shape="):
        distribution.expert_parallel(mesh_shape, devices=["cpu:0"])


@jax_only
@pytest.mark.parametrize("devices", [[], ["cpu:0", "cpu:0"]])
def test_devices_are_different_ones(devices):
    for ask in (distribution.expert_parallel, distribution.data_parallel):
        with pytest.raises(ValueError, match="Received: devices="):
            ask(devices=devices)


@jax_only
@pytest.mark.parametrize("mesh_shape", [None, (1, 1)])
def test_one_device_is_enough(mesh_shape):
    placed = distribution.expert_parallel(mesh_shape, devices=["cpu:0"])
    assert isinstance(placed, keras.distribution.ModelParallel)
    with placed.scope():
        layer = layers.SoftMoE(num_experts=3, mlp_dim=5)
        assert layer(keras.ops.ones((2, 4, 6))).shape == (2, 4, 6)
        rows = distribution.audit(layer).rows
    assert all(row.shard_shape == row.shape for row in rows)


@jax_only
def test_replicas_are_keras_own():
    placed = distribution.data_parallel(devices=["cpu:0"])
    assert isinstance(placed, keras.distribution.DataParallel)
    assert placed.get_data_layout((3, 2)).axes == ("batch", None)
