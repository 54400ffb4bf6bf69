"""Adafactor against a plain NumPy twin; what it keeps; what it refuses."""

import keras
import numpy as np
import pytest

from keras_softmoe import training
from tests.support.close import assert_near
from tests.training.test_optimizers import apply, assert_equal, initial, rates_of

SCHEDULE = training.WarmupSchedule(0.1, 8, 2)
# Factored along (0, 1), (1, 2), (0, 2), (0, 3); then those that are not: the second
# largest axis is short, or there is none.
SHAPES = {
    "kernel": (40, 33),
    "bank": (3, 36, 36),
    "bias_of_bank": (32, 1, 34),
    "patches": (33, 2, 1, 32),
    "narrow": (31, 64),
    "bias": (40,),
    "scale": (),
}
FACTORED = {
    "kernel": [(1, 33), (40, 1)],
    "bank": [(3, 1, 36), (3, 36, 1)],
    "bias_of_bank": [(1, 1, 34), (32, 1, 1)],
    "patches": [(1, 2, 1, 32), (33, 2, 1, 1)],
}
DECAY = 0.3


def make_variables(dtype="float32"):
    rng = np.random.default_rng(0)
    return [
        keras.Variable(rng.normal(size=shape), name=name, dtype=dtype)
        for name, shape in SHAPES.items()
    ]


def make_gradients(steps):
    rng = np.random.default_rng(1)
    gradients = [[rng.normal(size=s) for s in SHAPES.values()] for _ in range(steps)]
    for step in gradients:
        # What no example has touched, and rows of very different size.
        step[0][3:6] = 0.0
        step[0] *= np.logspace(-6, 2, 40)[:, None]
    # One that is zero at first, and at last.
    gradients[0][5][:] = gradients[-1][4][:] = 0.0
    return gradients


def to_bfloat16(x):
    """The nearest number of which bfloat16 has the bits, the even one of two."""
    bits = np.float32(x).view("uint32")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype("uint32").view("float32").astype("float64")


def mean_of_squares(squares, moments, beta_2, min_size):
    """Average of squares: of all of them, or a product of means along two axes."""
    axes = np.argsort(squares.shape, kind="stable")[-2:]
    if len(axes) < 2 or squares.shape[axes[0]] < min_size:
        moments["all"] = beta_2 * moments.get("all", 0.0) + (1 - beta_2) * squares
        return moments["all"]
    for axis in axes:
        mean = squares.mean(axis=axis, keepdims=True)
        moments[axis] = beta_2 * moments.get(axis, 0.0) + (1 - beta_2) * mean
    first, second = (moments[axis] for axis in axes)
    return first * second / first.mean(axis=axes[1], keepdims=True)


def twin(values, gradients, rates, beta_1=0.9, min_size=32, rounded=lambda x: x):
    """The optimizer in float64, as its docstring says; decay 0.3 of all variables."""
    momentums = [0.0 for _ in values]
    moments = [{} for _ in values]
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        beta_2 = min(0.999, 1 - step**-0.8)
        for i, g in enumerate(gradient):
            mean = mean_of_squares(g**2 + 1e-30, moments[i], beta_2, min_size)
            new = beta_1 * momentums[i] + (1 - beta_1) * g / np.sqrt(mean)
            values[i] = values[i] - rate * (new + DECAY * values[i])
            momentums[i] = rounded(new)
    return values


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta_1": 0.0},
        {"beta_1": 0.5},
        {"min_dim_size_to_factor": 2},
        {"min_dim_size_to_factor": 128},
    ],
)
def test_steps(settings):
    variables, gradients = make_variables(), make_gradients(5)
    expected = twin(
        initial(variables),
        gradients,
        rates_of(5),
        settings.get("beta_1", 0.9),
        settings.get("min_dim_size_to_factor", 32),
    )
    optimizer = training.Adafactor(
        SCHEDULE, momentum_dtype="float32", weight_decay=DECAY, **settings
    )
    assert_equal(apply(optimizer, variables, gradients)[-1], expected)


def test_momentum_in_bfloat16():
    variables, gradients = make_variables(), make_gradients(5)
    rates = np.full(5, 0.1)
    start = initial(variables)
    expected = twin([*start], gradients, rates, rounded=to_bfloat16)
    unrounded = twin([*start], gradients, rates)
    optimizer = training.Adafactor(0.1, weight_decay=DECAY)
    actual = apply(optimizer, variables, gradients)[-1]
    for a, b, c in zip(actual, expected, unrounded, strict=True):
        # Rounding is the same but where a rounding error of float32 lies at its edge.
        assert np.mean(np.abs(a - b) > 2e-6) < 1e-3
        assert_near(a, b, atol=0.1 * 2**-7)
        assert a.shape == () or np.abs(a - c).max() > 1e-5


def test_the_decay_of_the_squares_ends_at_its_largest():
    # After 5,623 steps; from there on old squares weigh no more.
    variables = [keras.Variable(np.zeros(2), name="weight")]
    optimizer = training.Adafactor(0.1, beta_1=0.0)
    optimizer.build(variables)
    optimizer.iterations.assign(9_999)
    (moment,) = optimizer.second_moments[0]
    moment.assign(np.full(2, 4.0))
    gradient = np.array([1.0, -3.0])
    (value,) = apply(optimizer, variables, [[gradient]])[-1]
    mean = 0.999 * 4.0 + 0.001 * gradient**2
    np.testing.assert_allclose(value, -0.1 * gradient / np.sqrt(mean), rtol=1e-5)


def test_what_it_keeps():
    optimizer = training.Adafactor()
    optimizer.build(make_variables())
    kept = zip(SHAPES, optimizer.momentums, optimizer.second_moments, strict=True)
    for name, momentum, moments in kept:
        assert (tuple(momentum.shape), momentum.dtype) == (SHAPES[name], "bfloat16")
        shapes = [tuple(moment.shape) for moment in moments]
        assert sorted(shapes) == sorted(FACTORED.get(name, [SHAPES[name]]))
        assert {moment.dtype for moment in moments} == {"float32"}
        # As `distribution.audit` finds them.
        assert momentum.path.rpartition("/")[2] == f"{name}_momentum"
    without = training.Adafactor(beta_1=0.0)
    without.build(make_variables())
    assert without.momentums == []


def test_bfloat16_variables_are_computed_in_float32():
    gradients = make_gradients(3)
    variables = make_variables("bfloat16")
    start = initial(variables)
    expected = twin([*start], gradients, np.full(3, 0.1), rounded=to_bfloat16)
    actual = apply(training.Adafactor(0.1, weight_decay=DECAY), variables, gradients)
    for a, b in zip(actual[-1], expected, strict=True):
        assert_near(a, b, rtol=0.02, atol=0.03)


@pytest.mark.parametrize(
    "arguments",
    [
        {"beta_1": 1.0},
        {"beta_1": -0.1},
        {"max_beta_2": 1.5},
        {"beta_2_decay": 0.8},
        {"momentum_dtype": "float16"},
    ],
)
def test_bad_arguments_are_named(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"Received: {name}={value!r}"):
        training.Adafactor(**arguments)
