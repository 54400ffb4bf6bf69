"""The router in which pairs of token and expert compete."""

from typing import Unpack

import keras

from keras_softmoe import ops
from keras_softmoe.ops.numbers import at_least, where
from keras_softmoe.routers.assignment import Race
from keras_softmoe.routers.losses import RoutingLoss
from keras_softmoe.routers.scores import Logits
from keras_softmoe.routers.sparse import SparseRouter, SparseSettings


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ExpertRaceRouter(SparseRouter):
    """All pairs of token and expert compete, and the best are chosen.

    In training, the `K * S` pairs of a group with the largest logits win: a token may
    have several experts or none. A moving average of the lowest winning logit is kept,
    and outside of training all pairs win that reach it: whether a token has an expert
    does not depend on the other tokens. The gates are the logits.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the average number `K` of experts of a token.
        capacity_factor: float, slots per winning pair, if these spread evenly. An
            expert with more winners than slots keeps the best. `None`: no winner is
            dropped.
        threshold_momentum: float in `[0, 1)`, weight of the former threshold in its
            moving average, which is the mean of all steps at the beginning.
        noise_std: float, see `SoftmaxTokenChoiceRouter`; also on the gates.
        **settings: as in `SoftmaxTokenChoiceRouter`. By default `losses` are
            `ops.router_similarity_loss` with a weight of 1e-4. With
            `random_logits=True` pairs compete in predictions, too.

    Weights: `kernel` `(D, E)`; `threshold` and `num_thresholds` `()`, without gradient,
    the average and its number of steps. Returns, when called on `(G, S, D)` tokens:
    `Decision` with a `SlotRouting`; `selection` in the summary are the logits that
    compete.

    Raises:
        ValueError: if `num_selected_experts` is over `num_experts`, or another argument
            is not among the accepted values.

    Source: Yuan et al. 2025 (Expert Race), sections 4 and 5. There all tokens of a
    batch compete (`group_images=None` of `layers.MoE`), experts have no capacity, and a
    loss for each layer trains the router, too, which is not offered.

    Examples:
        >>> router = ksm.routers.ExpertRaceRouter(8, num_selected_experts=2)
        >>> tokens = np.random.normal(size=(4, 16, 32))
        >>> decision = router(tokens, training=True)
        >>> decision.routing.token.shape
        (4, 8, 8)
    """

    default_losses = (RoutingLoss(ops.router_similarity_loss, weight=1e-4),)

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 1,
        capacity_factor: float | None = 2.0,
        *,
        threshold_momentum: float = 0.99,
        noise_std: float = 0.0,
        **settings: Unpack[SparseSettings],
    ):
        super().__init__(
            num_experts,
            Logits(noise_std),
            Race(num_selected_experts, threshold_momentum),
            capacity_factor=capacity_factor,
            **settings,
        )

    def _choose(self, scores, valid, training, sharded):
        # That of this batch in training, the moving average in predictions
        threshold = self.threshold
        if training or self.random_logits is True:
            threshold = self.assignment.lowest_winner(scores, valid, sharded)
        if training and self.trainable and not self.random_logits:
            self._move_threshold(threshold, valid)
        return scores, self.assignment.winners(scores, threshold, valid)

    def _move_threshold(self, lowest, valid):
        """Move the threshold to the lowest winners of the groups, `(G, 1, 1)`."""
        if valid is None:
            mean, is_any = keras.ops.mean(lowest), 1.0
        else:
            # Images that fill up a batch may be a group of their own. A batch of
            # padding moves nothing.
            has_tokens = keras.ops.any(valid, axis=-1)[:, None, None]
            groups = keras.ops.sum(keras.ops.cast(has_tokens, lowest.dtype))
            lowest = where(has_tokens, lowest, 0.0)
            mean = keras.ops.sum(lowest) / at_least(groups, 1.0)
            is_any = keras.ops.cast(groups > 0, lowest.dtype)
        count = self.num_thresholds + is_any
        # The mean of all steps, until a moving average has seen enough of them
        rate = 1.0 - self.assignment.threshold_momentum
        rate = at_least(1.0 / at_least(count, 1.0), rate)
        change = is_any * rate * (mean - self.threshold)
        self.threshold.assign(self.threshold + change)
        self.num_thresholds.assign(count)
