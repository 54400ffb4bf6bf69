"""`ExpertRaceRouter`: pairs of token and expert compete."""

import keras
import numpy as np
import pytest

from keras_softmoe import ops, routers
from tests.support import cases, twins
from tests.support.close import assert_near
from tests.support.layer_checks import reloaded
from tests.support.references import assert_all_equal, to_numpy
from tests.support.sparse_routers import WIDTH, build, call, call_in_training


def test_training_and_threshold_are_their_twins():
    """Of a few steps, with padding, a group of padding only, and too few slots."""
    router = build("expert_race", capacity_factor=1.0, threshold_momentum=0.6)
    router.threshold.assign(9.0)  # The first step sets it.
    step, threshold = call_in_training(router), None
    for seed in range(1, 6):
        tokens = cases.array("normal", (3, 8, WIDTH), seed)
        valid = cases.padding((3, 8), seed)
        valid = np.ones((3, 8), bool) if valid is None else valid
        groups = [0, 2] if seed == 3 else [0, 1, 2]
        if seed == 3:
            valid[1] = False
        (token, filled, gate), summary = step(
            np.where(valid[..., None], tokens, 50.0), valid
        )
        scores = summary["logits"]
        lowest = twins.lowest_winners(scores[groups], 2, valid[groups])
        seats = twins.race(scores[groups], lowest, 4, valid[groups])
        assert_all_equal((token[groups], filled[groups]), seats)
        assert filled.shape[-1] == 4
        assert filled[groups].sum() == filled.sum()
        np.testing.assert_allclose(gate, twins.gates(scores, token, filled), rtol=1e-6)
        won = scores[groups] >= np.reshape(lowest, (-1, 1, 1))
        loss = 1e-4 * twins.router_similarity_loss(
            twins.softmax(scores[groups]), won, valid[groups]
        )
        np.testing.assert_allclose(summary["auxiliary_loss"][groups], loss, rtol=2e-5)
        # The mean of the first steps, then a moving average.
        rate = max(0.4, 1 / seed)
        mean = np.mean(lowest)
        threshold = mean if seed == 1 else threshold + rate * (mean - threshold)
        assert_near(to_numpy(router.threshold), threshold, atol=2e-6)
    assert to_numpy(router.num_thresholds) == 5


def test_without_a_mask_as_many_pairs_win():
    router = build("expert_race", capacity_factor=None)
    tokens = cases.array("normal", (3, 8, WIDTH), 0)
    _, everything = call(router, tokens, np.ones((3, 8), bool), training=True)
    _, unmasked = call(router, tokens, training=True)
    for summary in (everything, unmasked):
        np.testing.assert_array_equal(summary["load"].sum(-1), [16, 16, 16])
    np.testing.assert_array_equal(everything["load"], unmasked["load"])


def test_predictions_depend_on_no_other_token():
    router = build("expert_race", capacity_factor=None)
    taken = []
    three = cases.TOKENS[:, :3]
    for group in (cases.TOKENS, three, np.concatenate([three, three], 1)):
        (token, filled, gate), _ = call(router, group)
        dispatch, _ = twins.to_dense(token, filled, gate, group.shape[1])
        taken.append(dispatch.sum(-1)[:, :3])
    np.testing.assert_array_equal(taken[1], taken[0])
    np.testing.assert_array_equal(taken[2], taken[0])
    assert 0 < taken[0].mean() < 1


def test_when_the_threshold_stays():
    for settings, training in (
        ({}, False),
        ({"trainable": False}, True),
        ({"random_logits": True}, True),
    ):
        router = build("expert_race", **settings)
        before = [to_numpy(v) for v in (router.threshold, router.num_thresholds)]
        router(cases.TOKENS, training=training)
        after = [to_numpy(v) for v in (router.threshold, router.num_thresholds)]
        assert after == before, settings
    # Noise is not on the scale of the threshold: pairs compete in predictions, too.
    router = build("expert_race", random_logits=True, capacity_factor=None)
    router.threshold.assign(50.0)
    _, summary = call(router, cases.TOKENS)
    np.testing.assert_array_equal(summary["load"].sum(-1), [16, 16])


def test_files_keep_the_threshold(tmp_path):
    router = routers.ExpertRaceRouter(4, name="router")
    inputs = keras.Input((8, WIDTH))
    model = keras.Model(inputs, router(inputs).routing.gate)
    router.threshold.assign(1.5)
    revived = reloaded(model, tmp_path, compile=False)
    assert to_numpy(revived.get_layer("router").threshold) == 1.5
    found, expected = (to_numpy(m(cases.TOKENS)) for m in (revived, model))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda: routers.ExpertRaceRouter(4, 5), "num_selected_experts=5"),
        (
            lambda: routers.ExpertRaceRouter(4, threshold_momentum=1.0),
            "threshold_momentum=1.0",
        ),
        (
            lambda: routers.SoftmaxTokenChoiceRouter(
                4, losses=[routers.RoutingLoss(ops.router_similarity_loss)]
            ),
            "losses with.*router_similarity_loss",
        ),
    ],
)
def test_bad_settings(make, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        make()
