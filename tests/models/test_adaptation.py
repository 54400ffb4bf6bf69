"""LoRA and int8 quantization: they reach the expert banks."""

import keras
import numpy as np

from keras_softmoe import models
from tests.models import tiny
from tests.references import to_numpy

pytestmark = [tiny.FITTING, tiny.LOADING, tiny.QUANTIZING]
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
    np.testing.assert_allclose(
        tiny.predict(model, tiny.pixels(2)), expected, rtol=1e-4, atol=1e-5
    )
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
    model.save_to_preset(str(tmp_path / "adapted"))
    revived = models.ViTMoEImageClassifier.from_preset(str(tmp_path / "adapted"))
    assert not any("lora" in w.path for w in revived.weights)
    np.testing.assert_allclose(
        tiny.predict(revived, tiny.pixels(3)), expected, rtol=1e-4, atol=1e-4
    )


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
        for one, other in zip(revived.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(tiny.predict(revived, x), actual, rtol=1e-4, atol=1e-5)
