"""Pruning a LIMoE: kept experts compute what they did, the others are gone."""

import numpy as np
import pytest

from keras_softmoe import evaluation, models, routers
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.layer_checks import randomize
from tests.support.references import to_numpy

NUM_EXPERTS = 6
# Kept of them, most used first: 4 and 1 in block 1; 0 and 3 in block 3.
USAGE = {1: [0, 5, 2, 1, 9, 5], 3: np.array([70, 1, 1, 8, 1, 0])}
KEPT = {1: (1, 4), 3: (0, 3)}


def backbone(**router):
    model = models.LIMoEBackbone(
        **{**tiny.SIZES, "num_layers": 4},
        vocabulary_size=20,
        sequence_length=5,
        moe_layers=(1, 3),
        router=routers.LIMoERouter(NUM_EXPERTS, **router),
        embedding_dim=6,
        image_pooling="map",
        group_images=4,
    )
    randomize(model)
    return model


def token_ids(count=4):
    return np.random.default_rng(0).integers(0, 20, (count, 5)).astype("int32")


def encode(model):
    return tiny.predict(model.text_encoder, token_ids())["text_embedding"]


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("method", ["router_pred", "router_drop"])
def test_keeping_all_experts_changes_nothing(method):
    model = backbone()
    pruned = models.prune_experts(model, USAGE, NUM_EXPERTS, method=method)
    np.testing.assert_array_equal(encode(pruned), encode(model))
    images = tiny.images(3)
    np.testing.assert_array_equal(
        *(
            tiny.predict(m.image_encoder, images)["image_embedding"]
            for m in (pruned, model)
        )
    )


@pytest.mark.parametrize("settings", [{}, {"per_modality": True}])
@pytest.mark.parametrize("method", ["router_pred", "router_drop"])
def test_first_block_routes_among_the_kept_experts(method, settings):
    model = backbone(**settings)
    pruned = models.prune_experts(model, USAGE, 2, method=method)
    before = model.route(token_ids=token_ids())[1].summary
    after = pruned.route(token_ids=token_ids())[1].summary
    # Up to here both have computed the same.
    kept = list(KEPT[1])
    if method == "router_pred":
        expected = softmax(to_numpy(before["logits"]))[..., kept]
    else:
        expected = softmax(to_numpy(before["logits"])[..., kept])
    assert_near(to_numpy(after["probabilities"]), expected, rtol=1e-5, atol=1e-7)
    # Nothing is dropped: text has room for all of it.
    assert not to_numpy(after["dropped"]).any()


def test_block_with_pruned_experts_equals_the_literal_one():
    """Every token goes to the kept expert with the largest of its old gates."""
    model = backbone()
    pruned = models.prune_experts(model, USAGE, 2)
    tokens = np.random.default_rng(1).normal(size=(4, 5, 8)).astype("float32")
    moe, new = model.blocks[1].moe, pruned.blocks[1].moe
    gates = softmax(tokens @ to_numpy(moe.router.kernel))[..., KEPT[1]]
    # All experts on all tokens, (E, B * S, D)
    slots = np.broadcast_to(tokens.reshape(1, 1, -1, 8), (1, NUM_EXPERTS, 20, 8))
    outputs = to_numpy(moe.experts(slots))[0].reshape(NUM_EXPERTS, 4, 5, 8)
    best = gates.argmax(-1)
    expected = np.zeros_like(tokens)
    for place, expert in np.ndenumerate(best):
        expected[place] = gates[place][expert] * outputs[KEPT[1][expert]][place]
    found = to_numpy(new(tokens, modalities=(("text", 5),)))
    assert_near(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["router_pred", "router_drop"])
