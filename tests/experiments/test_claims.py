"""Claims of the papers, computed from made-up results."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from experiments import router_study as study
from tests.support import made_up_study
from tests.support.close import assert_near

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
    "permuted_identity": 0.40,
}
SOFT_HEADLINE, TOKEN_HEADLINE, SOFT_TOKEN = 0, 1, 2
SOFT_LAST, TOKEN_LAST = 3, 4
TOKEN, EXPERT, AFFINITY, SINKHORN, DENSE, TWO = range(5, 11)
DISPATCH, UNIFORM, IDENTITY, POSITION = range(11, 15)
SCALE, PRIORITY, DATA, ONE, DROPPED, MORE, COMBINE = range(15, 22)
FEWER_LAYERS, SPREAD, MORE_LAYERS = range(22, 25)


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
    if "_scale" in name:
        accuracy -= 0.01
    if "_k2" in name:
        accuracy += 0.01
    if "choice" in name and "_data" in name:
        accuracy -= 0.02
    if name.endswith("_bpr"):
        accuracy += 0.03 if "_c0.25" in name else 0.01
    return accuracy


def found(accuracy=as_the_papers, scale=study.SMALL, **kwargs):
    return study.claims(made_up_study.results(scale, accuracy, **kwargs))


def test_claims_that_hold():
    claims = found()
    assert len(claims) == 25
    for claim in claims:
        dropping = claim is claims[DROPPED]
        metrics = ["dropped"] if dropping else ["upstream_accuracy", "5-shot"]
        assert list(claim.differences) == metrics
        for metric in metrics:
            assert claim.verdict(metric) == "yes", claim.text
    assert len(claims[DENSE].differences["upstream_accuracy"]) == 6
    for claim in (SOFT_HEADLINE, SOFT_LAST, TOKEN_LAST):
        (soft,) = claims[claim].differences["upstream_accuracy"]
        assert soft.seeds == 6
    assert "last half" in claims[SOFT_LAST].text


def test_claims_that_do_not_hold():
    for claim in found(lambda name, seed: -as_the_papers(name, seed)):
        if "dropped" not in claim.differences:
            assert claim.verdict("upstream_accuracy") == "no", claim.text


def test_claims_without_a_difference():
    for claim in found(lambda name, seed: 0.5):
        if "dropped" not in claim.differences:
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

    soft = table("soft_1s", "soft_2s").mean(1)
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
    allocation = sum(
        table(*(f"{a}_expert_choice_c{c}" for c in (1, 2))).mean(1)
        - table(*(f"{a}_token_choice_k{k}" for k in (1, 2))).mean(1)
        for a in ("softmax", "sinkhorn")
    )
    allocation = allocation / 2
    expected = {
        TOKEN: [soft - expert],
        EXPERT: [expert - token],
        SINKHORN: [gain[0], gain[0] - gain[1]],
        AFFINITY: [
            allocation - sum(gain) / 2,
            allocation + sum(gain) / 2,
        ],
        DISPATCH: [
            table("soft_uniform_at2-3")[:, 0] - table("uniform_soft_at2-3")[:, 0]
        ],
    }
    for index, contrasts in expected.items():
        whole, halves = (
            claims[index].differences[metric]
            for metric in ("upstream_accuracy", "5-shot")
        )
        for by_seed, difference, half in zip(contrasts, whole, halves, strict=True):
            assert difference.seeds == 3
            assert_near(difference.mean, by_seed.mean(), atol=1e-12)
            error = by_seed.std(ddof=1) / np.sqrt(3)
            assert_near(difference.error, error, atol=1e-12)
            interval = stats.ttest_1samp(by_seed, 0).confidence_interval()
            ends = difference.mean + difference.margin * np.array([-1, 1])
            np.testing.assert_allclose(ends, interval)
            p = stats.ttest_1samp(by_seed, 0).pvalue
            np.testing.assert_allclose(difference.p, p)
            assert_near(half.mean, by_seed.mean() / 2, atol=1e-12)


def changed(names, by):
    def accuracy(name, seed):
        return as_the_papers(name, seed) + by * name.startswith(names)

    return found(accuracy)


def test_to_hurt_less_is_no_help():
    claim = changed("sinkhorn_", -0.2)[SINKHORN]
    assert claim.verdict("upstream_accuracy") == "no"
    names = ("softmax_expert_choice_c4", "soft_4s")
    claim = changed(names, -0.2)[MORE]
    assert claim.verdict("upstream_accuracy") == "no"


def test_the_last_layers_beat_each_other_place():
    claims = changed("softmax_token_choice_k1_bpr", 0.2)
    assert claims[SPREAD].verdict("upstream_accuracy") == "no"
    for other in (FEWER_LAYERS, MORE_LAYERS):
        assert claims[other].verdict("upstream_accuracy") == "yes"
    sizes = [len(c.differences["5-shot"]) for c in claims[FEWER_LAYERS:]]
    assert sizes == [6, 3, 3]


def test_the_claims_of_all_scales():
    """A scale can give models other names, and has other layers."""
    for scale in (study.SMOKE, study.SMALL, study.ANYWHERE, study.FULL):
        claims = found(scale=scale)
        for claim in claims:
            for metric in claim.differences:
                assert claim.verdict(metric) != "not run", (scale.name, claim.text)
        for claim in (UNIFORM, IDENTITY):
            assert len(claims[claim].differences["5-shot"]) == 2


def test_t_intervals_decide():
    # Differences of 1, 1 + x, 1 - x: a mean of 1 and an error of x / sqrt(3), which
    # counts 4.303 times with two degrees of freedom.
    def accuracy(spread):
        wobble = (0, spread, -spread)
        return lambda name, seed: (1 + wobble[seed]) * name.startswith("soft_uniform")

    studies = ("fixed",)
    verdicts = [
        found(accuracy(spread), studies=studies)[DISPATCH].verdict("upstream_accuracy")
        for spread in (0.40, 0.41)
    ]
    assert verdicts == ["yes", "open"]


def test_holm_s_correction():
    rng = np.random.default_rng(1)
    noise = {}

    def accuracy(name, seed):
        noise.setdefault((name, seed), rng.normal(scale=0.005))
        return as_the_papers(name, seed) + noise[name, seed]

    claims = found(accuracy)
    # One family of all metrics. Two claims look at Soft MoE over the dense model: one
    # test of each metric.
    every = {
        (m, d) for c in claims for m, found in c.differences.items() for d in found
    }
    assert {"upstream_accuracy", "5-shot", "dropped"} == {m for m, _ in every}
    every = sorted(d for _, d in every)
    p = np.array([d.p for d in every])
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    np.testing.assert_allclose([d.adjusted_p for d in every], adjusted)
    survive = [
        c.survives("upstream_accuracy") for c in claims if c is not claims[DROPPED]
    ]
    assert any(survive) and not all(survive)
    for claim in claims:
        for metric in claim.differences:
            clear = [d.adjusted_p < 0.05 for d in claim.differences[metric]]
            if claim.verdict(metric) == "yes":
                assert claim.survives(metric) == all(clear)


def test_one_seed_decides_nothing():
    scale = dataclasses.replace(study.SMALL, seeds=(0,), more_seeds=())
    for claim in found(scale=scale):
        for metric in claim.differences:
            for difference in claim.differences[metric]:
                assert difference.seeds == 1 and math.isnan(difference.error)
            assert claim.verdict(metric) == "open"
            assert not claim.survives(metric)


def test_cells_that_are_missing():
    def accuracy(name, seed):
        lacks = name == "uniform_soft_at2-3" and seed == 1
        return None if lacks or name == "soft_2s" else as_the_papers(name, seed)

    claims = found(accuracy)
    assert claims[TOKEN].verdict("5-shot") == "not run"
    assert claims[EXPERT].verdict("5-shot") == "yes"
    (difference,) = claims[DISPATCH].differences["5-shot"]
    assert difference.seeds == 2


def test_models_that_diverged():
    results = made_up_study.results(study.SMALL, as_the_papers)
    results["cells"]["soft_uniform_at2-3"]["2"] = {"diverged": True, "curve": []}
    (difference,) = study.claims(results)[DISPATCH].differences["upstream_accuracy"]
    assert difference.seeds == 2


@pytest.mark.parametrize("name", list(study.configurations(study.SMALL)))
def test_part_of_the_studies(name):
    of_study = {
        "learning_rate": set(),
        "close_rates": set(),
        "headline": {
            SOFT_HEADLINE,
            TOKEN_HEADLINE,
            SOFT_TOKEN,
            SOFT_LAST,
            TOKEN_LAST,
        },
        "routers": {TOKEN, EXPERT, AFFINITY, SINKHORN, DENSE, TWO},
        "fixed": {DISPATCH, UNIFORM, IDENTITY, POSITION},
        "initial_scale": {SCALE},
        "priority": {PRIORITY},
        "data": {DATA},
        "combine": {COMBINE},
        "experts": {ONE, DROPPED},
        "slots": {MORE},
        "placement": {FEWER_LAYERS, SPREAD, MORE_LAYERS},
    }
    claims = found(studies=(name,))
    run = {i for i, c in enumerate(claims) if any(c.differences.values())}
    assert run == of_study[name]
