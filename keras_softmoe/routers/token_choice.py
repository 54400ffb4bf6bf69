"""Routers in which tokens choose experts."""

import keras
from keras import ops

from keras_softmoe.ops.assignment import (
    check_keep_fraction,
    check_num_selected_experts,
    check_priority,
    token_choice,
)
from keras_softmoe.ops.largest import top_indices
from keras_softmoe.ops.losses import gshard_loss, importance_loss, load_loss
from keras_softmoe.ops.softmax import softmax
from keras_softmoe.ops.transport import sinkhorn_plan
from keras_softmoe.routers.sparse import SparseRouter
from keras_softmoe.sharding import is_distributed


class TokenChoiceRouter(SparseRouter):
    """Base class of the routers in which every token chooses its best experts."""

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
        num_selected_experts,
        capacity_factor,
        priority,
        rounding,
        multiple_of,
        keep_fraction,
        normalize_gates,
        importance_loss_weight,
        load_loss_weight,
        gshard_loss_weight,
        **kwargs,
    ):
        super().__init__(num_experts, capacity_factor, rounding, multiple_of, **kwargs)
        check_num_selected_experts(num_selected_experts, num_experts)
        check_priority(priority)
        check_keep_fraction(keep_fraction)
        self.num_selected_experts = num_selected_experts
        self.priority = priority
        self.keep_fraction = keep_fraction
        self.normalize_gates = normalize_gates
        self.importance_loss_weight = importance_loss_weight
        self.load_loss_weight = load_loss_weight
        self.gshard_loss_weight = gshard_loss_weight

    def choices_per_token(self):
        return self.num_selected_experts

    def seat(self, selection, capacity, valid):
        return token_choice(
            selection,
            self.num_selected_experts,
            capacity,
            priority=self.priority,
            keep_fraction=self.keep_fraction,
            valid=valid,
            seed=self.seed_generator,
            sharded=is_distributed(),
        )

    def weigh(self, scores, selection):
        if not self.normalize_gates:
            return scores
        chosen = top_indices(
            selection, self.num_selected_experts, sharded=is_distributed()
        )
        chosen_scores = ops.take_along_axis(scores, chosen, axis=-1)
        return scores / ops.sum(chosen_scores, axis=-1, keepdims=True)

    def balancing_losses(self, logits, noisy_logits, probabilities, valid):
        losses = []
        if self.importance_loss_weight:
            loss = importance_loss(softmax(logits, axis=-1), valid)
            losses.append(self.importance_loss_weight * loss)
        # The load loss is about the noise: without any there is none.
        if self.load_loss_weight and noisy_logits is not logits:
            loss = load_loss(
                logits,
                noisy_logits,
                self.num_selected_experts,
                self.noise_std / self.num_experts,
                valid,
                sharded=is_distributed(),
            )
            losses.append(self.load_loss_weight * loss)
        if self.gshard_loss_weight:
            loss = gshard_loss(probabilities, valid)
            losses.append(self.gshard_loss_weight * loss)
        return losses

    def get_config(self):
        return {
            **super().get_config(),
            "num_selected_experts": self.num_selected_experts,
            "priority": self.priority,
            "keep_fraction": self.keep_fraction,
            "normalize_gates": self.normalize_gates,
            "noise_std": self.noise_std,
            "importance_loss_weight": self.importance_loss_weight,
            "load_loss_weight": self.load_loss_weight,
            "gshard_loss_weight": self.gshard_loss_weight,
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
            even if they spread evenly.
        priority: `"position"` (tokens are seated in their order), `"max"` (batch
            prioritized routing: tokens with the largest probability first), `"sum"`,
            `"pair"` or `"random"`, see `ops.token_choice`.
        rounding: `"ceil"` or `"round"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits that choose and weigh.
        importance_loss_weight: float, weight of `ops.importance_loss`.
        load_loss_weight: float, weight of `ops.load_loss`, which exists only in
            training and with noise.
        gshard_loss_weight: float, weight of `ops.gshard_loss`.
        z_loss_weight: float, weight of `ops.z_loss`.
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        keep_fraction: float in `(0, 1]`. Under 1, tokens of low priority are skipped
            (V-MoE, algorithm 3), see `ops.token_choice`.
        normalize_gates: bool, whether the gates of a token's choices are divided by
            their sum. For a softmax that is the same as taking the softmax over the
            chosen logits only, "softmax(TOP-K)" in V-MoE's table 3; with one choice
            the router then gets no gradient.
        random_logits: bool, whether the logits are normal noise instead (V-MoE,
            appendix E.1: what routing at random does to a trained model).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`. In
    training, the mean of `auxiliary_loss` over the groups is added to the losses.

    Raises:
        ValueError: if a token would choose more experts than there are, or another
            argument is not among the accepted values.

    Source: V-MoE, section 2 and appendix A; router study, section 2 ("Softmax Token
    Choice"). Noise and loss weights are those of the V-MoE paper.

    Example:

    >>> router = ksm.routers.SoftmaxTokenChoiceRouter(8, num_selected_experts=2)
    >>> decision = router(np.random.normal(size=(4, 16, 32)))
    >>> decision.routing.token.shape
    (4, 8, 8)
    """

    def __init__(
        self,
        num_experts,
        num_selected_experts=1,
        capacity_factor=1.05,
        priority="position",
        rounding="ceil",
        multiple_of=4,
        noise_std=1.0,
        importance_loss_weight=0.005,
        load_loss_weight=0.005,
        gshard_loss_weight=0.0,
        z_loss_weight=0.0,
        eval_capacity_factor=None,
        keep_fraction=1.0,
        normalize_gates=False,
        random_logits=False,
        **kwargs,
    ):
        super().__init__(
            num_experts,
            num_selected_experts,
            capacity_factor,
            priority,
            rounding,
            multiple_of,
            keep_fraction,
            normalize_gates,
            importance_loss_weight,
            load_loss_weight,
            gshard_loss_weight,
            eval_capacity_factor=eval_capacity_factor,
            noise_std=noise_std,
            z_loss_weight=z_loss_weight,
            random_logits=random_logits,
            **kwargs,
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SinkhornTokenChoiceRouter(TokenChoiceRouter):
    """Every token chooses the experts with the most weight in a balanced plan.

    The plan is `ops.sinkhorn_plan` of the logits: since each expert receives the same
    total weight in it, few choices are dropped and no balancing loss is needed. The
    gates are softmax probabilities by default. Noise changes the plan only: the
    probabilities are those of the logits without it, as in the released code.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity_factor: float, slots per choice.
        priority: `"position"`, `"max"` (tokens with the largest entry in the plan
            first), `"sum"`, `"pair"` or `"random"`, see `ops.token_choice`.
        rounding: `"ceil"` or `"round"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits.
        importance_loss_weight: float, weight of `ops.importance_loss`.
        load_loss_weight: float, weight of `ops.load_loss`.
        gshard_loss_weight: float, weight of `ops.gshard_loss`.
        z_loss_weight: float, weight of `ops.z_loss`.
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
        random_logits: bool, whether the logits are normal noise instead (V-MoE,
            appendix E.1: what routing at random does to a trained model).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`;
    `selection` in the summary is the plan.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: router study, section 2 ("Sinkhorn Token Choice").

    Example:

    >>> router = ksm.routers.SinkhornTokenChoiceRouter(8, capacity_factor=1.0)
    >>> decision = router(np.random.normal(size=(4, 16, 32)))
    >>> keras.ops.sum(decision.summary["selection"], axis=1)[0]  # near 16 / 8 = 2
    """

    noisy_gates = False

    def __init__(
        self,
        num_experts,
        num_selected_experts=1,
        capacity_factor=1.05,
        priority="position",
        rounding="ceil",
        multiple_of=4,
        noise_std=1.0,
        importance_loss_weight=0.0,
        load_loss_weight=0.0,
        gshard_loss_weight=0.0,
        z_loss_weight=0.0,
        num_iterations=20,
        combine="softmax",
        eval_capacity_factor=None,
        keep_fraction=1.0,
        normalize_gates=False,
        random_logits=False,
        **kwargs,
    ):
        super().__init__(
            num_experts,
            num_selected_experts,
            capacity_factor,
            priority,
            rounding,
            multiple_of,
            keep_fraction,
            normalize_gates,
            importance_loss_weight,
            load_loss_weight,
            gshard_loss_weight,
            eval_capacity_factor=eval_capacity_factor,
            noise_std=noise_std,
            z_loss_weight=z_loss_weight,
            combine=combine,
            random_logits=random_logits,
            **kwargs,
        )
        self.num_iterations = num_iterations

    def selection_scores(self, logits, probabilities, capacity, valid):
        if self.combine == "softmax":
            logits = ops.stop_gradient(logits)
        return sinkhorn_plan(logits, self.num_iterations, valid)

    def get_config(self):
        return {
            **super().get_config(),
            "num_iterations": self.num_iterations,
            "combine": self.combine,
        }
