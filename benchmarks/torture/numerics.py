"""Numbers that spread or overflow: in padding, in small dtypes, in huge logits.

Every kind of router, with every dispatcher, forward and backward; and compiled as a
whole, by the backends that do that.
"""

import contextlib
import itertools

import keras
import numpy as np

from keras_softmoe import layers, routers
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients
from tests.support.references import to_numpy

IMAGES, TOKENS, WIDTH, EXPERTS = 3, 6, 4, 3


def _token_choice(cls=routers.SoftmaxTokenChoiceRouter, **settings):
    return lambda: cls(EXPERTS, **{"capacity_factor": 1.5, **settings})


ROUTERS = {
    "soft": lambda: routers.SoftRouter(EXPERTS),
    "soft, uniform dispatch": lambda: routers.SoftRouter(EXPERTS, dispatch="uniform"),
    "soft, uniform combine": lambda: routers.SoftRouter(EXPERTS, combine="uniform"),
    "soft, not normalized": lambda: routers.SoftRouter(EXPERTS, normalize=False),
    "identity": lambda: routers.IdentityRouter(EXPERTS),
    "token choice": _token_choice(),
    "token choice, two": _token_choice(num_selected_experts=2, normalize_gates=True),
    "token choice, max": _token_choice(priority="max", capacity_factor=0.5),
    "token choice, sum": _token_choice(priority="sum", num_selected_experts=2),
    "token choice, pair": _token_choice(priority="pair", num_selected_experts=2),
    "token choice, a half": _token_choice(keep_fraction=0.5),
    "token choice, dropless": _token_choice(capacity_factor=None),
    "Sinkhorn token choice": _token_choice(routers.SinkhornTokenChoiceRouter),
    "Sinkhorn token choice, plan": _token_choice(
        routers.SinkhornTokenChoiceRouter, combine="plan"
    ),
    "expert choice": lambda: routers.SoftmaxExpertChoiceRouter(EXPERTS),
    "Sinkhorn expert choice": lambda: routers.SinkhornExpertChoiceRouter(EXPERTS),
    "Sinkhorn expert choice, plan": lambda: routers.SinkhornExpertChoiceRouter(
        EXPERTS, combine="plan"
    ),
    "sparse transport": lambda: routers.SparseTransportExpertChoiceRouter(EXPERTS),
    "sparse transport, plan": lambda: routers.SparseTransportExpertChoiceRouter(
        EXPERTS, combine="plan"
    ),
}
DISPATCHERS = ("gather", "einsum", "auto")


def _each(cases, seed, *more):
    """Names of cases, callables that make a layer, generators, and of `more` one each.

    All routers with all dispatchers come in turn.
    """
    turns = itertools.product(ROUTERS, DISPATCHERS, (1, 2, None), *more)
    for number, turn in zip(range(cases), itertools.cycle(turns), strict=False):
        name, dispatcher, group_images, *rest = turn
        case = f"{number}: {name}, {dispatcher}, groups of {group_images} {rest}"

        def make(name=name, dispatcher=dispatcher, group_images=group_images):
            return layers.MoE(
                ROUTERS[name](),
                mlp_dim=5,
                dispatcher=dispatcher,
                group_images=group_images,
            )

        yield case, make, np.random.default_rng((seed, number)), *rest


def _inputs(rng):
    """Tokens and a mask; now and then nothing of an image is real, or of all."""
    tokens = rng.normal(size=(IMAGES, TOKENS, WIDTH)).astype("float32")
    mask = rng.random((IMAGES, TOKENS)) < rng.choice([0.3, 0.7, 0.9])
    mask[rng.integers(IMAGES)] = rng.random() < 0.5
    if rng.random() < 0.1:
        mask[:] = False
    return tokens, mask


def _derivatives(layer, tokens, mask, training):
    """Dict of a sum over outputs and balancing losses, and of its gradients."""
    weights = np.random.default_rng(1).normal(size=tokens.shape)
    weights = keras.ops.convert_to_tensor(weights, "float32")
    value, of_tokens, of_weights = layer_gradients(
        layer,
        tokens,
        lambda y, losses: (
            keras.ops.sum(keras.ops.cast(y, "float32") * weights)
            + sum(keras.ops.cast(loss, "float32") for loss in losses)
        ),
        compiled=False,
        mask=keras.ops.convert_to_tensor(mask),
        training=training,
    )
    return {"value": value, "tokens": of_tokens, **of_weights}


