"""The benchmarks time what they should; how fast that is is not tested."""

import importlib
import itertools
import json
import pathlib

import keras
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"

TWICE = ["--rounds", "2"]


@pytest.fixture
def benchmark(monkeypatch):
    """Callable from the name of a benchmark to its module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def layers(benchmark, monkeypatch):
    """The benchmark of layers, with tiny shapes in place of the small ones."""
    module = benchmark("layers")
    tiny = module.Shapes(images=8, tokens=4, width=8, mlp_dim=8)
    monkeypatch.setitem(module.SHAPES, "small", tiny)
    monkeypatch.setitem(module.LONG_SHAPES, "small", tiny)
    return module


@pytest.fixture
def tiny_models(benchmark):
    """The benchmark of models, and tiny shapes for it."""
    module = benchmark("models")
    return module, module.Shapes(8, 8, 4, 2, 2, 8, 8, num_experts=4)


def check_times(row, names):
    """The row has times of all names, and ratios of the first to the others."""
    ours, *rivals = names
    assert row["ours"] == ours
    assert list(row["ms"]) == list(row["first_call_s"]) == list(names)
    assert min(*row["ms"].values(), *row["first_call_s"].values()) > 0
    assert list(row["ratios"]) == rivals
    for ratio in row["ratios"].values():
        assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]


def test_every_layer_is_reported_in_both_passes(layers, benchmark, tmp_path, capsys):
    file = tmp_path / "results.json"
    names = ["soft_32x6", "token_choice"]
    sections = ["--sections", "layers", "--layers", *names]
    benchmark("run").main([*TWICE, *sections, "--json", str(file)])

    (content,) = json.loads(file.read_text(encoding="utf-8")).values()
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert keras.backend.backend() in content["machine"]["backend"]
    assert content["machine"]["dtype"] == "float32"
    rows = content["sections"]["layers"]
    assert [(row["name"], row["pass"]) for row in rows] == list(
        itertools.product(
            [*names, "dropless", "token_choice_dispatch"],
            ["forward", "forward+backward"],
        )
    )
    for row in rows[2:4]:
        check_times(row, ["layer", "dense", "products"])
    for row in rows[4:6]:
        check_times(row, ["dropless", "capacity_1.25"])
    for row in rows[6:]:
        check_times(row, ["gather", "einsum", "products"])
    assert {row["rounds"] for row in rows} == {2}
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


@pytest.mark.parametrize("name", ["soft_32x6", "token_choice"])
def test_the_dense_mlp_costs_as_much_as_the_products(layers, name):
    shapes = layers.Shapes(images=8, tokens=16, width=8, mlp_dim=64)
    competitors, inputs = layers.competitors(layers.ROUTERS[name](), shapes)
    products = layers.product_shapes(competitors["layer"], *inputs.shape)
    dense = 2 * inputs.size * competitors["dense"].mlp_dim
    assert dense == pytest.approx(layers.multiply_adds(products), rel=0.02)


def test_the_soft_moe_runs_beside_its_twin(benchmark, tiny_models):
    models, shapes = tiny_models
    rows = list(models.measure_twins(shapes, benchmark("timing").Patience(rounds=1)))
    assert [row["pass"] for row in rows] == ["forward", "fit", "fit"]
    for row in rows:
        check_times(row, ["soft_moe", "dense_twin"])


def test_ratios_are_taken_within_rounds(benchmark):
    first_call = {"layer": 5.0, "dense": 6.0, "products": 7.0}
    seconds = {
        "layer": [2.0, 8.0, 3.0],
        "dense": [1.0, 2.0, 3.0],
        "products": [2.0, 2.0, 2.0],
    }
    result = benchmark("timing").summarize(
        first_call, seconds, "layer", ["dense", "products"]
    )
    assert result == {
        "ours": "layer",
        "rounds": 3,
        "ms": {"layer": 3000.0, "dense": 2000.0, "products": 2000.0},
        "first_call_s": first_call,
        "ratios": {
            # Medians of rounds: 2 2 2 over 1 2 3.
            "dense": {"median": 2.0, "min": 1.0, "max": 4.0, "products": 1.0},
            "products": {"median": 1.5, "min": 1.0, "max": 4.0},
        },
    }
