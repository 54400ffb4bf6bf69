"""Tokens of several modalities in the encoder block of LIMoE."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from keras_softmoe.layers import limoe_block
from keras_softmoe.layers.limoe_block import LIMoEBlock
from tests.layers.test_moe import expert_weights
from tests.support import layer_checks, limoe_router_twin as twin, twins
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients, recorded
from tests.support.references import assert_each_near, to_numpy

WIDTH, NUM_EXPERTS, MLP_DIM = 8, 4, 6
LENGTHS = {"image": 4, "text": 2}
PLAIN = routers.SoftmaxTokenChoiceRouter(
    NUM_EXPERTS, priority="max", capacity_factor=0.5
)
LOSSES = (
    routers.RoutingLoss(ops.local_entropy_loss, "text"),
    routers.RoutingLoss(ops.z_loss, "image"),
)
LIMOE = routers.LIMoERouter(
    NUM_EXPERTS, capacity_factor=0.5, losses=LOSSES, loss_weight=1.0
)
# Room for every token.
AMPLE = routers.LIMoERouter(NUM_EXPERTS, capacity_factor=NUM_EXPERTS, losses=LOSSES)


def pairs(batch=layer_checks.BATCH):
    """Three pairs: in groups of two, the last group is half padding."""
    return {
        name: layer_checks.normal((batch, length, WIDTH), seed)
        for seed, (name, length) in enumerate(LENGTHS.items())
    }


def build(make, *args, like, **kwargs):
    layer = make(*args, **kwargs)
    layer.build(keras.tree.map_structure(lambda x: (None, *x.shape[1:]), like))
    layer_checks.randomize(layer)
    return layer


def block(router, like, **kwargs):
    cls = LIMoEBlock if isinstance(like, dict) else layers.EncoderBlock
    known = {"cls": cls, "group_images": 2, **kwargs}
    return build(layer_checks.encoder_block, 2, MLP_DIM, router, like=like, **known)


def assert_close(actual, expected, tolerance=1e-5):
    assert sorted(actual) == sorted(expected)
    assert_each_near(actual, expected, tolerance, tolerance)


# === Joining and splitting ===


@pytest.mark.parametrize("names", [["text", "image"], ["text"]])
def test_split_is_the_inverse_of_join(names):
    inputs = {name: pairs()[name] for name in sorted(names)}
    joined = limoe_block.join(list(inputs.values()))
    expected = np.concatenate(list(inputs.values()), axis=1)
    np.testing.assert_array_equal(to_numpy(joined), expected)
    layout = [(name, LENGTHS[name]) for name in inputs]
    assert_close(limoe_block.split(joined, layout), inputs, 0)


# === Mixture of experts ===


def test_one_modality_is_the_plain_layer():
    tokens = pairs()["image"]
    named = block(PLAIN, {"image": tokens})
    plain = block(PLAIN, tokens)
    plain.set_weights(named.get_weights())
    assert_close(named({"image": tokens}), {"image": plain(tokens)})


def test_order_of_keys_does_not_matter():
    inputs = pairs()
    backwards = {name: inputs[name] for name in reversed(list(inputs))}
    one, other = (block(LIMOE, x) for x in (inputs, backwards))
    expected = one(inputs)
    assert_close(one(backwards), expected, 0)
    other.set_weights(one.get_weights())
    assert_close(other(backwards), expected, 0)


def test_layer_is_its_twin_and_padding_has_no_say():
    inputs = pairs()
    joined = np.concatenate([inputs["image"], inputs["text"]], axis=1)
    layer = build(layers.MoE, LIMOE, MLP_DIM, like=joined, group_images=2)
    outputs, (routing, summary) = recorded(
        layer, joined, modalities=tuple(LENGTHS.items())
    )
    outputs = {"image": outputs[:, :4], "text": outputs[:, 4:]}

    # Two groups of two pairs: four patches, two words, four patches, two words.
    names = (["image"] * 4 + ["text"] * 2) * 2
    tokens = np.zeros((4, 6, WIDTH))
    tokens[: layer_checks.BATCH] = np.concatenate(
        [inputs["image"], inputs["text"]], axis=1
    )
    tokens = tokens.reshape(2, 12, WIDTH)
    valid = np.ones((2, 12), bool)
    valid[1, 6:] = False
    logits = twin.logits(tokens, names, {None: to_numpy(layer.router.kernel)})
    probabilities = twins.softmax(logits)
    # 12 tokens x 0.5 / 4 experts
    token, filled = twin.token_choice(probabilities, 1, 2, "sum", names, valid)
    gate = twins.gates(probabilities, token, filled)
    np.testing.assert_array_equal(to_numpy(routing.token), token)
    np.testing.assert_array_equal(to_numpy(routing.filled), filled)
    assert_near(to_numpy(routing.gate), gate, rtol=1e-5, atol=1e-6)

    expected = twins.moe(
        tokens, *twins.to_dense(token, filled, gate, 12), expert_weights(layer)
    )
    expected = expected.reshape(4, 6, WIDTH)[: layer_checks.BATCH]
    assert_close(outputs, {"image": expected[:, :4], "text": expected[:, 4:]}, 5e-5)

    routed = twin.Routed(logits, logits, twin.members(names, 2, valid), 1, 0.25)
    auxiliary = twin.auxiliary_loss(
        [(twin.local, "text"), (twin.z, "image")], routed, 1.0
    )
    np.testing.assert_allclose(
        to_numpy(summary["auxiliary_loss"]), auxiliary, rtol=2e-5
    )


@pytest.mark.parametrize("dispatcher", ["gather", "einsum"])
def test_both_dispatchers(dispatcher):
    inputs = pairs()
    expected = block(LIMOE, inputs)(inputs)
    assert_close(block(LIMOE, inputs, dispatcher=dispatcher)(inputs), expected)


def test_with_room_for_all_groups_do_not_matter():
    inputs = pairs()
    expected = block(AMPLE, inputs)(inputs)
    assert_close(block(AMPLE, inputs, group_images=1)(inputs), expected)


# === Encoder block ===


def test_modalities_do_not_attend_to_each_other():
    inputs = pairs()
    layer = block(AMPLE, inputs)
    expected = layer(inputs)
    for name, other in (("image", "text"), ("text", "image")):
        changed = layer({name: inputs[name], other: inputs[other] + 1.0})
        assert_close({name: changed[name]}, {name: expected[name]}, 1e-6)
        difference = to_numpy(changed[other]) - to_numpy(expected[other])
        assert np.abs(difference).max() > 1e-2
    # Alone, a modality comes out the same.
    assert_close(layer({"image": inputs["image"]}), {"image": expected["image"]})


def test_modalities_compete_for_slots():
    inputs = pairs()
    layer = block(LIMOE, inputs)
    changed = layer({"image": inputs["image"], "text": 5.0 * inputs["text"]})
    difference = to_numpy(changed["image"]) - to_numpy(layer(inputs)["image"])
    assert np.abs(difference).max() > 1e-2


def test_decision_of_a_block():
    inputs = pairs()
    layer = block(LIMOE, inputs)
    outputs, decision = recorded(layer, inputs)
    # On JAX `recorded` compiles the layer, which may round sums differently.
    assert_close(outputs, layer(inputs), 1e-6)
    assert tuple(decision.routing.token.shape) == (2, NUM_EXPERTS, 2)


# === Files and models ===


def test_configuration():
    inputs = pairs()
    layer = block(LIMOE, inputs)
    # Built again, with shapes that were lists in JSON.
    revived = layer_checks.revive(layer)
    assert revived.get_config() == layer.get_config()
    revived.set_weights(layer.get_weights())
    assert_close(revived(inputs), layer(inputs), 0)


def test_a_functional_model_of_blocks_trains():
    inputs = pairs()
    symbols = {name: keras.Input(x.shape[1:], name=name) for name, x in inputs.items()}
    layer = layer_checks.encoder_block(
        2, MLP_DIM, LIMOE, group_images=2, dtype="mixed_bfloat16", cls=LIMoEBlock
    )
    outputs = layer(symbols)
    for name, length in LENGTHS.items():
        assert outputs[name].shape == (None, length, WIDTH)
        assert outputs[name].dtype == "bfloat16"
    model = keras.Model(symbols, outputs)
    layer_checks.randomize(model)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(1.0), {"image": "mse", "text": "mse"})
    targets = {name: np.zeros_like(x) for name, x in inputs.items()}
    assert np.isfinite(model.train_on_batch(inputs, targets)).all()
    layer_checks.assert_trained(model, before)


# === Bad input ===


def test_names_are_needed():
    tokens = pairs()["image"]
    with pytest.raises(ValueError, match=r"(?s)of each token.*modalities=\(\)"):
        block(LIMOE, tokens)(tokens)
    inputs = {"image": tokens, "audio": tokens}
    with pytest.raises(ValueError, match="(?s)modality of each token.*'audio'"):
        block(LIMOE, inputs)(inputs)


@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"image": (2, 4, 8), "text": (2, 2, 6)}, r"(?s)one width.*\(2, 2, 6\)"),
        ({}, "(?s)one or more names.*shapes={}"),
        ({"text": (2, None, 8)}, r"(?s)known beforehand.*\(2, None, 8\)"),
    ],
)
def test_bad_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        layer_checks.encoder_block(2, MLP_DIM, LIMOE, cls=LIMoEBlock).build(shapes)


IMAGE, TEXT = (3, 4, 8), (3, 2, 8)


@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"image": IMAGE, "text": (2, 2, 8)}, r"batches of one size.*\(2, 2, 8\)"),
        ({"image": IMAGE, "text": (3, 8)}, r"\(3, 8\), with 2 axes"),
    ],
)
def test_modalities_that_do_not_fit_together(shapes, message):
    """Also in a call after the first one, which built the layer."""
    layer = block(PLAIN, pairs())
    inputs = {name: np.zeros(shape, "float32") for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        layer(inputs)


@pytest.mark.parametrize(
    "mask",
    [
        {"text": np.ones((3, 4), bool)},
        {"text": np.ones((1, 2), bool)},
        {"text": np.ones((3, 2, 1), bool)},
        {"audio": np.ones((3, 2), bool)},
        np.ones((3, 6), bool),
    ],
)
def test_masks_that_do_not_fit(mask):
    with pytest.raises(ValueError, match="(?s)[Mm]ask.*Received: a mask"):
        block(PLAIN, pairs())(pairs(), mask=mask)


@pytest.mark.parametrize(
    "mask", [{"image": np.ones((3, 4), bool)}, np.ones((3, 5), bool), np.ones(3, bool)]
)
def test_mask_that_does_not_fit_a_tensor(mask):
    tokens = pairs()["image"]
    moe = build(layers.MoE, PLAIN, MLP_DIM, like=tokens, group_images=2)
    for layer in (moe, block(PLAIN, tokens)):
        with pytest.raises(ValueError, match="(?s)without the width.*tokens of shape"):
            layer(tokens, mask=mask)


# === Masks ===


class Joined(keras.layers.Layer):
    """A layer for both modalities, called on one tensor; only text is masked."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.built = self.supports_masking = True

    def call(self, x, mask, training=None):
        inputs = {"image": x[:, :4], "text": x[:, 4:]}
        outputs = self.layer(inputs, mask={"text": mask}, training=training)
        return keras.ops.concatenate([outputs["image"], outputs["text"]], axis=1)


