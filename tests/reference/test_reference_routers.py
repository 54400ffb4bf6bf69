"""Sparse routers against the released code's numbers (files b and c)."""

import itertools

import keras
import numpy as np
import pytest

from keras_softmoe import ops, routers
from tests.reference.test_reference_ops import check_indices
from tests.support.gradients import outputs
from tests.support.references import (
    Reference,
    affine_output,
    build,
    check_auxiliary_loss,
    check_dense,
    check_statistics,
    finish,
    losses_of,
    slot_routing,
)

TOKEN_CHOICE_FILES = [f"b_tokens_choice_{s}" for s in ("even", "odd", "skewed")]
EXPERT_CHOICE_FILES = [f"c_expert_choice_{s}" for s in ("even", "odd")]


def by_capacity(reference, cases, make):
    """A router for each capacity that the settings of cases come to, and no more.

    Whatever else they say of the capacity has no other effect: many routings are one.
    """
    found = {}
    for case in cases:
        settings = reference.config["cases"][case]
        router, capacity = make(settings), settings["capacity"]
        assert router.capacity(reference.given("inputs").shape[1]) == capacity
        found.setdefault(capacity, router)
    return {c: build(router, reference)[0] for c, router in found.items()}


def rounding(settings):
    return {
        "capacity_factor": settings["capacity_factor"],
        "rounding": settings["ceil_or_round"],
        "multiple_of": settings["multiple_of"],
    }


TOKEN_CHOICE_CASES = [
    f"k{k}_bpr{b}_cf{cf}_{r}_m{m}"
    for k, b, cf, r, m in itertools.product(
        (1, 2), (0, 1), (0.5, 1.0, 1.05), ("ceil", "round"), (None, 1, 4)
    )
]
NOISY_TOKEN_CHOICE = [f"noisy_k{k}_bpr1_cf1.05_ceil_m1" for k in (1, 2)]


def token_choice_router(reference, settings, **kwargs):
    return routers.SoftmaxTokenChoiceRouter(
        reference.config["E"],
        num_selected_experts=settings["k"],
        priority="max" if settings["batch_priority"] else "position",
        **rounding(settings),
        losses=losses_of(
            reference.config["loss_weights"], kwargs.get("noise_std", 1.0)
        ),
        **kwargs,
    )


@pytest.mark.parametrize("name", TOKEN_CHOICE_FILES)
@pytest.mark.parametrize("k, bpr", itertools.product((1, 2), (0, 1)))
def test_token_choice(name, k, bpr):
    reference = Reference(name)
    cases = [c for c in TOKEN_CHOICE_CASES if c.startswith(f"k{k}_bpr{bpr}_")]
    built = by_capacity(reference, cases, lambda s: token_choice_router(reference, s))
    priority = "max" if bpr else "position"

    def compute(inputs):
        """All cases at once, in one program where programs are compiled."""
        gates, tokens = inputs
        found = {}
        for capacity, router in built.items():
            # From the saved gates: exactly the same slots.
            seats = ops.token_choice(gates, k, capacity, priority=priority)
            # From the tokens, through the router.
            decision = router(tokens)
            affine = affine_output(tokens, decision.routing)
            found[capacity] = slot_routing(*seats, gates), decision, affine
        return found

    found = outputs(compute, [reference.given("gates"), reference.given("inputs")])
    for case in cases:
        capacity = reference.config["cases"][case]["capacity"]
        routing, decision, affine = found[capacity]
        check_dense(reference, f"{case}/", routing)
        check_indices(
            routing,
            reference.given(f"{case}/indices"),
            reference.given(f"{case}/indices_combine_weights"),
        )
        reference.check("gates", decision.summary["probabilities"])
        check_dense(reference, f"{case}/", decision.routing)
        if f"{case}/affine_output" in reference:
            reference.check(f"{case}/affine_output", affine)
        metrics = f"metrics_det_k{k}"
        probabilities = decision.summary["probabilities"]
        reference.check(f"{metrics}/gshard_loss", ops.gshard_loss(probabilities))
        reference.check(
            f"{metrics}/importance_loss", ops.importance_loss(probabilities)
        )
        reference.check(f"{metrics}/auxiliary_loss", decision.summary["auxiliary_loss"])
    finish(reference, f"k{k}_bpr{bpr}_")
    finish(reference, f"metrics_det_k{k}/")


