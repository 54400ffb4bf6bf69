"""The presets without weights: complete, and as the papers' tables have them.

Covers `catalogue/papers.py`, `catalogue/row.py` and `catalogue/unreleased.py`.
"""

import functools
import re

import pytest

from keras_softmoe import catalogue, models
from keras_softmoe.evaluation import cost
from tests.support import tiny


@functools.cache
def all_metadata():
    names = catalogue.names_of_kind("architecture")
    return {name: catalogue.read_metadata(name) for name in names}


def all_published():
    found = all_metadata().items()
    return {name: m["published"] for name, m in found if "published" in m}


def rows_of(table):
    """What follows the table in the metadata, over all presets."""
    rows = [published["row"] for published in all_published().values()]
    return [part for row in rows for part in re.findall(rf"{table}(.*?)(?:;|$)", row)]


def test_every_row_is_there():
    # V-MoE: no two rows alike
    assert len(set(rows_of("table 8, "))) == len(rows_of("table 8, ")) == 25
    # Soft MoE: models, of which some are in the table with several lengths of training
    assert len(rows_of("table 9")) == 10
    found = [int(n) for part in rows_of("table 10, ") for n in re.findall(r"\d+", part)]
    assert sorted(found) == list(range(1, 108))
    for metadata in all_metadata().values():
        settings = metadata.get("settings", [])
        named = {setting["row"] for setting in settings if "row" in setting}
        listed = re.search(
            r"table 10, rows? (.*)", metadata.get("published", {}).get("row", "")
        )
        if named:
            assert named == set(map(int, listed[1].split(", ")))


def test_every_router_of_the_study_is_there():
    for model in ("base_patch32", "base_patch16", "large_patch16"):
        names = [
            name
            for name, metadata in all_metadata().items()
            if metadata["source"].startswith("Router study") and f"_{model}_" in name
        ]
        # Six routers, the soft one with two numbers of slots
        assert len(names) == 7
        for name in names:
            assert all_metadata()[name]["dense_twin"] == f"vmoe_dense_{model}_224"
            assert len(all_metadata()[name].get("settings", [])) == (
                0 if name.startswith("soft_moe") else 2
            )


def printed(text):
    """Number and half the last digit of a figure such as `36.5M`."""
    digits, unit = text[:-1], {"M": 1e6, "B": 1e9}[text[-1]]
    return float(digits) * unit, 0.5 * unit / 10 ** len(digits.partition(".")[2])


def test_published_parameters():
    checked = 0
    for name, published in all_published().items():
        if "parameters" not in published:
            continue
        value, rounding = printed(published["parameters"])
        found = all_metadata()[name]["parameter_count_with_head"]
        assert abs(found - value) <= max(rounding, 0.0015 * value), name
        if checked % 7 == 0:
            assert found == cost(name, published["head_classes"]).parameters
        checked += 1
    assert checked == 35


def test_published_flops():
    published = {n: p for n, p in all_published().items() if "gflop_per_image" in p}
    assert len(published) == 10
    for name, row in published.items():
        found = cost(name, row["head_classes"]).gflop_per_image
        assert found == pytest.approx(row["gflop_per_image"], rel=0.01), name


def arguments(name):
    return catalogue.read_config(name)[1]


def test_slots_are_those_of_the_source():
    # The nearest whole number in the papers, a multiple of four in the released code.
    found = {True: set(), False: set()}
    for name, metadata in all_metadata().items():
        config = router.get_config() if (router := arguments(name)["router"]) else {}
        if "rounding" in config:
            is_code = metadata["source"] == "V-MoE, released code"
            found[is_code].add((config["rounding"], config["multiple_of"]))
    assert found == {True: {("ceil", 4)}, False: {("round", None)}}


def test_dense_twins():
    of_experts = ("name", "moe_layers", "router", "group_images", "equal_experts")
    for name, metadata in all_metadata().items():
        own = arguments(name)
        if metadata["dense_twin"] is None:
            assert own["router"] is None and "moe_layers" not in own
            continue
        assert own["router"] and own["moe_layers"]
        for argument in of_experts:
            own.pop(argument, None)
        twin = arguments(metadata["dense_twin"])
        assert own == {key: twin[key] for key in twin.keys() - {"name", "router"}}


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch8_224",
        "vmoe_15b_patch14_every2_32e_224",
        "vmoe_small_patch32_last2_32e_k5_224",
        "soft_moe_base_patch16_every2_32e_6s_224",
        "sinkhorn_token_choice_base_patch32_every2_32e_224",
        "sparse_transport_expert_choice_large_patch16_every2_32e_224",
    ],
)
def test_presets_can_be_loaded(name):
    # A few of them, made small
    small = {**tiny.SIZES, "num_layers": 1}
    if all_metadata()[name]["dense_twin"]:
        small["moe_layers"] = (0,)
    model = models.ViTMoEBackbone.from_preset(name, load_weights=False, **small)
    assert cost(name, **small).parameters == model.count_params()
    assert models.ViTMoEImageConverter.from_preset(name).image_size == (224, 224)
