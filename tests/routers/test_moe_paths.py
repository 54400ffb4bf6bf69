"""Every router inside a MoE layer: gather path, dense path and NumPy twin."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from tests.skips import only_on
from tests.support import cases, twins
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients, recorded
from tests.support.references import to_numpy
from tests.support.sparse_routers import PLANS, SPARSE

BATCH, NUM_TOKENS, WIDTH, NUM_EXPERTS, MLP_DIM = 3, 4, 4, 4, 6
ROUTERS = {
    **{name: lambda make=make: make(NUM_EXPERTS) for name, make in SPARSE.items()},
    "identity": lambda: routers.IdentityRouter(NUM_EXPERTS),
    "soft": lambda: routers.SoftRouter(NUM_EXPERTS, slots_per_expert=2),
    "uniform_soft": lambda: routers.SoftRouter(NUM_EXPERTS, dispatch="uniform"),
    "soft_uniform": lambda: routers.SoftRouter(NUM_EXPERTS, combine="uniform"),
    "uniform": lambda: routers.SoftRouter(
        NUM_EXPERTS, dispatch="uniform", combine="uniform"
    ),
}


def build(name, **kwargs):
    layer = layers.MoE(ROUTERS[name](), MLP_DIM, **kwargs)
    layer.build((None, NUM_TOKENS, WIDTH))
    # Biases start near zero, where forgetting one would not show.
    rng = np.random.default_rng(0)
    for weight in layer.experts.weights:
        weight.assign(rng.normal(size=weight.shape))
    return layer


def expert_weights(layer):
    """Kernel (E, D, H), bias (E, H), kernel (E, H, D), bias (E, D)."""
    return [to_numpy(w.value) for w in layer.experts.weights]


def images():
    return cases.array("normal", (BATCH, NUM_TOKENS, WIDTH), 0)


def dense_routing(decision, num_tokens):
    routing = [to_numpy(x) for x in decision.routing]
    return routing if len(routing) == 2 else twins.to_dense(*routing, num_tokens)


@pytest.mark.parametrize(
    "dispatcher, group_images", [("gather", 1), ("einsum", 2), ("auto", 1), ("auto", 2)]
)
@pytest.mark.parametrize("name", ROUTERS)
def test_layer_is_its_twin(name, dispatcher, group_images):
    layer = build(name, group_images=group_images, dispatcher=dispatcher)
    outputs, decision = recorded(layer, images())
    # Three images in groups of two: the last group is half padding.
    num_groups = -(-BATCH // group_images)
    padded = np.zeros((num_groups * group_images, NUM_TOKENS, WIDTH))
    padded[:BATCH] = images()
    tokens = padded.reshape(num_groups, group_images * NUM_TOKENS, WIDTH)
    weights = dense_routing(decision, tokens.shape[1])
    expected = twins.moe(tokens, *weights, expert_weights(layer))
    expected = expected.reshape(padded.shape)[:BATCH]
    assert_near(to_numpy(outputs), expected, rtol=5e-5, atol=5e-5)
    # Without the decision the layer computes the same.
    assert_near(to_numpy(layer(images())), expected, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("group_images", [1, 2])
@pytest.mark.parametrize("name", [*SPARSE, "identity"])
def test_gather_equals_dense(name, group_images):
    gather = build(name, group_images=group_images, dispatcher="gather")
    dense = build(name, group_images=group_images, dispatcher="einsum")
    dense.set_weights(gather.get_weights())
    cotangent = keras.ops.convert_to_tensor(
        cases.array("normal", (BATCH, NUM_TOKENS, WIDTH), 1)
    )

    def loss(outputs, losses):
        return keras.ops.sum(outputs * cotangent) + sum(losses)

    outputs = [to_numpy(layer(images())) for layer in (gather, dense)]
    assert_near(*outputs, rtol=2e-5, atol=2e-5)
    value, for_inputs, for_weights = layer_gradients(
        gather, images(), loss, training=True
    )
    expected_value, expected_for_inputs, expected_for_weights = layer_gradients(
        dense, images(), loss, training=True
    )
    assert_near(value, expected_value, rtol=2e-5, atol=2e-5)
    assert_near(for_inputs, expected_for_inputs, rtol=5e-5, atol=5e-5)
    gradients = zip(for_weights.values(), expected_for_weights.values(), strict=True)
    for gradient, expected in gradients:
        assert_near(gradient, expected, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["soft", "softmax_token_choice"])
def test_any_batch_size(name):
    # Groups of two: whatever follows in the batch, the first two images come out the
    # same; a soft router routes each image alone.
    layer = build(name, group_images=1 if name == "soft" else 2)
    inputs = np.concatenate([images(), images()[::-1]])
    expected = to_numpy(layer(inputs))
    for batch in (2, 3, 5):
        actual = to_numpy(layer(inputs[:batch]))
        assert actual.shape[0] == batch
        assert_near(actual[:2], expected[:2], rtol=1e-5, atol=1e-5)
    if name == "soft":
        alone = np.concatenate([to_numpy(layer(x[None])) for x in inputs])
        assert_near(alone, expected, rtol=1e-5, atol=1e-5)


def test_soft_moe_is_a_moe_layer_with_a_soft_router():
    short = layers.SoftMoE(NUM_EXPERTS, MLP_DIM, slots_per_expert=2)
    short.build((None, NUM_TOKENS, WIDTH))
    long = build("soft")
    long.set_weights(short.get_weights())
    assert_near(
        to_numpy(short(images())), to_numpy(long(images())), rtol=1e-6, atol=1e-6
    )


@only_on("tensorflow", because="own loop")
@pytest.mark.parametrize("name", PLANS)
def test_gradient_of_a_plan_that_xla_compiles(name):
    # It has to know how often a loop runs.
    weights = []
    for jit_compile in (True, False):
        keras.utils.set_random_seed(0)
        # One of the plans has no gradient, but a router gets that of its loss.
        router = SPARSE[name](
            NUM_EXPERTS, combine="plan", losses=[routers.RoutingLoss(ops.z_loss)]
        )
        layer = layers.MoE(router, MLP_DIM)
        model = keras.Sequential([keras.Input((NUM_TOKENS, WIDTH)), layer])
        model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=jit_compile)
        model.fit(images(), np.ones_like(images()), verbose=0)
        weights.append(model.get_weights())
    for found, expected in zip(*weights, strict=True):
        assert_near(found, expected, rtol=1e-4, atol=1e-6)


def test_experts_follow_the_policy():
    layer = layers.MoE(ROUTERS["soft"](), MLP_DIM, dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(layer(images()).dtype) == "bfloat16"
    _, decision = recorded(layer, images())
    assert all(
        keras.backend.standardize_dtype(w.dtype) == "float32" for w in decision.routing
    )


def test_training_reaches_the_router():
    # `stateless_call`, of which training loops on JAX are made, calls the layer without
    # the context through which Keras passes `training` on.
    layer = build("softmax_token_choice")
    *_, losses = layer.stateless_call(
        [v.value for v in layer.trainable_variables],
        [v.value for v in layer.non_trainable_variables],
        images(),
        training=True,
        return_losses=True,
    )
    assert len(losses) == 1
    layer(images(), training=True)
    assert len(layer.losses) == 1
    layer(images(), training=False)
    assert len(layer.losses) == 0
