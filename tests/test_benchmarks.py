"""The benchmarks time what they should; how fast that is is not tested."""

import argparse
import importlib
import itertools
import json
import pathlib
import sys

import keras
import numpy as np
import pytest
from keras import ops

import keras_softmoe as ksm
from tests.skips import needs, only_on
from tests.support.close import assert_near

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


def test_every_layer_is_reported_in_both_passes(layers, tmp_path, capsys):
    file = tmp_path / "results.json"
    names = ["soft_32x6", "token_choice"]
    layers.main([*TWICE, "--layers", *names, "--json", str(file)])

    content = json.loads(file.read_text(encoding="utf-8"))
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
    competitors, inputs = layers.competitors(layers.ROUTERS[name](), shapes, "auto")
    products = layers.product_shapes(competitors["layer"], *inputs.shape)
    dense = 2 * inputs.size * competitors["dense"].mlp_dim
    assert dense == pytest.approx(layers.multiply_adds(products), rel=0.02)


def test_multiply_adds_of_a_soft_layer(layers):
    layer = ksm.layers.SoftMoE(32, mlp_dim=7, slots_per_expert=6).moe
    products = layers.product_shapes(layer, 2, 5, 3)
    # Per image: logits, dispatch and combine are 5 tokens x 192 slots x 3 each; the
    # experts multiply 192 slots by 3 x 7 twice.
    assert layers.multiply_adds(products) == 2 * (3 * 5 * 192 * 3 + 2 * 192 * 3 * 7)


@pytest.mark.parametrize("option", [["--rounds", "0"], ["--shapes", "huge"]])
def test_wrong_options_are_refused(layers, capsys, option):
    with pytest.raises(SystemExit):
        layers.main(option)
    message = capsys.readouterr().err
    assert option[0] in message
    assert option[1] in message


def test_scaling_compares_with_the_fewest_experts(benchmark, monkeypatch):
    scaling = benchmark("scaling")
    shapes = scaling.Shapes(2, 4, 8, 8, slots=8, experts=(2, 4, 8))
    rows = list(scaling.measure(shapes, benchmark("timing").Patience(rounds=1)))
    for row, name in zip(rows, ["4 experts", "8 experts"], strict=True):
        check_times(row, [name, "2 experts"])


def test_the_soft_moe_runs_beside_its_twin(benchmark, tiny_models):
    models, shapes = tiny_models
    patience = benchmark("timing").Patience(rounds=1)
    rows = list(models.measure_twins(shapes, patience))
    assert [row["pass"] for row in rows] == ["forward", "fit", "fit"]
    for row in rows:
        check_times(row, ["soft_moe", "dense_twin"])


def test_updates_by_two_optimizers_take_turns(benchmark):
    where = benchmark("where")
    row = where.measure_adam((2, 3, 4), rounds=2)
    names = ["training.Adam", where.KERAS_ADAM]
    assert list(row["user_s"]) == list(row["first_s"]) == names
    assert min(row["first_s"].values()) > 0


def test_ratios_of_processor_time_are_taken_within_rounds(benchmark, monkeypatch):
    where = benchmark("where")
    # First calls, calls that are not counted, and two rounds: user, system, pages
    taken = iter([(9, 9, 9)] * 4 + [(2, 1, 5), (1, 0, 0), (3, 3, 7), (1, 1, 0)])
    monkeypatch.setattr(where, "spent", lambda run: next(taken))
    row = where.row("model", "fit", {"ours": None, "twin": None}, rounds=2)
    assert row["ratios"] == {"twin": {"median": 3.0, "min": 3.0, "max": 3.0}}
    assert row["user_s"] == {"ours": 2.5, "twin": 1.0}
    assert row["system_s"] == {"ours": 2.0, "twin": 0.5}
    assert row["pages"] == {"ours": 6.0, "twin": 0.0}


def test_twins_differ_in_their_experts_alone(tiny_models):
    models, shapes = tiny_models
    moe, dense = models.soft_moe(shapes), models.backbone(shapes)
    assert moe.moe_layers == (1,)
    differing = {
        name
        for name, value in moe.get_config().items()
        if value != dense.get_config()[name]
    }
    assert differing == {"name", "moe_layers", "router", "equal_experts"}


def test_a_step_of_fit_trains(benchmark, tiny_models):
    models, shapes = tiny_models
    model = models.classifier(models.backbone(shapes).output["pooled_output"])
    before = [ops.convert_to_numpy(v) for v in model.trainable_variables]
    benchmark("timing").fit_step(model, *models.data(shapes))()
    after = [ops.convert_to_numpy(v) for v in model.trainable_variables]
    assert not np.array_equal(before[-2], after[-2])
    assert model.optimizer.iterations == 1