@pytest.mark.parametrize(
    "per_modality, capacity_factor", [(False, 1.0), (True, None), (True, 1.0)]
)
def test_masked_text_is_not_there(per_modality, capacity_factor):
    """NaN in it reaches no output, no loss and no gradient."""
    inputs = pairs()
    router = routers.LIMoERouter(
        NUM_EXPERTS,
        capacity_factor=capacity_factor,
        per_modality=per_modality,
        losses=(
            *routers.classic_losses(by_modality=True),
            *routers.entropy_losses(NUM_EXPERTS),
            routers.RoutingLoss(ops.mutual_information_loss),
        ),
    )
    layer = Joined(block(router, inputs))
    x = np.concatenate([inputs["image"], inputs["text"]], axis=1)
    mask = np.array([[True, False], [True, True], [False, False]])
    there = np.concatenate([np.ones((3, 4), bool), mask], axis=1)

    def loss(y, losses):
        kept = keras.ops.where(there[..., None], y, 0.0)
        return keras.ops.sum(keras.ops.square(kept)) + sum(losses)

    (seed,) = [v for v in layer.variables if "seed" in v.path]
    found = []
    for padding in (0.0, np.nan):
        x[~there] = padding
        seed.assign([1, 2])
        found.append(layer_gradients(layer, x, loss, mask=mask, training=True))
    expected, (value, of_inputs, of_weights) = found
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    assert_near(of_inputs, expected[1], atol=1e-6)
    assert_each_near(of_weights, expected[2], rtol=1e-4, atol=1e-6)
