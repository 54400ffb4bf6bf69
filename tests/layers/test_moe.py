"""Groups, padding, batch sizes, dispatchers and errors of the MoE layer."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from tests.support import twins
from tests.support.close import assert_near
from tests.support.gradients import recorded
from tests.support.layer_checks import encoder_block, normal, randomize
from tests.support.references import assert_all_equal, to_numpy

NUM_TOKENS, WIDTH, NUM_EXPERTS, MLP_DIM = 4, 8, 4, 6
SHAPE = (NUM_TOKENS, WIDTH)
# So tight that tokens are dropped, and that padding would take others' slots.
TIGHT = {"capacity_factor": 0.5}
ROUTERS = {
    "soft": routers.SoftRouter(NUM_EXPERTS, slots_per_expert=2),
    "identity": routers.IdentityRouter(NUM_EXPERTS),
    "token_choice": routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, num_selected_experts=2, noise_std=0.0, priority="max", **TIGHT
    ),
    "expert_choice": routers.SoftmaxExpertChoiceRouter(NUM_EXPERTS, **TIGHT),
}


def build(router, seed=0, **kwargs):
    layer = layers.MoE(router, MLP_DIM, **kwargs)
    layer.build((None, *SHAPE))
    randomize(layer, seed)
    return layer


def expert_weights(layer):
    """Kernel (E, D, H), bias (E, H), kernel (E, H, D), bias (E, D)."""
    banks = layer.experts.intermediate_dense, layer.experts.output_dense
    return [to_numpy(w) for bank in banks for w in (bank.kernel, bank.bias)]


# === Groups and padding ===


@pytest.mark.parametrize("name", ["identity", "token_choice", "expert_choice"])
def test_padding_takes_no_slot(name):
    # Three images in groups of two. Whatever is in the padding, the last image comes
    # out as if its group were padded with tokens that no expert may take.
    layer = build(ROUTERS[name], group_images=2)
    inputs = normal((3, *SHAPE))
    outputs, decision = recorded(layer, inputs)
    token, filled, gate = (to_numpy(x) for x in decision.routing)
    assert token.shape[0] == 2
    assert filled[1].any()
    # Real tokens are the first four of the second group.
    assert (token[1][filled[1]] < NUM_TOKENS).all()
    assert not gate[1][~filled[1]].any()
    dropped = to_numpy(decision.summary["dropped"])
    assert dropped.shape == (2, 2 * NUM_TOKENS)
    assert not dropped[1, NUM_TOKENS:].any()

    # The last group's seats again, from the four real tokens alone.
    real = inputs[2:]
    capacity = token.shape[-1]
    if name == "identity":
        expected_token, _ = twins.identity(1, 2 * NUM_TOKENS, NUM_EXPERTS)
        expected_filled = expected_token < NUM_TOKENS
        expected_gate = expected_filled.astype("float64")
    else:
        probabilities = twins.softmax(real @ to_numpy(layer.router.kernel))
        choose = {
            "token_choice": lambda: twins.token_choice(
                probabilities, 2, capacity, "max"
            ),
            "expert_choice": lambda: twins.expert_choice(probabilities, capacity),
        }[name]
        expected_token, expected_filled = choose()
        expected_gate = twins.gates(probabilities, expected_token, expected_filled)
    np.testing.assert_array_equal(filled[1:], expected_filled)
    np.testing.assert_array_equal(
        token[1:][filled[1:]], expected_token[expected_filled]
    )
    assert_near(gate[1:], expected_gate, rtol=1e-5, atol=1e-6)
    weights = twins.to_dense(
        expected_token * expected_filled, expected_filled, expected_gate, NUM_TOKENS
    )
    expected = twins.moe(real, *weights, expert_weights(layer))
    assert_near(to_numpy(outputs)[2:], expected, rtol=2e-5, atol=2e-5)


def test_padding_under_a_soft_router():
    # The last image's slots are mixed from its own tokens only.
    grouped = build(ROUTERS["soft"], group_images=2)
    single = build(ROUTERS["soft"])
    single.set_weights(grouped.get_weights())
    inputs = normal((3, *SHAPE))
    outputs, decision = recorded(grouped, inputs)
    dispatch = to_numpy(decision.routing.dispatch)
    assert_near(dispatch[1, NUM_TOKENS:], 0.0, atol=1e-12)
    np.testing.assert_allclose(dispatch.sum(1), 1.0, rtol=1e-5)
    assert_near(
        to_numpy(outputs)[2:], to_numpy(single(inputs[2:])), rtol=1e-5, atol=1e-5
    )


def test_padding_counts_in_no_loss():
    router = routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS,
        noise_std=0.0,
        losses=[
            routers.RoutingLoss(ops.importance_loss),
            routers.RoutingLoss(ops.z_loss),
        ],
    )
    grouped, single = build(router, group_images=2), build(router)
    single.set_weights(grouped.get_weights())
    inputs = normal((1, *SHAPE))
    for layer in (grouped, single):
        layer(inputs, training=True)
    losses = (to_numpy(x.losses[0]) for x in (grouped, single))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert to_numpy(single.losses[0]) > 0.01


@pytest.mark.parametrize(
    "name, dispatcher",
    [("soft", "auto"), ("token_choice", "gather"), ("expert_choice", "einsum")],
)
def test_batch_sizes_in_a_compiled_model(name, dispatcher):
    layer = build(ROUTERS[name], group_images=4, dispatcher=dispatcher)
    model = keras.Sequential([keras.Input(SHAPE), layer])
    inputs = normal((33, *SHAPE))
    expected = to_numpy(layer(inputs))
    # 33 images in batches of 7 and 32: a batch of 5, a batch of one.
    for batch_size in (1, 7, 32):
        actual = model.predict(inputs, batch_size=batch_size, verbose=0)
        assert actual.shape == inputs.shape
        # The full groups of the first batch are those of the whole.
        whole = batch_size // 4 * 4
        assert_near(actual[:whole], expected[:whole], rtol=1e-5, atol=1e-5)


def test_groups_of_images_compete_for_slots():
    # One slot per expert and image alone; routed together, an image may take more.
    router = routers.SoftmaxExpertChoiceRouter(2, capacity_factor=0.5)
    layer = build(router, group_images=2)
    layer.router.kernel.assign(np.eye(WIDTH)[:, :2])
    inputs = np.zeros((2, *SHAPE), "float32")
    # The first image has the two best tokens for both experts.
    inputs[0, :2, 0] = 5.0
    inputs[0, 2:, 1] = 5.0
    _, decision = recorded(layer, inputs)
    token = to_numpy(decision.routing.token)
    assert token.shape == (1, 2, 2)
    assert token[0].tolist() == [[0, 1], [2, 3]]


# === Outputs ===


def test_dropped_token_comes_back_as_zeros():
    layer = build(ROUTERS["token_choice"])
    outputs, decision = recorded(layer, normal((3, *SHAPE)))
    dropped = to_numpy(decision.summary["dropped"])
    assert dropped.any() and not dropped.all()
    outputs = to_numpy(outputs)
    assert not outputs[dropped].any()
    assert (np.abs(outputs[~dropped]).max(-1) > 0).all()


@pytest.mark.parametrize("num_tokens, multiplies", [(63, True), (64, False)])
def test_auto_dispatcher(num_tokens, multiplies, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "keras_softmoe.layers.moe.to_dense",
        lambda *args: calls.append(1) or ops.to_dense(*args),
    )
    router = routers.SoftmaxExpertChoiceRouter(2, capacity_factor=0.1)
    layer = layers.MoE(router, 2)
    layer(normal((1, num_tokens, 2)))
    assert bool(calls) == multiplies


def test_a_symbolic_call_decides_nothing():
    layer = build(ROUTERS["soft"])
    with routers.record() as decisions:
        layer(keras.Input(SHAPE))
    assert decisions == {}


# === Bad input ===


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"router": "soft"}, "(?s)from `keras_softmoe.routers`.*router='soft'"),
        ({"router": None}, "(?s)from `keras_softmoe.routers`.*router=None"),
        ({"group_images": 0}, "at least one image.*group_images=0"),
        ({"dispatcher": "sort"}, "'auto', 'gather', 'einsum'.*dispatcher='sort'"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        layers.MoE(**{"router": ROUTERS["soft"], "mlp_dim": MLP_DIM, **arguments})


@pytest.mark.parametrize("shape", [(2, 8), (2,), (2, 4, None)])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.MoE(ROUTERS["soft"], MLP_DIM),
        lambda: layers.SoftMoE(2, MLP_DIM),
        lambda: encoder_block(2, MLP_DIM, ROUTERS["soft"]),
    ],
)
def test_wrong_rank(layer, shape):
    with pytest.raises(ValueError, match=r"\(batch, .*, width\).*shape=\(2,"):
        layer().build(shape)


# === The whole batch, rounding, expert dropout ===


@pytest.mark.parametrize("name", ROUTERS)
def test_whole_batch_is_one_group(name):
    inputs = normal((3, *SHAPE))
    layer = build(ROUTERS[name], group_images=None)
    outputs, decision = recorded(layer, inputs)
    if name != "soft":
        assert decision.routing.token.shape[0] == 1
    expected = build(ROUTERS[name], group_images=3)(inputs)
    np.testing.assert_allclose(to_numpy(outputs), to_numpy(expected), rtol=1e-6)


def test_whole_batch_in_a_compiled_model():
    inputs = normal((3, *SHAPE))
    layer = build(ROUTERS["token_choice"], group_images=None)
    x = keras.Input(SHAPE)
    model = keras.Model(x, layer(x))

    def check(batch):
        expected = build(ROUTERS["token_choice"], group_images=len(batch))(batch)
        actual = model.predict_on_batch(batch)
        assert_near(actual, to_numpy(expected), rtol=1e-5, atol=1e-6)

    check(inputs)
    if keras.backend.backend() == "tensorflow":
        # A second size makes it trace for batches of any size.
        with pytest.raises(ValueError, match="drop_remainder=True"):
            model.predict_on_batch(inputs[:1])
    else:
        check(inputs[:1])


@pytest.mark.parametrize("dispatcher", ["gather", "einsum"])
def test_tokens_are_rounded_on_their_way(dispatcher):
    inputs = normal((2, *SHAPE))
    layer = build(
        ROUTERS["token_choice"], dispatcher=dispatcher, dispatch_dtype="bfloat16"
    )
    exact = build(ROUTERS["token_choice"], dispatcher=dispatcher)
    outputs, (routing, _) = recorded(layer, inputs)
    _, (exact_routing, _) = recorded(exact, inputs)
    assert_all_equal(routing, exact_routing)

    def rounded(x):
        return to_numpy(keras.ops.cast(x, "bfloat16"))

    slots = layer.experts(ops.dispatch(rounded(inputs), exact_routing))
    expected = ops.combine(rounded(slots), exact_routing, NUM_TOKENS)
    assert_near(to_numpy(outputs), to_numpy(expected), atol=1e-6)
    assert np.abs(to_numpy(outputs) - to_numpy(exact(inputs))).max() > 1e-4


def test_expert_dropout_is_inside_the_experts():
    inputs = normal((2, *SHAPE))
    layer = build(ROUTERS["token_choice"], expert_dropout_rate=0.5)
    plain = build(ROUTERS["token_choice"])
    np.testing.assert_array_equal(to_numpy(layer(inputs)), to_numpy(plain(inputs)))
    kept = to_numpy(layer(inputs, training=True))
    assert np.abs(kept - to_numpy(plain(inputs, training=True))).max() > 1e-3
    # With everything dropped, the bias of the second bank is left.
    kernel, bias = layer.experts.intermediate_dense.weights
    kernel.assign(np.zeros(kernel.shape))
    bias.assign(np.zeros(bias.shape))
    np.testing.assert_array_equal(
        to_numpy(layer(inputs, training=True)), to_numpy(layer(inputs))
    )
