"""LIMoE's backbone: what its outputs are, who feels whom, its files, its errors."""

import keras
import numpy as np
import pytest

from keras_softmoe import models, routers
from keras_softmoe.layers.pooling import TEXT_POOLINGS
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.gradients import recorded
from tests.support.layer_checks import assert_same_weights, dtype_of, from_preset
from tests.support.references import assert_each_near, to_numpy
from tests.support.tiny_limoe import AMPLE, BATCH, LENGTH, NUM_PATCHES, as_numpy, pairs

WIDTH, EMBEDDING_DIM = 8, 6
EMBEDDINGS = {"image": "image_embedding", "text": "text_embedding"}


@pytest.mark.parametrize("index", range(len(TEXT_POOLINGS)))
def test_embeddings_are_pooled_projected_and_normalized(index):
    # Every pooling once for images, once for text.
    pooling = {"image": TEXT_POOLINGS[index], "text": TEXT_POOLINGS[index - 1]}
    model = tiny_limoe.backbone(
        image_pooling=pooling["image"], text_pooling=pooling["text"]
    )
    outputs = as_numpy(model(pairs()))
    names = {layer.name for layer in model.layers}
    for modality, length in (("image", NUM_PATCHES), ("text", LENGTH)):
        tokens = outputs[f"{modality}_sequence_output"]
        assert tokens.shape == (BATCH, length, WIDTH)
        attention = f"{modality}_attention_pooling"
        assert (attention in names) == (pooling[modality] == "map")
        pooled = {
            "first": lambda tokens=tokens: tokens[:, 0],
            "last": lambda tokens=tokens: tokens[:, -1],
            "gap": lambda tokens=tokens: tokens.mean(1),
            "gmp": lambda tokens=tokens: tokens.max(1),
            "map": lambda tokens=tokens, name=attention: to_numpy(
                model.get_layer(name)(tokens)
            ),
        }[pooling[modality]]()
        (kernel,) = model.get_layer(f"{modality}_projection").weights
        projected = pooled @ to_numpy(kernel)
        expected = projected / np.linalg.norm(projected, axis=-1, keepdims=True)
        assert_each_near(outputs, {EMBEDDINGS[modality]: expected})
        assert outputs[EMBEDDINGS[modality]].shape == (BATCH, EMBEDDING_DIM)


def test_symbolic_outputs():
    for bias in (None, -10.0):
        model = tiny_limoe.backbone(logit_bias=bias)
        symbolic = {name: (x.shape, x.dtype) for name, x in model.output.items()}
        expected = {
            "image_sequence_output": (None, NUM_PATCHES, WIDTH),
            "text_sequence_output": (None, LENGTH, WIDTH),
            "image_embedding": (None, EMBEDDING_DIM),
            "text_embedding": (None, EMBEDDING_DIM),
            "logit_scale": (None,),
        }
        if bias is not None:
            expected["logit_bias"] = (None,)
        assert symbolic == {k: (shape, "float32") for k, shape in expected.items()}


def test_initial_scale_and_bias():
    model = models.LIMoEBackbone(
        **{**tiny_limoe.backbone().get_config(), "router": AMPLE, "logit_bias": -10.0}
    )
    outputs = as_numpy(model(pairs()))
    np.testing.assert_allclose(outputs["logit_scale"], [10.0] * BATCH, rtol=1e-5)
    np.testing.assert_allclose(outputs["logit_bias"], [-10.0] * BATCH, rtol=1e-5)


def test_dense_twin():
    model = tiny_limoe.backbone(**tiny_limoe.DENSE)
    assert model.router is None and model.routers == {}
    assert model.route(**pairs()) == {}
    # A block has 4 normalization vectors, attention and an MLP; then patches, text
    # tokens, positions of both, the last normalization, projections and the scale.
    block = 4 * WIDTH + 4 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH * 12 + 12 + WIDTH
    around = (4 * 4 * 3 + 1) * WIDTH + tiny_limoe.VOCABULARY_SIZE * WIDTH
    around += (NUM_PATCHES + LENGTH) * WIDTH + 2 * WIDTH + 2 * WIDTH * EMBEDDING_DIM
    assert model.count_params() == 2 * block + around + 1
    # Blocks are shared, but nobody attends to the other modality.
    expected = as_numpy(model(pairs()))
    changed = as_numpy(model({**pairs(), "token_ids": tiny_limoe.token_ids(seed=1)}))
    assert_each_near(
        changed, {k: v for k, v in expected.items() if "image" in k}, 1e-6, 1e-6
    )


