"""LoRA and quantization of whole models: they reach the expert banks."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_softmoe as ksm
from keras_softmoe import layers, models
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights, from_preset
from tests.support.references import to_numpy

pytestmark = [tiny.FITTING, tiny.LOADING]
EXPERT_BANKS = {
    f"block_1/moe/experts/{name}_dense" for name in ("intermediate", "output")
}


def layers_where(model, condition):
    return {
        layer.path.removeprefix(f"{model.name}/")
        for layer in model._flatten_layers(include_self=False)
        if condition(layer)
    }


def test_lora_reaches_the_experts_and_trains_nothing_else():
    model = tiny.classifier()
    backbone = model.backbone
    expected = tiny.predict(model, tiny.pixels(2))
    backbone.enable_lora(2)
    adapted = layers_where(backbone, lambda x: getattr(x, "lora_enabled", False))
    assert adapted == EXPERT_BANKS | {
        *(f"block_{i}/attention/{name}" for i in (0, 1) for name in ("query", "value")),
        "block_0/mlp/intermediate_dense",
        "block_0/mlp/output_dense",
    }
    # Nothing has changed before the first step.
    assert_near(tiny.predict(model, tiny.pixels(2)), expected, rtol=1e-4, atol=1e-5)
    trainable = {w.path for w in backbone.trainable_weights}
    kernels = [w for w in backbone.trainable_weights if "lora_kernel" in w.path]
    assert len(kernels) == 2 * len(adapted)
    # Besides them only the biases of the adapted layers learn, as Keras has it.
    assert {path.split("/")[-1] for path in trainable} <= {
        "lora_kernel_a",
        "lora_kernel_b",
        "bias",
    }
    frozen = {w.path: to_numpy(w) for w in backbone.non_trainable_weights}
    learned = {w.path: to_numpy(w) for w in kernels}
    model.compile(keras.optimizers.Adam(0.1))
    model.fit(tiny.pixels(8), tiny.labels(8), batch_size=4, epochs=2, verbose=0)
    for weight in backbone.weights:
        if weight.path in frozen:
            np.testing.assert_array_equal(to_numpy(weight), frozen[weight.path])
        elif weight.path in learned:
            assert np.abs(to_numpy(weight) - learned[weight.path]).max() > 0


def test_lora_is_merged_when_saved(tmp_path):
    model = tiny.classifier()
    model.backbone.enable_lora(2)
    for weight in model.backbone.trainable_weights:
        weight.assign(np.random.default_rng(0).normal(size=weight.shape) * 0.1)
    expected = tiny.predict(model, tiny.pixels(3))
    revived = from_preset(model, tmp_path)
    assert not any("lora" in w.path for w in revived.weights)
    assert revived.compiled
    assert_near(tiny.predict(revived, tiny.pixels(3)), expected, rtol=1e-4, atol=1e-4)


def adapted(rank=2):
    """A compiled classifier that has learned factors."""
    model = tiny.classifier()
    model.backbone.enable_lora(rank)
    model.compile(keras.optimizers.Adam(0.01))
    model.fit(tiny.pixels(8), tiny.labels(8), batch_size=4, verbose=0)
    return model


def paths(model):
    """Paths of the weights below the name of the model, and whether they learn."""
    return {w.path.removeprefix(f"{model.name}/"): w.trainable for w in model.weights}


def test_merged_model_is_an_ordinary_one():
    model, x = adapted(), tiny.pixels(3)
    expected = tiny.predict(model, x)
    # The backbone alone; the classifier around it was compiled with the factors.
    merged = models.merge_lora(model.backbone)
    assert len(merged) == 8 and EXPERT_BANKS <= set(merged)
    assert_near(tiny.predict(model, x), expected, rtol=1e-4, atol=1e-4)
    plain = tiny.classifier()
    assert list(paths(model)) == list(paths(plain))
    assert models.merge_lora(model) == []
    with pytest.raises(ValueError, match="no lora-enabled layers"):
        model.backbone.save_lora_weights("x.lora.h5")
    model.trainable = False
    model.trainable = True
    assert paths(model) == paths(plain)
    plain.set_weights(model.get_weights())
    assert_near(tiny.predict(plain, x), expected, rtol=1e-4, atol=1e-4)
    # And once more
    model.backbone.enable_lora(1)
    assert_near(tiny.predict(model, x), expected, rtol=1e-4, atol=1e-4)
    assert ksm.evaluation.cost(model) == ksm.evaluation.cost(plain)


def test_every_layer_of_keras_is_merged():
    inputs = keras.Input((4, 6), dtype="int32")
    x = keras.layers.Embedding(7, 3)(inputs)
    x = keras.layers.Conv2D(5, 2)(x)
    x = keras.layers.Dense(6)(x)
    x = keras.layers.EinsumDense("bhwd,dkn->bhwkn", (3, 5, 2, 4), bias_axes="kn")(x)
    x = keras.layers.Reshape((15, 8))(x)
    model = keras.Model(inputs, layers.SoftMoE(3, 6)(x))
    plain = paths(model)
    rng = np.random.default_rng(0)
    for layer in model._flatten_layers(include_self=False):
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
            for weight in layer.trainable_weights:
                weight.assign(rng.normal(size=weight.shape) * 0.3)
    assert len(paths(model)) == len(plain) + 2 * 6
    ids = np.random.default_rng(0).integers(0, 7, (2, 4, 6))
    expected = tiny.predict(model, ids)
    assert len(models.merge_lora(model)) == 6
    assert paths(model) == plain
    assert_near(tiny.predict(model, ids), expected, rtol=1e-3, atol=1e-4)


def test_lora_in_files(tmp_path):
    model, x = adapted(), tiny.pixels(3)
    expected = tiny.predict(model, x)
    # The sum, which a model without factors loads
    model.backbone.save_weights(tmp_path / "sum.weights.h5")
    model.save(tmp_path / "sum.keras")
    plain = tiny.classifier()
    plain.set_weights([*plain.get_weights()[:-2], *model.get_weights()[-2:]])
    plain.backbone.load_weights(tmp_path / "sum.weights.h5")
    for other in (plain, keras.saving.load_model(tmp_path / "sum.keras")):
        assert not any("lora" in w.path for w in other.weights)
        # A file has no optimizer's state for the kernels.
        assert other.compiled == (other is plain)
        assert_near(tiny.predict(other, x), expected, rtol=1e-4, atol=1e-4)
    # The factors, for a model that has the kernels
    file = str(tmp_path / "factors.lora.h5")
    model.backbone.save_lora_weights(file)
    other = tiny.backbone()
    other.load_lora_weights(file)
    for index, block in enumerate(other.blocks):
        for weight, value in zip(
            block.weights, model.backbone.blocks[index].weights, strict=True
        ):
            if "lora_kernel" in weight.path:
                np.testing.assert_array_equal(to_numpy(weight), to_numpy(value))
    assert other.blocks[1].moe.experts.output_dense.lora_enabled


def test_lora_of_a_quantized_model(tmp_path):
    model, x = tiny.classifier(), tiny.pixels(8)
    model.backbone.quantize("int8")
    before = tiny.predict(model, x)
    model.backbone.enable_lora(2)
    assert_near(tiny.predict(model, x), before, rtol=1e-3, atol=1e-4)
    model.compile(keras.optimizers.Adam(0.03))
    kernels = [
        (w, to_numpy(w)) for w in model.backbone.weights if w.path.endswith("kernel")
    ]
    model.fit(x, tiny.labels(8), batch_size=4, epochs=3, verbose=0)
    for weight, value in kernels:
        np.testing.assert_array_equal(to_numpy(weight), value)
    after = tiny.predict(model, x)
    assert np.abs(after - before).max() > 0.01
    # The factors in a file of their own, exactly
    file = str(tmp_path / "factors.lora.h5")
    model.backbone.save_lora_weights(file)
    model.backbone.load_lora_weights(file)
    np.testing.assert_array_equal(tiny.predict(model, x), after)


@pytest.mark.parametrize(
    "config, words",
    [
        (
            keras.quantizers.GPTQConfig(dataset=["x"], tokenizer=lambda x: x),
            "not quantized by 'gptq'.*Take 'int8'",
        ),
        (
            keras.quantizers.AWQConfig(dataset=["x"], tokenizer=lambda x: x),
            "not quantized by 'awq'.*Take 'int8'",
        ),
        (
            keras.quantizers.Int4QuantizationConfig(block_size=-1),
            "not quantized by 'int4'.*Take 'int8'",
        ),
    ],
)
def test_refused_modes_change_nothing(config, words):
    model = tiny.classifier()
    for part in (model, model.backbone):
        with pytest.raises(ValueError, match=words):
            part.quantize(config=config)
    assert not layers_where(model, lambda x: x.quantization_mode)
    # Without the experts it is none of our business.
    if config.mode == "int4":
        model.quantize(config=config, filters=lambda x: "experts" not in str(x.path))
        assert layers_where(model, lambda x: x.quantization_mode == "int4")


def test_own_model_around_experts_is_refused_by_the_bank():
    model = keras.Sequential([keras.Input((4, 6)), layers.SoftMoE(3, 8)])
    config = keras.quantizers.GPTQConfig(
        dataset=["x"],
        tokenizer=lambda x: x,
        # From Keras 3.16 on it is asked for before any layer is.
        quantization_layer_structure={
            "pre_block_layers": [],
            "sequential_blocks": model.layers,
        },
    )
    with pytest.raises(ValueError, match="not quantized by 'gptq'.*Take 'int8'"):
        model.quantize("gptq", config=config)


def test_int8_reaches_the_experts_and_round_trips(tmp_path):
    model = tiny.classifier()
    # Before anything has run, and so before the preprocessor has.
    model.quantize("int8")
    quantized = layers_where(model, lambda x: x.quantization_mode == "int8")
    assert EXPERT_BANKS <= {"/".join(path.split("/")[-4:]) for path in quantized}
    for name in EXPERT_BANKS:
        bank = getattr(model.backbone.blocks[1].moe.experts, name.split("/")[-1])
        assert to_numpy(bank.kernel).dtype == "int8"
    router = model.backbone.router
    assert all(to_numpy(w).dtype == "float32" for w in router.weights)

    x = tiny.pixels(16)
    expected = tiny.predict(tiny.classifier(), x)
    actual = tiny.predict(model, x)
    assert 0 < np.abs(actual - expected).max() < 0.2 * expected.std()

    model.save_to_preset(str(tmp_path / "int8"))
    model.save(tmp_path / "int8.keras")
    for revived in (
        models.ViTMoEImageClassifier.from_preset(str(tmp_path / "int8")),
        keras.saving.load_model(tmp_path / "int8.keras"),
    ):
        bank = revived.backbone.blocks[1].moe.experts.output_dense
        assert bank.quantization_mode == "int8"
        assert_same_weights(revived, model)
    assert_near(tiny.predict(revived, x), actual, rtol=1e-4, atol=1e-5)


def towers():
    image = tiny.backbone()
    text = models.TextMoEBackbone(20, 5, 1, 2, 8, 12, (0,), tiny.SPARSE)
    return models.TwoTowerBackbone(image, text, 6, 6)


def limoe():
    return models.LIMoEBackbone(
        (8, 8, 3), 4, 20, 5, 1, 2, 8, 12, (0,), router=tiny.SPARSE
    )


QUANTIZED = {
    "int8": (tiny.backbone, "int8", 0),
    "int8 with LoRA": (tiny.backbone, "int8", 2),
    "LIMoE": (limoe, "int8", 0),
    "float8": (tiny.backbone, "float8", 0),
    # Blocks of both have equal names.
    "two towers": (towers, "int8", 0),
}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a .quantize:UserWarning")
@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantized_backbone_comes_back(case, tmp_path):
    """KerasHub's `from_preset` drops the dtype, in which it keeps quantization."""
    make, mode, rank = QUANTIZED[case]
    model = make()
    x = {
        "images": tiny.images(2),
        "token_ids": np.arange(10).reshape(2, 5).astype("int32"),
    }
    x = x if isinstance(model.input, dict) else x["images"]

    def outputs(model):
        return keras.tree.flatten(keras.tree.map_structure(to_numpy, model(x)))

    before = outputs(model)
    model.quantize(mode)
    if rank:
        model.enable_lora(rank)
    expected, config = outputs(model), model.get_config()
    assert max(np.abs(a - b).max() for a, b in zip(before, expected, strict=True)) > 0
    model.save_to_preset(str(tmp_path / "preset"))
    assert model.get_config() == config
    for cls in (keras_hub.models.Backbone, type(model)):
        loaded = cls.from_preset(str(tmp_path / "preset"))
        modes = {layer.quantization_mode for layer in loaded._flatten_layers()}
        assert modes == {None, mode}
        for found, right in zip(outputs(loaded), expected, strict=True):
            assert_near(found, right, rtol=1e-4, atol=1e-5)


def test_the_dtype_of_what_is_not_quantized(tmp_path):
    model = tiny.backbone(dtype="bfloat16")
    model.quantize("int8", filters="query")
    model.save_to_preset(str(tmp_path / "preset"))
    for dtype in (None, "float32"):
        kwargs = {} if dtype is None else {"dtype": dtype}
        loaded = models.ViTMoEBackbone.from_preset(str(tmp_path / "preset"), **kwargs)
        query = loaded.get_layer("block_0").attention.query
        expected = dtype or "bfloat16"
        assert query.quantization_mode == "int8" and query.compute_dtype == expected
        assert loaded.get_layer("block_0").attention.key.compute_dtype == expected
        np.testing.assert_array_equal(
            to_numpy(query._kernel),
            to_numpy(model.get_layer("block_0").attention.query._kernel),
        )