def masked_tokens(tally, cases, seed):
    """What is in padding changes nothing: no output, no gradient, no loss."""
    for case, make, rng in _each(cases, seed):
        with tally.case(case, seconds=120):
            layer, (tokens, mask) = make(), _inputs(rng)
            layer.build(tokens.shape)
            training = bool(rng.random() < 0.5)
            empty, spoilt = (
                np.where(mask[..., None], tokens, np.float32(number))
                for number in (0, rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38]))
            )
            expected = _derivatives(layer, empty, mask, training)
            found = _derivatives(layer, spoilt, mask, training)
            for name, value in expected.items():
                assert np.isfinite(value).all(), f"{name}: not finite"
                assert_near(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
            assert (found["tokens"][~mask] == 0).all()


def small_dtypes(tally, cases, seed):
    """All is finite whatever dtype is Keras' default."""
    floats = ("float16", "bfloat16", "float64")
    for case, make, rng, floatx in _each(cases, seed, floats):
        with tally.case(case, seconds=120), _default_dtype(floatx):
            layer, (tokens, mask) = make(), _inputs(rng)
            layer.build(tokens.shape)
            with routers.record() as decisions:
                outputs = to_numpy(layer(tokens, mask=mask, training=True))
            assert np.isfinite(outputs.astype("float64")).all()
            assert (outputs[~mask] == 0).all()
            (decision,) = decisions.values()
            for x in keras.tree.flatten([*decision.routing, dict(decision.summary)]):
                x = to_numpy(x)
                assert x.dtype.kind != "f" or not np.isnan(x).any(), "NaN in a decision"
            for name, x in _derivatives(layer, tokens, mask, True).items():
                assert np.isfinite(np.asarray(x, "float64")).all(), name


@contextlib.contextmanager
def _default_dtype(floatx):
    before = keras.config.floatx()
    with contextlib.ExitStack() as stack:
        if floatx == "float64" and keras.backend.backend() == "jax":
            import jax

            stack.enter_context(jax.enable_x64(True))
        stack.callback(keras.config.set_dtype_policy, before)
        stack.callback(keras.config.set_floatx, before)
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(floatx)
        yield


def large_logits(tally, cases, seed):
    """Logits up to 1e30: valid routings, finite gates and gradients of tokens."""
    for case, make, rng in _each(cases, seed):
        with tally.case(case, seconds=120):
            layer, (tokens, mask) = make(), _inputs(rng)
            layer.build(tokens.shape)
            size = np.float32(10.0 ** rng.uniform(3, 30))
            for weight in layer.router.trainable_variables:
                weight.assign(to_numpy(weight.value) * size)
            if rng.random() < 0.3:
                mask[:] = True
            with routers.record() as decisions:
                outputs = to_numpy(layer(tokens, mask=mask, training=False))
            assert np.isfinite(outputs).all()
            (decision,) = decisions.values()
            routing = decision.routing
            gates = to_numpy(routing[-1] if len(routing) == 2 else routing.gate)
            assert np.isfinite(gates).all(), "gates are not finite"
            # The marginals of a sparse plan hold approximately.
            most = TOKENS * IMAGES if "sparse transport, plan" in case else 1 + 1e-3
            assert gates.min(initial=0) >= 0 and gates.max(initial=0) <= most, (
                f"gates from {gates.min()} to {gates.max()}"
            )
            of_tokens = _derivatives(layer, tokens, mask, False)["tokens"]
            assert not np.isnan(of_tokens).any(), "NaN in the gradient of tokens"


def compiled(tally, cases, seed):
    """A training step that is compiled as a whole moves weights as one that is not."""
    for case, make, rng in _each(cases, seed):
        with tally.case(case, seconds=300):
            x = rng.normal(size=(4, TOKENS, WIDTH)).astype("float32")
            steps = [_weights_after_a_step(make, x, jit) for jit in (True, False)]
            for found, expected in zip(*steps, strict=True):
                assert_near(found, expected, rtol=1e-3, atol=1e-4)


def _weights_after_a_step(make, x, jit):
    keras.utils.set_random_seed(3)
    layer = make()
    # XLA draws other noise on TensorFlow.
    if getattr(layer.router, "noise_std", 0.0):
        layer.router.noise_std = 0.0
    model = keras.Sequential([keras.Input(x.shape[1:], len(x)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit)
    model.fit(x, np.ones_like(x), batch_size=len(x), epochs=1, verbose=0)
    return [to_numpy(weight.value) for weight in model.trainable_variables]
