"""What accelerators need of models on PyTorch, seen on a processor."""

import keras
import pytest

from keras_softmoe import routers
from tests.support import tiny

torch = pytest.importorskip("torch")

SPARSE = {"group_images": 2}
CLASSIFIERS = {
    "dense": tiny.DENSE,
    "soft": {},
    "token choice": {"router": tiny.SPARSE, **SPARSE},
    "expert choice": {"router": routers.SoftmaxExpertChoiceRouter(4), **SPARSE},
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_model_is_one_graph(kind):
    """So that it may be compiled whole, and a CUDA graph may hold it."""
    torch._dynamo.reset()
    model = tiny.classifier(**CLASSIFIERS[kind])
    x = keras.ops.convert_to_tensor(tiny.images(4))
    with torch.no_grad():
        found = torch._dynamo.explain(model)(x)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
