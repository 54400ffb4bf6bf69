"""All optimizers: rules by variable, order of operations, averages, saving.

Tests `training/optimizers.py` and its base, `training/optimizer_base.py`.
"""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

from keras_softmoe import training
from tests.skips import only_on
from tests.support.close import assert_near
from tests.support.layer_checks import reloaded
from tests.support.references import assert_all_equal, to_numpy

SCHEDULE = training.WarmupSchedule(0.1, 8, 2)
ALL = pytest.mark.parametrize("cls", [training.Adafactor, training.Adam, training.SGD])


def make_variables(dtype="float32"):
    rng = np.random.default_rng(0)
    made = []
    for scope, name, shape in (
        ("block", "kernel", (3, 2)),
        ("block", "bias", (2,)),
        ("predictions", "kernel", (2, 4)),
    ):
        with keras.name_scope(scope):
            value = rng.normal(size=shape)
            made.append(keras.Variable(value, name=name, dtype=dtype))
    return made


def make_gradients(variables, steps):
    rng = np.random.default_rng(1)
    return [[rng.normal(size=v.shape) for v in variables] for _ in range(steps)]


def apply(optimizer, variables, gradients):
    """Values of the variables after each step."""
    history = []
    for step in gradients:
        tensors = [
            keras.ops.convert_to_tensor(g, v.dtype)
            for g, v in zip(step, variables, strict=True)
        ]
        optimizer.apply(tensors, variables)
        history.append([to_numpy(v.value).astype("float64") for v in variables])
    return history


def trained(optimizer, steps, dtype="float32"):
    """Values of new variables after some steps."""
    variables = make_variables(dtype)
    return apply(optimizer, variables, make_gradients(variables, steps))[-1]


def assert_equal(actual, expected, rtol=2e-5, atol=1e-6):
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b, rtol=rtol, atol=atol)


def adam_twin(values, gradients, rates, decays, epsilon=1e-8, kept_in="float64"):
    """The Adam paper's algorithm 1, then decay and learning rate.

    Between steps the first moment is kept in the dtype `kept_in`.
    """
    first = [np.zeros_like(v) for v in values]
    second = [np.zeros_like(v) for v in values]
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        for i, g in enumerate(gradient):
            first[i] = 0.9 * first[i].astype(kept_in).astype("float64") + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            root = np.sqrt(second[i] / (1 - 0.999**step))
            update = first[i] / (1 - 0.9**step) / (root + epsilon)
            values[i] = values[i] - rate * (update + decays[i] * values[i])
    return values


def sgd_twin(values, gradients, rates, decays, momentum=0.9, nesterov=False):
    moments = [np.zeros_like(v) for v in values]
    for gradient, rate in zip(gradients, rates, strict=True):
        for i, g in enumerate(gradient):
            moments[i] = momentum * moments[i] + g
            update = g + momentum * moments[i] if nesterov else moments[i]
            values[i] = values[i] - rate * (update + decays[i] * values[i])
    return values


RULES = [("predictions/kernel", 3.0), ("kernel$", 0.3)]
DECAYS = [0.3, 0.0, 3.0]


def rates_of(steps):
    return to_numpy(SCHEDULE(np.arange(steps)))


def initial(variables):
    return [to_numpy(v.value).astype("float64") for v in variables]


def test_adam():
    variables = make_variables()
    gradients = make_gradients(variables, 5)
    # As small as epsilon, where it matters what epsilon is added to.
    gradients = [[1e-7 * a, b, c] for a, b, c in gradients]
    expected = adam_twin(initial(variables), gradients, rates_of(5), DECAYS)
    optimizer = training.Adam(SCHEDULE, weight_decay_rules=RULES)
    assert_equal(apply(optimizer, variables, gradients)[-1], expected)


def test_adam_takes_gradients_in_any_layout():
    """On PyTorch its step in one pass would read a transposed one in its order."""
    gradient = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    transposed = ops.transpose(ops.convert_to_tensor(gradient.T.copy()))
    values = []
    for given in (ops.convert_to_tensor(gradient), transposed):
        variable = keras.Variable(np.ones((3, 4), "float32"))
        training.Adam(0.1).apply([given], [variable])
        values.append(to_numpy(variable.value))
    assert_equal(values[:1], values[1:])
    assert np.all(values[0] != 1)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"learning_rate": training.WarmupSchedule(0.01, 8, 2)},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "global_clipnorm": 1.0},
        {"clipvalue": 0.5, "gradient_accumulation_steps": 3},
        {"use_ema": True, "loss_scale_factor": 8.0},
    ],
)
def test_adam_is_that_of_keras(arguments):
    """But for the place of an epsilon that is not as small as this one.

    Keras rounds `1 - beta_2 ** steps`, which is 3e-5 of the first step.
    """
    arguments = {"learning_rate": 0.01, "epsilon": 1e-12, **arguments}
    results = []
    for cls in (training.Adam, keras.optimizers.AdamW):
        optimizer = cls(**{"weight_decay": 0.0, **arguments})
        if "weight_decay" in arguments:
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        results.append(trained(optimizer, 21))
    assert_equal(*results, rtol=1e-7, atol=2e-6)


