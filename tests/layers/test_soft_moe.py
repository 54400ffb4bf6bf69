"""What sets Soft MoE apart: images are independent, slots start as broad averages."""

import numpy as np
import pytest

from keras_softmoe import layers
from tests.support import twins
from tests.support.close import assert_near
from tests.support.layer_checks import normal, randomize
from tests.support.references import to_numpy


@pytest.mark.parametrize("others", ["different", "zeros", "huge"])
def test_image_does_not_depend_on_its_batch(others):
    layer = layers.SoftMoE(4, mlp_dim=6, slots_per_expert=2)
    layer.build((None, 5, 8))
    randomize(layer)
    image = normal((1, 5, 8))
    alone = to_numpy(layer(image))
    rest = {
        "different": normal((6, 5, 8), 1),
        "zeros": np.zeros((6, 5, 8), "float32"),
        "huge": 1e4 * normal((6, 5, 8), 1),
    }[others]
    for position in (0, 6):
        batch = np.insert(rest, position, image[0], axis=0)
        assert_near(to_numpy(layer(batch))[position], alone[0], rtol=1e-5, atol=1e-5)


def test_slots_start_as_broad_averages():
    # Normalized logits are small at any width. Without the normalization, or with a
    # softmax over the wrong axis, single tokens would fill the slots.
    router = layers.SoftMoE(196, mlp_dim=4)
    router.build((None, 196, 512))
    tokens = normal((2, 196, 512))
    tokens = (tokens - tokens.mean(-1, keepdims=True)) / tokens.std(-1, keepdims=True)
    dispatch = to_numpy(router.moe.router(tokens).routing.dispatch)
    # (G, S, E, C) to the largest weight of each slot
    assert dispatch.shape == (2, 196, 196, 1)
    assert dispatch.max(axis=1).mean() < 0.02
    np.testing.assert_allclose(dispatch.sum(axis=1), 1.0, rtol=1e-4)


def test_slots_mix_the_tokens_themselves():
    # Ten times longer tokens are routed in the same way, and their slots are ten times
    # longer: what is mixed is not normalized.
    layer = layers.SoftMoE(3, mlp_dim=6)
    layer.build((None, 5, 8))
    randomize(layer)
    tokens = normal((2, 5, 8))
    seen = []
    layer.moe.experts.call = lambda slots, training: (
        seen.append(to_numpy(slots)) or slots
    )
    layer(tokens)
    layer(10 * tokens)
    assert_near(seen[1], 10 * seen[0], rtol=1e-4, atol=1e-4)
    dispatch, _ = twins.soft_router(
        tokens, to_numpy(layer.moe.router.mu), to_numpy(layer.moe.router.scale)
    )
    assert_near(seen[0], twins.dispatch_tokens(tokens, dispatch), rtol=1e-4, atol=1e-5)
