"""KerasHub's mixtures compute the same from the chosen experts alone.

Covers `converters/sparsify.py`.
"""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_softmoe import converters
from keras_softmoe.keras_adapter.layers import quick_garbage_collection
from tests.support.close import assert_near
from tests.support.references import to_numpy

# KerasHub's backbones have a head for tasks that is not trained alone.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

SIZES = {"vocabulary_size": 40, "num_query_heads": 2, "num_key_value_heads": 1}
SIZES |= {"num_layers": 1, "hidden_dim": 16}
EXPERTS = {"num_experts": 8, "top_k": 2}
LAYERS = {"decoder_sparse_step": 1, "moe_intermediate_dim": 12, "intermediate_dim": 20}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}

# Classes by family: of the backbone, then of the task, and arguments
FAMILIES = {
    "Qwen3Moe": {
        **LAYERS,
        "head_dim": 8,
        "norm_top_k_prob": True,
        "sliding_window_size": None,
        "mlp_only_layers": [],
        "router_aux_loss_coefficient": 0.1,
    },
    "QwenMoe": {
        **LAYERS,
        "shared_expert_intermediate_dim": 20,
        "norm_top_k_prob": False,
        "router_aux_loss_coefficient": 0.1,
    },
    "Mixtral": {
        "intermediate_dim": 12,
        "router_aux_loss_coef": 0.1,
        "sliding_window": 16,
    },
    "Qwen3_5Moe": {
        **LINEAR,
        "head_dim": 8,
        "moe_intermediate_dim": 12,
        "shared_expert_intermediate_size": 20,
        "layer_types": ["full_attention"],
        "router_aux_loss_coefficient": 0.1,
    },
    "GptOss": {"intermediate_dim": 12},
    "Gemma4": {
        "image_size": 16,
        "head_dim": 8,
        "intermediate_dim": 20,
        "enable_moe_block": True,
        "expert_intermediate_dim": 12,
        "num_experts_per_token": 2,
    },
}
# Of the acceptance of this library; the others are as near, by the same code.
MAIN = ["Qwen3Moe", "QwenMoe", "Mixtral"]


def backbone_of(family):
    keras.utils.set_random_seed(0)
    experts = {"num_experts": 8} if family == "Gemma4" else EXPERTS
    cls = getattr(keras_hub.models, f"{family}Backbone")
    model = cls(**SIZES, **experts, **FAMILIES[family])
    rng = np.random.default_rng(1)
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            noise = rng.normal(scale=0.2, size=weight.shape)
            weight.assign(to_numpy(weight) + noise)
    return model


def batch(model, length=9):
    """Token ids with padding at the end of one text, and in the last batch row."""
    rng = np.random.default_rng(0)
    mask = np.ones((3, length), "int32")
    mask[1, 5:] = 0
    x = {"token_ids": rng.integers(0, 40, (3, length)), "padding_mask": mask}
    if isinstance(model.input, dict) and "position_ids" in model.input:
        x["position_ids"] = np.tile(np.arange(length, dtype="int32"), (3, 1))
    return x


