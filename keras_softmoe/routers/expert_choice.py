"""Routers in which experts choose tokens."""

from typing import Unpack

import keras

from keras_softmoe.routers.assignment import ExpertChoice
from keras_softmoe.routers.scores import Sinkhorn, Softmax, SparseTransport
from keras_softmoe.routers.sparse import SparseRouter, SparseSettings


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SoftmaxExpertChoiceRouter(SparseRouter):
    """Every expert chooses the tokens with the highest probability for it.

    The probabilities are a softmax over experts, and the gates are the probabilities
    of the chosen pairs. All slots are filled, so no balancing loss is needed; a token
    may be chosen by several experts or by none.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per token: the average number of experts that
            process a token. An expert has at most as many slots as a group has tokens.
        noise_std: float, see `SoftmaxTokenChoiceRouter`.
        **settings: as in `SoftmaxTokenChoiceRouter`. No `losses` by default;
            `[RoutingLoss(ops.z_loss, weight=1e-4)]` keeps logits small.

    Weights: `kernel` `(D, E)`. Returns, when called on `(G, S, D)` tokens: `Decision`
    with a `SlotRouting`.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: router study, section 2 ("Softmax Expert Choice"); Soft MoE, section 3.

    Examples:
        >>> router = ksm.routers.SoftmaxExpertChoiceRouter(num_experts=4)
        >>> decision = router(np.random.normal(size=(1, 16, 32)))
        >>> keras.ops.convert_to_numpy(decision.summary["load"])  # 16 / 4 per expert
        array([[4., 4., 4., 4.]], dtype=float32)
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float = 1.0,
        *,
        noise_std: float = 0.0,
        **settings: Unpack[SparseSettings],
    ):
        super().__init__(
            num_experts,
            Softmax(noise_std),
            ExpertChoice(),
            capacity_factor=capacity_factor,
            **settings,
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SinkhornExpertChoiceRouter(SparseRouter):
    """Every expert chooses the tokens with the most weight in a balanced plan.

    The plan is `ops.sinkhorn_plan` of the logits. Every token has the same total weight
    in it, so fewer tokens get no expert than with `SoftmaxExpertChoiceRouter`.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per token.
        num_iterations: int, number of Sinkhorn iterations.
        combine: `"softmax"` (gates are probabilities, the plan has no gradient) or
            `"plan"` (gates are entries of the plan, which then has a gradient).
        noise_std: float, see `SoftmaxTokenChoiceRouter`.
        **settings: as in `SoftmaxTokenChoiceRouter`. No `losses` by default.

    Weights: `kernel` `(D, E)`. Returns, when called on `(G, S, D)` tokens: `Decision`
    with a `SlotRouting`; `selection` in the summary is the plan.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: router study, section 2 ("Sinkhorn Expert Choice").

    Examples:
        >>> router = ksm.routers.SinkhornExpertChoiceRouter(num_experts=8)
        >>> decision = router(np.random.normal(size=(4, 16, 32)))
        >>> plan = keras.ops.convert_to_numpy(decision.summary["selection"])
        >>> bool(abs(plan.sum(axis=2) - 1).max() < 1e-5)  # weights of a token
        True
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float = 1.0,
        *,
        num_iterations: int = 20,
        combine: str = "softmax",
        noise_std: float = 0.0,
        **settings: Unpack[SparseSettings],
    ):
        super().__init__(
            num_experts,
            Sinkhorn(num_iterations, combine, noise_std),
            ExpertChoice(),
            capacity_factor=capacity_factor,
            **settings,
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class SparseTransportExpertChoiceRouter(SparseRouter):
    """Experts choose by a balanced plan that respects their capacity.

    The plan is `ops.sparse_transport_plan` of the softmax probabilities. Unlike the
    Sinkhorn plan, it respects the capacity of an expert. No noise is added and no
    gradient flows through the plan.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per token.
        num_iterations: int, number of steps of the solver.
        learning_rate: float, step size of the solver.
        combine: `"softmax"` (gates are probabilities) or `"plan"` (gates are entries of
            the plan: then the router does not learn).
        **settings: as in `SoftmaxTokenChoiceRouter`. No `losses` by default.

    Weights: `kernel` `(D, E)`. Returns, when called on `(G, S, D)` tokens: `Decision`
    with a `SlotRouting`; `selection` in the summary is the plan.

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
        *,
        num_iterations: int = 20,
        learning_rate: float = 0.01,
        combine: str = "softmax",
        **settings: Unpack[SparseSettings],
    ):
        super().__init__(
            num_experts,
            SparseTransport(num_iterations, learning_rate, combine),
            ExpertChoice(),
            capacity_factor=capacity_factor,
            **settings,
        )
