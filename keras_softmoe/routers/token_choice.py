"""Routers in which tokens choose experts."""

from typing import Unpack

import keras

from keras_softmoe import ops
from keras_softmoe.checks import quote
from keras_softmoe.ops.numbers import positions, where
from keras_softmoe.routers.assignment import TokenChoice
from keras_softmoe.routers.losses import RoutingLoss
from keras_softmoe.routers.scores import Sinkhorn, TokenScores
from keras_softmoe.routers.sparse import SparseRouter, SparseSettings


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SoftmaxTokenChoiceRouter(SparseRouter):
    """V-MoE's router: every token chooses its `K` most probable experts.

    The gates are the softmax probabilities of the choices. A token whose experts are
    all full gets nothing from the layer.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity_factor: float, slots per choice. `None` for dropless routing, an
            `ops.ChoiceRouting`: each expert computes all tokens that choose it.
        priority: order in which tokens are assigned: `"position"`, `"max"` (batch
            prioritized routing), `"sum"`, `"pair"` or `"random"`, see
            `ops.token_choice`.
        keep_fraction: float in `(0, 1]`. Under 1, tokens of low priority are skipped.
        normalize_gates: bool, whether the gates of a token are divided by their sum.
            With one choice the router then gets no gradient.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits, for the choice and the
            gates. `None` for 1, or 0 with `bias_update_rate`.
        score: `"softmax"` or `"sigmoid"` of the logits.
        bias_update_rate: float or `None`. If given (0.001 in the paper), tokens choose
            by score plus `bias`, which rises by this number after each call in training
            for experts that fewer tokens than on average chose, and falls for others.
            `losses` are then empty by default. Cannot change later to or from `None`.
        bias_update_every: int, calls in training for each move of the bias: the
            `gradient_accumulation_steps` of the optimizer.
        **settings: settings of all sparse routers:

            - `losses`: sequence of `RoutingLoss`es, whose weighted sum is added to the
              loss in training. By default the importance loss and, with noise, the load
              loss, with weights of 0.005 as in the paper.
            - `eval_capacity_factor`: float, `capacity_factor` outside of training;
              `"dropless"` for predictions that depend on no other image.
            - `rounding`, `multiple_of`: see `ops.expert_capacity`.
            - `random_logits`: `True` replaces logits by normal noise, `"permuted"`
              shuffles each token's logits, to measure the benefit of routing (appendix
              E.1).
            - `name`, `trainable`: as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`; with a bias also `bias` `(E,)`, and if it moves after
    several calls, `load` `(E,)` and `calls` `()`, without gradient. Returns, when
    called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`.

    Raises:
        ValueError: if `num_selected_experts` is over `num_experts`, or another argument
            is not among the accepted values.

    Source: V-MoE, section 2 and appendix A; router study, section 2. Bias: Wang et al.
    2024 (Auxiliary-Loss-Free Load Balancing), section 3.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(8, num_selected_experts=2)
        >>> decision = router(np.random.normal(size=(4, 16, 32)))
        >>> decision.routing.token.shape
        (4, 8, 4)
    """

    default_losses = (
        RoutingLoss(ops.importance_loss, weight=0.005),
        RoutingLoss(ops.load_loss, weight=0.005),
    )

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 1,
        capacity_factor: float | None = 1.05,
        priority: str = "position",
        *,
        keep_fraction: float = 1.0,
        normalize_gates: bool = False,
        noise_std: float | None = None,
        score: str = "softmax",
        bias_update_rate: float | None = None,
        bias_update_every: int = 1,
        **settings: Unpack[SparseSettings],
    ):
        if noise_std is None:
            noise_std = 1.0 if bias_update_rate is None else 0.0
        if bias_update_rate is not None and settings.get("losses") is None:
            settings["losses"] = ()
        super().__init__(
            num_experts,
            TokenScores(noise_std, score, bias_update_rate, bias_update_every),
            TokenChoice(num_selected_experts, priority, keep_fraction, normalize_gates),
            capacity_factor=capacity_factor,
            **settings,
        )

    def _choose(self, scores, valid, training, sharded):
        if self.scores.bias_update_rate is None or self.random_logits:
            return scores, self.assignment.choose(scores, sharded)
        # The bias changes the choice alone, neither gates nor priorities.
        selection = scores + self.bias
        chosen = self.assignment.choose(selection, sharded)
        if training and self.trainable:
            self._move_bias(chosen, valid)
        return selection, self.assignment.ordered(chosen, scores, sharded)

    def _move_bias(self, chosen, valid):
        """Move the bias by the choices of a batch, `(G, S, K)`."""
        # Which valid tokens chose which expert, (G, S, K, E), and how many, (E,)
        counted = chosen[..., None] == positions(self.num_experts, chosen)
        if valid is not None:
            counted = counted & valid[..., None, None]
        load = keras.ops.sum(keras.ops.cast(counted, "float32"), axis=(0, 1, 2))
        # With accumulated gradients one move follows the choices of all their calls.
        every = self.scores.bias_update_every
        if every > 1:
            load = self.load + load
            calls = keras.ops.convert_to_tensor(self.calls) + 1.0
            is_due = calls >= every
            self.load.assign(where(~is_due, load, 0.0))
            self.calls.assign(where(~is_due, calls, 0.0))
            load = where(is_due, load, 0.0)
        # The sign of mean minus load, without a division, which would round
        under = keras.ops.sign(keras.ops.sum(load) - self.num_experts * load)
        self.bias.assign(self.bias + self.scores.bias_update_rate * under)

    def with_settings(self, **settings) -> "SoftmaxTokenChoiceRouter":
        rate = settings.get("bias_update_rate", self.bias_update_rate)
        if (rate is None) == self.scores.is_biased:
            raise ValueError(
                "The weight `bias` is made with the router: `bias_update_rate` may "
                "change to another number (0 freezes the bias), but not to or from "
                f"`None`. Received: bias_update_rate={quote(rate)} for a router with "
                f"bias_update_rate={self.bias_update_rate}."
            )
        return super().with_settings(**settings)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SinkhornTokenChoiceRouter(SparseRouter):
    """Every token chooses the experts with the most weight in a balanced plan.

    In the plan, `ops.sinkhorn_plan` of the logits, each expert has the same total
    weight. Still, more tokens may choose an expert than it has slots. Noise is added
    for the plan only. Probabilities have none, as in the released code.

    Args:
        num_experts: int, number of experts.
        num_selected_experts, capacity_factor: as in `SoftmaxTokenChoiceRouter`.
        keep_fraction, normalize_gates, noise_std: as there.
        priority: as in `SoftmaxTokenChoiceRouter`, by the entries of the plan.
        num_iterations: int, number of Sinkhorn iterations.
        combine: `"softmax"` (gates are probabilities, the plan has no gradient) or
            `"plan"` (gates are entries of the plan, which then has a gradient).
        **settings: as in `SoftmaxTokenChoiceRouter`. No `losses` by default.

    Weights: `kernel` `(D, E)`. Returns, when called on `(G, S, D)` tokens: `Decision`
    with a `SlotRouting`; `selection` in the summary is the plan.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: router study, section 2 ("Sinkhorn Token Choice").

    Examples:
        >>> router = ksm.routers.SinkhornTokenChoiceRouter(8, capacity_factor=1.0)
        >>> decision = router(np.random.normal(size=(4, 16, 32)))
        >>> plan = keras.ops.convert_to_numpy(decision.summary["selection"])
        >>> plan.sum(axis=1).shape  # of each expert, near 16 / 8 = 2
        (4, 8)
    """

    noisy_gates = False

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 1,
        capacity_factor: float | None = 1.05,
        priority: str = "position",
        *,
        keep_fraction: float = 1.0,
        normalize_gates: bool = False,
        num_iterations: int = 20,
        combine: str = "softmax",
        noise_std: float = 1.0,
        **settings: Unpack[SparseSettings],
    ):
        super().__init__(
            num_experts,
            Sinkhorn(num_iterations, combine, noise_std),
            TokenChoice(num_selected_experts, priority, keep_fraction, normalize_gates),
            capacity_factor=capacity_factor,
            **settings,
        )
