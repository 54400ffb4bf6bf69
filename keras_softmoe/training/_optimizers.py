"""Adam and SGD as the papers' training code uses them.

Keras' optimizers do most of it: `global_clipnorm`, `clipvalue`, `clipnorm`,
`gradient_accumulation_steps` and `weight_decay` (one rate for all variables, times the
learning rate) give the same numbers and are taken from there. What Keras lacks is
added: rates of decay that depend on the variable, gradients scaled by variable,
averages without a bias to the first step, and the papers' order of operations.
"""

import math
import re

import keras
from keras import ops

from keras_softmoe.keras_adapter import (
    OwnAverages,
    averages_of,
    index_of,
    num_gradients,
    variables_of,
)


class _ByVariable(OwnAverages):
    """What both optimizers add to Keras'. Mixed into an optimizer, in front of it."""

    def __init__(self, weight_decay_rules, gradient_scale_rules, **kwargs):
        super().__init__(**kwargs)
        if weight_decay_rules and self.weight_decay is not None:
            raise ValueError(
                "`weight_decay` is one rate for all variables, `weight_decay_rules` "
                "are rates by variable. Give one of them. Received: "
                f"weight_decay={self.weight_decay}, "
                f"weight_decay_rules={weight_decay_rules!r}."
            )
        self.weight_decay_rules = _check_rules("weight_decay_rules", weight_decay_rules)
        self.gradient_scale_rules = _check_rules(
            "gradient_scale_rules", gradient_scale_rules
        )

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._decay_rates = tuple(
            _first_match(self.weight_decay_rules, variable.path, 0.0)
            for variable in variables
        )

    def apply(self, grads, trainable_variables=None):
        if self.gradient_scale_rules:
            variables = trainable_variables or variables_of(self)
            grads = [
                gradient
                if gradient is None
                else gradient
                * _first_match(self.gradient_scale_rules, variable.path, 1.0)
                for gradient, variable in zip(grads, variables, strict=True)
            ]
        return super().apply(grads, trainable_variables)

    def _decay(self, variable, learning_rate):
        """The decay of one step. The gradient is computed already: order is free."""
        rate = self._decay_rates[index_of(self, variable)]
        if rate:
            self.assign_sub(
                variable, variable * ops.cast(rate * learning_rate, variable.dtype)
            )

    def update_averages(self, trainable_variables):
        # Keras starts its average from the variables after the first step. With the
        # momentum of V-MoE-15B they are still 97 % of it after 30,000 steps; here all
        # steps weigh what the momentum says.
        if not self.use_ema:
            return
        every = self.gradient_accumulation_steps or 1
        taken = num_gradients(self) + 1
        steps = ops.cast(ops.maximum(taken // every, 1), "float32")
        # Between the steps of an accumulated gradient nothing changes.
        share = ops.where(
            ops.equal(taken % every, 0),
            _share_of_newest(steps, self.ema_momentum),
            0.0,
        )
        averages = averages_of(self)
        for variable, average in zip(trainable_variables, averages, strict=True):
            if average is not None:
                step = ops.cast(share, average.dtype) * (variable - average)
                average.assign(average + step)

    def finalize_variable_values(self, var_list):
        super().finalize_variable_values(var_list)
        if self.use_ema:
            # On JAX variable and average would now share their memory, and the first
            # step of the next `fit` fails because it may use it up only once.
            for average in averages_of(self):
                if average is not None:
                    average.assign(ops.copy(average))

    def get_config(self):
        return {
            **super().get_config(),
            "weight_decay_rules": self.weight_decay_rules,
            "gradient_scale_rules": self.gradient_scale_rules,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Adam(_ByVariable, keras.optimizers.Optimizer):
    """Adam, with weight decay and gradient scale by variable.

    Differs from `keras.optimizers.Adam` in two more things. `epsilon` is added to the
    root of the bias-corrected second moment, as in the Adam paper (algorithm 1): Keras'
    weighs `1 / sqrt(1 - beta_2 ** step)` times as much, 32 times at the first step. And
    the average that `use_ema=True` keeps is not biased to the first step.

    Args:
        learning_rate: float or schedule.
        beta_1: float, decay of the first moment.
        beta_2: float, decay of the second moment.
        epsilon: float, see above.
        weight_decay_rules: optional list of `(pattern, rate)`. A variable decays at the
            rate of the first pattern that `re.search` finds in its path, and not at all
            if there is none: a step subtracts `learning_rate * rate * variable`. Paths
            are those of `[v.path for v in model.trainable_variables]`; variables that
            are not trained do not decay.
        gradient_scale_rules: optional list of `(pattern, factor)`, found in the same
            way: the gradient is multiplied with the factor before it is clipped.
        **kwargs: what all Keras optimizers take: `weight_decay` (one rate for all
            variables, in place of the rules), `clipnorm`, `clipvalue`,
            `global_clipnorm`, `use_ema`, `ema_momentum` (1 is the mean of all steps),
            `ema_overwrite_frequency`, `gradient_accumulation_steps`,
            `loss_scale_factor`, `name`.

    Raises:
        ValueError: if a rule is not a pair of a valid pattern and a number of at least
            0, or both `weight_decay` and `weight_decay_rules` are given.

    Source: V-MoE, table 6 and appendices B.3 (decay 0.03 for kernels, 3 for the head)
    and B.4 (debiased Polyak averaging).

    Example:

    >>> optimizer = ksm.training.Adam(
    ...     ksm.training.WarmupPolynomialDecay(8e-4, 300_000, 10_000),
    ...     weight_decay_rules=[("predictions/kernel", 3.0), ("kernel$", 0.03)],
    ...     global_clipnorm=1.0,
    ... )
    >>> classifier.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        weight_decay_rules=None,
        gradient_scale_rules=None,
        **kwargs,
    ):
        super().__init__(
            weight_decay_rules=weight_decay_rules,
            gradient_scale_rules=gradient_scale_rules,
            learning_rate=learning_rate,
            **kwargs,
        )
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.momentums, self.velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def update_step(self, gradient, variable, learning_rate):
        self._decay(variable, learning_rate)
        index, dtype = index_of(self, variable), variable.dtype
        momentum, velocity = self.momentums[index], self.velocities[index]
        gradient = ops.cast(gradient, dtype)
        self.assign_add(momentum, (gradient - momentum) * (1.0 - self.beta_1))
        self.assign_add(
            velocity, (ops.square(gradient) - velocity) * (1.0 - self.beta_2)
        )
        # In float32 whatever the variables are: bfloat16 takes 0.999 for 1.
        steps = ops.cast(self.iterations, "float32") + 1.0
        rate = learning_rate / _weight_of_all(steps, self.beta_1)
        root = ops.sqrt(velocity / ops.cast(_weight_of_all(steps, self.beta_2), dtype))
        self.assign_sub(
            variable, ops.cast(rate, dtype) * momentum / (root + self.epsilon)
        )

    def get_config(self):
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SGD(_ByVariable, keras.optimizers.SGD):
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

    Example:

    >>> schedule = keras.optimizers.schedules.CosineDecay(0.003, 10_000)
    >>> optimizer = ksm.training.SGD(schedule, momentum=0.9, global_clipnorm=10.0)
    >>> classifier.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate=0.01,
        momentum=0.0,
        nesterov=False,
        weight_decay_rules=None,
        gradient_scale_rules=None,
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
        self._decay(variable, learning_rate)
        step = ops.cast(gradient, variable.dtype)
        if self.momentum:
            momentum = self.momentums[index_of(self, variable)]
            self.assign(momentum, momentum * self.momentum + step)
            step = step + self.momentum * momentum if self.nesterov else momentum
        self.assign_sub(variable, step * ops.cast(learning_rate, variable.dtype))


def _first_match(rules, path, default):
    """Value of the first `(pattern, value)` whose pattern is found in the path."""
    for pattern, value in rules:
        if re.search(pattern, path):
            return value
    return default


def _check_rules(name, rules):
    """The rules as a tuple of pairs; raise if they are none."""
    checked = []
    for rule in rules or ():
        try:
            pattern, value = rule
            re.compile(pattern)
            value = float(value)
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(
                f"`{name}` must be pairs of a regular expression and a number, for "
                f"example [('kernel$', 0.03)]. Received: {name}={rules!r}, where "
                f"{rule!r} is no such pair: {error}."
            ) from error
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"The numbers in `{name}` must be finite and at least 0. "
                f"Received: {name}={rules!r}."
            )
        checked.append((pattern, value))
    return tuple(checked)


def _weight_of_all(steps, momentum):
    """What all values weigh in an average that started from 0: `1 - momentum ** steps`.

    Written so that a momentum near 1 loses no digits; float32.
    """
    return -ops.expm1(steps * math.log(momentum)) if momentum else ops.ones_like(steps)


def _share_of_newest(steps, momentum):
    """How much of the newest value enters a debiased average of `steps` values."""
    if momentum == 1:
        # The limit, an arithmetic mean.
        return 1.0 / steps
    return (1.0 - momentum) / _weight_of_all(steps, momentum)
