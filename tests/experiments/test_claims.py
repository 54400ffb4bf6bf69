"""Claims of the papers, computed from made-up results."""

import dataclasses
import math

import numpy as np
import pytest

from experiments import router_study as study
from tests.experiments import made_up

BASE = {
    "dense": 0.30,
    "softmax_token_choice": 0.36,
    "sinkhorn_token_choice": 0.40,
    "softmax_expert_choice": 0.44,
    "sinkhorn_expert_choice": 0.45,
    "sparse_expert_choice": 0.46,
    "soft": 0.50,
    "soft_uniform": 0.49,
    "uniform_soft": 0.48,
    "uniform": 0.47,
    "identity": 0.46,
}
TOKEN, EXPERT, SINKHORN, DENSE, DISPATCH, BETWEEN, ONE, MORE, COMBINE, PLACE = range(10)


def as_the_papers(name, seed):
    """Accuracies that make every claim true; seeds shift all models alike."""
    family = next(f for f in sorted(BASE, key=len, reverse=True) if name.startswith(f))
    accuracy = BASE[family] + 0.1 * seed
    if name.startswith("soft_1s_64e"):
        accuracy += 0.01
    if name.startswith("softmax_expert_choice_c4"):
        accuracy += 0.03
    if name.endswith("_plan"):
        accuracy -= 0.02
    if "_at2-3" in name:
        accuracy += 0.02
    return accuracy


def found(accuracy=as_the_papers, scale=study.SMALL, **kwargs):
    return study.claims(made_up.results(scale, accuracy, **kwargs))


def test_claims_that_hold():
    claims = found()
    assert len(claims) == 10
    for claim in claims:
        for metric in ("upstream_accuracy", "10-shot"):
            assert claim.verdict(metric) == "yes", claim.text
    assert len(claims[DENSE].differences["upstream_accuracy"]) == 16


def test_claims_that_do_not_hold():
    for claim in found(lambda name, seed: -as_the_papers(name, seed)):
        assert claim.verdict("upstream_accuracy") == "no", claim.text


def test_claims_without_a_difference():
    for claim in found(lambda name, seed: 0.5):
        assert claim.verdict("upstream_accuracy") == "open", claim.text


def test_differences_are_taken_within_seeds():
    """Against the formulas of a paired comparison, written out."""
    rng = np.random.default_rng(0)
    noise = {}

    def accuracy(name, seed):
        noise.setdefault((name, seed), rng.uniform())
        return noise[name, seed] + 10 * seed

    claims = found(accuracy)

    def table(*names):
        # (seeds, models)
        return np.array([[accuracy(n, s) for n in names] for s in study.SMALL.seeds])

    soft = table("soft_4s", "soft_8s").mean(1)
    token = table(
        *(f"{a}_token_choice_k{k}" for a in ("softmax", "sinkhorn") for k in (1, 2))
    ).mean(1)
    expert = table(
        *(
            f"{a}_expert_choice_c{c}"
            for a in ("softmax", "sinkhorn", "sparse")
            for c in (1, 2)
        )
    ).mean(1)
    gain = [
        table(*(f"sinkhorn_{kind}_choice_{letter}{n}" for n in (1, 2))).mean(1)
        - table(*(f"softmax_{kind}_choice_{letter}{n}" for n in (1, 2))).mean(1)
        for kind, letter in (("token", "k"), ("expert", "c"))
    ]
    expected = {
        TOKEN: [soft - expert],
        EXPERT: [expert - token],
        SINKHORN: [gain[0], gain[0] - gain[1]],
        DISPATCH: [table("soft_uniform")[:, 0] - table("uniform_soft")[:, 0]],
    }
    for index, contrasts in expected.items():
        whole, halves = (
            claims[index].differences[metric]
            for metric in ("upstream_accuracy", "10-shot")
        )
        for by_seed, difference, half in zip(contrasts, whole, halves, strict=True):
            assert difference.seeds == 3
            np.testing.assert_allclose(difference.mean, by_seed.mean(), atol=1e-12)
            error = by_seed.std(ddof=1) / np.sqrt(3)
            np.testing.assert_allclose(difference.error, error, atol=1e-12)
            np.testing.assert_allclose(half.mean, by_seed.mean() / 2, atol=1e-12)


def changed(names, by):
    def accuracy(name, seed):
        return as_the_papers(name, seed) + by * name.startswith(names)

    return found(accuracy)


def test_to_hurt_less_is_no_help():
    claim = changed("sinkhorn_", -0.2)[SINKHORN]
    assert claim.verdict("upstream_accuracy") == "no"
    names = ("softmax_expert_choice_c4", "soft_16s")
    claim = changed(names, -0.2)[MORE]
    assert claim.verdict("upstream_accuracy") == "no"


def test_the_last_layers_beat_those_that_are_spread():
    claim = changed("softmax_token_choice_k1_32e_bpr", 0.2)[PLACE]
    assert claim.verdict("upstream_accuracy") == "no"


def test_the_claims_of_all_scales():
    """A scale can give models other names, and has other layers."""
    for scale in (study.SMOKE, study.SMALL, study.FULL):
        for claim in found(scale=scale):
            assert claim.verdict("10-shot") != "not run", (scale.name, claim.text)
        between = found(scale=scale)[BETWEEN].differences["10-shot"]
        assert len(between) == 4


def test_two_standard_errors_decide():
    # Differences of 1, 1 + x, 1 - x: a mean of 1 and an error of x / sqrt(3).
    def accuracy(spread):
        wobble = (0, spread, -spread)
        return lambda name, seed: (1 + wobble[seed]) * (name == "soft_uniform")

    verdicts = [
        found(accuracy(spread))[DISPATCH].verdict("upstream_accuracy")
        for spread in (0.86, 0.87)
    ]
    assert verdicts == ["yes", "open"]


def test_one_seed_decides_nothing():
    scale = dataclasses.replace(study.SMALL, seeds=(0,))
    for claim in found(scale=scale):
        for difference in claim.differences["upstream_accuracy"]:
            assert difference.seeds == 1 and math.isnan(difference.error)
        assert claim.verdict("upstream_accuracy") == "open"


def test_cells_that_are_missing():
    def accuracy(name, seed):
        lacks = name == "uniform_soft" and seed == 1
        return None if lacks or name == "soft_8s" else as_the_papers(name, seed)

    claims = found(accuracy)
    assert claims[TOKEN].verdict("10-shot") == "not run"
    assert claims[EXPERT].verdict("10-shot") == "yes"
    (difference,) = claims[DISPATCH].differences["10-shot"]
    assert difference.seeds == 2


def test_models_that_diverged():
    results = made_up.results(study.SMALL, as_the_papers)
    results["cells"]["soft_uniform"]["2"] = {"diverged": True}
    (difference,) = study.claims(results)[DISPATCH].differences["upstream_accuracy"]
    assert difference.seeds == 2


@pytest.mark.parametrize("name", list(study.configurations(study.SMALL)))
def test_part_of_the_studies(name):
    of_study = {
        "routers": {TOKEN, EXPERT, SINKHORN, DENSE, DISPATCH, BETWEEN},
        "combine": {COMBINE},
        "experts": {ONE},
        "slots": {MORE},
        "placement": {PLACE},
        "learning_rate": set(),
    }
    claims = found(studies=(name,))
    run = {i for i, c in enumerate(claims) if c.verdict("10-shot") != "not run"}
    assert run == of_study[name]
