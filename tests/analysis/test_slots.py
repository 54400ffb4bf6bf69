"""Inner products of slot parameters, one pair after the other."""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, layers, routers
from keras_softmoe.analysis._slots import SlotCorrelation
from tests.models import tiny
from tests.references import to_numpy


def test_cosines_of_all_pairs():
    router = routers.SoftRouter(3, slots_per_expert=2)
    backbone = tiny.backbone(moe_layers=(0, 1), router=router)
    found = analysis.slot_correlation(backbone)
    assert list(found) == [0, 1]
    for block, router in backbone.routers.items():
        mu = to_numpy(router.mu)
        expected = np.empty((6, 6))
        within, between = [], []
        for e, c, f, d in np.ndindex(3, 2, 3, 2):
            one, other = mu[:, e, c], mu[:, f, d]
            cosine = one @ other / np.sqrt((one @ one) * (other @ other))
            expected[2 * e + c, 2 * f + d] = cosine
            if e != f:
                between.append(cosine)
            elif c != d:
                within.append(cosine)
        np.testing.assert_allclose(found[block].cosine, expected, atol=1e-5)
        np.testing.assert_allclose(found[block].within, np.mean(within), atol=1e-5)
        np.testing.assert_allclose(found[block].between, np.mean(between), atol=1e-5)
        assert found[block].num_experts == 3


def test_one_slot_or_one_expert():
    one_slot = SlotCorrelation(np.eye(4, dtype="float32"), 1)
    assert np.isnan(one_slot.within) and one_slot.between == 0
    one_expert = SlotCorrelation(np.eye(4, dtype="float32"), 4)
    assert np.isnan(one_expert.between) and one_expert.within == 0


def test_uniform_blocks_have_no_parameters():
    inputs = keras.Input((4, 6))
    uniform = routers.SoftRouter(2, dispatch="uniform", combine="uniform")
    x = layers.MoE(uniform, 8, name="uniform")(inputs)
    model = keras.Model(inputs, layers.SoftMoE(2, 8, name="soft")(x))
    assert list(analysis.slot_correlation(model)) == ["soft"]
    with pytest.raises(
        ValueError, match=r"the weight `mu`.*Received: .*\['SoftRouter'\]"
    ):
        analysis.slot_correlation(keras.Model(inputs, x))