def test_our_dense_vit_is_as_large_as_that_of_keras_hub(benchmark, tiny_models):
    models, shapes = tiny_models
    images, _ = models.data(shapes)
    ours = models.dense_vit(shapes)
    theirs = benchmark("rivals").keras_hub_vit(**shapes.vit)
    assert ours.count_params() == theirs.count_params()
    assert ours(images).shape == theirs(images).shape == (8, 5, 8)


def test_balancing_losses_are_timed_with_and_without(benchmark, tiny_models):
    overheads, (_, shapes) = benchmark("overheads"), tiny_models
    rows = overheads.measure(shapes, benchmark("timing").Patience(rounds=1))
    row = next(rows)
    assert (row["name"], row["pass"]) == ("auxiliary_losses", "fit")
    check_times(row, ["with", "without"])


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_only_one_side_has_balancing_losses(benchmark, tiny_models, weight):
    overheads, (models, shapes) = benchmark("overheads"), tiny_models
    backbone = overheads.two_blocks(shapes, overheads.token_choice(weight))
    backbone(models.data(shapes)[0], training=True)
    assert len(backbone.losses) == bool(weight)


@pytest.mark.parametrize("kind", ["soft", "token_choice"])
def test_the_other_side_does_not_route_in_float32(benchmark, tiny_models, kind):
    overheads, (models, shapes) = benchmark("overheads"), tiny_models
    if kind == "soft":
        router = ksm.routers.SoftRouter(4)
    else:
        router = overheads.token_choice(0.0, noise_std=0.0)
    mixed = "mixed_bfloat16"
    backbone = overheads.two_blocks(shapes, router, mixed, mixed)
    decision = backbone.route(models.data(shapes)[0])[1]
    for weights in (decision.routing[-1], decision.summary["logits"]):
        assert keras.backend.standardize_dtype(weights.dtype) == "bfloat16"


def test_peaks_of_memory_start_over(benchmark):
    memory = benchmark("memory")
    large = 200e6
    memory._forget_peak()
    before = memory.peak_memory()
    np.ones(int(large / 8))
    with_it = memory.peak_memory()
    memory._forget_peak()
    assert with_it - before > 0.9 * large
    assert with_it - memory.peak_memory() > 0.9 * large


@pytest.fixture
def equal_rival(benchmark):
    """Callable that gives a PyTorch package's layer and ours the same weights."""
    rivals = benchmark("rivals")

    def make(package, router):
        needs(package.replace("-", "_"))
        theirs = rivals.soft_moe_layers(4, 2, 8, 16)[package].module
        ours = ksm.layers.MoE(router, 16)
        ours.build((3, 5, 8))
        return ours, theirs

    return make


def to_numpy(tensor):
    return tensor.detach().numpy()


def test_soft_mixture_of_experts_is_our_layer_without_normalization(equal_rival):
    router = ksm.routers.SoftRouter(4, slots_per_expert=2, normalize=False)
    ours, theirs = equal_rival("soft-mixture-of-experts", router)
    ours.router.mu.assign(to_numpy(theirs.phi))
    banks = ours.experts.intermediate_dense, ours.experts.output_dense
    for bank, layer in zip(banks, theirs.experts[::2], strict=True):
        bank.kernel.assign(to_numpy(layer.weight))
        bank.bias.assign(to_numpy(layer.bias)[:, None])
    tokens = ops.convert_to_tensor(
        np.random.default_rng(0).normal(size=(3, 5, 8)), "float32"
    )
    assert_near(to_numpy(ours(tokens)), to_numpy(theirs(tokens)), atol=1e-6)


def test_soft_moe_pytorch_is_our_layer_on_normalized_tokens(equal_rival):
    router = ksm.routers.SoftRouter(4, slots_per_expert=2)
    ours, theirs = equal_rival("soft-moe-pytorch", router)
    # (E, C, D) to (D, E, C)
    ours.router.mu.assign(to_numpy(theirs.slot_embeds).transpose(2, 0, 1))
    # The norms of tokens and of slot parameters are both the root of the width.
    ours.router.scale.assign(8.0)
    banks = ours.experts.intermediate_dense, ours.experts.output_dense
    for bank, index in zip(banks, (0, 3), strict=True):
        layers = [expert[index] for expert in theirs.experts.experts]
        bank.kernel.assign(np.stack([to_numpy(layer.weight).T for layer in layers]))
        bias = np.stack([to_numpy(layer.bias) for layer in layers])
        bank.bias.assign(bias[:, None])
    tokens = np.random.default_rng(0).normal(size=(3, 5, 8))
    tokens /= np.sqrt(np.mean(tokens**2, axis=-1, keepdims=True))
    tokens = ops.convert_to_tensor(tokens, "float32")
    # The exact GELU and its approximation differ by up to 5e-4.
    assert_near(to_numpy(ours(tokens)), to_numpy(theirs(tokens)), atol=1e-3)


