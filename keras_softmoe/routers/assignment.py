"""Policies of assignment: who chooses whom, and the gates. See `scores.py`."""

from typing import ClassVar

from keras import ops

from keras_softmoe import checks
from keras_softmoe.ops.assignment import (
    PRIORITIES,
    assign_choices,
    best_tokens,
    check_keep_fraction,
    check_num_selected_experts,
    kept_tokens,
)
from keras_softmoe.ops.kernels import reshape
from keras_softmoe.ops.numbers import at_least, count_true, tiny, where
from keras_softmoe.ops.selection import (
    last_of_top,
    take_along,
    top_indices,
    with_real_first,
)
from keras_softmoe.routers.scores import DROPLESS, live, policy


@policy
class ExpertChoice:
    """Assignment in which every expert chooses its best tokens."""

    # Choices per token, by which slots are counted
    choices: ClassVar[int] = 1
    # Whether a capacity factor of `None` means rows of experts instead of slots
    has_rows: ClassVar[bool] = False
    # Whether pairs of token and expert compete in the whole group, see `Race`
    is_race: ClassVar[bool] = False
    # Weights without gradient: names, and whether there is one for each expert
    state: ClassVar[dict] = {}

    def check(self, num_experts, capacity):
        """Raise unless the policies of a router fit together."""
        factors = capacity.capacity_factor, capacity.eval_capacity_factor
        if factors[0] is None or factors[1] == DROPLESS:
            raise ValueError(
                "`capacity_factor` must be a positive number where experts choose. "
                f"Received: capacity_factor={factors[0]}, eval_capacity_factor="
                f"{factors[1]!r}. A `SoftmaxTokenChoiceRouter` can keep all choices."
            )

    def choose(self, selection, sharded):
        """Return the `(G, S, K)` experts that tokens choose, best first, or `None`."""
        return None

    def assign(self, selection, chosen, slots, *, valid, masks, seed, sharded):
        """Return `token` and `filled` of a `SlotRouting`, `(G, E, C)` each.

        Args:
            selection: `(G, S, E)` tensor, the scores by which choices are ordered.
            chosen: the result of `choose`.
            slots: int, number of slots of an expert.
            valid: `(G, S)` bool tensor or `None`.
            masks: dict from modalities to the `(1, S)` masks of their tokens.
            seed: `keras.random.SeedGenerator`.
            sharded: bool, see `ops.token_choice`.
        """
        return best_tokens(selection, slots, valid, sharded)


@policy
class TokenChoice:
    """Assignment in which every token chooses its best experts."""

    num_selected_experts: int = live(default=1)
    priority: str = live(default="position")
    keep_fraction: float = live(default=1.0)
    normalize_gates: bool = live(default=False)
    choices: ClassVar[int]
    priorities: ClassVar[tuple] = PRIORITIES
    has_rows: ClassVar[bool] = True
    is_race: ClassVar[bool] = False
    state: ClassVar[dict] = {}

    def __post_init__(self):
        checks.check_whole_numbers(1, num_selected_experts=self.num_selected_experts)
        checks.check_choice("priority", self.priority, self.priorities)
        check_keep_fraction(self.keep_fraction)
        checks.check_bools(normalize_gates=self.normalize_gates)
        object.__setattr__(self, "choices", self.num_selected_experts)

    def check(self, num_experts, capacity):
        check_num_selected_experts(self.num_selected_experts, num_experts)

    def choose(self, selection, sharded):
        return top_indices(selection, self.num_selected_experts, sharded)

    def ordered(self, chosen, scores, sharded):
        """Return the same experts of each token, in the order of other scores."""
        if self.num_selected_experts == 1:
            return chosen
        # Chosen by score plus bias, but priority and gates go by the score alone.
        by_score = take_along(scores, chosen, axis=-1)
        order = top_indices(by_score, self.num_selected_experts, sharded)
        return take_along(chosen, order, axis=-1)

    def assign(self, selection, chosen, slots, *, valid, masks, seed, sharded):
        return assign_choices(
            selection,
            chosen,
            slots,
            priority=self.priority,
            keep_fraction=self.keep_fraction,
            valid=valid,
            seed=seed,
            sharded=sharded,
        )

    def kept(self, selection, chosen, valid, seed):
        """Return a `(G, S)` bool mask of the tokens that choose (dropless routing)."""
        return kept_tokens(
            selection, chosen, self.priority, self.keep_fraction, valid, seed=seed
        )

    def normalized(self, scores, chosen):
        """Return `(G, S, E)` scores, divided by the sum of those of the choices."""
        # The sum of the chosen scores, (G, S, 1)
        found = take_along(scores, chosen, axis=-1)
        total = ops.stop_gradient(ops.sum(found, axis=-1, keepdims=True))
        # Zero for padding in a plan, and where the probabilities of all choices
        # underflow: the gates are zero then.
        nothing = tiny(total)
        # First scaled to about 1: the gradient of a quotient squares its divisor.
        inverse = where(total > nothing, 1.0 / at_least(total, nothing), 0.0)
        total = at_least(ops.sum(found * inverse, axis=-1, keepdims=True), 0.5)
        return scores * (inverse / total)


@policy
class Race(ExpertChoice):
    """Assignment by the best pairs of token and expert of a group, within the slots."""

    num_selected_experts: int = live(default=1)
    threshold_momentum: float = 0.99
    is_race: ClassVar[bool] = True
    state: ClassVar[dict] = {"threshold": False, "num_thresholds": False}

    def __post_init__(self):
        checks.check_whole_numbers(1, num_selected_experts=self.num_selected_experts)
        checks.check_numbers(
            least=0, under=1, threshold_momentum=self.threshold_momentum
        )
        object.__setattr__(self, "choices", self.num_selected_experts)

    def check(self, num_experts, capacity):
        check_num_selected_experts(self.num_selected_experts, num_experts)

    def lowest_winner(self, scores, valid, sharded):
        """Return the score of the last pair that wins in each group, `(G, 1, 1)`."""
        # `K` pairs win for each real token; in a group of padding all do. Without a
        # gradient: the threshold follows the scores.
        scores = ops.stop_gradient(scores)
        _, num_tokens, num_experts = scores.shape
        if valid is None:
            pairs = reshape(scores, (-1, num_tokens * num_experts))
            count = num_tokens * self.num_selected_experts
            return last_of_top(pairs, count, sharded)[..., None]
        # The number of winners differs between groups: sort all pairs, padding last,
        # and look up the last winner of each group.
        scores = with_real_first(scores, ops.expand_dims(valid, -1))
        pairs = reshape(scores, (-1, num_tokens * num_experts))
        falling = -ops.sort(-pairs, axis=-1)
        count = count_true(valid, axis=-1, keepdims=True)
        last = at_least(count * self.num_selected_experts - 1, 0)
        return take_along(falling, last, axis=-1)[..., None]

    def winners(self, scores, threshold, valid):
        """Return a `(G, S, E)` bool mask of the pairs at or above a threshold."""
        won = scores >= threshold
        return won if valid is None else won & valid[..., None]

    def assign(self, selection, chosen, slots, *, valid, masks, seed, sharded):
        token, filled = best_tokens(selection, slots, valid, sharded)
        # Winners in the slots of their expert, the best first; others leave theirs
        # empty. (G, E, S)
        won = ops.transpose(chosen, (0, 2, 1))
        filled = filled & take_along(won, token, axis=-1)
        return where(filled, token, 0), filled
