"""Learning-rate schedules: values, ends, arguments, and use inside a training step."""

import keras
import numpy as np
import pytest

from keras_softmoe import training
from tests.support.close import assert_near
from tests.support.references import to_numpy

SCHEDULES = {
    "linear": training.WarmupSchedule(0.8, 10, 4, end_learning_rate=0.2),
    "root": training.WarmupSchedule(0.8, 10, 4, power=0.5),
    "cosine": training.WarmupSchedule(0.8, 10, 4, "cosine", end_learning_rate=0.2),
    "rsqrt": training.WarmupSchedule(0.8, 10, 4, "rsqrt", timescale=3),
    "cooldown": training.WarmupSchedule(
        0.8, 10, 4, "rsqrt", timescale=3, cooldown_steps=3
    ),
}
EVERY = pytest.mark.parametrize("name", SCHEDULES)
WARMUP = [0.0, 0.2, 0.4, 0.6]
SQRT2 = 2**0.5
# Values from step 4 on, worked out by hand.
AFTER_WARMUP = {
    "linear": [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2],
    "root": [0.8 * (1 - t / 6) ** 0.5 for t in range(6)] + [0.0, 0.0],
    "cosine": [0.5 + 0.3 * np.cos(np.pi * min(t, 6) / 6) for t in range(8)],
    "rsqrt": [0.8 / (1 + t / 3) ** 0.5 for t in range(3)] + [0.8 / SQRT2],
    "cooldown": [0.8 / (1 + t / 3) ** 0.5 for t in range(3)]
    + [0.8 / SQRT2 * left for left in (1.0, 2 / 3, 1 / 3, 0.0, 0.0, 0.0)],
}


def values(schedule, steps):
    return to_numpy(schedule(np.asarray(steps)))


@EVERY
def test_values(name):
    expected = WARMUP + AFTER_WARMUP[name]
    actual = values(SCHEDULES[name], range(len(expected)))
    assert_near(actual, expected, rtol=1e-6, atol=1e-7)
    assert actual.dtype == np.float32


@EVERY
def test_configuration(name):
    schedule = SCHEDULES[name]
    copy = keras.optimizers.schedules.deserialize(
        keras.optimizers.schedules.serialize(schedule)
    )
    assert type(copy) is type(schedule)
    assert copy.get_config() == schedule.get_config()
    np.testing.assert_array_equal(values(copy, range(12)), values(schedule, range(12)))


@EVERY
def test_training_follows_it(name):
    schedule = SCHEDULES[name]
    # The loss is the weight itself: every step subtracts the learning rate from it.
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(schedule), lambda y_true, y_pred: y_pred)
    ones = np.ones((12, 1), "float32")
    model.build((None, 1))
    start = to_numpy(model.layers[0].kernel).item()
    model.fit(ones, ones, batch_size=1, shuffle=False, verbose=0)
    moved = start - to_numpy(model.layers[0].kernel).item()
    np.testing.assert_allclose(moved, values(schedule, range(12)).sum(), rtol=1e-5)


def test_starts_and_ends():
    assert values(training.WarmupSchedule(0.3, 10), 0) == np.float32(0.3)
    # The released code goes on along the line, to -0.4 / sqrt(2) here.
    assert values(SCHEDULES["cooldown"], [9, 10, 11, 1000]).min() == 0.0
    far = values(SCHEDULES["rsqrt"], [10, 1000])
    np.testing.assert_allclose(far, [0.8 / 3**0.5, 0.8 / 333**0.5], rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_schedules_of_keras(decay, warmup_steps):
    """The same values as theirs, which take one step at a time or have no warmup."""
    schedule = training.WarmupSchedule(
        0.8, 6 + warmup_steps, warmup_steps, decay, end_learning_rate=0.2
    )
    if decay == "linear":
        theirs = keras.optimizers.schedules.PolynomialDecay(0.8, 6, 0.2)
        first = warmup_steps
    else:
        theirs = keras.optimizers.schedules.CosineDecay(
            0.0, 6, 0.25, warmup_target=0.8, warmup_steps=warmup_steps
        )
        first = 0
    steps = np.arange(first, 12)
    expected = [to_numpy(theirs(step - first)) for step in steps]
    assert_near(values(schedule, steps), expected, rtol=1e-6, atol=1e-7)


@pytest.fixture(params=["float16", "bfloat16"])
def floatx(request):
    keras.config.set_floatx(request.param)
    yield
    keras.config.set_floatx("float32")


@pytest.mark.usefixtures("floatx")
def test_steps_are_float32_whatever_the_default():
    steps = [0, 40_000, 400_001, 781_250]
    schedule = training.WarmupSchedule(1e-3, 781_250, 40_000, "cosine")
    assert_near(
        values(schedule, steps), [0.0, 1e-3, 5.22506e-4, 0.0], rtol=1e-4, atol=1e-9
    )


def test_a_long_training():
    schedule = training.WarmupSchedule(
        1e-3, 10_000_000, 10_000, "rsqrt", timescale=1e4, cooldown_steps=500_000
    )
    steps = [9_499_999, 9_500_001, 9_999_999, 10_000_000]
    top = 1e-3 / (1 + 949) ** 0.5
    expected = [top, top * (1 - 2e-6), top * 2e-6, 0.0]
    np.testing.assert_allclose(values(schedule, steps), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: training.WarmupSchedule(-1.0, 10),
        lambda: training.WarmupSchedule(0.0, 10),
        lambda: training.WarmupSchedule(float("nan"), 10),
        lambda: training.WarmupSchedule(1.0, 10, warmup_steps=10),
        lambda: training.WarmupSchedule(1.0, 10, warmup_steps=-1),
        lambda: training.WarmupSchedule(1.0, 10, power=-1.0),
        lambda: training.WarmupSchedule(1.0, 10, end_learning_rate=-0.1),
        lambda: training.WarmupSchedule(1.0, 10, decay="exponential"),
        lambda: training.WarmupSchedule(1.0, 10, decay="cosine", cooldown_steps=5),
        lambda: training.WarmupSchedule(1.0, 10, 10, decay="cosine"),
        lambda: training.WarmupSchedule(1.0, 10, decay="rsqrt", end_learning_rate=0.1),
        lambda: training.WarmupSchedule(1.0, 10, decay="rsqrt", timescale=0),
        lambda: training.WarmupSchedule(1.0, 10, 6, "rsqrt", cooldown_steps=5),
    ],
)
def test_bad_arguments_are_named(make):
    with pytest.raises(ValueError, match="Received"):
        make()
