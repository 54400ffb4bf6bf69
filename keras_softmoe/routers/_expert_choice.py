"""Routers in which experts choose tokens."""

from collections.abc import Sequence

import keras

from keras_softmoe.checks import check_numbers, check_whole_numbers
from keras_softmoe.ops import expert_choice, sparse_transport_plan
from keras_softmoe.ops.capacity import MULTIPLE_OF, ROUNDING
from keras_softmoe.routers._sinkhorn import SinkhornSelection
from keras_softmoe.routers._sparse import SparseRouter
from keras_softmoe.sharding import is_distributed
from keras_softmoe.types import Tensor


class ExpertChoiceRouter(SparseRouter):
    """Base class of the routers in which every expert chooses its best tokens.

    Its arguments are those of `SparseRouter`.
    """

    def assign(self, selection, chosen, capacity, valid, masks):
        return expert_choice(selection, capacity, valid, sharded=is_distributed())


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SoftmaxExpertChoiceRouter(ExpertChoiceRouter):
    """Every expert chooses the tokens that find it most probable.

    The probabilities are a softmax over experts, and the gates are the probabilities
    of the chosen pairs. All slots are filled, so no balancing loss is needed; a token
    may be chosen by several experts or by none.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per token: the average number of experts that
            process a token. An expert takes at most all tokens of a group.
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits.
        losses: sequence of `RoutingLoss`es, which are added up with their weights.
            None by default; `(ZLoss(weight=1e-4),)` keeps logits small.
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        random_logits: bool, whether the logits are normal noise instead; `"permuted"`:
            each token's own, in random order. What routing at random does to a trained
            model (V-MoE, appendix E.1).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: router study, section 2 ("Softmax Expert Choice"); Soft MoE, section 3.

    Examples:
        >>> router = ksm.routers.SoftmaxExpertChoiceRouter(num_experts=4)
        >>> decision = router(np.random.normal(size=(1, 16, 32)))
        >>> keras.ops.convert_to_numpy(decision.summary["load"])  # 16 / 4 for everyone
        array([[4., 4., 4., 4.]], dtype=float32)
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float = 1.0,
        rounding: str = ROUNDING,
        multiple_of: int | None = MULTIPLE_OF,
        noise_std: float = 0.0,
        losses: Sequence | None = None,
        eval_capacity_factor: float | None = None,
        random_logits: bool = False,
        **kwargs,
    ):
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

    def get_config(self):
        return {**super().get_config(), "noise_std": self.noise_std}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SinkhornExpertChoiceRouter(SinkhornSelection, ExpertChoiceRouter):
    """Every expert chooses the tokens with the most weight in a balanced plan.

    The plan is `ops.sinkhorn_plan` of the logits. Since every token sends out the
    same total weight in it, fewer tokens stay without an expert than under
    `SoftmaxExpertChoiceRouter`.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per token.
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits, for plan and gates.
        losses: sequence of `RoutingLoss`es, which are added up with their weights.
            None by default; `(ZLoss(weight=1e-4),)` keeps logits small.
        num_iterations: int, number of Sinkhorn iterations.
        combine: `"softmax"` (gates are probabilities, the plan has no gradient) or
            `"plan"` (gates are entries of the plan, which then has a gradient).
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        random_logits: bool, whether the logits are normal noise instead; `"permuted"`:
            each token's own, in random order. What routing at random does to a trained
            model (V-MoE, appendix E.1).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`;
    `selection` in the summary is the plan.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: router study, section 2 ("Sinkhorn Expert Choice").

    Examples:
        >>> router = ksm.routers.SinkhornExpertChoiceRouter(num_experts=8)
        >>> decision = router(np.random.normal(size=(4, 16, 32)))
        >>> plan = keras.ops.convert_to_numpy(decision.summary["selection"])
        >>> bool(abs(plan.sum(axis=2) - 1).max() < 1e-5)  # each token gives all it has
        True
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float = 1.0,
        rounding: str = ROUNDING,
        multiple_of: int | None = MULTIPLE_OF,
        noise_std: float = 0.0,
        losses: Sequence | None = None,
        num_iterations: int = 20,
        combine: str = "softmax",
        eval_capacity_factor: float | None = None,
        random_logits: bool = False,
        **kwargs,
    ):
        super().__init__(
            num_experts,
            capacity_factor=capacity_factor,
            rounding=rounding,
            multiple_of=multiple_of,
            noise_std=noise_std,
            losses=losses,
            combine=combine,
            eval_capacity_factor=eval_capacity_factor,
            random_logits=random_logits,
            **kwargs,
        )
        check_whole_numbers(1, num_iterations=num_iterations)
        self.num_iterations = num_iterations

    def get_config(self):
        return {
            **super().get_config(),
            "noise_std": self.noise_std,
            "num_iterations": self.num_iterations,
            "combine": self.combine,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SparseTransportExpertChoiceRouter(ExpertChoiceRouter):
    """Experts choose by a balanced plan that respects their capacity.

    The plan is `ops.sparse_transport_plan` of the softmax probabilities: it knows, as
    the Sinkhorn plan does not, that an expert takes only `C` tokens. No noise is added
    and no gradient flows through the plan.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per token.
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        losses: sequence of `RoutingLoss`es, which are added up with their weights.
            None by default; `(ZLoss(weight=1e-4),)` keeps logits small.
        num_iterations: int, number of steps of the solver.
        learning_rate: float, step size of the solver.
        combine: `"softmax"` (gates are probabilities) or `"plan"` (gates are entries of
            the plan: then the router does not learn).
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        random_logits: bool, whether the logits are normal noise instead; `"permuted"`:
            each token's own, in random order. What routing at random does to a trained
            model (V-MoE, appendix E.1).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting`;
    `selection` in the summary is the plan.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: router study, section 2 ("Sparsity-constrained Expert Choice").

    Examples:
        >>> router = ksm.routers.SparseTransportExpertChoiceRouter(num_experts=8)
        >>> decision = router(np.random.normal(size=(4, 16, 32)))
        >>> decision.routing.filled.shape
        (4, 8, 2)
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float = 1.0,
        rounding: str = ROUNDING,
        multiple_of: int | None = MULTIPLE_OF,
        losses: Sequence | None = None,
        num_iterations: int = 20,
        learning_rate: float = 0.01,
        combine: str = "softmax",
        eval_capacity_factor: float | None = None,
        random_logits: bool = False,
        **kwargs,
    ):
        super().__init__(
            num_experts,
            capacity_factor=capacity_factor,
            rounding=rounding,
            multiple_of=multiple_of,
            noise_std=0.0,
            losses=losses,
            combine=combine,
            eval_capacity_factor=eval_capacity_factor,
            random_logits=random_logits,
            **kwargs,
        )
        check_whole_numbers(1, num_iterations=num_iterations)
        self.num_iterations = num_iterations
        check_numbers(over=0, learning_rate=learning_rate)
        self.learning_rate = learning_rate

    def selection_scores(
        self,
        logits: Tensor,
        probabilities: Tensor,
        capacity: int,
        valid: Tensor | None,
        limit: Tensor | None,
    ) -> Tensor:
        return sparse_transport_plan(
            probabilities,
            capacity,
            num_iterations=self.num_iterations,
            learning_rate=self.learning_rate,
            valid=valid,
            sharded=is_distributed(),
            limit=limit,
        )

    def get_config(self):
        return {
            **super().get_config(),
            "num_iterations": self.num_iterations,
            "learning_rate": self.learning_rate,
            "combine": self.combine,
        }