def changes_in_a_step(model, weights, x):
    """Loss with the balancing loss, and how a step of SGD changes some weights."""
    before = [to_numpy(weight).copy() for weight in weights]
    model.compile(keras.optimizers.SGD(1.0), "mse")
    zeros = np.zeros(model.compute_output_shape({k: v.shape for k, v in x.items()}))
    loss = model.train_on_batch(x, zeros)
    after = [to_numpy(weight).copy() for weight in weights]
    for weight, value in zip(weights, before, strict=True):
        weight.assign(value)
    return loss, [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_gradients_and_balancing_loss_are_equal(family):
    dense = backbone_of(family)
    sparse = converters.sparsify(dense)
    assert type(sparse) is type(dense)
    assert all(a is b for a, b in zip(dense.weights, sparse.weights, strict=True))
    x = batch(dense)
    expected = dense.predict_on_batch(x)
    assert_near(sparse.predict_on_batch(x), expected, rtol=1e-5, atol=1e-5)
    (loss, changes), (own_loss, own_changes) = (
        changes_in_a_step(model, dense.weights, x) for model in (dense, sparse)
    )
    np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
    for weight, one, two in zip(dense.weights, changes, own_changes, strict=True):
        assert_near(two, one, rtol=1e-3, atol=1e-5, err_msg=weight.path)


@pytest.mark.parametrize("family", MAIN)
def test_only_the_chosen_experts_are_computed(family):
    dense = backbone_of(family)
    sparse = converters.sparsify(dense)
    # Experts that are never chosen may hold anything, where 0 times it is not 0.
    x = batch(dense)
    block = next(b for b in sparse._flatten_layers() if hasattr(b, "expert_bank"))
    router = next(v for v in block.weights if tuple(v.shape) == (16, 8))
    router.assign(np.concatenate([to_numpy(router)[:, :7], np.zeros((16, 1))], 1))
    spoiled = [v for v in block.expert_bank.weights]
    _, logits = block(np.ones((1, 4, 16), "float32"))
    least = int(np.argmin(to_numpy(logits)[0]))
    for v in spoiled:
        value = to_numpy(v).copy()
        value[least] = np.nan
        v.assign(value)
    ones = np.ones((1, 4, 16), "float32")
    assert np.isfinite(to_numpy(block(ones)[0])).all()
    assert np.isnan(to_numpy(dense.predict_on_batch(x))).all()


@pytest.mark.parametrize("family", MAIN)
def test_generation_with_caches(family):
    dense = getattr(keras_hub.models, f"{family}CausalLM")(
        backbone=backbone_of(family), preprocessor=None
    )
    sparse = converters.sparsify(dense)
    assert type(sparse) is type(dense)
    found = []
    for model in (dense, sparse):
        model.compile(sampler="greedy")
        x = batch(model.backbone)
        x["padding_mask"][:, 4:] = 0
        tokens = model.generate(x, stop_token_ids=None)["token_ids"]
        found.append(to_numpy(tokens))
    np.testing.assert_array_equal(*found)


def test_files_are_those_of_kerashub(tmp_path):
    dense = backbone_of("Mixtral")
    task = keras_hub.models.MixtralCausalLM(backbone=dense, preprocessor=None)
    sparse = converters.sparsify(task)
    x = batch(dense)
    expected = sparse.predict_on_batch(x)
    sparse.backbone.save_to_preset(str(tmp_path))
    loaded = keras_hub.models.Backbone.from_preset(str(tmp_path))
    again = converters.sparsify(loaded)
    hidden = sparse.backbone.predict_on_batch(x)
    assert_near(loaded.predict_on_batch(x), hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(again.predict_on_batch(x), hidden)
    sparse.save_weights(tmp_path / "a.weights.h5")
    other = backbone_of("Mixtral")
    for weight in other.weights:
        weight.assign(np.zeros(weight.shape))
    other = keras_hub.models.MixtralCausalLM(backbone=other, preprocessor=None)
    other.load_weights(tmp_path / "a.weights.h5")
    assert_near(other.predict_on_batch(x), expected, rtol=1e-5, atol=1e-5)


def test_lora_and_int8_are_those_of_kerashub():
    dense = backbone_of("Qwen3Moe")
    x = batch(dense)
    found = []
    for make in (lambda model: model, converters.sparsify):
        model = make(backbone_of("Qwen3Moe"))
        model.enable_lora(2)
        for index, weight in enumerate(w for w in model.weights if "lora" in w.path):
            value = np.random.default_rng(index).normal(size=weight.shape)
            weight.assign(0.3 * value)
        adapted = changes_in_a_step(model, model.trainable_weights, x)
        model = make(backbone_of("Qwen3Moe"))
        with quick_garbage_collection():
            model.quantize("int8")
        found.append((*adapted, model.predict_on_batch(x)))
        with pytest.raises(ValueError, match=r"first, then .*has been changed"):
            converters.sparsify(model)
    (loss, changes, quantized), (own_loss, own_changes, own_quantized) = found
    np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
    for one, two in zip(changes, own_changes, strict=True):
        assert_near(two, one, rtol=1e-3, atol=1e-5)
    # A token near the border of two integers may be rounded to the other one.
    assert_near(own_quantized, quantized, rtol=1e-2, atol=1e-2)


def test_in_half_precision():
    policy = keras.dtype_policies.get("mixed_bfloat16")
    arguments = {**SIZES, **EXPERTS, **FAMILIES["Mixtral"], "dtype": policy}
    dense = keras_hub.models.MixtralBackbone(**arguments)
    x = batch(dense)
    models = dense, converters.sparsify(dense)
    one, two = (to_numpy(ops.cast(model(x), "float32")) for model in models)
    assert_near(two, one, rtol=0.05, atol=0.05)


def test_the_given_model_is_as_it_was():
    dense = backbone_of("QwenMoe")
    x = batch(dense)
    expected, names = dense.predict_on_batch(x), [type(b) for b in dense.layers]
    sparse = converters.sparsify(dense)
    with quick_garbage_collection():
        sparse.quantize("int8")
    assert [type(layer) for layer in dense.layers] == names
    np.testing.assert_array_equal(dense.predict_on_batch(x), expected)


def test_refusals():
    llama = keras_hub.models.LlamaBackbone(intermediate_dim=12, **SIZES)
    with pytest.raises(ValueError, match=r"GPT-OSS and Gemma 4.*LlamaBackbone"):
        converters.sparsify(llama)
    with pytest.raises(ValueError, match="a backbone or a task of KerasHub"):
        converters.sparsify(keras.Sequential())
