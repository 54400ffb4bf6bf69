"""The soft router, whose slots are mixtures of all tokens."""

import math

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe import checks
from keras_softmoe.ops import DenseRouting
from keras_softmoe.ops.kernels import matmul, reshape, softmax
from keras_softmoe.ops.numbers import lowest, normal_like, where
from keras_softmoe.ops.selection import zero_padding
from keras_softmoe.routers.router import Decision, Router
from keras_softmoe.sharding.constraints import (
    check_placement,
    is_distributed,
    replicate,
)

# Added to squared norms, as in the released code. The paper's listing adds the same
# number to the norm itself, which has no gradient at an all-zero token (padding). The
# two differ only for vectors shorter than about 0.01.
_EPSILON = 1e-6
_UNIT_VARIANCE = "unit_variance"


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SoftRouter(Router):
    """Soft MoE's router: each slot is a weighted average of all tokens.

    With logits `A = scale * l2norm(X) l2norm(mu)`, one for each pair of token and slot,
    the dispatch weights are the softmax of `A` over the tokens and the combine weights
    its softmax over all slots of all experts. Nothing is dropped, and no loss is
    needed.

    Args:
        num_experts: int, number of experts.
        slots_per_expert: int, slots of each expert.
        dispatch: `"soft"`, or `"uniform"` for a plain average (an ablation of table 3).
        combine: `"soft"` or `"uniform"`.
        normalize: bool, whether the logits are a scaled cosine (needed at large widths)
            or the plain product `X mu` of equation 1.
        noise_std: float, standard deviation of normal noise on the logits in training,
            not divided by `num_experts`.
        initial_scale: positive float, initial value of the learned `scale` (1 in the
            papers), or `"unit_variance"` for `sqrt(D)`, with which the logits of random
            directions have variance 1: for runs of a few thousand steps, in which Adam
            changes a scale by only a few units.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `mu` `(D, E, C)` and `scale` `()`. Returns, when called on `(G, S, D)`
    tokens: `Decision` with a `DenseRouting` and the summary `logits` `(G, S, E, C)`.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: Soft MoE, sections 2.1, 2.3 (algorithm 1), 3.6, appendices A and E.

    Examples:
        >>> router = ksm.routers.SoftRouter(num_experts=8, slots_per_expert=2)
        >>> decision = router(np.random.normal(size=(4, 16, 32)))
        >>> decision.routing.dispatch.shape
        (4, 16, 8, 2)
    """

    config_arguments = (
        *("slots_per_expert", "dispatch", "combine", "normalize"),
        *("noise_std", "initial_scale"),
    )
    mixes_tokens = True

    def __init__(
        self,
        num_experts: int,
        slots_per_expert: int = 1,
        dispatch: str = "soft",
        combine: str = "soft",
        normalize: bool = True,
        noise_std: float = 0.0,
        initial_scale: float | str = 1.0,
        **kwargs,
    ):
        for argument, value in (("dispatch", dispatch), ("combine", combine)):
            checks.check_choice(argument, value, ("soft", "uniform"))
        checks.check_whole_numbers(1, slots_per_expert=slots_per_expert)
        checks.check_bools(normalize=normalize)
        checks.check_numbers(least=0, noise_std=noise_std)
        if isinstance(initial_scale, str):
            is_accepted = initial_scale == _UNIT_VARIANCE
        else:
            is_accepted = checks.is_number(initial_scale) and initial_scale > 0
        if not is_accepted:
            raise ValueError(
                f"`initial_scale` must be a positive number, or '{_UNIT_VARIANCE}' for "
                "the square root of the width. "
                + checks.received(initial_scale=initial_scale)
            )
        if not normalize and initial_scale != 1:
            raise ValueError(
                "Logits that are not normalized have no scale. "
                + checks.received(initial_scale=initial_scale, normalize=normalize)
            )
        super().__init__(num_experts, **kwargs)
        self.keep_arguments(locals())
        # Without a softmax of logits there are no weights.
        self._learns = "soft" in (dispatch, combine)
        self.num_directions = self._learns * num_experts * slots_per_expert
        self.normalizes_tokens = normalize
        self.differs_in_training = self._learns and noise_std > 0
        if noise_std:
            self.seed_generator = keras.random.SeedGenerator()

    def capacity(self, num_tokens: int, training: bool = False) -> int:
        return self.slots_per_expert

    def build(self, tokens_shape):
        if not self._learns:
            return
        self.mu = self.add_weight(
            shape=(tokens_shape[-1], self.num_experts, self.slots_per_expert),
            # Counts D * E inputs, as the released code does. Only the direction of
            # mu matters in the forward pass; its length sets the size of a step.
            initializer="lecun_normal",
            name="mu",
        )
        if self.normalize:
            scale = self.initial_scale
            if scale == _UNIT_VARIANCE:
                scale = math.sqrt(tokens_shape[-1])
            self.scale = self.add_weight(
                shape=(), initializer=keras.initializers.Constant(scale), name="scale"
            )
        check_placement("check_layer", self)

    def set_directions(self, directions: ArrayLike) -> None:
        if not self._learns:
            super().set_directions(directions)
        # (D, E * C)
        mu = np.transpose(directions)
        if self.normalize:
            length = np.linalg.norm(mu, axis=0).mean()
            self.scale.assign(length)
            # The length of `mu` only sets the size of a training step: that of `build`.
            mu = mu / (length * math.sqrt(self.num_experts))
        self.mu.assign(np.reshape(mu, self.mu.shape))

    def call(self, tokens, valid=None, training=False):
        summary, num_tokens = {}, tokens.shape[1] or ops.shape(tokens)[1]
        slots = (self.num_experts, self.slots_per_expert)
        logits = None
        if self._learns:
            # 1. Logits: the affinity of each token to each slot, (G, S, E * C)
            logits = self._logits(tokens, training)
            summary["logits"] = reshape(logits, (-1, num_tokens, *slots))
        if logits is None or "uniform" in (self.dispatch, self.combine):
            # Equal weights, as in the ablations of table 3
            zeros = ops.zeros_like(tokens[..., :1])
            uniform = ops.tile(zeros, (1, 1, slots[0] * slots[1]))
        # 2. Dispatch weights: each slot averages the tokens of its group.
        dispatch = uniform if self.dispatch == "uniform" else logits
        if valid is not None:
            dispatch = where(valid[..., None], dispatch, lowest(dispatch))
        dispatch = softmax(dispatch, axis=1)
        # 3. Combine weights: each token averages the outputs of all slots.
        combine = softmax(uniform if self.combine == "uniform" else logits, axis=-1)
        if valid is not None:
            # If all tokens are padding, they would have equal weights; and padding
            # gets no output of the slots either.
            dispatch, combine = (zero_padding(x, valid) for x in (dispatch, combine))
        # (G, S, E, C) each
        routing = DenseRouting(
            reshape(dispatch, (-1, num_tokens, *slots)),
            reshape(combine, (-1, num_tokens, *slots)),
        )
        return Decision(routing, summary)

    def _logits(self, tokens, training):
        mu = self.mu
        if is_distributed():
            # Slots are sharded with their experts; a softmax needs all of them.
            path = f"{self.path}/mu_of_all_experts"
            mu = replicate(ops.convert_to_tensor(mu), 1, path)
        # (D, E * C)
        mu = reshape(mu, (mu.shape[0], -1))
        if self.normalize:
            mu = mu * (self.scale * _inverse_norm(mu, axis=0))
        logits = matmul(tokens, mu)
        if self.normalize:
            # Dividing the products is cheaper than dividing the tokens.
            logits = logits * _inverse_norm(tokens, axis=-1)
        if training and self.noise_std:
            noise = normal_like(logits, self.seed_generator, self.noise_std)
            logits = logits + noise
        return logits


def _inverse_norm(x, axis):
    return ops.rsqrt(ops.sum(ops.square(x), axis=axis, keepdims=True) + _EPSILON)
