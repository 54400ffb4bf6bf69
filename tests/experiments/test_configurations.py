"""Which models a study trains."""

import dataclasses

import pytest

from experiments import router_study as study
from experiments.router_study.configurations import placements
from keras_softmoe import ops

SCALES = [study.SMOKE, study.SMALL, study.ANYWHERE, study.FULL]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: scale.name)
def test_the_routers(scale):
    models = study.configurations(scale, ("routers",))["routers"]
    families = [c.family for c in models.values()]
    # One and two slots per token of six routers, and a dense model.
    assert len(models) == 13
    assert sorted(families.count(family) for family in set(families)) == [1] + [2] * 6
    dense = models.pop("dense")
    assert dense.router is None and dense.moe_layers == ()
    for c in models.values():
        assert c.moe_layers == tuple(range(1, scale.num_layers, 2))
        sparse = "choice" in c.family
        assert c.group_images == (scale.group_images if sparse else 1)


def test_slots_of_routers_match():
    models = study.configurations(study.SMALL, ("routers",))["routers"]
    tokens = study.SMALL.num_tokens
    for factor, soft in ((1, "soft_1s"), (2, "soft_2s")):
        slots = 16 * models[soft].router.slots_per_expert
        assert slots == factor * tokens
        for name in (
            f"softmax_token_choice_k{factor}",
            f"sinkhorn_expert_choice_c{factor}",
            f"sparse_expert_choice_c{factor}",
        ):
            assert 16 * models[name].router.capacity(8 * tokens) == 8 * slots


def test_the_papers_model():
    """The router study's B/32: 32 experts, 50 tokens, in every second of 12 blocks."""
    models = study.configurations(study.FULL, ("routers",))["routers"]
    assert study.FULL.num_tokens == 50
    slots = [ops.expert_capacity(50, 32, c) for c in (1, 2)]
    assert slots == [2, 3]
    assert all(f"soft_{count}s" in models for count in slots)
    # 32 does not divide the tokens.
    fixed = study.configurations(study.FULL, ("fixed",))["fixed"]
    assert fixed["identity_25e_at6-7-8-9-10-11"].num_experts == 25


def test_models_that_studies_share():
    found = study.configurations(study.SMALL)
    for name in ("headline", "routers", "initial_scale", "slots", "placement"):
        assert "soft_1s" in found[name]
    for name in ("headline", "routers", "fixed"):
        assert "dense" in found[name]
    # Results of another seed, which must not get among the others.
    assert not set(found["learning_rate"]) & set(found["headline"])
    by_name = {}
    for models in found.values():
        for name, c in models.items():
            config = c.router and c.router.get_config()
            same = by_name.setdefault(name, (c._replace(router=None), config))
            assert same == (c._replace(router=None), config)
    # No two names for the same model either, but for those of another seed.
    settings = [
        (*c[1:2], *c[4:6], *c[8:], str(config))
        for name, (c, config) in by_name.items()
        if name not in found["learning_rate"]
    ]
    assert len(set(settings)) == len(settings)


def test_what_the_side_studies_change():
    found = study.configurations(study.SMALL)
    slots = [
        c.num_experts * c.router.slots_per_expert
        for c in found["experts"].values()
        if c.family == "soft"
    ]
    assert slots == [64, 64, 64]
    slots = [c.capacity for c in found["slots"].values() if c.family == "soft"]
    assert slots == [1, 2, 4]
    assert {c.data_share for c in found["data"].values()} == {1.0, 1 / 16}
    for c in found["placement"].values():
        assert c.num_experts * len(c.moe_layers) == 32
        if c.family == "soft":
            assert c.router.slots_per_expert == 1
        if c.family == "softmax_token_choice":
            assert c.router.priority == "max"
    plans = [c.router.combine for c in found["combine"].values()]
    assert plans == ["softmax", "plan"] * 2
    starts = [c.router.initial_scale for c in found["initial_scale"].values()]
    assert starts == ["unit_variance", 1.0, 4.0, 1.0]
    plain = [c.router.normalize for c in found["initial_scale"].values()]
    assert plain == [True, True, True, False]
    settings = [
        (c.router.capacity_factor, c.router.priority)
        for c in found["priority"].values()
    ]
    assert settings == [
        (factor, priority)
        for factor in (0.25, 0.5, 1.0)
        for priority in ("position", "max")
    ]
    for c in found["fixed"].values():
        assert c.family == "dense" or c.moe_layers == (2, 3)


def test_learning_rates():
    scale = dataclasses.replace(
        study.SMALL, rates={"dense": 1.0, "token": 2.0, "expert": 3.0, "soft": 4.0}
    )
    found = study.configurations(scale)
    tried = [c.learning_rate for c in found["learning_rate"].values()]
    assert tried == [rate for rate in scale.learning_rates for _ in range(4)]
    expected = {"dense": 1.0, "token": 2.0, "expert": 3.0}
    again = [c.learning_rate for c in found["close_rates"].values()]
    assert again == [rate for rate in scale.close_rates for _ in range(4)]
    for name in set(found) - {"learning_rate", "close_rates"}:
        for c in found[name].values():
            kind = next((k for k in expected if k in c.family), "soft")
            assert c.learning_rate == expected.get(kind, 4.0)


def test_placements_of_the_paper():
    """Those of Soft MoE, table 5."""
    assert placements(12) == [
        (11,),
        (10,),
        (10, 11),
        (5, 11),
        (8, 9, 10, 11),
        (2, 5, 8, 11),
        (4, 5, 6, 7, 8, 9, 10, 11),
        (1, 2, 3, 4, 8, 9, 10, 11),
    ]
    assert placements(2) == [(1,), (0,), (0, 1)]


@pytest.mark.parametrize("studies", [(), ("router",)])
def test_unknown_studies(studies):
    with pytest.raises(ValueError, match="The studies are 'learning_rate', .*Received"):
        study.configurations(study.SMALL, studies)


def test_experts_without_slots_are_refused_at_once():
    scale = dataclasses.replace(study.SMALL, capacities=(0.01,))
    with pytest.raises(ValueError, match="less than one slot"):
        study.configurations(scale, ("slots",))
