"""Routers in which tokens choose experts."""

from collections.abc import Sequence

import keras
from keras import ops

from keras_softmoe.checks import check_bools, check_numbers, check_whole_numbers
from keras_softmoe.ops.assignment import (
    assign_choices,
    check_keep_fraction,
    check_num_selected_experts,
    check_priority,
    kept_tokens,
)
from keras_softmoe.ops.backend import take_along, top_indices
from keras_softmoe.ops.capacity import MULTIPLE_OF, ROUNDING
from keras_softmoe.ops.constants import tiny
from keras_softmoe.routers._router import check_num_experts
from keras_softmoe.routers._routing_losses import ImportanceLoss, LoadLoss
from keras_softmoe.routers._sinkhorn import SinkhornSelection
from keras_softmoe.routers._sparse import SparseRouter
from keras_softmoe.sharding import is_distributed


class TokenChoiceRouter(SparseRouter):
    """Base class of the routers in which every token chooses its best experts.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity_factor: float, slots per choice, or `None`, see `SparseRouter`.
        priority: see `ops.token_choice`.
        rounding: see `SparseRouter`.
        multiple_of: see `SparseRouter`.
        noise_std: see `SparseRouter`.
        losses: see `SparseRouter`.
        eval_capacity_factor: see `SparseRouter`.
        keep_fraction: see `ops.token_choice`.
        normalize_gates: bool, whether the gates of a token's choices are divided by
            their sum.
        random_logits: see `SparseRouter`.
        **kwargs: see `SparseRouter`.
    """

    can_drop_nothing = True

    mutable_settings = (
        *SparseRouter.mutable_settings,
        "num_selected_experts",
        "priority",
        "keep_fraction",
        "normalize_gates",
    )

    def __init__(
        self,
        num_experts,
        num_selected_experts=1,
        capacity_factor=1.05,
        priority="position",
        rounding=ROUNDING,
        multiple_of=MULTIPLE_OF,
        noise_std=1.0,
        losses=None,
        eval_capacity_factor=None,
        keep_fraction=1.0,
        normalize_gates=False,
        random_logits=False,
        **kwargs,
    ):
        check_num_experts(num_experts)
        check_whole_numbers(1, num_selected_experts=num_selected_experts)
        check_num_selected_experts(num_selected_experts, num_experts)
        check_priority(priority)
        check_numbers(keep_fraction=keep_fraction)
        check_keep_fraction(keep_fraction)
        check_bools(normalize_gates=normalize_gates)
        self.num_selected_experts = num_selected_experts
        super().__init__(
            num_experts,
            capacity_factor=capacity_factor,
            rounding=rounding,
            multiple_of=multiple_of,
            noise_std=noise_std,
            losses=losses,
            eval_capacity_factor=eval_capacity_factor,
            random_logits=random_logits,
            **kwargs,
        )
        self.priority = priority
        self.keep_fraction = keep_fraction
        self.normalize_gates = normalize_gates

    @property
    def choices_per_token(self):
        return self.num_selected_experts

    def choose(self, selection):
        return top_indices(
            selection, self.num_selected_experts, sharded=is_distributed()
        )

    def kept_tokens(self, selection, chosen, valid):
        return kept_tokens(
            selection,
            chosen,
            self.priority,
            self.keep_fraction,
            valid,
            seed=self.seed_generator,
        )

    def assign(self, selection, chosen, capacity, valid, masks):
        return assign_choices(
            selection,
            chosen,
            capacity,
            priority=self.priority,
            keep_fraction=self.keep_fraction,
            valid=valid,
            seed=self.seed_generator,
            sharded=is_distributed(),
        )

    def weigh(self, scores, chosen):
        if not self.normalize_gates:
            return scores
        found = take_along(scores, chosen, axis=-1)
        total = ops.stop_gradient(ops.sum(found, axis=-1, keepdims=True))
        # Zero for padding in a plan, and where the probabilities of all choices have
        # come to nothing: there is no gate then.
        nothing = tiny(total)
        inverse = 1.0 / ops.maximum(total, nothing)
        # To numbers near 1 first, whose gradient has no square of a tiny one in it.
        inverse = ops.where(total > nothing, inverse, 0.0)
        total = ops.maximum(ops.sum(found * inverse, axis=-1, keepdims=True), 0.5)
        return scores * (inverse / total)

    def get_config(self):
        return {
            **super().get_config(),
            "num_selected_experts": self.num_selected_experts,
            "priority": self.priority,
            "keep_fraction": self.keep_fraction,
            "normalize_gates": self.normalize_gates,
            "noise_std": self.noise_std,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SoftmaxTokenChoiceRouter(TokenChoiceRouter):
    """V-MoE's router: every token chooses its `K` most probable experts.

    The gates are the softmax probabilities of the choices, by default not normalized
    after the choice. A token whose experts are all full gets nothing from the layer.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity_factor: float, slots per choice: under 1 some choices are dropped
            even if they spread evenly. `None`: nothing is dropped, and no slot stays
            empty (dropless). The experts then multiply as many rows as they are given,
            and the routing is an `ops.ChoiceRouting`.
        priority: `"position"` (tokens in their order), `"max"` (batch
            prioritized routing: tokens with the largest probability first), `"sum"`,
            `"pair"` or `"random"`, see `ops.token_choice`.
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits that choose and weigh.
            The load loss is about it: without noise there is none by default, and one
            in `losses` is refused.
        losses: sequence of `RoutingLoss`es, which are added up with their weights.
            `None` for those of the paper, `ImportanceLoss(weight=0.005)` and, if there
            is noise, `LoadLoss(weight=0.005)`, which exists only in training.
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        keep_fraction: float in `(0, 1]`. Under 1, tokens of low priority are skipped
            (V-MoE, algorithm 3), see `ops.token_choice`.
        normalize_gates: bool, whether the gates of a token's choices are divided by
            their sum. For a softmax that is the same as taking the softmax over the
            chosen logits only, "softmax(TOP-K)" in V-MoE's table 3; with one choice
            the router then gets no gradient.
        random_logits: bool, whether the logits are normal noise instead; `"permuted"`:
            each token's own, in random order. What routing at random does to a trained
            model (V-MoE, appendix E.1).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`. In
    training, the mean of `auxiliary_loss` over the groups is added to the losses.

    Raises:
        ValueError: if a token would choose more experts than there are, or another
            argument is not among the accepted values.

    Source: V-MoE, section 2 and appendix A; router study, section 2 ("Softmax Token
    Choice"). Noise and loss weights are those of the V-MoE paper.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(8, num_selected_experts=2)
        >>> decision = router(np.random.normal(size=(4, 16, 32)))
        >>> decision.routing.token.shape
        (4, 8, 4)
    """

    def default_losses(self) -> tuple:
        return (ImportanceLoss(weight=0.005), LoadLoss(weight=0.005))


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SinkhornTokenChoiceRouter(SinkhornSelection, TokenChoiceRouter):
    """Every token chooses the experts with the most weight in a balanced plan.

    The plan is `ops.sinkhorn_plan` of the logits: each expert receives the same total
    weight in it, so there is no balancing loss by default, but more tokens may choose
    an expert than it has slots. The gates are softmax probabilities by default. Noise
    changes the plan only: the probabilities are those of the logits without it, as in
    the released code.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity_factor: float, slots per choice. `None`: nothing is dropped, see
            `SoftmaxTokenChoiceRouter`.
        priority: `"position"`, `"max"` (tokens with the largest entry in the plan
            first), `"sum"`, `"pair"` or `"random"`, see `ops.token_choice`.
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits.
        losses: sequence of `RoutingLoss`es, which are added up with their weights.
            None by default.
        num_iterations: int, number of Sinkhorn iterations.
        combine: `"softmax"` (gates are probabilities, the plan has no gradient) or
            `"plan"` (gates are entries of the plan, which then has a gradient).
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        keep_fraction: float in `(0, 1]`. Under 1, tokens of low priority are skipped
            (V-MoE, algorithm 3), see `ops.token_choice`.
        normalize_gates: bool, whether the gates of a token's choices are divided by
            their sum. For a softmax that is the same as taking the softmax over the
            chosen logits only, "softmax(TOP-K)" in V-MoE's table 3; with one choice
            the router then gets no gradient.
        random_logits: bool, whether the logits are normal noise instead; `"permuted"`:
            each token's own, in random order. What routing at random does to a trained
            model (V-MoE, appendix E.1).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`;
    `selection` in the summary is the plan.

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
        rounding: str = ROUNDING,
        multiple_of: int | None = MULTIPLE_OF,
        noise_std: float = 1.0,
        losses: Sequence | None = None,
        num_iterations: int = 20,
        combine: str = "softmax",
        eval_capacity_factor: float | None = None,
        keep_fraction: float = 1.0,
        normalize_gates: bool = False,
        random_logits: bool = False,
        **kwargs,
    ):
        super().__init__(
            num_experts,
            num_selected_experts=num_selected_experts,
            capacity_factor=capacity_factor,
            priority=priority,
            rounding=rounding,
            multiple_of=multiple_of,
            noise_std=noise_std,
            losses=losses,
            combine=combine,
            eval_capacity_factor=eval_capacity_factor,
            keep_fraction=keep_fraction,
            normalize_gates=normalize_gates,
            random_logits=random_logits,
            **kwargs,
        )
        check_whole_numbers(1, num_iterations=num_iterations)
        self.num_iterations = num_iterations

    def get_config(self):
        return {
            **super().get_config(),
            "num_iterations": self.num_iterations,
            "combine": self.combine,
        }
