"""Losses of routers: a function of `ops`, the tokens it applies to, and a weight."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import keras

from keras_softmoe import ops
from keras_softmoe.checks import check_numbers, received
from keras_softmoe.sharding.constraints import is_distributed
from keras_softmoe.types import Tensor

MODALITIES = ("image", "text")


class Routed(NamedTuple):
    """The tensors from which losses are computed.

    Attributes:
        logits: `(G, S, E)` tensor, without noise.
        noisy_logits: `(G, S, E)` tensor; the same object without noise.
        probabilities: `(G, S, E)` tensor, without noise.
        noisy_probabilities: `(G, S, E)` tensor, with noise.
        chosen: what the router chose: `(G, S, K)` int tensor of experts where tokens
            choose, `(G, S, E)` bool tensor of pairs in a race, otherwise `None`.
        valid: dict from each present modality to the `(G or 1, S)` bool mask of its
            tokens, and from `None` to that of all tokens (`None` without padding).
        num_selected_experts: int, the number `K` of experts that a token chooses.
        noise_std: float, standard deviation of the noise on the logits.
    """

    logits: Tensor
    noisy_logits: Tensor
    probabilities: Tensor
    noisy_probabilities: Tensor
    chosen: Any
    valid: dict
    num_selected_experts: int
    noise_std: float


# === The table ===


class Term(NamedTuple):
    """A loss function of `ops`, and its arguments.

    Attributes:
        function: callable.
        name: str, its class name in files.
        takes: str, its arguments before the mask, separated by spaces: attributes of
            `Routed`, and the threshold of the loss.
        sorts: bool, whether it sorts experts and has the argument `sharded`.
        needs_softmax: bool, whether it is defined by probabilities that add up to 1.
        counts_choices: bool, whether the largest scores are the choices for it.
        compares_modalities: bool, whether it has lists with one item per modality.
    """

    function: Callable
    name: str
    takes: str
    sorts: bool = False
    compares_modalities: bool = False
    needs_softmax: bool = True
    counts_choices: bool = False

    def from_config(self, config):
        # Called by Keras when it reads a file
        return RoutingLoss(self.function, **config)


_K = "num_selected_experts"
_ROWS = (
    Term(ops.importance_loss, "ImportanceLoss", "probabilities", needs_softmax=False),
    Term(
        ops.load_loss,
        "LoadLoss",
        f"logits noisy_logits {_K} noise_std",
        sorts=True,
        needs_softmax=False,
        counts_choices=True,
    ),
    Term(ops.gshard_loss, "GShardLoss", "noisy_probabilities", counts_choices=True),
    Term(ops.z_loss, "ZLoss", "logits"),
    Term(ops.local_entropy_loss, "LocalEntropyLoss", "probabilities"),
    Term(ops.target_entropy_loss, "TargetEntropyLoss", f"probabilities {_K}"),
    Term(ops.merged_entropy_loss, "MergedEntropyLoss", f"probabilities {_K}", True),
    Term(ops.global_entropy_loss, "GlobalEntropyLoss", "probabilities threshold"),
    Term(
        ops.mutual_information_loss,
        "MutualInformationLoss",
        "probabilities",
        compares_modalities=True,
    ),
    Term(
        ops.router_similarity_loss, "RouterSimilarityLoss", "noisy_probabilities chosen"
    ),
)
_TERMS = {term.function: term for term in _ROWS}
for _term in _TERMS.values():
    keras.saving.get_custom_objects()[f"keras_softmoe>{_term.name}"] = _term

# === A loss of a router ===


@keras.saving.register_keras_serializable(package="keras_softmoe")
@dataclasses.dataclass(frozen=True, repr=False)
class RoutingLoss:
    """A loss of a router: a function, the tokens it applies to, and a weight.

    Args:
        function: `ops.importance_loss`, `ops.load_loss` (only with noise),
            `ops.gshard_loss` or `ops.z_loss` for any sparse router, fewer with sigmoid
            scores or a bias; `ops.router_similarity_loss` for an `ExpertRaceRouter`;
            `ops.local_entropy_loss`, `ops.target_entropy_loss`,
            `ops.merged_entropy_loss`, `ops.global_entropy_loss` and
            `ops.mutual_information_loss` (of both modalities) for a `LIMoERouter`; or
            your own `(routed, valid) -> (G,)`: `routed` has the `(G, S, E)` tensors
            `logits`, `noisy_logits`, `probabilities` and `noisy_probabilities`, and
            `valid` is a `(G, S)` bool mask or `None`. Register it with
            `keras.saving.register_keras_serializable` to save it.
        modality: `"image"`, `"text"` (`LIMoERouter` only) or `None` for all tokens.
        weight: float, factor of the loss in the router's sum.
        threshold: float in nats, only for `ops.global_entropy_loss`. May be negative.
        soft_minimum: positive float, `exp(threshold)`, an alternative to `threshold`:
            the number of experts at which the loss is zero, if they are used evenly.

    Raises:
        ValueError: if an argument is not among the accepted values, or a threshold is
            missing, given twice or given for another loss.

    Source: V-MoE, appendix A; GShard, section 2.2; ST-MoE, section 3; LIMoE, section
    2.2.2 and appendices B.1, B.2 (`S = exp(threshold)`) and E.1.

    Examples:
        >>> losses = [
        ...     ksm.routers.RoutingLoss(ksm.ops.importance_loss, weight=0.005),
        ...     ksm.routers.RoutingLoss(ksm.ops.z_loss, weight=1e-4),
        ... ]
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(8, losses=losses)
        >>> loss = ksm.routers.RoutingLoss(
        ...     ksm.ops.global_entropy_loss, "text", soft_minimum=9
        ... )
        >>> loss.threshold
        2.197...
    """

    function: Callable
    modality: str | None = None
    weight: float = 1.0
    threshold: float | None = dataclasses.field(default=None, kw_only=True)
    soft_minimum: dataclasses.InitVar[float | None] = dataclasses.field(
        default=None, kw_only=True
    )
    # The function's row of the table; without a name for a user's function
    term: ClassVar[Term]
    # Whether it is defined through the noise on the logits, or by the pairs that win
    needs_noise: ClassVar[bool]
    needs_race: ClassVar[bool]

    def __post_init__(self, soft_minimum: float | None) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise ValueError(
                "`function` must be a loss of `keras_softmoe.ops`, or a function "
                "`(routed, valid)` of your own. " + received(function=self.function)
            )
        if self.modality not in (None, *MODALITIES):
            raise ValueError(
                "Unknown modality. Accepted: 'image', 'text', or `None` for the tokens "
                "of both. " + received(modality=self.modality)
            )
        term = _TERMS.get(self.function) or Term(self.function, "", "")
        takes_threshold = "threshold" in term.takes
        # The record is frozen, as losses are compared and shared.
        vars(self).update(
            term=term,
            needs_noise="noise_std" in term.takes,
            needs_race="chosen" in term.takes,
        )
        if term.compares_modalities and self.modality is not None:
            raise ValueError(
                "The loss compares both modalities: leave `modality` out. "
                + received(modality=self.modality, function=self._name)
            )
        check_numbers(weight=self.weight)
        if takes_threshold:
            threshold = _checked_threshold(self.threshold, soft_minimum)
            vars(self).update(threshold=threshold)
        elif (self.threshold, soft_minimum) != (None, None):
            raise ValueError(
                "Only `ops.global_entropy_loss` has a threshold. "
                + received(
                    threshold=self.threshold,
                    soft_minimum=soft_minimum,
                    function=self._name,
                )
            )

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, routed: Routed) -> Tensor:
        """Return the loss of each group, `(G,)`, without its weight."""
        term = self.term
        # A user's function looks up its tensors itself.
        if not term.name:
            return self.function(routed, routed.valid[self.modality])
        if term.compares_modalities:
            # The same tensors with the mask of each modality, (G or 1, S)
            masks = [routed.valid[name] for name in MODALITIES]
            return self.function([routed.probabilities] * len(masks), masks)
        arguments = [
            self.threshold if name == "threshold" else getattr(routed, name)
            for name in term.takes.split()
        ]
        arguments.append(routed.valid[self.modality])
        if term.sorts:
            # The largest entries of a sharded axis are found by sorting.
            arguments.append(is_distributed())
        return self.function(*arguments)

    def check(self, num_experts: int, scores: Any, assignment: Any) -> None:
        """Raise `ValueError` if a router with these policies cannot have the loss."""
        noise_std = scores.noise_std
        if self.term.name and self.term.needs_softmax and not scores.adds_up:
            raise ValueError(
                "The loss is defined by probabilities that add up to 1, which sigmoids "
                f"do not. Received: losses with {self!r}, score='sigmoid'."
            )
        if self.term.counts_choices and scores.is_biased:
            raise ValueError(
                "The loss counts the largest scores, but tokens choose by score plus "
                f"bias, which balances alone. Received: losses with {self!r}, "
                f"bias_update_rate={scores.bias_update_rate}."
            )
        if self.needs_race and not assignment.is_race:
            raise ValueError(
                "Only in an `ExpertRaceRouter` do pairs of token and expert win. "
                f"Received: losses with {self!r}."
            )
        if self.needs_noise and not noise_std > 0:
            raise ValueError(
                "The load loss needs noise on the logits. Received: losses with "
                f"{self!r}, noise_std={noise_std}."
            )
        # Above the largest entropy the loss could never be zero. Logarithms round.
        highest = math.log(num_experts) + 1e-6
        if "threshold" in self.term.takes and self.threshold > highest:
            raise ValueError(
                f"With {num_experts} experts the entropy of routing is at most "
                f"log({num_experts}) = {math.log(num_experts):.4f}. Received: "
                f"num_experts={num_experts} and a threshold of {self.threshold:.4f} "
                f"for {self.modality or 'all'} tokens, a soft minimum of "
                f"{math.exp(self.threshold):.4g} experts."
            )

    def applies(self, routed: Routed) -> bool:
        """Return whether a call has the tokens and the noise that the loss needs."""
        # Without noise, as in prediction, both are one tensor.
        if self.needs_noise and routed.noisy_logits is routed.logits:
            return False
        needed = MODALITIES if self.term.compares_modalities else (self.modality,)
        return all(name in routed.valid for name in needed)

    def settings(self) -> dict:
        """Return the settings besides the function, without defaults."""
        weight = {} if self.weight == 1.0 else {"weight": self.weight}
        threshold = {} if self.threshold is None else {"threshold": self.threshold}
        return {"modality": self.modality, **weight, **threshold}

    def get_config(self) -> dict:
        if self.term.name:
            return {"function": self._name, **self.settings()}
        function = keras.saving.serialize_keras_object(self.function)
        return {"function": function, **self.settings()}

    @classmethod
    def from_config(cls, config: dict) -> "RoutingLoss":
        function = config["function"]
        if isinstance(function, str):
            # A loss of `ops` is saved by its name.
            named = {term.function.__name__: term.function for term in _TERMS.values()}
            function = named.get(function, function)
        elif isinstance(function, dict):
            function = keras.saving.deserialize_keras_object(function)
        return cls(**{**config, "function": function})

    def __repr__(self):
        settings = "".join(f", {k}={v!r}" for k, v in self.settings().items())
        return f"RoutingLoss({self._name}{settings})"


def _checked_threshold(threshold, soft_minimum):
    if (soft_minimum is None) == (threshold is None):
        raise ValueError(
            "Give either `soft_minimum`, the number of experts, or `threshold`, its "
            f"logarithm. {received(soft_minimum=soft_minimum, threshold=threshold)}"
        )
    if threshold is None:
        check_numbers(over=0, soft_minimum=soft_minimum)
        threshold = math.log(soft_minimum)
    check_numbers(threshold=threshold)
    return float(threshold)


def checked_losses(losses, num_experts, scores, assignment):
    """Return the losses of a router as a tuple, deserialized if necessary.

    `num_experts` counts those in the probabilities.
    """
    losses = [
        keras.saving.deserialize_keras_object(loss) if isinstance(loss, dict) else loss
        for loss in losses
    ]
    wrong = [loss for loss in losses if not isinstance(loss, RoutingLoss)]
    if wrong:
        raise ValueError(
            "`losses` must be `keras_softmoe.routers.RoutingLoss`es, such as those of "
            f"`classic_losses()`. Received: losses with {wrong}."
        )
    if len(set(losses)) < len(losses):
        raise ValueError(f"Each loss is given once. Received: losses={losses}.")
    for loss in losses:
        loss.check(num_experts, scores, assignment)
    return tuple(losses)


# === Losses in files ===

# Weights of losses by name, in files that are older than `losses`
FORMER_WEIGHTS = {
    "importance_loss_weight": ops.importance_loss,
    "load_loss_weight": ops.load_loss,
    "gshard_loss_weight": ops.gshard_loss,
    "z_loss_weight": ops.z_loss,
}


def serialize_loss(loss):
    """Return the configuration of a loss in a file: a class named by its function."""
    # `keras.saving.serialize_keras_object` would import TensorFlow for every layer that
    # clones its router.
    name = loss.term.name
    return {
        "module": RoutingLoss.__module__,
        "class_name": name or "RoutingLoss",
        "config": loss.settings() if name else loss.get_config(),
        "registered_name": f"keras_softmoe>{name or 'RoutingLoss'}",
    }


def with_losses(config, default):
    """Return a router's configuration with `losses` in place of `FORMER_WEIGHTS`.

    The configuration is from a file of any version; losses whose weights it leaves out
    have those in `default`.
    """
    named = {name: config[name] for name in FORMER_WEIGHTS if name in config}
    # Weights that are left out have their default.
    weights = {loss.function: loss.weight for loss in default}
    weights |= {FORMER_WEIGHTS[name]: weight for name, weight in named.items()}
    if config.get("noise_std") == 0:
        # Without noise, the weight of the load loss had no effect.
        weights.pop(ops.load_loss, None)
    losses = [RoutingLoss(f, weight=w) for f, w in weights.items() if w]
    return {**{k: v for k, v in config.items() if k not in named}, "losses": losses}
