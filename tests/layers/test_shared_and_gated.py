"""Gated experts, shared experts and routing by image, beside their twins.

Also for `layers/moe.py`, `layers/mlp.py` and `layers/image_moe.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, routers
from tests.support import twins
from tests.support.close import assert_near, difference
from tests.support.gradients import layer_gradients, recorded
from tests.support.layer_checks import check_layer, normal, randomize
from tests.support.products import counted
from tests.support.references import to_numpy

NUM_EXPERTS, NUM_TOKENS, WIDTH, MLP_DIM = 3, 6, 8, 5
TOKENS = (NUM_TOKENS, WIDTH)
ROUTERS = {
    "slots": routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, 2, capacity_factor=0.75, noise_std=0.0
    ),
    "dropless": routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, 2, capacity_factor=None, noise_std=0.0
    ),
    "soft": routers.SoftRouter(NUM_EXPERTS, slots_per_expert=2),
}


def silu(x):
    return x / (1 + np.exp(-x))


def gated(x, weights, e=None):
    """A gated MLP in NumPy, with kernel and bias of each of its layers."""
    units, bias, gate, of_gate, out, of_out = (
        w if e is None else w[e]
        for w in (to_numpy(w).astype("float64") for w in weights)
    )
    return (silu(x @ gate + of_gate) * (x @ units + bias)) @ out + of_out


def of_tokens(x, routing, expert):
    """The outputs of a mixture by a loop, given the output of an expert for inputs.

    Args:
        x: `(G, S, D)` array.
        routing: `DenseRouting` of arrays.
        expert: Callable from the number of an expert and `(N, D)` to `(N, D)`.
    """
    dispatch, combine = (to_numpy(w) for w in routing)
    y = np.zeros_like(x, "float64")
    for g in range(x.shape[0]):
        for e in range(dispatch.shape[2]):
            slots = np.einsum("sc,sd->cd", dispatch[g, :, e], x[g])
            y[g] += np.einsum("sc,cd->sd", combine[g, :, e], expert(e, slots))
    return y


def dense(decision, num_tokens):
    from keras_softmoe.ops import to_dense

    return to_dense(decision.routing, num_tokens)


@pytest.mark.parametrize("remat_experts", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_gated_and_shared_experts_are_their_twins(name, remat_experts):
    layer = layers.MoE(
        ROUTERS[name],
        MLP_DIM,
        activation="silu",
        gated=True,
        shared_mlp_dim=4,
        remat_experts=remat_experts,
    )
    inputs = normal((2, *TOKENS))
    layer.build(inputs.shape)
    randomize(layer)
    mask = np.arange(NUM_TOKENS) < np.array([[NUM_TOKENS], [4]])
    outputs, decision = recorded(layer, inputs, mask=mask)
    weights = layer.experts.weights
    assert [w.path.split("/")[-2] for w in weights[::2]] == [
        "intermediate_dense",
        "gate_dense",
        "output_dense",
    ]
    x = inputs * mask[..., None]
    expected = of_tokens(
        x, dense(decision, NUM_TOKENS), lambda e, slots: gated(slots, weights, e)
    )
    expected += gated(x, layer.shared_mlp.weights) * mask[..., None]
    assert_near(to_numpy(outputs), expected, rtol=1e-4, atol=1e-5)
    assert not to_numpy(outputs)[~mask].any()


def test_dropout_and_int8_and_lora_of_gated_experts():
    layer = layers.Experts(NUM_EXPERTS, MLP_DIM, gated=True, dropout_rate=0.5)
    slots = normal((2, NUM_EXPERTS, 4, WIDTH))
    exact = to_numpy(layer(slots))
    assert not np.allclose(to_numpy(layer(slots, training=True)), exact)
    for bank in layer.banks:
        bank.enable_lora(2)
    assert_near(to_numpy(layer(slots)), exact, rtol=1e-5, atol=1e-6)
    for bank in layer.banks:
        bank.lora_kernel_b.assign(normal(bank.lora_kernel_b.shape))
    adapted = to_numpy(layer(slots))
    assert difference(adapted, exact) > 0.1
    for bank in layer.banks:
        bank.merge_lora()
    assert_near(to_numpy(layer(slots)), adapted, rtol=1e-4, atol=1e-4)
    for bank in layer.banks:
        bank.quantize("int8")
    error = np.abs(to_numpy(layer(slots)) - adapted)
    assert error.max() < 0.05 * np.abs(adapted).max()


def test_dropless_gradients_are_those_of_slots():
    found = []
    for factor in (None, NUM_EXPERTS / 2):
        router = routers.SoftmaxTokenChoiceRouter(
            NUM_EXPERTS, 2, capacity_factor=factor, noise_std=0.0
        )
        layer = layers.MoE(router, MLP_DIM, gated=True, shared_mlp_dim=4)
        layer.build((None, *TOKENS))
        randomize(layer)
        inputs = normal((2, *TOKENS))
        found.append(layer_gradients(layer, inputs, lambda y, _: keras.ops.sum(y**2)))
    (value, of_inputs, of_weights), other = found
    np.testing.assert_allclose(other[0], value, rtol=1e-4)
    assert_near(other[1], of_inputs, rtol=1e-3, atol=1e-3)
    pairs = zip(of_weights.values(), other[2].values(), strict=True)
    for gradient, expected in pairs:
        assert abs(gradient).max() > 1e-4
        assert_near(gradient, expected, rtol=1e-3, atol=1e-3)


def test_layers():
    def mlp(**kwargs):
        return layers.MLP(MLP_DIM, "relu", gated=True, **kwargs)

    check_layer(mlp, TOKENS, TOKENS, num_weights=6)

    def moe(**kwargs):
        return layers.ImageMoE(
            routers.SoftRouter(3),
            MLP_DIM,
            activation="silu",
            gated=True,
            shared_mlp_dim=4,
            group_images=2,
            **kwargs,
        )

    check_layer(moe, TOKENS, TOKENS, num_weights=2 + 6 + 6)


@pytest.mark.parametrize("name", ROUTERS)
def test_whole_images_are_routed(name):
    expert = keras.layers.Conv2D(WIDTH, 3, padding="same")
    layer = layers.ImageMoE(ROUTERS[name], expert=expert, group_images=3)
    inputs = normal((5, 2, 3, WIDTH))
    mask = np.random.default_rng(1).uniform(size=(5, 2, 3)) < 0.7
    mask[3] = False
    layer.build(inputs.shape)
    randomize(layer)
    outputs, decision = recorded(layer, inputs, mask=mask)
    # Two groups of three images; one of them is padding only, and one fills up.
    # Without a capacity, one image in each group
    shape = (5, 1) if layer.images_of_group() == 1 else (2, 3)
    number = np.prod(shape)
    valid = to_numpy(decision.summary["valid"])
    assert valid.shape == shape
    assert valid.ravel().tolist() == [True, True, True, False, True, False][:number]
    x = np.where(mask[..., None], inputs, 0.0)
    if name != "soft":
        means = x.sum((1, 2)) / np.maximum(mask.sum((1, 2)), 1)[:, None]
        logits = np.zeros((number, NUM_EXPERTS))
        logits[:5] = means @ to_numpy(layer.router.kernel)
        np.testing.assert_allclose(
            to_numpy(decision.summary["probabilities"])[valid],
            twins.softmax(logits)[valid.ravel()],
            rtol=1e-4,
        )
    kernels, biases = layer.experts.get_weights()
    one = keras.layers.Conv2D(WIDTH, 3, padding="same")
    one.build((None, 2, 3, WIDTH))

    def convolution(e, slots):
        maps = slots.reshape(-1, 2, 3, WIDTH).astype("float32")
        one.set_weights([kernels[e], biases[e]])
        return to_numpy(one(maps)).reshape(slots.shape)

    images = np.zeros((*shape, 6 * WIDTH), "float32")
    images.reshape(number, -1)[:5] = x.reshape(5, -1)
    expected = of_tokens(images, dense(decision, shape[1]), convolution)
    expected = expected.reshape(-1, 2, 3, WIDTH)[:5] * mask[..., None]
    assert_near(to_numpy(outputs), expected, rtol=1e-4, atol=1e-4)


def test_means_of_images_in_half_precision():
    """Sums of tokens are over the largest number of float16."""
    layer = layers.ImageMoE(ROUTERS["dropless"], 3, dtype="mixed_float16")
    inputs = normal((2, 600, WIDTH)) + 200
    outputs = to_numpy(layer(inputs, mask=np.ones((2, 600), "bool")))
    assert np.isfinite(outputs).all()
    # To the last bit of float16: the sum is written in another way.
    assert_near(outputs, to_numpy(layer(inputs)), atol=2**-10)


def test_modalities_are_no_matter_of_whole_images():
    with pytest.raises(ValueError, match="whole images.*router=<LIMoERouter"):
        layers.ImageMoE(routers.LIMoERouter(3), 3).build((None, 4, 8))


def test_mlps_by_image_are_those_of_tokens():
    """The bank computes all tokens of an image, with or without slots."""
    found = []
    for name in ("slots", "dropless"):
        router = (
            ROUTERS[name].with_settings()
            if name == "dropless"
            else (
                routers.SoftmaxTokenChoiceRouter(
                    NUM_EXPERTS, 2, capacity_factor=1.5, noise_std=0.0
                )
            )
        )
        layer = layers.ImageMoE(router, MLP_DIM, group_images=2)
        layer.build((None, *TOKENS))
        randomize(layer)
        found.append(to_numpy(layer(normal((4, *TOKENS)))))
    assert_near(*found, rtol=1e-4, atol=1e-5)


def test_costs():
    tokens = (4, *TOKENS)
    plain, shared, gate, by_image = (
        counted(cls(routers.SoftmaxExpertChoiceRouter(2), MLP_DIM, **arguments), tokens)
        for cls, arguments in (
            (layers.MoE, {}),
            (layers.MoE, {"shared_mlp_dim": 7}),
            (layers.MoE, {"gated": True}),
            (layers.ImageMoE, {"group_images": 2}),
        )
    )
    assert np.subtract(shared, plain).tolist() == list(counted(layers.MLP(7), tokens))
    # 24 rows by one kernel more of each expert
    more = [2 * (WIDTH + 1) * MLP_DIM, 24 * WIDTH * MLP_DIM]
    assert np.subtract(gate, plain).tolist() == more
    assert by_image[0] == plain[0]
    # The router compares 4 means instead of 24 tokens, and two images per group are
    # mixed into two slots, both ways.
    of_experts = 24 * 2 * WIDTH * MLP_DIM
    mixing = 2 * 2 * 2 * 2 * NUM_TOKENS * WIDTH
    assert by_image[1] == 4 * WIDTH * 2 + of_experts + mixing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mlp_dim": 3, "shared_mlp_dim": -1}, "shared_mlp_dim=-1"),
        ({"mlp_dim": 3, "activation": "nope"}, "'silu'.*activation='nope'"),
        ({"mlp_dim": 3, "gated": 2}, "gated=2"),
        (
            {"expert": keras.layers.Dense(8), "gated": True},
            "not of an `expert`.*gated=True",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        layers.MoE(ROUTERS["soft"], **arguments)