@pytest.mark.parametrize("changed, other", [("text", "image"), ("image", "text")])
def test_no_leakage(changed, other):
    key = {"image": "images", "text": "token_ids"}[changed]
    changed_pairs = {**pairs(), key: pairs(seed=1)[key]}
    model = tiny_limoe.backbone(router=AMPLE)
    before, after = as_numpy(model(pairs())), as_numpy(model(changed_pairs))
    same = [f"{other}_sequence_output", EMBEDDINGS[other]]
    assert_each_near(after, {name: before[name] for name in same}, 1e-6, 1e-6)
    difference = after[EMBEDDINGS[changed]] - before[EMBEDDINGS[changed]]
    assert np.abs(difference).max() > 1e-2

    # Where seats are scarce and those of the other come first, they do feel it.
    scarce = AMPLE.with_settings(priority=f"{changed}_first", capacity_factor=0.5)
    model = tiny_limoe.backbone(router=scarce)
    before, after = as_numpy(model(pairs())), as_numpy(model(changed_pairs))
    difference = after[EMBEDDINGS[other]] - before[EMBEDDINGS[other]]
    assert np.abs(difference).max() > 1e-2


def test_encoders_are_the_backbone_itself():
    # (What they compute is compared with pairs in `test_contrastive.py`.)
    model = tiny_limoe.backbone()
    weights = {id(w) for w in model.weights}
    for modality in ("image", "text"):
        encoder = getattr(model, f"{modality}_encoder")
        assert getattr(model, f"{modality}_encoder") is encoder
        assert sorted(encoder.output) == [
            EMBEDDINGS[modality],
            f"{modality}_sequence_output",
        ]
        assert {id(w) for w in encoder.weights} <= weights
        assert list(encoder.routers.values()) == list(model.routers.values())
    assert len(model.weights) == len(weights)


def test_any_batch_size():
    model = tiny_limoe.backbone()
    x = pairs()
    expected = as_numpy(model(x))
    # A full group and half a group; a batch of one.
    assert_each_near(tiny.predict(model, x, batch_size=2), expected)


def test_whole_batch_is_one_group():
    # Its size is known when traced, so full batches work on every backend.
    model = tiny_limoe.backbone(router=AMPLE, group_images=None)
    expected = tiny_limoe.backbone(router=AMPLE)(pairs())
    assert_each_near(tiny.predict(model, pairs(), batch_size=BATCH), as_numpy(expected))


