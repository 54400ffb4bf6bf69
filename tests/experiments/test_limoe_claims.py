"""Claims about LIMoE, from made-up runs, and the page of all claims."""

import json

import pytest
from scipy import stats

from experiments import claims as all_claims, limoe_claims

PRESETS, ENTROPY, DROPPED, EXPERTS, ALONE = range(5)
MORE, CHOICES, GROUPS, PRIORITY = range(5, 9)


def run(variant, seed, value):
    return {
        "variant": variant,
        "seed": seed,
        "zero_shot_new_of_64": value,
        "image_to_text_recall_at_1": value / 2,
        "text_dropped": value,
        "text_experts": [value, 3 * value],
    }


@pytest.fixture
def sweeps(tmp_path, monkeypatch):
    monkeypatch.setattr(limoe_claims, "RESULTS", tmp_path)

    def write(sweep, values):
        found = [
            run(variant, seed, value)
            for variant, by_seed in values.items()
            for seed, value in enumerate(by_seed)
        ]
        (tmp_path / f"{sweep}.json").write_text(json.dumps(found))

    return write


def test_differences_are_taken_within_seeds(sweeps):
    two, one = (0.5, 0.8, 0.6), (0.4, 0.6, 0.5)
    sweeps(
        "choices", {"num_selected_experts=2": two, "num_selected_experts=1": (*one, 0)}
    )
    claims = limoe_claims.claims()
    (found,) = claims[CHOICES].differences["zero_shot_new_of_64"]
    by_seed = [x - y for x, y in zip(two, one, strict=True)]
    assert found.mean == pytest.approx(sum(by_seed) / 3) and found.seeds == 3
    interval = stats.ttest_1samp(by_seed, 0).confidence_interval()
    assert found.mean - found.margin == pytest.approx(interval.low)
    (half,) = claims[CHOICES].differences["image_to_text_recall_at_1"]
    assert half.mean == pytest.approx(found.mean / 2)
    for claim in (MORE, GROUPS, PRIORITY, ENTROPY, EXPERTS, ALONE, DROPPED):
        assert all(
            claims[claim].verdict(metric) == "not run"
            for metric in claims[claim].differences
        )


def test_blocks_are_averaged(sweeps):
    runs = {"both": (2.0,), "S=6": (3.5,)}
    alone = {"entropy,S=1": (1.0,), "entropy": (2.5,), "entropy,S=6": (3.0,)}
    sweeps("losses", runs | alone)
    claims = limoe_claims.claims()
    found = claims[EXPERTS].differences["text_experts"]
    # Means of the value and three times the value, in hundreds.
    assert [d.mean for d in found] == pytest.approx([0.03])
    found = claims[ALONE].differences["text_experts"]
    assert [d.mean for d in found] == pytest.approx([0.01, 0.03])


def test_committed_presets_are_compared():
    (found,) = limoe_claims.claims()[PRESETS].differences["zero_shot_new_of_64"]
    assert found.seeds == 3


def test_the_page_names_every_paper():
    text = all_claims.text()
    for paper in ("Soft MoE", "V-MoE", "LIMoE", "router study"):
        assert paper in text


def test_the_page_begins_with_all_verdicts():
    text = all_claims.text()
    table = text.partition("\n### ")[0]
    sections = all_claims.sections()
    claims = [claim for section in sections for claim in section.claims]
    # A head, a line that says where the columns are, a row for each part.
    assert table.count("\n|") == 2 + len(sections) + len(claims)
    assert all(f"\n| {claim.text} | " in table for claim in claims)


def test_the_correction_is_for_all_experiments_together():
    """Against Holm's procedure, which stops at the first that is not small enough."""
    sections = all_claims.sections()
    every = {
        (section.title, metric, d)
        for section in sections
        for claim in section.claims
        for metric, found in claim.differences.items()
        for d in found
    }
    ordered = sorted(every, key=lambda entry: entry[2].p)
    small = [d.p < 0.05 / (len(every) - i) for i, (*_, d) in enumerate(ordered)]
    rejected = small.index(False)
    assert [d.adjusted_p < 0.05 for *_, d in ordered] == [
        i < rejected for i in range(len(ordered))
    ]
    assert f" {len(every)} differences are looked at" in all_claims.text()
    for _, claim, metric in all_claims.survivors(sections):
        assert any(d.adjusted_p < 0.05 for d in claim.differences[metric])
