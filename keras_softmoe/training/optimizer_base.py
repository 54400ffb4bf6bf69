"""Base of our optimizers: rules for single variables, and debiased averages."""

import math
import re

import keras
from keras import ops

from keras_softmoe.keras_adapter.optimizers import (
    OwnAverages,
    averages_of,
    index_of,
    num_gradients,
    variables_of,
)
from keras_softmoe.sharding.constraints import layout_of


class ByVariable(OwnAverages):
    """Mixin, in front of an optimizer of Keras: decay and gradient scale by variable.

    The averages of `use_ema=True` have no bias to the first step.
    """

    def __init__(self, weight_decay_rules, gradient_scale_rules, **kwargs):
        super().__init__(**kwargs)
        if weight_decay_rules and self.weight_decay is not None:
            raise ValueError(
                "`weight_decay` is one rate for all variables, `weight_decay_rules` "
                "are rates by variable. Give one of them. Received: "
                f"weight_decay={self.weight_decay}, "
                f"weight_decay_rules={weight_decay_rules!r}."
            )
        self.weight_decay_rules = check_rules("weight_decay_rules", weight_decay_rules)
        self.gradient_scale_rules = check_rules(
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

    def add_like(self, variable, name, mean_of=None, dtype=None):
        """Return a variable like another, with length 1 along the axis `mean_of`.

        It has the same layout on devices, and the same dtype unless one is given.
        """
        shape = [1 if i == mean_of else n for i, n in enumerate(variable.shape)]
        layout = layout_of(variable.path)
        if layout is not None:
            axes = [None if i == mean_of else a for i, a in enumerate(layout.axes)]
            # A rule may match another variable's path by chance.
            fits = len(axes) == len(shape)
            layout = type(layout)(axes, layout.device_mesh) if fits else None
        return self.add_variable(
            shape,
            dtype=dtype or variable.dtype,
            layout=layout,
            # `distribution.audit` finds the other variable by this name.
            name=f"{variable.path.replace('/', '_')}_{name}",
        )

    def apply(self, grads, trainable_variables=None):
        grads = [g if g is None else _dense(g) for g in grads]
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

    def decay_rate(self, variable):
        """Return the rate of the first rule that matches the variable."""
        return self._decay_rates[index_of(self, variable)]

    def decay_variable(self, variable, learning_rate):
        """Apply the decay of one step. Before or after the update is the same."""
        rate = self.decay_rate(variable)
        if rate:
            self.assign_sub(
                variable, variable * ops.cast(rate * learning_rate, variable.dtype)
            )

    def update_averages(self, trainable_variables):
        # Keras starts its average from the variables after the first step. With the
        # momentum of V-MoE-15B they are still 97 % of it after 30,000 steps.
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


def _dense(gradient):
    """Return a dense tensor: TensorFlow has sparse gradients of embeddings."""
    if keras.backend.backend() != "tensorflow":
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _first_match(rules, path, default):
    """Return the value of the first rule whose pattern is found in the path."""
    for pattern, value in rules:
        if re.search(pattern, path):
            return value
    return default


def check_rules(name, rules):
    """Return the rules as a tuple of pairs; raise if one is not a pair."""
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


def weight_of_all(steps, momentum):
    """Return the weight of all values in an average that started from 0, float32.

    That is `1 - momentum ** steps`, without loss of digits for a momentum near 1.
    """
    return -ops.expm1(steps * math.log(momentum)) if momentum else ops.ones_like(steps)


def _share_of_newest(steps, momentum):
    """Return the weight of the newest value in a debiased average of `steps` values."""
    if momentum == 1:
        # The limit, an arithmetic mean.
        return 1.0 / steps
    return (1.0 - momentum) / weight_of_all(steps, momentum)