def test_route():
    model = tiny_limoe.backbone()
    decisions = model.route(**pairs())
    assert list(decisions) == [0, 1]
    names = np.array((["image"] * NUM_PATCHES + ["text"] * LENGTH) * 2)
    for decision in decisions.values():
        token, filled, _ = (to_numpy(x) for x in decision.routing)
        # 2 pairs x 12 tokens x 0.75 / 4 experts = 4.5: 4 slots each, the even one
        assert token.shape == (2, 4, 4)
        dropped = to_numpy(decision.summary["dropped"])
        assert dropped.any()
        # Each real token is seated once or dropped; padding is neither.
        assert filled[0].sum() + dropped[0].sum() == 24
        assert filled[1].sum() + dropped[1].sum() == 12
        assert token[1].max() < 12 and not dropped[1, 12:].any()
        assert {"image", "text"} == set(names[token[0][filled[0]]])
    assert not model.losses
    # What it tells is what the model does: the second block, given what goes into it.
    between = dict(zip(("image", "text"), model.blocks[0].output, strict=True))
    first = keras.Model(model.input, between)
    _, expected = recorded(model.blocks[1], first(pairs()))
    for one, other in zip(decisions[1].routing, expected.routing, strict=True):
        assert_near(to_numpy(one), to_numpy(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "key, length", [("images", NUM_PATCHES), ("token_ids", LENGTH)]
)
def test_route_of_one_modality(key, length):
    decision = tiny_limoe.backbone().route(**{key: pairs()[key]})[1]
    # Sixteen times the room is more than there are tokens.
    assert tuple(decision.routing.token.shape) == (2, 4, 2 * length)
    assert to_numpy(decision.routing.filled).sum() == BATCH * length


def test_other_routers():
    # A router of the V-MoE kind sees one sequence, and a soft one as well.
    for router in (tiny.SPARSE, tiny.SOFT):
        model = tiny_limoe.backbone(router=router)
        assert np.isfinite(to_numpy(model(pairs())["text_embedding"])).all()


def test_mixed_precision():
    model = tiny_limoe.backbone(router=AMPLE, dtype="mixed_bfloat16")
    outputs = model(pairs())
    for name, x in outputs.items():
        expected = "bfloat16" if "sequence" in name else "float32"
        assert dtype_of(x) == expected, name
    assert {dtype_of(w) for w in model.trainable_weights} == {"float32"}
    block = model.blocks[1]
    assert block.moe.router.compute_dtype == "float32"
    assert block.moe.experts.intermediate_dense.compute_dtype == "bfloat16"
    exact = tiny_limoe.backbone(router=AMPLE)
    exact.set_weights(model.get_weights())
    expected = as_numpy(exact(pairs()))
    for name in EMBEDDINGS.values():
        assert np.median(np.abs(to_numpy(outputs[name]) - expected[name])) < 0.05


def test_configuration_round_trip():
    model = tiny_limoe.backbone(
        patch_size=(4, 2),
        router=tiny_limoe.ROUTER,
        embedding_dim=5,
        image_pooling="map",
        text_pooling="last",
        logit_scale=3.0,
        logit_bias=-2.0,
        name="other",
        trainable=False,
        **tiny.UNUSUAL,
    )
    revived = models.LIMoEBackbone.from_config(model.get_config())
    assert revived.get_config() == model.get_config()
    assert not revived.trainable
    assert [w.path for w in revived.weights] == [w.path for w in model.weights]
    block = revived.blocks[1]
    assert (block.use_qk_norm, block.dropout_rate) == (True, 0.1)
    moe = block.moe
    assert (moe.group_images, moe.dispatcher, moe.equal_experts) == (3, "einsum", True)
    assert (moe.expert_dropout_rate, moe.dispatch_dtype) == (0.2, "bfloat16")
    assert moe.experts.remat
    assert revived.get_layer("image_attention_pooling").use_qk_norm


def test_preset(tmp_path):
    model = tiny_limoe.backbone(image_pooling="map", logit_bias=-1.0)
    path = str(tmp_path / "preset")
    revived = from_preset(model, path)
    assert revived.get_config() == model.get_config()
    assert_same_weights(revived, model)
    # For larger images the positions of patches are resampled, and nothing else.
    larger = models.LIMoEBackbone.from_preset(
        path, image_shape=(16, 8, 3), priority="text_first"
    )
    assert larger.patch_grid == (4, 2)
    assert larger.router.priority == "text_first"
    for actual, expected in zip(larger.weights, model.weights, strict=True):
        if "image_position_embedding" in actual.path:
            layer = larger.get_layer("image_position_embedding")
            expected = layer.resample(to_numpy(expected), (2, 2))
            assert tuple(actual.shape) == (1, 8, WIDTH)
        assert_near(to_numpy(actual), to_numpy(expected), rtol=1e-6, atol=1e-7)
    fresh = models.LIMoEBackbone.from_preset(path, load_weights=False)
    kernel = to_numpy(fresh.get_layer("text_projection").kernel)
    assert np.abs(kernel - to_numpy(model.get_layer("text_projection").kernel)).max()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"patch_size": 3}, r"divide height and width.*\(8, 8, 3\)"),
        ({"router": None}, "go together.*router=None"),
        ({"image_pooling": "token"}, "'gap', 'gmp', 'map'.*image_pooling='token'"),
        ({"text_pooling": "mean"}, "'last', 'first'.*text_pooling='mean'"),
        ({"vocabulary_size": 0}, "positive integer.*vocabulary_size=0"),
        ({"sequence_length": 0}, "positive integer.*sequence_length=0"),
        ({"logit_scale": 0.0}, "number over 0.*scale=0.0"),
    ],
)
def test_bad_argument(wrong, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        tiny_limoe.backbone(**wrong)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"images": np.zeros((3, 8, 8, 1))}, r"\(None, 8, 8, 3\).*\(3, 8, 8, 1\)"),
        ({"images": np.zeros((8, 8, 3))}, r"\(None, 8, 8, 3\).*\(8, 8, 3\)"),
        ({"token_ids": np.zeros((3, 9), "int32")}, r"\(None, 8\).*\(3, 9\)"),
        ({"token_ids": np.zeros(8, "int32")}, r"\(None, 8\).*\(8,\)"),
        ({"images": np.zeros((2, 8, 8, 3))}, "equally many.*2 images, 3 texts"),
        ({"images": None, "token_ids": None}, "nothing to encode.*=None"),
    ],
)
def test_bad_pairs(wrong, message):
    model = tiny_limoe.backbone()
    for call in (lambda x: model.route(**x), lambda x: tiny.predict(model, x)):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call({**pairs(), **wrong})


def test_a_backbone_knows_which_routers_need_names():
    # As a list of blocks a plain identity router must divide the tokens of a pair.
    with pytest.raises(ValueError, match="num_tokens=24.*num_experts=5"):
        tiny_limoe.backbone(router=routers.IdentityRouter(5))