@only_on("torch", because="one backend")
@pytest.mark.parametrize("floatx", ["float16", "float32", "float64"])
def test_adam_takes_one_pass_on_torch(floatx):
    """One call for each rate of decay. On a GPU it reads its rate in float32."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        found = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "fused_adamw" in str(function):
                self.found.append((len(args[0]), kwargs["lr"].dtype))
            return function(*args, **(kwargs or {}))

    keras.config.set_floatx(floatx)
    try:
        with Calls() as calls:
            trained(training.Adam(weight_decay_rules=[("kernel$", 0.1)]), 1)
    finally:
        keras.config.set_floatx("float32")
    assert [(number, str(dtype)) for number, dtype in calls.found] == [
        (2, "torch.float32"),
        (1, "torch.float32"),
    ]


@only_on("torch", because="own loop")
@ALL
def test_a_compiled_step_holds_no_update(cls):
    """PyTorch's compiler gets the gradients, and calls the optimizer as it is."""
    import torch

    compiled = []

    def count(graph, _):
        compiled.extend(n.name for n in graph.graph.nodes if "call" in n.op)
        return graph.forward

    results = []
    for wrap in (lambda step: step, torch.compile(backend=count)):
        variables = make_variables()
        optimizer = cls(0.1)
        optimizer.build(variables)

        @wrap
        def step(gradients, optimizer=optimizer, variables=variables):
            optimizer.apply([2 * g for g in gradients], variables)

        for gradients in make_gradients(variables, 2):
            step([ops.convert_to_tensor(g, "float32") for g in gradients])
        results.append(initial(variables))
    assert_equal(*results)
    assert compiled == ["mul", "mul_1", "mul_2"]


def test_adam_with_momentum_in_bfloat16():
    variables = make_variables()
    gradients = make_gradients(variables, 5)
    inputs = gradients, rates_of(5), DECAYS
    expected = adam_twin(initial(variables), *inputs, kept_in=ml_dtypes.bfloat16)
    assert abs(expected[0] - adam_twin(initial(variables), *inputs)[0]).max() > 1e-4
    optimizer = training.Adam(
        SCHEDULE, weight_decay_rules=RULES, momentum_dtype="bfloat16"
    )
    assert_equal(apply(optimizer, variables, gradients)[-1], expected, rtol=1e-4)
    assert {v.dtype for v in optimizer.momentums} == {"bfloat16"}
    assert {v.dtype for v in optimizer.velocities} == {"float32"}
    with pytest.raises(ValueError, match="momentum_dtype='float16'"):
        training.Adam(momentum_dtype="float16")


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov):
    variables = make_variables()
    gradients = make_gradients(variables, 5)
    expected = sgd_twin(
        initial(variables), gradients, rates_of(5), DECAYS, nesterov=nesterov
    )
    optimizer = training.SGD(
        SCHEDULE, momentum=0.9, nesterov=nesterov, weight_decay_rules=RULES
    )
    assert_equal(apply(optimizer, variables, gradients)[-1], expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_at_a_constant_rate_is_that_of_keras(momentum):
    settings = {"momentum": momentum, "weight_decay": 0.2, "clipnorm": 1.0}
    classes = training.SGD, keras.optimizers.SGD
    assert_equal(*(trained(cls(0.1, **settings), 4) for cls in classes))


@ALL
def test_first_matching_rule_decides(cls):
    variables = make_variables()
    start = initial(variables)
    optimizer = cls(0.1, weight_decay_rules=RULES)
    zeros = [[np.zeros(v.shape) for v in variables]] * 2
    end = apply(optimizer, variables, zeros)[-1]
    expected = [(1 - 0.1 * d) ** 2 * v for d, v in zip(DECAYS, start, strict=True)]
    assert_equal(end, expected)
    np.testing.assert_array_equal(end[1], start[1])


@ALL
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.999999, 1.0])
def test_average_is_debiased(cls, momentum):
    variables = make_variables()
    optimizer = cls(0.1, use_ema=True, ema_momentum=momentum)
    history = apply(optimizer, variables, make_gradients(variables, 4))
    weights = np.array([momentum**age for age in (3, 2, 1, 0)])
    weights /= weights.sum()
    expected = [
        np.tensordot(weights, np.stack(v), 1) for v in zip(*history, strict=True)
    ]
    optimizer.finalize_variable_values(variables)
    assert_equal(initial(variables), expected)


