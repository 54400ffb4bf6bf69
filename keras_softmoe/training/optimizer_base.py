"""Base of our optimizers: decay by variable and debiased averages."""

import functools
import math
import re

import keras
from keras import ops

from keras_softmoe.checks import received
from keras_softmoe.keras_adapter import runs as adapter
from keras_softmoe.sharding.constraints import layout_of


def _left_out_by_torch_compile(method):
    """Wrap a method that takes longer to compile than it could ever save.

    PyTorch's compiler reads each weight's update for itself.
    """

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        if keras.backend.backend() == "torch":
            import torch

            if torch.compiler.is_compiling():
                return torch.compiler.disable(method)(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return run


class ByVariable(adapter.OwnAverages):
    """Mixin, in front of an optimizer of Keras: weight decay by variable.

    `settings` are the names of further arguments in the configuration.
    """

    settings = ()

    def __init__(self, weight_decay_rules, **kwargs):
        super().__init__(**kwargs)
        if weight_decay_rules and self.weight_decay is not None:
            raise ValueError(
                "`weight_decay` and `weight_decay_rules` exclude each other. "
                + received(
                    weight_decay=self.weight_decay,
                    weight_decay_rules=weight_decay_rules,
                )
            )
        self.weight_decay_rules = check_rules("weight_decay_rules", weight_decay_rules)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        # The rate of the first rule whose pattern matches the path.
        self._decay_rates = [
            next((n for p, n in self.weight_decay_rules if re.search(p, v.path)), 0.0)
            for v in variables
        ]

    def add_like(self, variable, name, mean_of=None, dtype=None):
        """Return a variable of the layout of another, of length 1 along `mean_of`."""
        shape = [1 if i == mean_of else n for i, n in enumerate(variable.shape)]
        layout = layout_of(variable.path)
        if layout is not None:
            axes = [None if i == mean_of else a for i, a in enumerate(layout.axes)]
            # A rule may match another variable's path by chance.
            fits = len(axes) == len(shape)
            layout = type(layout)(axes, layout.device_mesh) if fits else None
        # `distribution.audit` finds the other variable by this name.
        name = f"{variable.path.replace('/', '_')}_{name}"
        dtype = dtype or variable.dtype
        return self.add_variable(shape, dtype=dtype, layout=layout, name=name)

    @_left_out_by_torch_compile
    def apply(self, grads, trainable_variables=None):
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            # Gradients of embeddings are sparse there.
            grads = [g if g is None else tf.convert_to_tensor(g) for g in grads]
        return super().apply(grads, trainable_variables)

    def decay_rate(self, variable):
        """Return the decay rate of a variable."""
        return self._decay_rates[adapter.index_of(self, variable)]

    def decay_variable(self, variable, learning_rate):
        """Apply the decay of one step. Before or after the update is the same."""
        rate = self.decay_rate(variable)
        if rate:
            lost = variable * ops.cast(rate * learning_rate, variable.dtype)
            self.assign_sub(variable, lost)

    def update_averages(self, trainable_variables):
        # Keras starts its average from the variables after the first step. With the
        # momentum of V-MoE-15B they are still 97 % of it after 30,000 steps.
        if not self.use_ema:
            return
        every = self.gradient_accumulation_steps or 1
        taken = adapter.num_gradients(self) + 1
        steps = ops.cast(ops.maximum(taken // every, 1), "float32")
        if self.ema_momentum == 1:
            share = 1.0 / steps  # the limit, an arithmetic mean
        else:
            share = (1.0 - self.ema_momentum) / weight_of_all(steps, self.ema_momentum)
        # Between the steps of an accumulated gradient nothing changes.
        share = ops.where(ops.equal(taken % every, 0), share, 0.0)
        averages = adapter.averages_of(self)
        for variable, average in zip(trainable_variables, averages, strict=True):
            if average is not None:
                step = ops.cast(share, average.dtype) * (variable - average)
                average.assign(average + step)

    def finalize_variable_values(self, var_list):
        super().finalize_variable_values(var_list)
        if self.use_ema:
            # On JAX both would share memory, which the next `fit` may donate only once.
            for average in adapter.averages_of(self):
                if average is not None:
                    average.assign(ops.copy(average))

    def get_config(self):
        names = ("weight_decay_rules", *self.settings)
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own}


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
                f"example [('kernel$', 0.03)]. {received(**{name: rules})} {error}."
            ) from error
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"The numbers in `{name}` must be finite and at least 0. "
                + received(**{name: rules})
            )
        checked.append((pattern, value))
    return tuple(checked)


def weight_of_all(steps, momentum):
    """Return `1 - momentum ** steps`, precise for a momentum near 1, in float32."""
    return -ops.expm1(steps * math.log(momentum)) if momentum else ops.ones_like(steps)
