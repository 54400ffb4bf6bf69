"""The learning-rate schedule of the papers: a warmup, then one of three decays.

Those of Keras have no warmup, or count steps in `keras.config.floatx()`. Float32 holds
every whole number up to 16,777,216; the papers' longest run has 10 million steps.
"""

import math

import keras
from keras import ops

from keras_softmoe.checks import check_choice, check_numbers, keyword_names, received
from keras_softmoe.types import Tensor


@keras.saving.register_keras_serializable(package="keras_softmoe")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warmup from 0 to a peak, then a decay.

    `"linear"` (V-MoE) and `"cosine"` (fine-tuning, LIMoE) end at `end_learning_rate`.

    `"rsqrt"` (Soft MoE, V-MoE-15B) is `peak / sqrt(1 + t / timescale)`, `t` steps after
    the warmup, so a run can be extended or cooled down from any of its checkpoints.
    Over the last `cooldown_steps` it falls linearly to zero and stays zero.

    Args:
        peak_learning_rate: float, the learning rate at the end of the warmup.
        total_steps: int, the step at which the decay or the cooldown ends.
        warmup_steps: int, steps over which the learning rate rises from 0.
        decay: `"linear"`, `"cosine"` or `"rsqrt"`.
        end_learning_rate: float, the learning rate at the end, if linear or cosine.
        power: float, the exponent of a linear decay.
        timescale: float, steps after which a reciprocal square root is `0.7 * peak`.
        cooldown_steps: int, length of the cooldown of a reciprocal square root.

    Called on `step`, int or a tensor of any shape, it returns float32 of that shape. A
    number that is out of range, or of another decay, raises a `ValueError`.

    Source: V-MoE, table 6 and B.3; Soft MoE, sections 3.3 and 3.4; LIMoE, appendix A.

    Examples:
        >>> schedule = ksm.training.WarmupSchedule(
        ...     1e-3, 300_000, 10_000, decay="rsqrt", cooldown_steps=50_000
        ... )
        >>> [round(float(schedule(step)), 6) for step in (10_000, 20_000, 300_000)]
        [0.001, 0.000707, 0.0]
    """

    def __init__(
        self,
        peak_learning_rate: float,
        total_steps: int,
        warmup_steps: int = 0,
        decay: str = "linear",
        end_learning_rate: float = 0.0,
        power: float = 1.0,
        timescale: float = 10_000,
        cooldown_steps: int = 0,
    ):
        check_choice("decay", decay, ("linear", "cosine", "rsqrt"))
        check_numbers(over=0, peak_learning_rate=peak_learning_rate)
        check_numbers(over=0, timescale=timescale)
        check_numbers(
            least=0,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            end_learning_rate=end_learning_rate,
            power=power,
            cooldown_steps=cooldown_steps,
        )
        if end_learning_rate if decay == "rsqrt" else cooldown_steps:
            raise ValueError(
                "`cooldown_steps` belongs to `decay='rsqrt'`, `end_learning_rate` to "
                "the other decays. "
                + received(
                    decay=decay,
                    cooldown_steps=cooldown_steps,
                    end_learning_rate=end_learning_rate,
                )
            )
        rest = total_steps - warmup_steps - cooldown_steps
        if rest < 0 or (rest == 0 and decay != "rsqrt"):
            raise ValueError(
                "`total_steps` counts warmup and cooldown and must exceed them. "
                + received(
                    total_steps=total_steps,
                    warmup_steps=warmup_steps,
                    cooldown_steps=cooldown_steps,
                )
            )
        self.peak_learning_rate = peak_learning_rate
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.decay = decay
        self.end_learning_rate = end_learning_rate
        self.power = power
        self.timescale = timescale
        self.cooldown_steps = cooldown_steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        decayed = self._decayed(ops.maximum(step - self.warmup_steps, 0.0))
        if not self.warmup_steps:
            return decayed
        rising = self.peak_learning_rate * (step / self.warmup_steps)
        return ops.where(step < self.warmup_steps, rising, decayed)

    def _decayed(self, steps: Tensor) -> Tensor:
        """Return the learning rate `steps` after the end of the warmup."""
        length = self.total_steps - self.warmup_steps
        if self.decay == "rsqrt":
            left = 1.0
            if self.cooldown_steps:
                # The released code lets this line go on below zero.
                left = ops.clip((length - steps) / self.cooldown_steps, 0.0, 1.0)
                # During the cooldown the root is constant and only the line falls.
                steps = ops.minimum(steps, float(length - self.cooldown_steps))
            root = ops.sqrt(1.0 + steps / self.timescale)
            return self.peak_learning_rate * left / root
        done = ops.minimum(steps / length, 1.0)
        if self.decay == "cosine":
            left = 0.5 * (1.0 + ops.cos(math.pi * done))
        else:
            left = ops.power(1.0 - done, self.power)
        span = self.peak_learning_rate - self.end_learning_rate
        return self.end_learning_rate + span * left

    def get_config(self):
        names = keyword_names(type(self).__init__)
        return {name: getattr(self, name) for name in names}
