"""Which models a study trains."""

import dataclasses

import pytest

from experiments import router_study as study
from experiments.router_study.configurations import placements
from keras_softmoe import ops

NEAREST = {"rounding": "round", "multiple_of": None}
SCALES = [study.SMOKE, study.SMALL, study.FULL]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: scale.name)
def test_the_routers(scale):
    models = study.configurations(scale, ("routers",))["routers"]
    families = [c.family for c in models.values()]
    # One and two slots per token of six routers, four fixed routings, a dense model.
    assert len(models) == 17
    assert (
        sorted(families.count(family) for family in set(families)) == [1] * 5 + [2] * 6
    )
    dense = models.pop("dense")
    assert dense.router is None and dense.moe_layers == ()
    for c in models.values():
        assert c.moe_layers == tuple(range(1, scale.num_layers, 2))
        sparse = "choice" in c.family
        assert c.group_images == (scale.group_images if sparse else 1)


def test_slots_of_routers_match():
    models = study.configurations(study.SMALL, ("routers",))["routers"]
    tokens = study.SMALL.num_tokens
    for factor, soft in ((1, "soft_4s"), (2, "soft_8s")):
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
    slots = [ops.expert_capacity(50, 32, c, **NEAREST) for c in (1, 2)]
    assert slots == [2, 3]
    assert all(f"soft_{count}s" in models for count in slots)
    # 32 does not divide the tokens.
    assert models["identity_25e"].num_experts == 25


def test_models_that_studies_share():
    found = study.configurations(study.SMALL)
    assert "soft_4s" in found["routers"]
    assert "soft_4s" in found["experts"]
    assert "soft_4s" in found["slots"]
    assert "dense" in found["learning_rate"]
    by_name = {}
    for models in found.values():
        for name, c in models.items():
            config = c.router and c.router.get_config()
            same = by_name.setdefault(name, (c._replace(router=None), config))
            assert same == (c._replace(router=None), config)
    # No two names for the same model either.
    settings = [
        (c.family, c.moe_layers, c.group_images, c.learning_rate, str(config))
        for c, config in by_name.values()
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
    assert slots == [0.25, 1, 2, 4]
    alone = [c for c in found["slots"].values() if c.name.endswith("_of1")]
    assert len(alone) == 4 and all(c.group_images == 1 for c in alone)
    for c in found["placement"].values():
        assert c.num_experts * len(c.moe_layers) == 64
        if c.family == "soft":
            assert c.router.slots_per_expert == 1
        if c.family == "softmax_token_choice":
            assert c.router.priority == "max"
    plans = [c.router.combine for c in found["combine"].values()]
    assert plans == ["softmax", "plan"] * 2


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
    with pytest.raises(ValueError, match="The studies are 'routers', .*Received"):
        study.configurations(study.SMALL, studies)


def test_experts_without_slots_are_refused_at_once():
    scale = dataclasses.replace(study.SMALL, capacities=(0.01,))
    with pytest.raises(ValueError, match="less than one slot"):
        study.configurations(scale, ("slots",))