@ALL
def test_accumulated_gradients(cls):
    arguments = {
        "learning_rate": 0.1,
        "weight_decay_rules": RULES,
        "use_ema": True,
        "ema_momentum": 0.5,
    }
    variables = make_variables()
    gradients = make_gradients(variables, 4)
    accumulating = cls(gradient_accumulation_steps=2, **arguments)
    apply(accumulating, variables, gradients)
    twins = make_variables()
    means = [
        [(a + b) / 2 for a, b in zip(gradients[i], gradients[i + 1], strict=True)]
        for i in (0, 2)
    ]
    plain = cls(**arguments)
    apply(plain, twins, means)
    assert_equal(initial(variables), initial(twins))
    accumulating.finalize_variable_values(variables)
    plain.finalize_variable_values(twins)
    assert_equal(initial(variables), initial(twins))


@ALL
def test_bfloat16_variables(cls):
    rounded, exact = (
        trained(cls(0.05, weight_decay_rules=RULES), 3, dtype)
        for dtype in ("bfloat16", "float32")
    )
    assert_equal(rounded, exact, rtol=1e-7, atol=0.05)


def make_model(cls, **arguments):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, activation="tanh", name="block")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="predictions")(x))
    model.compile(cls(SCHEDULE, weight_decay_rules=RULES, **arguments), "mse")
    return model


def fit(model, epochs=1):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 4)), rng.normal(size=(4, 2))
    model.fit(x, y, batch_size=4, epochs=epochs, verbose=0)


def weights(model):
    return [to_numpy(v.value) for v in model.trainable_variables]


@ALL
def test_training_goes_on_after_saving(cls, tmp_path):
    model = make_model(cls, global_clipnorm=1.0)
    fit(model, epochs=3)
    restored = reloaded(model, tmp_path)
    assert restored.optimizer.get_config() == model.optimizer.get_config()
    fit(model, epochs=2)
    fit(restored, epochs=2)
    assert_equal(weights(restored), weights(model))


@ALL
def test_mixed_precision(cls):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = make_model(cls, use_ema=True)
    before = weights(model)
    fit(model, epochs=3)
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    for a, b in zip(weights(model), before, strict=True):
        assert np.isfinite(a).all()
        assert (a != b).any()


@ALL
def test_embeddings(cls):
    # Of a batch only the rows that were looked up have a gradient.
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(50, 40, name="tokens")(inputs)
    model = keras.Model(inputs, keras.ops.mean(x, axis=1))
    model.compile(cls(0.1), "mse")
    (table,) = model.trainable_variables
    before = to_numpy(table.value)
    model.fit(np.array([[1, 2, 3, 3]]), np.ones((1, 40)), verbose=0)
    moved = np.abs(to_numpy(table.value) - before).max(axis=1)
    assert (moved[[1, 2, 3]] > 1e-3).all()
    np.testing.assert_array_equal(np.delete(moved, [1, 2, 3]), 0.0)


@ALL
def test_what_is_not_trained_does_not_decay(cls):
    model = make_model(cls)
    model.get_layer("block").enable_lora(1)
    model.get_layer("predictions").trainable = False
    frozen = [v for v in model.variables if not v.trainable]
    before = initial(frozen)
    trained = weights(model)
    fit(model, epochs=3)
    assert_all_equal(frozen, before)
    assert any((a != b).any() for a, b in zip(weights(model), trained, strict=True))


@ALL
@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_decay_rules": ["kernel"]},
        {"weight_decay_rules": [("kernel", "much")]},
        {"weight_decay_rules": [("kernel", -0.1)]},
        {"weight_decay_rules": [("kernel", float("inf"))]},
        {"weight_decay_rules": [("(", 0.1)]},
        {"weight_decay_rules": [("kernel", 1.0, 2.0)]},
        {"weight_decay_rules": RULES, "weight_decay": 0.1},
    ],
)
def test_bad_arguments_are_named(cls, arguments):
    with pytest.raises(ValueError, match="Received"):
        cls(0.1, **arguments)
