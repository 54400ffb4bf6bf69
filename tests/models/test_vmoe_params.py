"""V-MoE's parameter names: there and back, and what does not fit."""

import numpy as np
import pytest

from keras_softmoe import converters, models, routers
from tests.support import tiny
from tests.support.layer_checks import assert_same_weights, randomize
from tests.support.references import to_numpy

MODELS = {
    "soft_token": {"position_embedding": "learned"},
    "soft_map": {"pooling": "map", "use_qk_norm": True, "representation_dim": 5},
    "uniform_gap": {
        "pooling": "gap",
        "position_embedding": "none",
        "router": routers.SoftRouter(4, dispatch="uniform", combine="uniform"),
    },
    "not_normalized": {"router": routers.SoftRouter(4, normalize=False)},
    "identity_first": {"pooling": "first", "router": routers.IdentityRouter(4)},
    # With a random state, which is no parameter
    "token_choice": {"router": tiny.SPARSE, "dropout_rate": 0.1},
    "expert_choice": {"router": routers.SinkhornExpertChoiceRouter(4)},
    "registers": {
        "router": tiny.SPARSE,
        "num_registers": 2,
        "layer_scale": 0.5,
        "moe_layers": (0,),
    },
    "dense_sincos": {**tiny.DENSE, "position_embedding": "sincos2d"},
}
ATTENTION = {
    f"{name}/{weight}"
    for name in ("query", "key", "value", "out")
    for weight in ("kernel", "bias")
}


def block_names(index, mlp):
    block = f"Encoder/encoderblock_{index}"
    names = {f"SelfAttention/{name}" for name in ATTENTION}
    names |= {f"LayerNorm_{i}/{w}" for i in (0, 1) for w in ("scale", "bias")}
    names |= {f"{mlp}/Dense_{i}/{w}" for i in (0, 1) for w in ("kernel", "bias")}
    return {f"{block}/{name}" for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name):
    first, second = (tiny.classifier(**MODELS[name]) for _ in range(2))
    randomize(second, seed=1)
    params = converters.to_vmoe_params(first)
    assert all(isinstance(value, np.ndarray) for value in params.values())
    assert len(params) == len(first.weights)
    converters.load_vmoe_params(second, params)
    assert_same_weights(second, first)


def test_names_and_shapes():
    params = converters.to_vmoe_params(tiny.classifier())
    expected = block_names(0, "Mlp") | block_names(1, "Moe/Mlp")
    expected |= {f"{n}/{w}" for n in ("embedding", "head") for w in ("kernel", "bias")}
    expected |= {f"Encoder/encoder_norm/{w}" for w in ("scale", "bias")}
    expected |= {f"Encoder/encoderblock_1/Moe/Router/{w}" for w in ("mu", "scale")}
    expected |= {"cls", "Encoder/posembed_input/pos_embedding"}
    assert set(params) == expected
    shapes = {
        "embedding/kernel": (4, 4, 3, 8),
        "cls": (1, 1, 8),
        "Encoder/posembed_input/pos_embedding": (1, 5, 8),
        "Encoder/encoderblock_0/SelfAttention/query/kernel": (8, 2, 4),
        "Encoder/encoderblock_0/SelfAttention/query/bias": (2, 4),
        "Encoder/encoderblock_0/SelfAttention/out/kernel": (2, 4, 8),
        "Encoder/encoderblock_0/Mlp/Dense_0/kernel": (8, 12),
        "Encoder/encoderblock_1/Moe/Mlp/Dense_0/kernel": (4, 8, 12),
        "Encoder/encoderblock_1/Moe/Mlp/Dense_0/bias": (4, 12),
        "Encoder/encoderblock_1/Moe/Mlp/Dense_1/bias": (4, 8),
        "Encoder/encoderblock_1/Moe/Router/mu": (8, 4, 1),
        "Encoder/encoderblock_1/Moe/Router/scale": (),
        "head/kernel": (8, 3),
    }
    assert {name: params[name].shape for name in shapes} == shapes


def test_names_of_the_other_parts():
    model = tiny.backbone(
        pooling="map", use_qk_norm=True, representation_dim=5, router=tiny.SPARSE
    )
    params = converters.to_vmoe_params(model)
    head = "MapHead/MultiHeadDotProductAttention"
    expected = {f"{head}/{name}" for name in ATTENTION}
    expected |= {f"{head}/{name}_ln/scale" for name in ("query", "key")}
    expected |= {f"MapHead/LayerNorm/{w}" for w in ("scale", "bias")}
    expected |= {
        f"MapHead/Mlp/Dense_{i}/{w}" for i in (0, 1) for w in ("kernel", "bias")
    }
    expected |= {"MapHead/probe"}
    assert {name for name in params if name.startswith("MapHead")} == expected
    assert params["pre_logits/kernel"].shape == (8, 5)
    assert params["Encoder/encoderblock_1/Moe/Router/dense/kernel"].shape == (8, 4)
    assert params["Encoder/encoderblock_0/SelfAttention/query_ln/scale"].shape == (4,)