RELEASED = """
class MlpMoeBlock:
    def __init__(self, num_experts, group_size, router, mlp_dim, **kwargs):
        assert router["name"].endswith("Router") and mlp_dim == 8
        assert group_size in (4, 32) and num_experts in (32, 128)
        assert set(kwargs) == {"deterministic", "split_rngs"}

    def init(self, keys, inputs):
        return {"params": {"kernel": inputs[0]}}

    def apply(self, variables, inputs, rngs):
        outputs = inputs * variables["params"]["kernel"]
        return outputs, {"auxiliary_loss": outputs.sum()}
"""


@pytest.fixture
def released_code(tmp_path, monkeypatch):
    """Where the released code is; a small module with its names stands in for it."""
    file = tmp_path / "vmoe" / "nn" / "vit_moe.py"
    file.parent.mkdir(parents=True)
    file.write_text(RELEASED)
    (tmp_path / "flax.py").write_text("__version__ = '1'")
    monkeypatch.setenv("REFERENCE_PYTHON", sys.executable)
    monkeypatch.setenv("REFERENCE_PATH", str(tmp_path))
    return file


def test_released_code_runs_in_processes_of_its_own(
    layers, benchmark, released_code, monkeypatch
):
    # Its processes have JAX whatever ours computes with.
    needs("jax")
    reference = benchmark("reference")
    options = argparse.Namespace(shapes="small", rounds=1, seconds=1.0)
    if keras.backend.backend() != "jax":
        assert list(reference.measure_all(options)) == []
        assert reference.described() == {}
    monkeypatch.setattr(reference, "is_there", lambda: True)
    rows = list(reference.measure_all(options))
    rivals = {name: list(rivals) for name, rivals in reference.RIVALS.items()}
    assert [(row["name"], row["pass"]) for row in rows] == list(
        itertools.product(rivals, ["forward", "forward+backward"])
    )
    for row in rows:
        check_times(row, ["layer", *rivals[row["name"]]])
    version = reference.described()["vmoe"]["version"]
    assert version.endswith(" flax 1)")
    assert version.startswith("(jax ") and version.count("jax") == 1


def test_released_code_that_does_not_start_is_named(benchmark, released_code, capfd):
    released_code.unlink()
    with pytest.raises(RuntimeError, match="REFERENCE_PATH="):
        benchmark("reference").Worker()
    assert "No module named" in capfd.readouterr().err


@only_on("jax", because="own loop")
def test_released_code_runs_here(layers, benchmark, released_code, monkeypatch):
    monkeypatch.delenv("REFERENCE_PYTHON")
    monkeypatch.setattr(sys, "path", list(sys.path))
    reference = benchmark("reference")
    options = argparse.Namespace(shapes="small", rounds=1, seconds=1.0)
    try:
        row = next(reference.measure_all(options))
    finally:
        for name in ("reference_worker", "vmoe.nn.vit_moe", "vmoe.nn", "vmoe"):
            sys.modules.pop(name, None)
    check_times(row, ["layer", "vmoe"])


def test_bounds(benchmark):
    module = benchmark("bounds")
    preset, device = "soft_moe_small_patch16_128e_224", module.DEVICES[0]
    few, many = (module.bounds(preset, 1, images, device)[0] for images in (8, 64))
    # The update of all experts takes the same time for any batch, all else grows.
    assert few["weights"] == many["weights"] > few["products"]
    np.testing.assert_allclose(many["products"], 8 * few["products"])
    assert many["activations"] > few["activations"]
    # One device sends nothing.
    assert few["links"] == 0


def test_steps_beside_their_bounds(benchmark, monkeypatch):
    module = benchmark("bounds")
    monkeypatch.setattr(module, "DTYPE", "float32")
    (row,) = module.measure("vit_tiny_patch4_32_glyphs", [2], rounds=1)
    # A processor has neither bounds nor a counter of its memory.
    assert row.keys() == {"images", "ms", "first_call_s", "peak_gb"}
    assert row["ms"] > 0
    found = module.on_paper("soft_moe_small_patch16_128e_224", 8, "NVIDIA H100 80GB")
    assert found["bounds_ms"]["weights"] > 0 and found["planned_gb"] > 10
