"""Adam, SGD and Adafactor as in the papers' released training code, and Muon.

Arguments that Keras' optimizers have, too, work as there.
"""

import re
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_softmoe.checks import check_choice, check_numbers
from keras_softmoe.keras_adapter.runs import InOnePass, MuonByShape, index_of
from keras_softmoe.ops.numbers import smallest
from keras_softmoe.training.optimizer_base import ByVariable, weight_of_all
from keras_softmoe.types import Tensor


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Adam(ByVariable, InOnePass, keras.optimizers.Optimizer):
    """Adam with weight decay by variable.

    In contrast to `keras.optimizers.Adam`, `epsilon` is added to the root of the
    bias-corrected second moment (the Adam paper's algorithm 1, as `torch.optim.AdamW`),
    and the average of `use_ema=True` is not biased to the first step. On PyTorch all
    weights in float32 are updated in one pass, without copies.

    Args:
        learning_rate: float or schedule.
        beta_1: float, decay of the first moment.
        beta_2: float, decay of the second moment.
        epsilon: float, see above. For weights in float16 it is at least 6e-5.
        weight_decay_rules: optional list of `(pattern, rate)`. A step subtracts
            `learning_rate * rate * variable` with the rate of the first pattern that
            `re.search` finds in `variable.path`; without a match there is no decay.
        momentum_dtype: `"bfloat16"` for the first moment, or `None` as the variables.
        **kwargs: arguments of `keras.optimizers.Optimizer`, such as `weight_decay` (one
            rate for all, in place of the rules), `global_clipnorm`, `use_ema`,
            `ema_momentum` (1 is the mean of all steps).

    Source: V-MoE, table 6 and appendices B.3 (decay 0.03 for kernels, 3 for the head;
    first moments in half precision) and B.4 (debiased Polyak averaging).

    Examples:
        >>> rules = [("predictions/kernel", 3.0), ("kernel$", 0.03)]
        >>> classifier.compile(ksm.training.Adam(1e-3, weight_decay_rules=rules))
    """

    settings = ("beta_1", "beta_2", "epsilon", "momentum_dtype")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay_rules: Sequence | None = None,
        momentum_dtype: str | None = None,
        **kwargs,
    ):
        check_choice("momentum_dtype", momentum_dtype, (None, "bfloat16"))
        super().__init__(weight_decay_rules, learning_rate=learning_rate, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.momentum_dtype = momentum_dtype

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        if self.momentum_dtype is None:
            added = self.add_optimizer_variables(variables, ["momentum", "velocity"])
            self.momentums, self.velocities = added
            return
        self.velocities = self.add_optimizer_variables(variables, "velocity")
        dtype = self.momentum_dtype
        self.momentums = [self.add_like(v, "momentum", dtype=dtype) for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        index, dtype = index_of(self, variable), variable.dtype
        momentum, velocity = self.momentums[index], self.velocities[index]
        # In float16 an epsilon of 1e-8 would be zero.
        epsilon = max(self.epsilon, smallest(dtype))
        gradient = ops.cast(gradient, dtype)
        self.decay_variable(variable, learning_rate)
        mean = ops.cast(momentum, dtype)
        mean = mean + (gradient - mean) * (1.0 - self.beta_1)
        self.assign(momentum, ops.cast(mean, momentum.dtype))
        change = (ops.square(gradient) - velocity) * (1.0 - self.beta_2)
        self.assign_add(velocity, change)
        # In float32 whatever the variables are: bfloat16 rounds 0.999 to 1.
        steps = ops.cast(self.iterations, "float32") + 1.0
        rate = learning_rate / weight_of_all(steps, self.beta_1)
        root = ops.sqrt(velocity / ops.cast(weight_of_all(steps, self.beta_2), dtype))
        step = ops.cast(rate, dtype) * mean / (root + epsilon)
        self.assign_sub(variable, step)

    def update_together(
        self, gradients: Sequence, variables: Sequence, learning_rate: Tensor
    ) -> list:
        """Update PyTorch tensors in place, in one pass; return pairs that are left.

        Operation by operation, PyTorch writes half a dozen arrays of the size of the
        experts' kernels into new memory. The compilers of the other backends do not.
        """
        from torch.optim.adamw import adamw

        # Rate of decay -> rows of variable, gradient, momentum and velocity
        together, left = {}, []
        for gradient, variable in zip(gradients, variables, strict=True):
            index = index_of(self, variable)
            moments = self.momentums[index], self.velocities[index]
            value, *moments = (v.value.data for v in (variable, *moments))
            row = value, gradient, *moments
            if _can_fuse(row):
                together.setdefault(self.decay_rate(variable), []).append(row)
            else:
                left.append((gradient, variable))
        for decay, rows in together.items():
            # On a GPU both are read in float32; each tensor's steps are counted up.
            steps = ops.cast(self.iterations, "float32").repeat(len(rows))
            adamw(
                *map(list, zip(*rows, strict=True)),
                max_exp_avg_sqs=[],
                state_steps=list(steps.unbind()),
                fused=True,
                amsgrad=False,
                beta1=self.beta_1,
                beta2=self.beta_2,
                lr=ops.cast(learning_rate, "float32"),
                weight_decay=decay,
                eps=self.epsilon,
                maximize=False,
            )
        return left


def _can_fuse(tensors):
    """Return whether PyTorch has a fused step of Adam for these tensors."""
    import torch

    # A spread tensor has its own type. Transposed gradients would be read in disorder.
    return all(
        type(x) is torch.Tensor
        and x.dtype in (torch.float32, torch.float64)
        and x.dtype == tensors[0].dtype
        and x.device.type in ("cpu", "cuda")
        and x.is_contiguous()
        for x in tensors
    )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SGD(ByVariable, keras.optimizers.SGD):
    """SGD with momentum and weight decay by variable.

    In contrast to `keras.optimizers.SGD`, the learning rate scales the step and not the
    gradient that enters the momentum (`m = momentum * m + gradient; variable -=
    learning_rate * m`), and the average of `use_ema=True` has no bias.

    Args:
        learning_rate: float or schedule.
        momentum: float from 0 to 1.
        nesterov: bool, whether to apply Nesterov momentum.
        weight_decay_rules: see `Adam`.
        **kwargs: see `Adam`.

    Source: V-MoE, section 3.5 and appendix B.4; order of operations from released code.

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
        **kwargs,
    ):
        own = {"learning_rate": learning_rate, "momentum": momentum}
        super().__init__(weight_decay_rules, **own, nesterov=nesterov, **kwargs)

    def update_step(self, gradient, variable, learning_rate):
        self.decay_variable(variable, learning_rate)
        step = ops.cast(gradient, variable.dtype)
        if self.momentum:
            momentum = self.momentums[index_of(self, variable)]
            self.assign(momentum, momentum * self.momentum + step)
            step = step + self.momentum * momentum if self.nesterov else momentum
        self.assign_sub(variable, step * ops.cast(learning_rate, variable.dtype))


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Adafactor(ByVariable, keras.optimizers.Optimizer):
    """Adafactor with momentum, the optimizer of LIMoE and V-MoE-15B.

    A gradient is divided by the root of an average of its squares, and a step is an
    average of such quotients. A matrix keeps only the means of the squares in its rows
    and columns. Unlike `keras.optimizers.Adafactor` it has a momentum, scales a step by
    the learning rate alone, and factors the two largest axes. It computes in float32.

    Args:
        learning_rate: float or schedule.
        beta_1: float, decay of the momentum; 0 for none.
        beta_2_decay: float below 0, the exponent in `1 - step ** beta_2_decay`.
        max_beta_2: float, the largest decay of the squares.
        epsilon: float, added to the squares.
        min_dim_size_to_factor: int, least second largest axis of a factored variable.
        momentum_dtype: `"bfloat16"` or `"float32"`, dtype of the momentum.
        weight_decay_rules: see `Adam`.
        **kwargs: see `Adam`.

    Source: LIMoE, appendix A; V-MoE, table 6 and appendix B.3. Both follow Zhai et al.
    2022 (Scaling Vision Transformers), section 3.4. Numbers from the released code.

    Examples:
        >>> schedule = ksm.training.WarmupSchedule(8e-4, 300_000, 10_000, decay="rsqrt")
        >>> classifier.compile(ksm.training.Adafactor(schedule))
    """

    settings = (
        *("beta_1", "beta_2_decay", "max_beta_2", "epsilon"),
        *("min_dim_size_to_factor", "momentum_dtype"),
    )

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
        **kwargs,
    ):
        check_numbers(least=0, under=1, beta_1=beta_1, max_beta_2=max_beta_2)
        check_numbers(under=0, beta_2_decay=beta_2_decay)
        check_choice("momentum_dtype", momentum_dtype, ("bfloat16", "float32"))
        super().__init__(weight_decay_rules, learning_rate=learning_rate, **kwargs)
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
            # The two largest axes, of equal ones the last, unless they are short.
            shape, least = variable.shape, self.min_dim_size_to_factor
            axes = sorted(range(len(shape)), key=lambda axis: shape[axis])[-2:]
            axes = tuple(axes) if len(axes) == 2 and shape[axes[0]] >= least else ()
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
        """Return one over the root of the average of squares, after an update."""
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


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Muon(MuonByShape, keras.optimizers.Muon):
    """`keras.optimizers.Muon` that orthogonalizes the update of each expert.

    The class of Keras uses AdamW for all that is no matrix, also for the experts'
    kernels `(E, D, H)`. Here each expert is updated as a matrix `(D, H)`.

    Args:
        learning_rate: float or schedule.
        expert_layers: str, regular expression for paths of `(E, ...)` variables.
        **kwargs: as in `keras.optimizers.Muon`. Name the layers to be left to AdamW,
            such as the last one: `exclude_layers=["predictions"]`.

    Source: Liu et al. 2025 (Muon is Scalable), section 2, for one matrix.

    Examples:
        >>> optimizer = ksm.training.Muon(1e-3, exclude_layers=["predictions"])
        >>> classifier.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        expert_layers: str = r"(^|/)experts(_\d+)?/",
        **kwargs,
    ):
        super().__init__(learning_rate, **kwargs)
        self.expert_layers = expert_layers

    def shape_of(self, variable: keras.Variable) -> tuple:
        """Return the shape that decides whether a variable is a matrix."""
        shape = tuple(variable.shape)
        if not re.search(self.expert_layers, variable.path):
            return shape
        # A bank of biases is (E, 1, H), or (E, H) where a template is stacked.
        return tuple(size for size in shape[1:] if size > 1)

    def lr_adjust(self, x):
        if self.rms_rate is None:
            return x
        # Of the last two axes; Keras uses the first two.
        return x * max(x.shape[-2:]) ** 0.5 * self.rms_rate

    def get_config(self):
        return {**super().get_config(), "expert_layers": self.expert_layers}
