"""Adam and SGD as the papers' training code uses them.

Keras' optimizers do most of it: `global_clipnorm`, `clipvalue`, `clipnorm`,
`gradient_accumulation_steps` and `weight_decay` (one rate for all variables, times the
learning rate) give the same numbers and are taken from there. What Keras lacks is
added: what `ByVariable` has, and the papers' order of operations.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_softmoe.checks import check_choice
from keras_softmoe.keras_adapter import index_of
from keras_softmoe.ops.constants import smallest
from keras_softmoe.training._by_variable import ByVariable, weight_of_all


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Adam(ByVariable, keras.optimizers.Optimizer):
    """Adam, with weight decay and gradient scale by variable.

    Differs from `keras.optimizers.Adam` in two more things. `epsilon` is added to the
    root of the bias-corrected second moment, as in the Adam paper (algorithm 1): Keras'
    weighs `1 / sqrt(1 - beta_2 ** step)` times as much, 32 times at the first step. And
    the average that `use_ema=True` keeps is not biased to the first step.

    Args:
        learning_rate: float or schedule.
        beta_1: float, decay of the first moment.
        beta_2: float, decay of the second moment.
        epsilon: float, see above. Float16 has none that small: of weights of that
            dtype it is at least 6e-5.
        weight_decay_rules: optional list of `(pattern, rate)`. A variable decays at the
            rate of the first pattern that `re.search` finds in its path, and not at all
            if there is none: a step subtracts `learning_rate * rate * variable`. Paths
            are those of `[v.path for v in model.trainable_variables]`; variables that
            are not trained do not decay.
        gradient_scale_rules: optional list of `(pattern, factor)`, found in the same
            way: the gradient is multiplied with the factor before it is clipped.
        momentum_dtype: `"bfloat16"`, in which the first moment takes half the memory,
            or `None` for the dtype of the variables. The second moment always has
            that: in bfloat16 its steps of a thousandth would be rounded away.
        **kwargs: what all Keras optimizers take: `weight_decay` (one rate for all
            variables, in place of the rules), `clipnorm`, `clipvalue`,
            `global_clipnorm`, `use_ema`, `ema_momentum` (1 is the mean of all steps),
            `ema_overwrite_frequency`, `gradient_accumulation_steps`,
            `loss_scale_factor`, `name`.

    Raises:
        ValueError: if a rule is not a pair of a valid pattern and a number of at least
            0, both `weight_decay` and `weight_decay_rules` are given, or
            `momentum_dtype` is another.

    Source: V-MoE, table 6 and appendices B.3 (decay 0.03 for kernels, 3 for the head;
    first moments in half precision) and B.4 (debiased Polyak averaging).

    Examples:
        >>> optimizer = ksm.training.Adam(
        ...     ksm.training.WarmupPolynomialDecay(8e-4, 300_000, 10_000),
        ...     weight_decay_rules=[("predictions/kernel", 3.0), ("kernel$", 0.03)],
        ...     global_clipnorm=1.0,
        ... )
        >>> classifier.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay_rules: Sequence | None = None,
        gradient_scale_rules: Sequence | None = None,
        momentum_dtype: str | None = None,
        **kwargs,
    ):
        check_choice("momentum_dtype", momentum_dtype, (None, "bfloat16"))
        super().__init__(
            weight_decay_rules=weight_decay_rules,
            gradient_scale_rules=gradient_scale_rules,
            learning_rate=learning_rate,
            **kwargs,
        )
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.momentum_dtype = momentum_dtype

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        if self.momentum_dtype is None:
            self.momentums, self.velocities = self.add_optimizer_variables(
                variables, ["momentum", "velocity"]
            )
            return
        self.velocities = self.add_optimizer_variables(variables, "velocity")
        self.momentums = [
            self.add_like(variable, "momentum", dtype=self.momentum_dtype)
            for variable in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        self.decay_variable(variable, learning_rate)
        index, dtype = index_of(self, variable), variable.dtype
        momentum, velocity = self.momentums[index], self.velocities[index]
        gradient = ops.cast(gradient, dtype)
        mean = ops.cast(momentum, dtype)
        mean = mean + (gradient - mean) * (1.0 - self.beta_1)
        self.assign(momentum, ops.cast(mean, momentum.dtype))
        self.assign_add(
            velocity, (ops.square(gradient) - velocity) * (1.0 - self.beta_2)
        )
        # In float32 whatever the variables are: bfloat16 takes 0.999 for 1.
        steps = ops.cast(self.iterations, "float32") + 1.0
        rate = learning_rate / weight_of_all(steps, self.beta_1)
        root = ops.sqrt(velocity / ops.cast(weight_of_all(steps, self.beta_2), dtype))
        # In float16 an epsilon of 1e-8 would be zero.
        root = root + max(self.epsilon, smallest(dtype))
        self.assign_sub(variable, ops.cast(rate, dtype) * mean / root)

    def get_config(self):
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "momentum_dtype": self.momentum_dtype,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SGD(ByVariable, keras.optimizers.SGD):
    """SGD with momentum, with weight decay and gradient scale by variable.

    Differs from `keras.optimizers.SGD` in two more things. The learning rate scales the
    step that is taken, not the gradient that enters the momentum: `m = momentum * m +
    gradient; variable -= learning_rate * m`. The two are equal at a constant rate; when
    it changes, Keras still takes steps at the rates of the past. And the average that
    `use_ema=True` keeps is not biased to the first step.

    Args:
        learning_rate: float or schedule.
        momentum: float from 0 to 1.
        nesterov: bool, whether to apply Nesterov momentum.
        weight_decay_rules: see `Adam`.
        gradient_scale_rules: see `Adam`.
        **kwargs: what all Keras optimizers take, see `Adam`.

    Raises:
        ValueError: if a rule is not a pair of a valid pattern and a number of at least
            0, or both `weight_decay` and `weight_decay_rules` are given.

    Source: V-MoE, section 3.5 and appendix B.4, which follow the Vision Transformer's
    fine-tuning; order of operations from its released code.

    Examples:
        >>> schedule = keras.optimizers.schedules.CosineDecay(0.003, 10_000)
        >>> optimizer = ksm.training.SGD(schedule, momentum=0.9, global_clipnorm=10.0)
        >>> classifier.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay_rules: Sequence | None = None,
        gradient_scale_rules: Sequence | None = None,
        **kwargs,
    ):
        super().__init__(
            weight_decay_rules=weight_decay_rules,
            gradient_scale_rules=gradient_scale_rules,
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            **kwargs,
        )

    def update_step(self, gradient, variable, learning_rate):
        self.decay_variable(variable, learning_rate)
        step = ops.cast(gradient, variable.dtype)
        if self.momentum:
            momentum = self.momentums[index_of(self, variable)]
            self.assign(momentum, momentum * self.momentum + step)
            step = step + self.momentum * momentum if self.nesterov else momentum
        self.assign_sub(variable, step * ops.cast(learning_rate, variable.dtype))
