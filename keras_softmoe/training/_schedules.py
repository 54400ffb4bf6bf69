"""Learning-rate schedules of the V-MoE and Soft MoE papers that Keras does not have.

Both start with a linear warmup to the peak and differ in how they come down from it.
Steps are counted from 0, warmup included. What is counted is cast to float32, which
holds every whole number up to 16,777,216; the longest run in the papers has 10 million.
The cosine of the papers' fine-tuning is `keras.optimizers.schedules.CosineDecay`.
"""

import math

import keras
from keras import ops

from keras_softmoe.types import Tensor


class _WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A linear warmup, then what a subclass returns from `decay(steps)`.

    That is the learning rate `steps`, a float32 tensor of at least 0, after the end of
    the warmup. Without a warmup step 0 has the peak.
    """

    def __init__(self, peak_learning_rate, warmup_steps):
        check_numbers(peak_learning_rate=peak_learning_rate, warmup_steps=warmup_steps)
        self.peak_learning_rate = peak_learning_rate
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        decayed = self.decay(ops.maximum(step - self.warmup_steps, 0.0))
        if not self.warmup_steps:
            return decayed
        rising = self.peak_learning_rate * (step / self.warmup_steps)
        return ops.where(step < self.warmup_steps, rising, decayed)

    def get_config(self):
        return {
            "peak_learning_rate": self.peak_learning_rate,
            "warmup_steps": self.warmup_steps,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class WarmupPolynomialDecay(_WarmupSchedule):
    """Linear warmup, then linear (or polynomial) decay: V-MoE's pretraining.

    `keras.optimizers.schedules.PolynomialDecay` with a warmup. After `total_steps` the
    learning rate stays at its end.

    Args:
        peak_learning_rate: float, the learning rate at the end of the warmup.
        total_steps: int, the step at which the decay ends, counted from the start of
            training, warmup included.
        warmup_steps: int, steps over which the learning rate rises from 0.
        end_learning_rate: float, the learning rate at the end.
        power: float, 1 is a straight line; larger powers fall faster at first.

    Call arguments:
        - `step`: int, or int or float tensor of any shape: steps taken so far.

    Returns:
        float32 tensor of the shape of `step`.

    Raises:
        ValueError: if a number is negative or not finite, or the warmup lasts as long
            as the training.

    Source: V-MoE, table 6 ("linear"); warmup and end from its released code.

    Examples:
        >>> schedule = ksm.training.WarmupPolynomialDecay(8e-4, 300_000, 10_000, 1e-5)
        >>> round(float(schedule(10_000)), 6)
        0.0008
    """

    def __init__(
        self,
        peak_learning_rate: float,
        total_steps: int,
        warmup_steps: int = 0,
        end_learning_rate: float = 0.0,
        power: float = 1.0,
    ):
        super().__init__(peak_learning_rate, warmup_steps)
        check_numbers(end_learning_rate=end_learning_rate, power=power)
        check_decay(total_steps, warmup_steps)
        self.total_steps = total_steps
        self.end_learning_rate = end_learning_rate
        self.power = power

    def decay(self, steps: Tensor) -> Tensor:
        done = ops.minimum(steps / (self.total_steps - self.warmup_steps), 1.0)
        span = self.peak_learning_rate - self.end_learning_rate
        return self.end_learning_rate + span * ops.power(1.0 - done, self.power)

    def get_config(self):
        return {
            **super().get_config(),
            "total_steps": self.total_steps,
            "end_learning_rate": self.end_learning_rate,
            "power": self.power,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class WarmupRsqrtDecay(_WarmupSchedule):
    """Warmup, reciprocal square root, linear cooldown to zero: Soft MoE's pretraining.

    `t` steps after the warmup the learning rate is `peak / sqrt(1 + t / timescale)`.
    It does not depend on the length of the training, so a run can be extended, or be
    cooled down early from any of its checkpoints. Over the last `cooldown_steps` it
    falls in a straight line to zero at `total_steps`.

    After `total_steps` the learning rate stays zero. (The released code goes on along
    the line: the learning rate turns negative, and training climbs the loss.) Without a
    cooldown there is no end, as in the released code.

    Args:
        peak_learning_rate: float, the learning rate at the end of the warmup.
        total_steps: int, the step at which the cooldown ends, counted from the start of
            training, warmup included. Without a cooldown it changes nothing.
        timescale: float, steps after which the learning rate starts to fall notably: it
            is `0.7 * peak` one timescale after the warmup, `0.58 * peak` after two.
        warmup_steps: int, steps over which the learning rate rises from 0.
        cooldown_steps: int, the steps at the end.

    Call arguments:
        - `step`: int, or int or float tensor of any shape: steps taken so far.

    Returns:
        float32 tensor of the shape of `step`.

    Raises:
        ValueError: if a number is negative or not finite, the timescale is zero, or
            warmup and cooldown overlap.

    Source: Soft MoE, sections 3.3 and 3.4, appendix E; V-MoE, table 6 and appendix B.3
    (V-MoE-15B). Formula from their released code.

    Examples:
        >>> schedule = ksm.training.WarmupRsqrtDecay(
        ...     1e-3,
        ...     300_000,
        ...     timescale=10_000,
        ...     warmup_steps=10_000,
        ...     cooldown_steps=50_000,
        ... )
        >>> [round(float(schedule(step)), 6) for step in (10_000, 20_000, 300_000)]
        [0.001, 0.000707, 0.0]
    """

    def __init__(
        self,
        peak_learning_rate: float,
        total_steps: int,
        timescale: float,
        warmup_steps: int = 0,
        cooldown_steps: int = 0,
    ):
        super().__init__(peak_learning_rate, warmup_steps)
        check_numbers(total_steps=total_steps, cooldown_steps=cooldown_steps)
        check_positive(timescale=timescale)
        if warmup_steps + cooldown_steps > total_steps:
            raise ValueError(
                "Warmup and cooldown must fit into `total_steps`. Received: "
                f"total_steps={total_steps}, warmup_steps={warmup_steps}, "
                f"cooldown_steps={cooldown_steps}."
            )
        self.total_steps = total_steps
        self.timescale = timescale
        self.cooldown_steps = cooldown_steps

    def decay(self, steps: Tensor) -> Tensor:
        left = 1.0
        if self.cooldown_steps:
            end = self.total_steps - self.warmup_steps
            left = ops.clip((end - steps) / self.cooldown_steps, 0.0, 1.0)
            # During the cooldown the root stands still and only the line falls.
            steps = ops.minimum(steps, float(end - self.cooldown_steps))
        return self.peak_learning_rate * left / ops.sqrt(1.0 + steps / self.timescale)

    def get_config(self):
        return {
            **super().get_config(),
            "total_steps": self.total_steps,
            "timescale": self.timescale,
            "cooldown_steps": self.cooldown_steps,
        }


def warmup_cosine_decay(peak_learning_rate, steps, warmup_steps, end_learning_rate=0.0):
    """Keras' cosine after a linear warmup, with the arguments of the others.

    Keras counts the decay without the warmup, and the end as a share of the peak.
    """
    check_positive(peak_learning_rate=peak_learning_rate)
    check_numbers(warmup_steps=warmup_steps, end_learning_rate=end_learning_rate)
    check_decay(steps, warmup_steps)
    return keras.optimizers.schedules.CosineDecay(
        0.0,
        decay_steps=steps - warmup_steps,
        alpha=end_learning_rate / peak_learning_rate,
        warmup_target=peak_learning_rate,
        warmup_steps=warmup_steps,
    )


def check_decay(total_steps, warmup_steps):
    """Raise unless there are steps left after the warmup."""
    if not math.isfinite(total_steps) or total_steps <= warmup_steps:
        raise ValueError(
            "`total_steps` counts the warmup and must go beyond it. Received: "
            f"total_steps={total_steps}, warmup_steps={warmup_steps}. Train for "
            "longer or warm up for less."
        )


def check_numbers(**arguments):
    """Raise unless every argument is a finite number of at least 0."""
    for name, value in arguments.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"`{name}` must be a finite number of at least 0. "
                f"Received: {name}={value!r}."
            )


def check_positive(**arguments):
    """Raise unless every argument is a finite number over 0."""
    check_numbers(**arguments)
    for name, value in arguments.items():
        if not value:
            raise ValueError(
                f"`{name}` must be greater than 0. Received: {name}={value!r}."
            )