def test_what_is_pruned_is_gone(method):
    model = backbone()
    before = {w.path: to_numpy(w).copy() for w in model.weights}
    pruned = models.prune_experts(model, USAGE, 2, method=method)
    for index, kept in KEPT.items():
        experts = pruned.blocks[index].moe.experts
        old = model.blocks[index].moe.experts
        for name in ("intermediate_dense", "output_dense"):
            for new, whole in zip(
                getattr(experts, name).weights, getattr(old, name).weights, strict=True
            ):
                np.testing.assert_array_equal(
                    to_numpy(new), to_numpy(whole)[list(kept)]
                )
    one_expert = 8 * 12 + 12 + 12 * 8 + 8
    gone = 2 * 4 * one_expert + (2 * 4 * 8 if method == "router_drop" else 0)
    assert model.count_params() - pruned.count_params() == gone
    # What is counted without a model agrees.
    assert evaluation.cost(pruned).parameters == pruned.count_params()
    # The model that was pruned is as it was.
    for weight in model.weights:
        np.testing.assert_array_equal(to_numpy(weight), before[weight.path])


@pytest.mark.parametrize("method", ["router_pred", "router_drop"])
def test_pruned_model_is_saved_and_loaded(method, tmp_path):
    pruned = models.prune_experts(backbone(), USAGE, 2, method=method)
    pruned.save_to_preset(tmp_path / "pruned")
    loaded = models.LIMoEBackbone.from_preset(str(tmp_path / "pruned"))
    np.testing.assert_array_equal(encode(loaded), encode(pruned))
    assert loaded.get_config() == pruned.get_config()


def test_pruned_models_have_no_losses():
    pruned = models.prune_experts(backbone(), USAGE, 2)
    pruned({"images": tiny.images(4), "token_ids": token_ids()}, training=True)
    assert not pruned.losses


def test_disjoint_experts_stay_apart():
    # Text may use the last three of six.
    model = backbone(image_experts=3, text_experts=3)
    usage = {1: [0, 0, 0, 1, 2, 3], 3: [0, 0, 0, 3, 2, 1]}
    pruned = models.prune_experts(model, usage, 2)
    gates = softmax(to_numpy(model.route(token_ids=token_ids())[1].summary["logits"]))
    assert np.all(gates[..., :3] == 0)
    after = pruned.route(token_ids=token_ids())[1].summary["probabilities"]
    assert_near(to_numpy(after), gates[..., 4:], rtol=1e-5, atol=1e-7)
    dropped = models.prune_experts(model, usage, 3, method="router_drop")
    assert_near(encode(dropped), encode(model), rtol=1e-5, atol=1e-6)


def test_two_choices_of_the_kept_experts():
    pruned = models.prune_experts(backbone(num_selected_experts=2), USAGE, 3)
    assert pruned.routers[1].num_selected_experts == 2
    load = to_numpy(pruned.route(token_ids=token_ids())[1].summary["load"])
    assert load.shape == (1, 3) and load.sum() == 2 * 20


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_experts": 0}, "from 1, .*, to 6.*num_experts=0"),
        ({"num_experts": 7}, "num_experts=7"),
        ({"usage": {1: USAGE[1]}}, r"blocks \[3\] is missing"),
        ({"usage": USAGE | {3: [1, 2]}}, r"shape \(2,\) for 6 experts"),
        ({"method": "drop"}, "'router_pred', 'router_drop'.*method='drop'"),
    ],
)
def test_bad_input(arguments, message):
    arguments = {"usage": USAGE, "num_experts": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        models.prune_experts(backbone(), **arguments)


def test_models_that_are_not_pruned():
    pruned = models.prune_experts(backbone(), USAGE, 3)
    with pytest.raises(ValueError, match="only once"):
        models.prune_experts(pruned, USAGE, 2)
    with pytest.raises(ValueError, match="ViTMoEBackbone"):
        models.prune_experts(tiny.backbone(), USAGE, 2)
    dense = models.LIMoEBackbone((8, 8, 3), 4, 20, 5, 1, 2, 8, 12)
    with pytest.raises(ValueError, match="not a dense one"):
        models.prune_experts(dense, {}, 2)
    adapted = backbone()
    adapted.enable_lora(2)
    with pytest.raises(ValueError, match="those with LoRA weights cannot be pruned"):
        models.prune_experts(adapted, USAGE, 2)
