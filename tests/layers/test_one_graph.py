"""`torch.compile` of mixtures of experts, whose operations it must all know.

Where it cuts the graph inside a layer, PyTorch compiles the functions of Keras that
call the layer for each of them, up to a limit of eight: later layers run uncompiled.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, routers
from tests.support.references import to_numpy

torch = pytest.importorskip("torch")

ROUTERS = {
    "token choice": routers.SoftmaxTokenChoiceRouter(4, 2, noise_std=1.0),
    "dropless": routers.SoftmaxTokenChoiceRouter(4, 2, capacity_factor=None),
    "bias": routers.SoftmaxTokenChoiceRouter(4, 2, bias_update_rate=0.01),
    "race": routers.ExpertRaceRouter(4, 2),
    "expert choice": routers.SoftmaxExpertChoiceRouter(4),
    "sinkhorn token choice": routers.SinkhornTokenChoiceRouter(4),
    "sinkhorn expert choice": routers.SinkhornExpertChoiceRouter(4),
    "sparse transport": routers.SparseTransportExpertChoiceRouter(4),
    "soft": routers.SoftRouter(4),
    "soft with noise": routers.SoftRouter(4, noise_std=0.1),
    "identity": routers.IdentityRouter(4),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_one_graph_in_training(name):
    """Without Inductor, which takes most of the time of compiling."""
    torch._dynamo.reset()
    layer = layers.MoE(ROUTERS[name], mlp_dim=8, group_images=4)
    layer.build((None, 5, 8))
    x = np.random.default_rng(0).normal(size=(8, 5, 8)).astype("float32")
    x = keras.ops.convert_to_tensor(x)

    def outputs(x):
        return layer(x, training=True)

    compiled = torch.compile(outputs, backend="eager", fullgraph=True)
    seeds = [g.state for g in layer.router._seed_generators]
    before = [to_numpy(seed).copy() for seed in seeds]
    found = to_numpy(compiled(x))
    for seed, value in zip(seeds, before, strict=True):
        seed.assign(value)
    if name == "bias":
        # It moved in the first call.
        layer.router.bias.assign(0 * layer.router.bias)
    np.testing.assert_allclose(found, to_numpy(outputs(x)), rtol=1e-5)
