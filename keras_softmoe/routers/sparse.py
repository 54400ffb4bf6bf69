"""What all learned sparse routers share."""

import keras
from keras import ops

from keras_softmoe.ops.capacity import expert_capacity
from keras_softmoe.ops.losses import z_loss
from keras_softmoe.ops.routing import SlotRouting
from keras_softmoe.ops.softmax import softmax
from keras_softmoe.routers.router import Decision, Router


class SparseRouter(Router):
    """Base class of the routers that learn a score for each token and expert.

    The steps are the same for all: logits `X W`, noise in training, selection scores,
    seats, gates, losses. Subclasses fill in the ones that differ: `seat` and, where
    they need to, `choices_per_token`, `selection_scores`, `weigh`, `balancing_losses`.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per choice.
        eval_capacity_factor: float or `None`, slots per choice outside training;
            `None` for the same as in training.
        rounding: `"ceil"` or `"round"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits.
        z_loss_weight: float, weight of the z-loss.
        combine: `"softmax"` or `"plan"`: whether gates are softmax probabilities or
            the selection scores.
        random_logits: bool, whether the logits are normal noise and the tokens are not
            looked at: what routing at random does to a trained model (V-MoE,
            appendix E.1).
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`.
    """

    # Whether the gates feel the noise, or only the choice of seats does.
    noisy_gates = True

    mutable_settings = ("capacity_factor", "eval_capacity_factor", "random_logits")

    def __init__(
        self,
        num_experts,
        capacity_factor,
        rounding,
        multiple_of,
        eval_capacity_factor=None,
        noise_std=0.0,
        z_loss_weight=0.0,
        combine="softmax",
        random_logits=False,
        **kwargs,
    ):
        if combine not in ("softmax", "plan"):
            raise ValueError(
                "Unknown `combine`. Accepted: 'softmax', 'plan'. "
                f"Received: combine={combine!r}."
            )
        for factor in (capacity_factor, eval_capacity_factor):
            if factor is not None and not factor > 0:
                raise ValueError(
                    "Experts without slots process nothing. `capacity_factor` and "
                    "`eval_capacity_factor` must be positive. Received: "
                    f"capacity_factor={capacity_factor}, "
                    f"eval_capacity_factor={eval_capacity_factor}."
                )
        super().__init__(num_experts, **kwargs)
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.rounding = rounding
        self.multiple_of = multiple_of
        self.noise_std = noise_std
        self.z_loss_weight = z_loss_weight
        self.combine = combine
        self.random_logits = random_logits
        # Always there: a setting that needs it can be switched on later.
        self.seed_generator = keras.random.SeedGenerator()

    def build(self, tokens_shape):
        if tokens_shape[1] is not None:
            # Says before work starts that there is not one slot, if so.
            self.capacity(tokens_shape[1])
        self.kernel = self.add_weight(
            shape=(tokens_shape[-1], self.num_experts),
            initializer="lecun_normal",
            name="kernel",
        )

    def call(self, tokens, valid=None, training=False):
        num_tokens = tokens.shape[1]
        capacity = self.capacity(num_tokens, training)
        # (G, S, E)
        logits = ops.matmul(tokens, self.kernel)
        if self.random_logits:
            logits = self.noise_like(logits)
        noisy_logits = self.add_noise(logits, training)
        probabilities = softmax(noisy_logits, axis=-1)

        selection = self.selection_scores(noisy_logits, probabilities, capacity, valid)
        token, filled = self.seat(selection, capacity, valid)
        if self.combine == "plan":
            scores = selection
        elif self.noisy_gates or noisy_logits is logits:
            scores = probabilities
        else:
            scores = softmax(logits, axis=-1)
        scores = self.weigh(scores, selection)
        routing = SlotRouting(token, filled, gates(scores, token, filled))

        losses = self.balancing_losses(logits, noisy_logits, probabilities, valid)
        if self.z_loss_weight:
            losses.append(self.z_loss_weight * z_loss(logits, valid))
        if losses:
            auxiliary_loss = sum(losses[1:], start=losses[0])
            if training:
                self.add_loss(ops.mean(auxiliary_loss))
        else:
            auxiliary_loss = ops.zeros_like(logits[:, 0, 0])
        summary = {
            "logits": logits,
            "probabilities": probabilities,
            "selection": selection,
            "auxiliary_loss": auxiliary_loss,
        }
        return Decision(routing, summary)

    def add_noise(self, logits, training):
        """The logits with the noise of training; the same tensor if there is none."""
        if not training or not self.noise_std:
            return logits
        return logits + (self.noise_std / self.num_experts) * self.noise_like(logits)

    def noise_like(self, logits):
        """Standard normal noise."""
        return keras.random.normal(ops.shape(logits), seed=self.seed_generator)

    def capacity(self, num_tokens, training=False):
        """Slots per expert for a group of `num_tokens` tokens, as a Python int."""
        capacity_factor = self.capacity_factor
        if not training and self.eval_capacity_factor is not None:
            capacity_factor = self.eval_capacity_factor
        return self.slots(num_tokens, capacity_factor)

    def slots(self, num_tokens, capacity_factor):
        """Slots per expert for a group of `num_tokens` tokens and a given factor."""
        return expert_capacity(
            num_tokens * self.choices_per_token(),
            self.num_experts,
            capacity_factor,
            rounding=self.rounding,
            multiple_of=self.multiple_of,
        )

    def choices_per_token(self):
        """The choices that a token brings along, which `capacity` makes room for."""
        return 1

    def selection_scores(self, logits, probabilities, capacity, valid):
        """The `(G, S, E)` scores that choose the seats."""
        return probabilities

    def seat(self, selection, capacity, valid):
        """`token` and `filled` of a `SlotRouting`, from the selection scores."""
        raise TypeError(
            f"`{type(self).__name__}` is abstract: it seats nothing. Use one of the "
            "routers in `keras_softmoe.routers`, or implement `seat`."
        )

    def weigh(self, scores, selection):
        """The `(G, S, E)` weights at which gates are looked up."""
        return scores

    def balancing_losses(self, logits, noisy_logits, probabilities, valid):
        """Weighted losses, a list of `(G,)` tensors."""
        return []

    def get_config(self):
        return {
            **super().get_config(),
            "capacity_factor": self.capacity_factor,
            "eval_capacity_factor": self.eval_capacity_factor,
            "rounding": self.rounding,
            "multiple_of": self.multiple_of,
            "z_loss_weight": self.z_loss_weight,
            "random_logits": self.random_logits,
        }


def gates(scores, token, filled):
    """Look up the score of each slot's token at its expert; 0 where empty."""
    # (G, E, S)
    by_expert = ops.transpose(scores, (0, 2, 1))
    return ops.where(filled, ops.take_along_axis(by_expert, token, axis=-1), 0.0)
