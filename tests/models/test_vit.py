"""The backbone: its parts put together, its decisions, its errors.

Tests `models/vit.py`, its base `models/backbone.py` and the checks of its arguments
in `models/arguments.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import architecture, layers, models, ops, routers
from tests.support import tiny
from tests.support.close import assert_near, difference
from tests.support.gradients import recorded
from tests.support.layer_checks import dtype_of
from tests.support.references import to_numpy

NUM_PATCHES, WIDTH = 4, 8


@pytest.mark.parametrize("position_embedding", ["learned", "sincos2d", "none"])
@pytest.mark.parametrize("pooling", ["token", "first", "gap", "map"])
def test_outputs(pooling, position_embedding):
    model = tiny.backbone(pooling=pooling, position_embedding=position_embedding)
    num_tokens = NUM_PATCHES + (pooling == "token")
    names = [layer.name for layer in model.layers]
    assert ("class_token" in names) == (pooling == "token")
    assert ("position_embedding" in names) == (position_embedding != "none")
    learned = position_embedding == "learned"
    table = [w for w in model.weights if w.path.startswith("position_embedding")]
    assert [tuple(w.shape) for w in table] == [(1, num_tokens, WIDTH)] * learned

    outputs = model(tiny.images(3))
    tokens = to_numpy(outputs["sequence_output"])
    pooled = to_numpy(outputs["pooled_output"])
    assert tokens.shape == (3, num_tokens, WIDTH)
    expected = {
        "token": lambda: tokens[:, 0],
        "first": lambda: tokens[:, 0],
        "gap": lambda: tokens.mean(1),
        "map": lambda: to_numpy(model.get_layer("attention_pooling")(tokens)),
    }[pooling]()
    assert_near(pooled, expected, rtol=1e-5, atol=1e-5)

    symbolic = {name: tensor.shape for name, tensor in model.output.items()}
    assert symbolic == {
        "sequence_output": (None, num_tokens, WIDTH),
        "pooled_output": (None, WIDTH),
    }


def test_positions_matter():
    # Without position embeddings and class token the mean does not see where a patch
    # is; with them it does.
    image = tiny.images(1)
    swapped = np.concatenate([image[:, 4:], image[:, :4]], axis=1)
    for position_embedding in ("none", "sincos2d", "learned"):
        model = tiny.backbone(pooling="gap", position_embedding=position_embedding)
        first, second = (to_numpy(model(x)["pooled_output"]) for x in (image, swapped))
        same = difference(first, second) < 1e-4
        assert same == (position_embedding == "none")


def test_representation():
    model = tiny.backbone(representation_dim=5)
    outputs = model(tiny.images(2))
    dense = model.get_layer("pre_logits")
    expected = np.tanh(
        to_numpy(outputs["sequence_output"])[:, 0] @ to_numpy(dense.kernel)
        + to_numpy(dense.bias)
    )
    assert_near(to_numpy(outputs["pooled_output"]), expected, rtol=1e-5, atol=1e-5)


def test_blocks_are_dense_or_mixtures():
    model = tiny.backbone(num_layers=4, moe_layers=(3, 1))
    kinds = [block.moe is not None for block in model.blocks]
    assert kinds == [False, True, False, True]
    assert model.moe_layers == (1, 3)
    first, second = (model.blocks[index].moe.router for index in (1, 3))
    assert model.router is first
    assert first.mu is not second.mu


def test_dense_model():
    model = tiny.backbone(**tiny.DENSE)
    assert model.router is None
    assert all(isinstance(block.mlp, layers.MLP) for block in model.blocks)
    assert model.route(tiny.images(2)) == {}
    # One block has 4 normalization vectors, attention and an MLP; then the patches,
    # the class token, the positions and the last normalization.
    attention = 4 * (WIDTH * WIDTH + WIDTH)
    mlp = WIDTH * 12 + 12 + 12 * WIDTH + WIDTH
    block = 4 * WIDTH + attention + mlp
    around = (4 * 4 * 3 + 1) * WIDTH + WIDTH + 5 * WIDTH + 2 * WIDTH
    assert model.count_params() == 2 * block + around


def test_any_batch_size_and_patch_shape():
    model = tiny.backbone(
        image_shape=(8, 12, 1), patch_size=(4, 6), group_images=4, router=tiny.SPARSE
    )
    assert model.patch_grid == (2, 2)
    x = tiny.images(8, (8, 12, 1))
    everything = to_numpy(model(x)["pooled_output"])
    for batch in (1, 3, 5):
        assert to_numpy(model(x[:batch])["pooled_output"]).shape == (batch, WIDTH)
    # The first group of four is the same whatever follows.
    actual = to_numpy(model(x[:5])["pooled_output"])
    assert_near(actual[:4], everything[:4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["token", "map"])
def test_route_soft(pooling):
    model = tiny.backbone(pooling=pooling, moe_layers=(0, 1))
    decisions = model.route(tiny.images(3))
    num_tokens = NUM_PATCHES + (pooling == "token")
    assert list(decisions) == [0, 1]
    for decision in decisions.values():
        assert isinstance(decision.routing, ops.DenseRouting)
        dispatch, combine = (to_numpy(x) for x in decision.routing)
        assert dispatch.shape == combine.shape == (3, num_tokens, 4, 1)
        np.testing.assert_allclose(dispatch.sum(1), 1.0, rtol=1e-5)
        np.testing.assert_allclose(combine.sum((2, 3)), 1.0, rtol=1e-5)


def test_route_tells_what_the_model_does():
    model = tiny.backbone(position_embedding="sincos2d")
    x = tiny.images(2)
    last = model.blocks[1]
    inputs = keras.Model(model.input, model.get_layer("block_0").output)(x)
    _, expected = recorded(last, inputs)
    actual = model.route(x)[1]
    for one, other in zip(actual.routing, expected.routing, strict=True):
        assert_near(to_numpy(one), to_numpy(other), rtol=1e-5, atol=1e-6)


def test_route_sparse_in_groups():
    model = tiny.backbone(router=tiny.SPARSE, group_images=2, pooling="gap")
    # Three images in groups of two: the last group is half padding.
    decision = model.route(tiny.images(3))[1]
    assert isinstance(decision.routing, ops.SlotRouting)
    # 2 images x 4 tokens x 0.75 / 4 experts: 2 slots each
    token, filled = to_numpy(decision.routing.token), to_numpy(decision.routing.filled)
    assert token.shape == filled.shape == (2, 4, 2)
    dropped = to_numpy(decision.summary["dropped"])
    assert dropped.shape == (2, 8)
    # Every real token is either seated once or dropped; padding is neither.
    assert filled[0].sum() + dropped[0].sum() == 8
    assert filled[1].sum() + dropped[1].sum() == 4
    assert token[1].max() < 4 and not dropped[1, 4:].any()


def test_route_is_deterministic_and_adds_no_loss():
    router = routers.SoftmaxTokenChoiceRouter(4, noise_std=10.0)
    model = tiny.backbone(router=router)
    first, second = (model.route(tiny.images(2))[1].summary for _ in range(2))
    np.testing.assert_array_equal(to_numpy(first["logits"]), to_numpy(second["logits"]))
    np.testing.assert_array_equal(
        to_numpy(first["selection"]), to_numpy(first["probabilities"])
    )
    assert not model.losses


def test_mixed_precision():
    model = tiny.backbone(pooling="map", dtype="mixed_bfloat16")
    outputs = model(tiny.images(2))
    assert {dtype_of(x) for x in outputs.values()} == {"bfloat16"}
    assert {dtype_of(w) for w in model.weights} == {"float32"}
    decision = model.route(tiny.images(2))[1]
    assert {dtype_of(x) for x in decision.routing} == {"float32"}
    experts = model.blocks[1].moe.experts
    assert experts.intermediate_dense.compute_dtype == "bfloat16"
    exact = tiny.backbone(pooling="map")
    exact.set_weights(model.get_weights())
    expected = to_numpy(exact(tiny.images(2))["pooled_output"])
    actual = to_numpy(outputs["pooled_output"])
    assert_near(actual, expected, atol=0.1)


def test_global_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = tiny.backbone()
    assert model.blocks[0].mlp.compute_dtype == "bfloat16"
    assert model.blocks[1].moe.router.compute_dtype == "float32"


def test_configuration_round_trip():
    model = tiny.backbone(
        patch_size=(4, 2),
        router=tiny.SPARSE,
        pooling="map",
        position_embedding="none",
        representation_dim=6,
        name="other",
        **tiny.UNUSUAL,
    )
    model.trainable = False
    revived = models.ViTMoEBackbone.from_config(model.get_config())
    assert revived.get_config() == model.get_config()
    assert not revived.trainable
    assert [w.path for w in revived.weights] == [w.path for w in model.weights]


def test_what_dense_models_were_trained_with():
    settings = {
        "activation": "gelu",
        "layer_norm_epsilon": 1e-3,
        "layer_scale": 0.5,
        "num_registers": 2,
        "position_resampling": "bicubic",
    }
    model = tiny.backbone(**settings, pooling="map")
    revived = models.ViTMoEBackbone.from_config(model.get_config())
    assert revived.get_config() == model.get_config()
    assert {name: getattr(revived, name) for name in settings} == settings
    dense, sparse = revived.blocks
    pooling = revived.get_layer("attention_pooling")
    layers_with_one = (dense.mlp, sparse.moe, sparse.moe.experts, pooling, pooling.mlp)
    assert {layer.activation for layer in layers_with_one} == {"gelu"}
    norms = [
        *(norm for b in (dense, sparse) for norm in (b.attention_norm, b.mlp_norm)),
        revived.get_layer("encoder_norm"),
        pooling.mlp_norm,
    ]
    assert {norm.epsilon for norm in norms} == {1e-3}
    # Without them a model is as it was before there were any.
    plain = tiny.backbone()
    assert {w.path for w in model.weights} - {w.path for w in plain.weights} > {
        "registers/registers",
        "block_0/attention_scale/gamma",
        "block_1/mlp_scale/gamma",
    }
    defaults = {**plain.get_config(), "name": "other"}
    for name in settings:
        defaults.pop(name)
    again = models.ViTMoEBackbone.from_config(defaults)
    assert [w.path for w in again.weights] == [w.path for w in plain.weights]


@pytest.mark.parametrize("pooling", ["gap", "first"])
def test_registers_are_not_pooled(pooling):
    model = tiny.backbone(num_registers=2, pooling=pooling)
    outputs = {name: to_numpy(x) for name, x in model(tiny.images(2)).items()}
    tokens = outputs["sequence_output"]
    assert tokens.shape[1] == 2 + 4
    expected = tokens[:, 2:].mean(1) if pooling == "gap" else tokens[:, 2]
    assert_near(outputs["pooled_output"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("equal_experts", [False, True])
def test_equal_experts(equal_experts):
    model = models.ViTMoEBackbone(
        tiny.IMAGE_SHAPE, 4, 1, 2, 8, 12, (0,), tiny.SOFT, equal_experts=equal_experts
    )
    kernel = to_numpy(model.blocks[0].moe.experts.intermediate_dense.kernel)
    assert np.array_equal(kernel[0], kernel[1]) == equal_experts


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"image_shape": (9, 8, 3)}, r"divide height and width.*\(9, 8, 3\).*\(4, 4\)"),
        ({"patch_size": (4, 3)}, r"divide height and width.*\(8, 8, 3\).*\(4, 3\)"),
        ({"image_shape": (8, 8)}, r"\(height, width, channels\).*image_shape=\(8, 8\)"),
        ({"image_shape": (None, 8, 3)}, "all known.*image_shape="),
        ({"num_heads": 3}, "must divide.*num_heads=3, width=8"),
        ({"moe_layers": (2,)}, r"from 0 to 1.*moe_layers=\(2,\), num_layers=2"),
        ({"moe_layers": (1, 1)}, r"at most once.*moe_layers=\(1, 1\)"),
        ({"router": None}, "go together.*router=None"),
        ({"moe_layers": ()}, r"go together.*moe_layers=\(\)"),
        ({"pooling": "max"}, "'token', 'first', 'gap', 'map'.*pooling='max'"),
        (
            {"position_embedding": "sin"},
            "'learned', 'sincos2d', 'none'.*position_embedding='sin'",
        ),
        (
            {"position_embedding": "sincos2d", "hidden_dim": 6},
            "multiple of 4.*hidden_dim=6",
        ),
        ({"group_images": 0}, "at least one image.*group_images=0"),
        ({"dispatcher": "scatter"}, "'auto', 'gather', 'einsum'.*dispatcher='scatter'"),
        (
            # 5 tokens with the class token
            {"router": routers.IdentityRouter(4)},
            "num_tokens=5.*num_experts=4",
        ),
        (
            {"router": routers.SoftmaxExpertChoiceRouter(16, capacity_factor=0.1)},
            "less than one slot.*num_tokens=5, num_experts=16",
        ),
    ],
)
def test_bad_argument(wrong, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        tiny.backbone(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_images": "x"},
        {"dispatcher": "fast"},
        {"equal_experts": 1.5},
        {"expert_dropout_rate": 2},
        {"remat_experts": "yes"},
        {"dispatch_dtype": "float99"},
    ],
)
def test_settings_of_experts_in_a_dense_model(wrong):
    """With other `moe_layers` they would be those of its experts."""
    assert set(architecture.Mixture.names()) >= set(wrong)
    ((name, value),) = wrong.items()
    text = {"vocabulary_size": 9, "sequence_length": 4}
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
    for make in (
        lambda: tiny.backbone(**tiny.DENSE, **wrong),
        lambda: models.TextMoEBackbone(**text, **sizes, **wrong),
        lambda: models.LIMoEBackbone((8, 8, 3), 4, **text, **sizes, **wrong),
    ):
        with pytest.raises(ValueError, match=f"Received: {name}={value!r}"):
            make()


def test_wrong_images():
    model = tiny.backbone()
    expected = to_numpy(model(tiny.images(2))["pooled_output"])
    for shape in [(2, 8, 8, 1), (2, 8, 8, 4), (2, 8, 8), (8, 8, 3), (2, 12, 8, 3)]:
        x = np.zeros(shape, "float32")
        message = rf"\(None, 8, 8, 3\).*shape \({', '.join(map(str, shape))}\)"
        with pytest.raises(ValueError, match=message):
            tiny.predict(model, x)
        with pytest.raises(ValueError, match=message):
            model.route(x)
    # The model still works.
    actual = to_numpy(model(tiny.images(2))["pooled_output"])
    assert_near(actual, expected, rtol=1e-5, atol=1e-5)