def test_values_arrive_where_they_belong():
    model = tiny.backbone()
    params = converters.to_vmoe_params(model)
    np.testing.assert_array_equal(
        params["Encoder/encoderblock_1/Moe/Mlp/Dense_1/kernel"],
        to_numpy(model.blocks[1].moe.experts.output_dense.kernel),
    )
    np.testing.assert_array_equal(
        params["Encoder/encoderblock_0/LayerNorm_1/bias"],
        to_numpy(model.blocks[0].mlp_norm.beta),
    )


def test_leading_params_is_ignored():
    first, second = tiny.classifier(), tiny.classifier()
    randomize(second, seed=1)
    params = converters.to_vmoe_params(first)
    converters.load_vmoe_params(second, {f"params/{n}": v for n, v in params.items()})
    assert_same_weights(second, first)


def test_one_error_lists_all_that_does_not_fit():
    model = tiny.classifier()
    before = model.get_weights()
    params = {n: v + 1.0 for n, v in converters.to_vmoe_params(model).items()}
    del params["cls"], params["Encoder/encoderblock_1/Moe/Router/mu"]
    params["Encoder/encoderblock_2/LayerNorm_0/bias"] = np.zeros(8)
    params["head/kernel"] = np.zeros((8, 4))
    # An expert fewer in one bank
    bank = "Encoder/encoderblock_1/Moe/Mlp/Dense_0/bias"
    params[bank] = params[bank][1:]
    with pytest.raises(ValueError) as error:
        converters.load_vmoe_params(model, params)
    lines = str(error.value).splitlines()[1:]
    assert [line.split("(")[0].strip() for line in lines] == [
        "missing: Encoder/encoderblock_1/Moe/Router/mu",
        "missing: cls",
        f"shape: {bank} is",
        "shape: head/kernel is",
        "unused: Encoder/encoderblock_2/LayerNorm_0/bias, shape",
    ]
    assert "is (3, 12)" in lines[2] and lines[2].endswith("takes (4, 12)")
    assert "(1, 1, 8)" in lines[1] and "class_token" in lines[1]
    assert_same_weights(model, before)


def test_kernel_of_another_layout_is_refused():
    # As many numbers, but not the same shape: nothing is reshaped by guessing.
    model = tiny.backbone()
    params = converters.to_vmoe_params(model)
    name = "Encoder/encoderblock_0/SelfAttention/query/kernel"
    params[name] = params[name].reshape(8, 8)
    with pytest.raises(ValueError, match=rf"shape: {name} is \(8, 8\)"):
        converters.load_vmoe_params(model, params)


@pytest.mark.parametrize(
    "values, message",
    [
        (np.full(3, 1j), "real numbers.*head/bias .complex128"),
        (np.array(["a", "b", "c"]), "real numbers.*head/bias"),
        (np.array([0.0, np.nan, 1.0]), "finite.*'head/bias'.*Fetch"),
        (np.array([0.0, np.inf, 1.0]), "finite.*'head/bias'"),
    ],
)
def test_values_that_no_weight_has(values, message):
    model = tiny.classifier()
    params = converters.to_vmoe_params(model)
    with pytest.raises(ValueError, match=message):
        converters.load_vmoe_params(model, {**params, "head/bias": values})


def test_backbone_takes_no_head():
    classifier = tiny.classifier()
    params = converters.to_vmoe_params(classifier)
    with pytest.raises(ValueError, match="unused: head/bias"):
        converters.load_vmoe_params(classifier.backbone, params)


def test_model_with_other_variables():
    model = tiny.backbone()
    model.enable_lora(2)
    with pytest.raises(ValueError, match="no name for.*lora_kernel_a"):
        converters.to_vmoe_params(model)


def test_same_names_for_a_backbone_inside_a_classifier():
    classifier = models.ViTMoEImageClassifier(tiny.backbone(name="mine"), 3)
    inside = set(converters.to_vmoe_params(classifier))
    alone = set(converters.to_vmoe_params(classifier.backbone))
    assert inside - alone == {"head/kernel", "head/bias"}
