"""The benchmark runs and reports what it should; how fast is not tested."""

import importlib
import json
import pathlib

import keras
import pytest

import keras_softmoe as ksm

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark as a module, with tiny shapes in place of the small ones."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("layers")
    tiny = module.Shapes(images=8, tokens=4, width=8, mlp_dim=8)
    monkeypatch.setitem(module.SHAPES, "small", tiny)
    return module


def test_every_layer_is_reported_in_both_passes(benchmark, tmp_path, capsys):
    file = tmp_path / "results.json"
    names = ["soft_32x6", "identity"]
    benchmark.main(["--rounds", "2", "--layers", *names, "--json", str(file)])

    content = json.loads(file.read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert keras.backend.backend() in content["machine"]["backend"]
    assert content["machine"]["dtype"] == "float32"
    assert [(row["layer"], row["pass"]) for row in content["results"]] == [
        (name, kind) for name in names for kind in ("forward", "forward+backward")
    ]
    for row in content["results"]:
        assert min(row[f"{key}_ms"] for key in ("layer", "dense", "products")) > 0
        for ratio in (row["to_dense"], row["to_products"]):
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_ratios_are_taken_within_rounds(benchmark):
    seconds = {
        "layer": [2.0, 8.0, 3.0],
        "dense": [1.0, 2.0, 3.0],
        "products": [2.0, 2.0, 2.0],
    }
    result = benchmark.summarize(seconds)
    assert result["layer_ms"] == pytest.approx(3000.0)
    assert result["to_dense"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert result["to_products"] == {"median": 1.5, "min": 1.0, "max": 4.0}


@pytest.mark.parametrize("name", ["soft_32x6", "token_choice"])
def test_the_dense_mlp_costs_as_much_as_the_products(benchmark, name):
    shapes = benchmark.Shapes(images=8, tokens=16, width=8, mlp_dim=64)
    layers, inputs = benchmark.competitors(benchmark.ROUTERS[name], shapes, "auto")
    products = benchmark.product_shapes(layers["layer"], *inputs.shape)
    dense = 2 * inputs.size * layers["dense"].mlp_dim
    assert dense == pytest.approx(benchmark.multiply_adds(products), rel=0.02)


def test_multiply_adds_of_a_soft_layer(benchmark):
    layer = ksm.layers.SoftMoE(32, mlp_dim=7, slots_per_expert=6).moe
    products = benchmark.product_shapes(layer, 2, 5, 3)
    # Per image: logits, dispatch and combine are 5 tokens x 192 slots x 3 each; the
    # experts multiply 192 slots by 3 x 7 twice.
    assert benchmark.multiply_adds(products) == 2 * (3 * 5 * 192 * 3 + 2 * 192 * 3 * 7)


def test_zero_rounds_are_refused(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--rounds", "0"])
    assert "Received: 0" in capsys.readouterr().err
