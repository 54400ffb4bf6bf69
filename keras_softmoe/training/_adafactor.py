"""Adafactor as the papers train with it: with momentum, in place of Adam."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_softmoe.checks import check_choice
from keras_softmoe.keras_adapter import index_of
from keras_softmoe.training._by_variable import ByVariable

_MOMENTUM_DTYPES = ("bfloat16", "float32")


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Adafactor(ByVariable, keras.optimizers.Optimizer):
    """Adafactor with momentum, the optimizer of LIMoE and V-MoE-15B.

    A gradient is divided by the root of an average of its squares, and a step is an
    average of such quotients. Of the squares a matrix keeps only the means of its rows
    and of its columns. So it takes little more than 2 bytes for each weight, where Adam
    takes 8.

    `keras.optimizers.Adafactor` is the one of Shazeer and Stern 2018. LIMoE and
    V-MoE-15B train with another, that of ViT-G, which differs from it in this:

    - It has a momentum: `beta_1` of it stay, it starts from zeros, and it is not
      debiased. Kept in bfloat16.
    - A step is as long as the learning rate says. Keras multiplies it with the root
      mean square of the variable (at least 0.001), lowers the rate to `1 / sqrt(step)`
      where that is less, and clips a step to a root mean square of 1.
    - Of the average of squares stay `1 - step ** -0.8`, but at most 0.999.
    - Factored are the two largest axes of a variable, if both are 32 or longer. Keras
      takes the last two, always, and keeps a full-size average beside their means.

    Of these V-MoE spells out the bfloat16 average alone and LIMoE none: they name their
    source ("the same modifications used for ViT-G"). The numbers and the rule of the
    two largest axes are from the released code. All is computed in float32, whatever
    the dtype of the variables.

    Args:
        learning_rate: float or schedule.
        beta_1: float, decay of the momentum; 0 for none.
        beta_2_decay: float below 0, the exponent in `1 - step ** beta_2_decay`.
        max_beta_2: float, the largest decay of the squares.
        epsilon: float, what is added to the squares.
        min_dim_size_to_factor: int, variables whose second largest axis is shorter keep
            all their squares.
        momentum_dtype: `"bfloat16"` or `"float32"`, in which the momentum is kept.
        weight_decay_rules: see `Adam`.
        gradient_scale_rules: see `Adam`.
        **kwargs: what all Keras optimizers take, see `Adam`.

    Raises:
        ValueError: if a number is out of range, `momentum_dtype` is another, a rule is
            not a pair of a valid pattern and a number of at least 0, or both
            `weight_decay` and `weight_decay_rules` are given.

    Source: LIMoE, appendix A; V-MoE, table 6 and appendix B.3. Both follow Zhai et al.
    2022 (Scaling Vision Transformers), section 3.4.

    Examples:
        >>> optimizer = ksm.training.Adafactor(
        ...     ksm.training.WarmupRsqrtDecay(8e-4, 300_000, 10_000, 10_000, 50_000),
        ...     weight_decay_rules=[("predictions/kernel", 3.0), ("kernel$", 0.03)],
        ... )
        >>> classifier.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2_decay: float = -0.8,
        max_beta_2: float = 0.999,
        epsilon: float = 1e-30,
        min_dim_size_to_factor: int = 32,
        momentum_dtype: str = "bfloat16",
        weight_decay_rules: Sequence | None = None,
        gradient_scale_rules: Sequence | None = None,
        **kwargs,
    ):
        _check_decays(beta_1, beta_2_decay, max_beta_2)
        check_choice("momentum_dtype", momentum_dtype, _MOMENTUM_DTYPES)
        super().__init__(
            weight_decay_rules=weight_decay_rules,
            gradient_scale_rules=gradient_scale_rules,
            learning_rate=learning_rate,
            **kwargs,
        )
        self.beta_1 = beta_1
        self.beta_2_decay = beta_2_decay
        self.max_beta_2 = max_beta_2
        self.epsilon = epsilon
        self.min_dim_size_to_factor = min_dim_size_to_factor
        self.momentum_dtype = momentum_dtype

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._axes, self.momentums, self.second_moments = [], [], []
        for variable in variables:
            axes = _axes_to_factor(variable.shape, self.min_dim_size_to_factor)
            self._axes.append(axes)
            self.second_moments.append(
                [
                    self.add_like(variable, f"mean_of_axis_{a}", a, "float32")
                    for a in axes
                ]
                or [self.add_like(variable, "velocity", dtype="float32")]
            )
            if self.beta_1:
                dtype = self.momentum_dtype
                self.momentums.append(self.add_like(variable, "momentum", dtype=dtype))

    def update_step(self, gradient, variable, learning_rate):
        self.decay_variable(variable, learning_rate)
        index = index_of(self, variable)
        gradient = ops.cast(gradient, "float32")
        step = gradient * self._inverse_root(gradient, index)
        if self.beta_1:
            momentum = self.momentums[index]
            before = ops.cast(momentum, "float32")
            step = self.beta_1 * before + (1.0 - self.beta_1) * step
            self.assign(momentum, ops.cast(step, momentum.dtype))
        step = ops.cast(learning_rate, "float32") * step
        self.assign_sub(variable, ops.cast(step, variable.dtype))

    def _inverse_root(self, gradient, index):
        """One over the root of the average of squares, this gradient's among them."""
        steps = ops.cast(self.iterations, "float32") + 1.0
        beta_2 = ops.minimum(1.0 - ops.power(steps, self.beta_2_decay), self.max_beta_2)
        squares = ops.square(gradient) + self.epsilon
        axes, moments = self._axes[index], self.second_moments[index]
        means = [ops.mean(squares, axis=a, keepdims=True) for a in axes] or [squares]
        roots = []
        for moment, mean in zip(moments, means, strict=True):
            mean = beta_2 * moment + (1.0 - beta_2) * mean
            self.assign(moment, mean)
            roots.append(ops.rsqrt(mean))
        if not axes:
            return roots[0]
        # `mean` has the means of the second axis: along the first one, of all.
        mean_of_all = ops.mean(mean, axis=axes[0], keepdims=True)
        return roots[0] * roots[1] * ops.sqrt(mean_of_all)

    def get_config(self):
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2_decay": self.beta_2_decay,
            "max_beta_2": self.max_beta_2,
            "epsilon": self.epsilon,
            "min_dim_size_to_factor": self.min_dim_size_to_factor,
            "momentum_dtype": self.momentum_dtype,
        }


def _axes_to_factor(shape, min_size):
    """The two largest axes, of equal ones the last; none if the smaller is too short.

    A tuple of two or no ints.
    """
    axes = sorted(range(len(shape)), key=lambda axis: shape[axis])[-2:]
    return tuple(axes) if len(axes) == 2 and shape[axes[0]] >= min_size else ()


def _check_decays(beta_1, beta_2_decay, max_beta_2):
    for name, value in (("beta_1", beta_1), ("max_beta_2", max_beta_2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(
                f"`{name}` is the share of an average that stays in a step, from 0 to "
                f"below 1. Received: {name}={value!r}."
            )
    if not beta_2_decay < 0.0:
        raise ValueError(
            "The decay of the squares, `1 - step ** beta_2_decay`, rises from 0 "
            "towards 1: `beta_2_decay` must be below 0, as -0.8. "
            f"Received: beta_2_decay={beta_2_decay!r}."
        )