@pytest.mark.parametrize("name", TOKEN_CHOICE_FILES)
@pytest.mark.parametrize("case", NOISY_TOKEN_CHOICE)
def test_noisy_token_choice(name, case, set_noise):
    reference = Reference(name)
    settings = reference.config["cases"][case.removeprefix("noisy_")]
    router, tokens = build(
        token_choice_router(reference, settings, noise_std=1.0), reference
    )
    set_noise(reference.given(f"{case}/noise_raw"))

    def compute(inputs):
        tokens, noise = inputs
        with keras.StatelessScope(collect_losses=True):
            routing, summary = router(tokens, training=True)
            (added,) = router.losses
        logits = summary["logits"]
        losses = {
            "auxiliary_loss": summary["auxiliary_loss"],
            "importance_loss": ops.importance_loss(keras.ops.softmax(logits)),
            "gshard_loss": ops.gshard_loss(summary["probabilities"]),
            "load_loss": ops.load_loss(
                logits, logits + noise, settings["k"], 1.0 / router.num_experts
            ),
        }
        return routing, summary["probabilities"], losses, added

    noise = reference.given(f"{case}/logits_noise")
    routing, gates, losses, added = outputs(compute, [tokens, noise])
    reference.check(f"{case}/gates", gates)
    check_dense(reference, f"{case}/", routing)
    for loss, value in losses.items():
        reference.check(f"{case}/metrics/{loss}", value)
    np.testing.assert_allclose(added, losses["auxiliary_loss"].mean(), rtol=1e-5)
    finish(reference, f"{case}/")


EXPERT_CHOICE_CASES = [
    *(
        f"cf{cf}_{r}_m{m}"
        for cf, r, m in itertools.product(
            (0.5, 1.0, 1.05), ("ceil", "round"), (None, 1, 4)
        )
    ),
    "cf2.0_round_m1",
]
NOISY_EXPERT_CHOICE = "noisy_cf1.0_round_m1"


@pytest.mark.parametrize("name", EXPERT_CHOICE_FILES)
def test_expert_choice(name):
    reference = Reference(name)
    built = by_capacity(
        reference,
        EXPERT_CHOICE_CASES,
        lambda settings: routers.SoftmaxExpertChoiceRouter(
            reference.config["E"], **rounding(settings)
        ),
    )

    def compute(inputs):
        gates, tokens = inputs
        found = {}
        for capacity, router in built.items():
            routing = slot_routing(*ops.expert_choice(gates, capacity), gates)
            decision = router(tokens)
            affine = affine_output(tokens, decision.routing)
            found[capacity] = routing, decision, affine
        return found

    found = outputs(compute, [reference.given("gates"), reference.given("inputs")])
    for case in EXPERT_CHOICE_CASES:
        capacity = reference.config["cases"][case]["capacity"]
        routing, decision, affine = found[capacity]
        check_dense(reference, f"{case}/", routing)
        check_expert_choice(reference, f"{case}/", decision, affine)
        reference.check("gates", decision.summary["probabilities"])
        finish(reference, f"{case}/")


def check_expert_choice(reference, case, decision, affine):
    check_dense(reference, case, decision.routing)
    check_statistics(
        reference, f"{case}metrics/", decision.routing, decision.summary["selection"]
    )
    check_auxiliary_loss(
        reference, f"{case}metrics/auxiliary_loss", decision.summary["auxiliary_loss"]
    )
    if f"{case}affine_output" in reference:
        reference.check(f"{case}affine_output", affine)


@pytest.mark.parametrize("name", EXPERT_CHOICE_FILES)
def test_noisy_expert_choice(name, set_noise):
    reference = Reference(name)
    case = f"{NOISY_EXPERT_CHOICE}/"
    settings = reference.config["cases"]["cf1.0_round_m1"]
    router, tokens = build(
        routers.SoftmaxExpertChoiceRouter(
            reference.config["E"], noise_std=1.0, **rounding(settings)
        ),
        reference,
    )
    noise = reference.given(f"{case}noise_raw")
    reference.check(f"{case}logits_noise", noise / router.num_experts)
    set_noise(noise)

    def compute(tokens):
        decision = router(tokens, training=True)
        return decision, affine_output(tokens, decision.routing)

    decision, affine = outputs(compute, tokens)
    reference.check(f"{case}gates", decision.summary["probabilities"])
    check_expert_choice(reference, case, decision, affine)
    finish(reference, case)


@pytest.mark.parametrize("name", EXPERT_CHOICE_FILES)
def test_expert_choice_beyond_the_group_raises(name):
    reference = Reference(name)
    (case,) = (c for c, s in reference.config["cases"].items() if "raises" in s)
    factor = float(case.split("_")[0].removeprefix("cf"))
    gates = reference.given("gates")
    capacity = ops.expert_capacity(
        gates.shape[1], gates.shape[2], factor, multiple_of=1
    )
    with pytest.raises(ValueError, match="Received"):
        ops.expert_choice(gates, capacity)
