"""A batch without any image: no outputs, losses of zero, gradients of zero."""

import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from tests.layers.test_masks import ROUTERS, squares
from tests.support.gradients import layer_gradients
from tests.support.references import to_numpy

SHAPE = (0, 16, 5)


@pytest.mark.parametrize(
    ("router", "group_images", "dispatcher"),
    [
        *((name, 1, "gather") for name in ROUTERS),
        *((name, None, "auto") for name in ("soft", "expert choice", "identity")),
        *((name, 4, "einsum") for name in ("batch priority", "dropless")),
    ],
)
def test_layer(router, group_images, dispatcher):
    layer = layers.MoE(
        ROUTERS[router](), 8, group_images=group_images, dispatcher=dispatcher
    )
    layer.build((None, *SHAPE[1:]))
    x = np.zeros(SHAPE, "float32")
    with routers.record() as decisions:
        assert tuple(layer(x, training=False).shape) == SHAPE
    (decision,) = decisions.values()
    assert decision.summary["valid"].shape[0] == 0
    loss, _, of_weights = layer_gradients(layer, x, squares, training=True)
    assert loss == 0
    for path, gradient in of_weights.items():
        assert not gradient.any(), path


def test_all_losses():
    """The load loss too, which Keras' `min` would refuse."""
    router = routers.SoftmaxTokenChoiceRouter(4, noise_std=1.0)
    decision = router(np.zeros(SHAPE, "float32"), training=True)
    assert tuple(decision.summary["auxiliary_loss"].shape) == (0,)
    (loss,) = router.losses
    assert to_numpy(loss) == 0


def test_dispatch_and_combine():
    x = np.zeros((0, 4, 3), "float32")
    token, filled = ops.token_choice(x, 1, capacity=2)
    routing = ops.SlotRouting(token, filled, to_numpy(filled).astype("float32"))
    slots = ops.dispatch(x, routing)
    assert tuple(slots.shape) == (0, 3, 2, 3)
    assert tuple(ops.combine(slots, routing, 4).shape) == (0, 4, 3)
