"""Routers with given weights, the directions compared with tokens."""

import numpy as np
import pytest

from keras_softmoe import routers
from tests.support import cases
from tests.support.close import assert_near
from tests.support.references import to_numpy
from tests.support.sparse_routers import SPARSE, WIDTH, build


def directions(number):
    """Vectors of length three."""
    vectors = cases.array("normal", (1, number, WIDTH), 1)[0]
    return 3 * vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def logits(router):
    return to_numpy(router(cases.TOKENS).summary["logits"]).reshape(2, 8, -1)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name):
    router = build(name)
    assert router.num_directions == 4 and not router.normalizes_tokens
    router.set_directions(directions(4))
    assert_near(logits(router), cases.TOKENS @ directions(4).T, atol=1e-4)


@pytest.mark.parametrize("normalize", [True, False])
def test_soft(normalize):
    router = routers.SoftRouter(4, slots_per_expert=2, normalize=normalize)
    router.build(cases.TOKENS.shape)
    assert router.num_directions == 8 and router.normalizes_tokens == normalize
    lengths = np.linalg.norm(to_numpy(router.mu), axis=0)
    router.set_directions(directions(8))
    tokens = cases.TOKENS
    if normalize:
        tokens = tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)
        # As long as new ones, so that a step of training turns them as far.
        given = np.linalg.norm(to_numpy(router.mu), axis=0)
        np.testing.assert_allclose(given, 0.5, rtol=1e-5)
        assert lengths.mean() == pytest.approx(0.5, rel=0.3)
    assert_near(logits(router), tokens @ directions(8).T, atol=1e-4)


@pytest.mark.parametrize(
    "router",
    [
        routers.IdentityRouter(4),
        routers.SoftRouter(4, dispatch="uniform", combine="uniform"),
    ],
    ids=lambda router: type(router).__name__,
)
def test_without_weights(router):
    router.build(cases.TOKENS.shape)
    assert router.num_directions == 0
    with pytest.raises(ValueError, match=r"no weights.*of shape \(4, "):
        router.set_directions(directions(4))


def test_one_kernel_for_all_tokens():
    assert routers.LIMoERouter(4).num_directions == 4
    assert routers.LIMoERouter(4, per_modality=True).num_directions == 0
