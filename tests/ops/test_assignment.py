"""Slot assignment and the rule for ties (`ops/selection.py`), against the twins."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import given, settings

from keras_softmoe import ops
from keras_softmoe.ops import assignment
from keras_softmoe.ops.assignment import PRIORITIES
from tests.support import cases, twins
from tests.support.references import assert_all_equal, to_numpy

CAPACITIES = [1, 3]


def assert_same_slots(actual, expected):
    token, filled = map(to_numpy, actual)
    assert token.dtype == np.int32 and filled.dtype == np.bool_
    # An empty slot holds token 0, so the whole array is defined.
    assert_all_equal((token, filled), expected)


@given(
    scores=cases.scores(),
    num_selected_experts=st.sampled_from([1, 2, 3]),
    capacity=st.sampled_from(CAPACITIES),
    priority=st.sampled_from(["position", "max", "sum", "pair"]),
    seed=cases.seeds,
)
@settings(max_examples=20)
def test_token_choice_is_the_queue(
    scores, num_selected_experts, capacity, priority, seed
):
    num_selected_experts = min(num_selected_experts, scores.shape[-1])
    valid = cases.padding(scores.shape[:2], seed)
    actual = ops.token_choice(
        scores, num_selected_experts, capacity, priority=priority, valid=valid
    )
    expected = twins.token_choice(
        scores, num_selected_experts, capacity, priority, valid
    )
    assert_same_slots(actual, expected)


@pytest.mark.parametrize("priority", ["position", "max", "sum", "pair"])
def test_order_of_each_priority(priority):
    scores = cases.array("normal", (3, 12, 4), 5)
    valid = cases.padding((3, 12), 2)
    actual = ops.token_choice(scores, 2, 3, priority=priority, valid=valid)
    assert_same_slots(actual, twins.token_choice(scores, 2, 3, priority, valid))


@pytest.mark.parametrize("num_selected_experts", [1, 2])
def test_priority_by_numbers(num_selected_experts):
    scores = cases.array("normal", (2, 8, 4), 0)
    valid = cases.padding((2, 8), 1)
    # Ties among them go to the lower index.
    numbers = np.random.default_rng(0).integers(0, 3, (2, 8)).astype("float32")
    token, filled = map(
        to_numpy,
        ops.token_choice(
            scores, num_selected_experts, 2, priority=numbers, valid=valid
        ),
    )
    for g in range(2):
        order = sorted(range(8), key=lambda s: -numbers[g, s])
        expected_token, expected_filled = twins.token_choice(
            scores[g : g + 1, order],
            num_selected_experts,
            2,
            "position",
            valid[g : g + 1, order],
        )
        np.testing.assert_array_equal(filled[g], expected_filled[0])
        expected = np.where(expected_filled, np.array(order)[expected_token], 0)
        np.testing.assert_array_equal(token[g], expected[0])


@given(
    scores=cases.scores(shapes=[(2, 8, 4)]),
    priority=st.sampled_from(["position", "max", "sum", "pair"]),
    keep_fraction=st.sampled_from([0.01, 0.3, 0.5, 0.99]),
    seed=cases.seeds,
)
def test_skipped_tokens_choose_nothing(scores, priority, keep_fraction, seed):
    valid = cases.padding(scores.shape[:2], seed)
    actual = ops.token_choice(
        scores, 2, 3, priority=priority, keep_fraction=keep_fraction, valid=valid
    )
    expected = twins.token_choice(scores, 2, 3, priority, valid, keep_fraction)
    assert_same_slots(actual, expected)


def test_pairs_of_the_papers_example():
    # V-MoE, appendix C.1: two tokens whose choices weigh (0.7, 0.2) and (0.5, 0.4).
    # Both second choices go to expert 2, which has one slot.
    scores = np.array([[[0.7, 0.0, 0.2], [0.0, 0.5, 0.4]]], "float32")
    token, _ = ops.token_choice(scores, 2, 1, priority="pair")
    assert to_numpy(token)[0, 2, 0] == 1
    token, _ = ops.token_choice(scores, 2, 1, priority="max")
    assert to_numpy(token)[0, 2, 0] == 0


def test_random_priority_is_fair_and_follows_its_seed():
    # Four equal tokens, one slot: each gets it about once in four times.
    scores = np.ones((400, 4, 1), "float32")
    token, filled = ops.token_choice(scores, 1, 1, priority="random", seed=0)
    assert np.all(to_numpy(filled))
    share = np.bincount(to_numpy(token).ravel(), minlength=4) / 400
    assert np.all(np.abs(share - 0.25) < 0.08)
    again, _ = ops.token_choice(scores, 1, 1, priority="random", seed=0)
    np.testing.assert_array_equal(to_numpy(token), to_numpy(again))
    other, _ = ops.token_choice(scores, 1, 1, priority="random", seed=1)
    assert np.any(to_numpy(token) != to_numpy(other))


@given(scores=cases.scores(), capacity=st.sampled_from(CAPACITIES), seed=cases.seeds)
def test_expert_choice_takes_the_best_tokens(scores, capacity, seed):
    capacity = min(capacity, scores.shape[1])
    valid = cases.padding(scores.shape[:2], seed)
    actual = ops.expert_choice(scores, capacity, valid=valid)
    assert_same_slots(actual, twins.expert_choice(scores, capacity, valid))


@given(
    scores=cases.scores(shapes=[(2, 8, 4)]),
    num_selected_experts=st.sampled_from([1, 2, 4]),
    capacity=st.sampled_from(CAPACITIES),
    seed=cases.seeds,
)
def test_token_choice_invariants(scores, num_selected_experts, capacity, seed):
    valid = cases.padding(scores.shape[:2], seed)
    token, filled = map(
        to_numpy,
        ops.token_choice(
            scores, num_selected_experts, capacity, priority="max", valid=valid
        ),
    )
    dispatch, _ = twins.to_dense(token, filled, np.ones(token.shape), scores.shape[1])
    # A token is never twice with one expert, and has at most K slots in all.
    assert dispatch.sum(-1).max() <= 1
    slots_of_token = dispatch.sum((2, 3))
    assert slots_of_token.max() <= num_selected_experts
    if valid is not None:
        assert np.all(slots_of_token[~valid] == 0)
    # Slots fill from the first one on.
    assert np.all(filled[..., 1:] <= filled[..., :-1])


@pytest.mark.parametrize("priority", PRIORITIES)
def test_enough_capacity_drops_no_choice(priority):
    scores = cases.array("normal", (2, 8, 4), 0)
    _, filled = ops.token_choice(scores, 2, 8, priority=priority)
    assert to_numpy(filled).sum() == 2 * 8 * 2


@pytest.mark.parametrize("priority", PRIORITIES)
def test_priorities_agree_where_everybody_finds_a_seat(priority):
    # Every expert is the first choice of 2 tokens and the second of 2 others.
    scores = np.zeros((1, 8, 4), "float32")
    for s in range(8):
        scores[0, s, s % 4] = 0.6 + 0.01 * s
        scores[0, s, (s + 1) % 4] = 0.3 - 0.01 * s
    capacity = ops.expert_capacity(8 * 2, 4, 1.05)
    token, filled = map(
        to_numpy, ops.token_choice(scores, 2, capacity, priority=priority)
    )
    expected = {e: {s for s in range(8) if (e - s) % 4 < 2} for e in range(4)}
    for e in range(4):
        assert set(token[0, e][filled[0, e]]) == expected[e]


def test_batch_priority_keeps_the_confident_tokens():
    # All three tokens want expert 0, which has one slot: the most certain one, token
    # 2, gets it by priority, and token 0 by position.
    scores = np.array([[[0.6, 0.4], [0.7, 0.3], [0.9, 0.1]]], "float32")
    token, filled = ops.token_choice(scores, 1, 1, priority="max")
    assert to_numpy(token)[0, :, 0].tolist() == [2, 0]
    assert to_numpy(filled)[0, :, 0].tolist() == [True, False]
    token, _ = ops.token_choice(scores, 1, 1, priority="position")
    assert to_numpy(token)[0, 0, 0] == 0


def test_first_choices_come_before_second_choices():
    # Expert 0 is the second choice of tokens 0 and 1, and the first one of token 2:
    # token 2 is served before them.
    scores = np.array([[[0.4, 0.6], [0.4, 0.6], [0.6, 0.4]]], "float32")
    token, filled = ops.token_choice(scores, 2, 2)
    assert to_numpy(token)[0, 0].tolist() == [2, 0]
    assert np.all(to_numpy(filled))


@pytest.mark.parametrize("assign", ["token_choice", "expert_choice"])
def test_bfloat16_scores(assign):
    # Rounding makes ties; they are broken as in float32.
    rounded = keras.ops.cast(cases.array("normal", (2, 8, 4), 3), "bfloat16")
    if assign == "token_choice":
        actual = ops.token_choice(rounded, 2, 4, priority="max")
        expected = twins.token_choice(to_numpy(rounded), 2, 4, "max")
    else:
        actual = ops.expert_choice(rounded, 4)
        expected = twins.expert_choice(to_numpy(rounded), 4)
    assert_same_slots(actual, expected)


def test_ties_of_zeros_with_a_sign():
    """-0 and 0 are equal, so the lower index comes first."""
    scores = np.zeros((1, 12, 2), "float32")
    scores[0, [1, 2, 3, 5, 7]] = -0.0
    token, _ = ops.expert_choice(scores, capacity=5)
    np.testing.assert_array_equal(to_numpy(token), [[[0, 1, 2, 3, 4]] * 2])


def test_priorities_without_a_sign():
    scores = np.full((1, 4, 1), 0.5, "float32")
    priority = np.array([[1, 3, 0, 2]], "uint8")
    token, _ = ops.token_choice(scores, 1, capacity=2, priority=priority)
    np.testing.assert_array_equal(to_numpy(token), [[[1, 3]]])


@pytest.mark.parametrize("worst", [-np.inf, np.nan])
def test_real_tokens_before_padding_whatever_their_scores(worst):
    scores = np.zeros((1, 4, 1), "float32")
    scores[0, 1] = worst
    valid = np.array([[False, True, False, True]])
    token, filled = ops.expert_choice(scores, capacity=3, valid=valid)
    np.testing.assert_array_equal(to_numpy(filled), [[[True, True, False]]])
    np.testing.assert_array_equal(to_numpy(token), [[[3, 1, 0]]])


@pytest.mark.parametrize("worst", [-np.inf, np.nan])
@pytest.mark.parametrize("priority", ["max", "sum", "numbers"])
def test_real_tokens_are_kept_before_padding_whatever_their_scores(priority, worst):
    scores = np.full((1, 4, 2), worst, "float32")
    valid = np.array([[False, False, True, True]])
    if priority == "numbers":
        priority = np.full((1, 4), worst, "float32")
    token, filled = ops.token_choice(
        scores, 2, 4, priority=priority, valid=valid, keep_fraction=0.5
    )
    # Half of the two real ones is one, the first of equals.
    np.testing.assert_array_equal(to_numpy(filled).sum(-1), [[1, 1]])
    np.testing.assert_array_equal(to_numpy(token)[..., 0], [[2, 2]])


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 6, 1), (2, 8, 4), (1, 6, 3)])
def test_identity_is_round_robin(shape):
    assert_same_slots(assignment.identity(*shape), twins.identity(*shape))


@pytest.mark.parametrize(
    "call, received",
    [
        (lambda s: ops.token_choice(s, 5, 2), "5"),
        (lambda s: ops.token_choice(s, 0, 2), "0"),
        (lambda s: ops.token_choice(s, 1, 0), "0"),
        (lambda s: ops.token_choice(s, 1, 2, priority="best"), "best"),
        (lambda s: ops.token_choice(s, 1, 2, keep_fraction=0.0), "0.0"),
        (lambda s: ops.token_choice(s, 1, 2, keep_fraction=1.5), "1.5"),
        (lambda s: ops.expert_choice(s, 9), "9"),
        (lambda s: ops.expert_choice(s, 0), "0"),
        (lambda s: assignment.identity(1, 7, 4), "7"),
    ],
)
def test_bad_arguments_are_named(call, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        call(np.zeros((1, 8, 4), "float32"))
