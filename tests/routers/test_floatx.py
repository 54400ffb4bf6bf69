"""Every router is finite whatever the default dtype of Keras is."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers, training
from tests.skips import REASONS
from tests.support import cases, limoe_routers
from tests.support.gradients import layer_gradients
from tests.support.references import to_numpy

BATCH, NUM_TOKENS, WIDTH, NUM_EXPERTS = 3, 4, 4, 3

# Masked: nothing of one image, and some of another.
MASK = np.array([[True] * NUM_TOKENS, [True, False] * 2, [False] * NUM_TOKENS])

SPARSE_LOSSES = {
    "losses": (*routers.classic_losses(), routers.RoutingLoss(ops.gshard_loss)),
    "noise_std": 1.0,
}
ROUTERS = {
    "softmax token choice": lambda: routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, 2, priority="sum", keep_fraction=0.5, **SPARSE_LOSSES
    ),
    "softmax token choice, normalized, at random": (
        lambda: routers.SoftmaxTokenChoiceRouter(
            NUM_EXPERTS, 2, priority="random", normalize_gates=True
        )
    ),
    "softmax token choice, dropless": lambda: routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, 2, capacity_factor=None
    ),
    "sinkhorn token choice": lambda: routers.SinkhornTokenChoiceRouter(NUM_EXPERTS),
    "sinkhorn token choice, plan": lambda: routers.SinkhornTokenChoiceRouter(
        NUM_EXPERTS, combine="plan", normalize_gates=True, **SPARSE_LOSSES
    ),
    "softmax expert choice": lambda: routers.SoftmaxExpertChoiceRouter(
        NUM_EXPERTS, **SPARSE_LOSSES
    ),
    "sinkhorn expert choice, plan": lambda: routers.SinkhornExpertChoiceRouter(
        NUM_EXPERTS, combine="plan"
    ),
    "sparse transport": lambda: routers.SparseTransportExpertChoiceRouter(NUM_EXPERTS),
    "sparse transport, plan": lambda: routers.SparseTransportExpertChoiceRouter(
        NUM_EXPERTS, combine="plan"
    ),
    "soft": lambda: routers.SoftRouter(NUM_EXPERTS, noise_std=1.0),
    "soft, not normalized": lambda: routers.SoftRouter(NUM_EXPERTS, normalize=False),
    "uniform": lambda: routers.SoftRouter(
        NUM_EXPERTS, dispatch="uniform", combine="uniform"
    ),
    "identity": lambda: routers.IdentityRouter(2),
}


@pytest.fixture(params=["float16", "bfloat16", "float64"])
def floatx(request):
    """The default dtype of Keras is another one."""
    if keras.backend.backend() == "jax" and request.param != "float16":
        # It compiles every operation anew for every dtype.
        pytest.skip(REASONS["one backend"])
    keras.config.set_floatx(request.param)
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx("float32")


def assert_finite(layer, inputs, **kwargs):
    """Outputs, losses and gradients of training are."""
    inputs = to_numpy(keras.ops.cast(inputs, layer.compute_dtype))

    def loss(outputs, losses):
        total = keras.ops.cast(keras.ops.sum(outputs), "float32")
        return total + sum(keras.ops.cast(x, "float32") for x in losses)

    value, of_inputs, gradients = layer_gradients(
        layer, inputs, loss, compiled=False, training=True, **kwargs
    )
    assert np.isfinite(value)
    for gradient in (of_inputs, *gradients.values()):
        assert np.isfinite(np.asarray(gradient, "float64")).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_are_finite(floatx, name, masked):
    # Three images in groups of two: one of the last group is padding.
    layer = layers.MoE(ROUTERS[name](), mlp_dim=4, group_images=2)
    layer.build((None, NUM_TOKENS, WIDTH))
    assert layer.experts.weights[0].dtype == floatx
    mask = {"mask": keras.ops.convert_to_tensor(MASK)} if masked else {}
    assert_finite(layer, cases.array("normal", (BATCH, NUM_TOKENS, WIDTH), 0), **mask)


@pytest.mark.parametrize("form", ["joint", "disjoint_per_modality"])
def test_limoe_is_finite(floatx, form):
    router = limoe_routers.build(
        losses=(
            *routers.classic_losses(),
            *routers.entropy_losses(limoe_routers.NUM_EXPERTS),
            routers.RoutingLoss(ops.mutual_information_loss),
        ),
        noise_std=1.0,
        **limoe_routers.FORMS[form],
    )
    valid = np.ones((limoe_routers.GROUPS, limoe_routers.NUM_TOKENS), bool)
    valid[0, 3:] = False

    def loss(decision, losses):
        gates = keras.ops.sum(decision.routing.gate)
        return gates + sum(keras.ops.cast(x, gates.dtype) for x in losses)

    value, of_tokens, gradients = layer_gradients(
        router,
        limoe_routers.tokens(),
        loss,
        compiled=False,
        valid=keras.ops.convert_to_tensor(valid),
        modalities=limoe_routers.MODALITIES,
        training=True,
    )
    for x in (value, of_tokens, *gradients.values()):
        assert np.isfinite(np.asarray(x, "float64")).all()


@pytest.mark.parametrize("floatx", ["float16", "float64"], indirect=True)
def test_balancing_losses_are_added_to_that_of_the_model(floatx):
    # With an optimizer whose epsilon is zero in float16, and a weight without gradient.
    model = keras.Sequential(
        [
            keras.Input((NUM_TOKENS, WIDTH)),
            layers.MoE(
                routers.SoftmaxTokenChoiceRouter(NUM_EXPERTS), 4, group_images=2
            ),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(training.Adam(1e-3), "mse")
    x = cases.array("normal", (BATCH, NUM_TOKENS, WIDTH), 0)
    history = model.fit(x, np.zeros((BATCH, 2)), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    for weight in model.get_weights():
        assert np.isfinite(np.asarray(weight, "float64")).all()
