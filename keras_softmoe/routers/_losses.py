"""Losses of routers: a function of `ops`, the tokens that count, and a weight."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import keras

from keras_softmoe import ops
from keras_softmoe.checks import check_numbers, quote
from keras_softmoe.ops.assignment import check_num_selected_experts
from keras_softmoe.ops.backend import softmax
from keras_softmoe.sharding.constraints import is_distributed
from keras_softmoe.types import Tensor

MODALITIES = ("image", "text")

# The thresholds of the ablations, 9 text and 20 image experts of 32, for any number.
_TEXT_SHARE, _IMAGE_SHARE = 9 / 32, 20 / 32


class Routed:
    """The tensors from which losses are computed.

    Args:
        logits: `(G, S, E)` tensor, without noise.
        noisy_logits: `(G, S, E)` tensor; the same object where there is no noise.
        valid: dict from each modality that is there to the `(G or 1, S)` bool tensor of
            its tokens. Under the key `None` the tokens of all: a tensor, or `None`
            where none is padding.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        noise_std: float, standard deviation of the noise on the logits.

    Attributes:
        probabilities: `(G, S, E)` tensor, without noise.
        noisy_probabilities: `(G, S, E)` tensor, with noise.
    """

    def __init__(self, logits, noisy_logits, valid, num_selected_experts, noise_std):
        self.logits = logits
        self.noisy_logits = noisy_logits
        self.valid = valid
        self.num_selected_experts = num_selected_experts
        self.noise_std = noise_std
        # At once, and not when first needed: `torch.compile` could not look into
        # `functools.cached_property`.
        self.probabilities = self.noisy_probabilities = softmax(logits, axis=-1)
        if noisy_logits is not logits:
            self.noisy_probabilities = softmax(noisy_logits, axis=-1)


# === The table ===


class Term(NamedTuple):
    """A loss function of `ops`, and its arguments.

    Attributes:
        function: callable.
        name: str, of the class that stands for it in files.
        takes: tuple of str, its arguments before the mask: attributes of `Routed`, and
            the threshold of the loss.
        sorts: bool, whether it sorts experts, and so has to know of sharded groups.
        compares_modalities: bool, whether it takes lists, of images and of text.
    """

    function: Callable
    name: str
    takes: tuple
    sorts: bool = False
    compares_modalities: bool = False

    def from_config(self, config):
        # Keras calls it for a loss in a file.
        return RoutingLoss(self.function, **config)


_K = "num_selected_experts"
_LOAD = ("logits", "noisy_logits", _K, "noise_std")
_TERMS = {
    term.function: term
    for term in (
        Term(ops.importance_loss, "ImportanceLoss", ("probabilities",)),
        Term(ops.load_loss, "LoadLoss", _LOAD, sorts=True),
        Term(ops.gshard_loss, "GShardLoss", ("noisy_probabilities",)),
        Term(ops.z_loss, "ZLoss", ("logits",)),
        Term(ops.local_entropy_loss, "LocalEntropyLoss", ("probabilities",)),
        Term(ops.target_entropy_loss, "TargetEntropyLoss", ("probabilities", _K)),
        Term(
            ops.merged_entropy_loss,
            "MergedEntropyLoss",
            ("probabilities", _K),
            sorts=True,
        ),
        Term(
            ops.global_entropy_loss,
            "GlobalEntropyLoss",
            ("probabilities", "threshold"),
        ),
        Term(
            ops.mutual_information_loss,
            "MutualInformationLoss",
            ("probabilities",),
            compares_modalities=True,
        ),
    )
}
for _term in _TERMS.values():
    keras.saving.get_custom_objects()[f"keras_softmoe>{_term.name}"] = _term

# === A loss of a router ===


@keras.saving.register_keras_serializable(package="keras_softmoe")
@dataclasses.dataclass(frozen=True, repr=False)
class RoutingLoss:
    """A loss of a router: a function, the tokens that count, and a weight.

    The losses of V-MoE and others, for any sparse router: `ops.importance_loss`,
    `ops.load_loss` (only with noise), `ops.gshard_loss` and `ops.z_loss`. Those of
    LIMoE, mostly for one modality: `ops.local_entropy_loss`, `ops.target_entropy_loss`,
    `ops.merged_entropy_loss`, `ops.global_entropy_loss` and
    `ops.mutual_information_loss` (of both modalities, left out where one is missing).

    Args:
        function: one of these, or a function of your own, `(routed, valid) -> (G,)`:
            `routed` has the `(G, S, E)` tensors `logits`, `noisy_logits`,
            `probabilities` and `noisy_probabilities`, and `valid` is the `(G, S)` bool
            tensor of the tokens that count, or `None` for all. Register it with
            `keras.saving.register_keras_serializable`, so that files can name it.
        modality: `"image"`, `"text"` or `None` for all tokens. Only a `LIMoERouter`
            knows modalities.
        weight: float, factor of the loss in the router's sum.
        threshold: float, of `ops.global_entropy_loss` only, in nats. May be negative.
        soft_minimum: positive float, `exp(threshold)`, which may be given in its place:
            the number of experts that have to be used (evenly; more, if unevenly) for
            the loss to be zero. Under one the loss is zero whatever the routing, and
            only counts among those that a `LIMoERouter` averages.

    Raises:
        ValueError: if the modality is none of these, `weight` is no number, or
            threshold and soft minimum are missing, not finite, both given, or given for
            another loss.

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

        A loss of your own:

        >>> @keras.saving.register_keras_serializable(package="mine")
        ... def squared_logits(routed, valid):
        ...     return keras.ops.mean(routed.logits**2, axis=(1, 2))
        >>> loss = ksm.routers.RoutingLoss(squared_logits, weight=0.01)
        >>> router = ksm.routers.SoftmaxExpertChoiceRouter(8, losses=[loss])
    """

    function: Callable
    modality: str | None = None
    weight: float = 1.0
    threshold: float | None = dataclasses.field(default=None, kw_only=True)
    soft_minimum: dataclasses.InitVar[float | None] = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self, soft_minimum: float | None) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise ValueError(
                "`function` is a loss of `keras_softmoe.ops`, such as `ops.z_loss`, or "
                "a function `(routed, valid)` of your own. Received: "
                f"function={quote(self.function)}."
            )
        if self.modality not in (None, *MODALITIES):
            raise ValueError(
                "Unknown modality. Accepted: 'image', 'text', or `None` for the tokens "
                f"of both. Received: modality={quote(self.modality)}."
            )
        if self.term.compares_modalities and self.modality is not None:
            raise ValueError(
                "The loss compares both modalities: leave `modality` out. Received: "
                f"modality={self.modality!r} for {self._name}."
            )
        check_numbers(weight=self.weight)
        if self._takes_threshold:
            threshold = _checked_threshold(self.threshold, soft_minimum)
            object.__setattr__(self, "threshold", threshold)
        elif (self.threshold, soft_minimum) != (None, None):
            raise ValueError(
                "Only `ops.global_entropy_loss` has a threshold. Received: "
                f"threshold={self.threshold}, soft_minimum={soft_minimum} for "
                f"{self._name}."
            )

    @property
    def term(self) -> Term:
        """The function's row in the table; one without a name for a user's own."""
        return _TERMS.get(self.function) or Term(self.function, "", ())

    @property
    def _takes_threshold(self) -> bool:
        return "threshold" in self.term.takes

    @property
    def needs_noise(self) -> bool:
        """Bool, whether it is defined through the noise on the logits."""
        return "noise_std" in self.term.takes

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, routed: Routed) -> Tensor:
        """The loss of each group, `(G,)`, before it is multiplied by its weight."""
        term = self.term
        if not term.name:
            return self.function(routed, routed.valid[self.modality])
        if term.compares_modalities:
            masks = [routed.valid[name] for name in MODALITIES]
            return self.function([routed.probabilities] * len(masks), masks)
        arguments = [
            self.threshold if name == "threshold" else getattr(routed, name)
            for name in term.takes
        ]
        if term.sorts:
            arguments += [routed.valid[self.modality], is_distributed()]
        else:
            arguments += [routed.valid[self.modality]]
        return self.function(*arguments)

    def check(self, num_experts: int, noise_std: float) -> None:
        """Raise `ValueError` if a router of these settings cannot have the loss."""
        if self.needs_noise and not noise_std > 0:
            raise ValueError(
                "The load loss is about the noise of the router. Received: "
                f"losses with {self!r}, noise_std={noise_std}. Make the noise positive "
                "or leave the loss out."
            )
        if self._takes_threshold and self.threshold > math.log(num_experts) + 1e-6:
            raise ValueError(
                f"With {num_experts} experts the entropy of routing is at most "
                f"log({num_experts}) = {math.log(num_experts):.4f}. Received: "
                f"num_experts={num_experts} and a threshold of {self.threshold:.4f} "
                f"for {self.modality or 'all'} tokens, a soft minimum of "
                f"{math.exp(self.threshold):.4g} experts. Lower it or add experts."
            )

    def applies(self, routed: Routed) -> bool:
        """Whether there are the tokens, and the noise, that the loss is about."""
        if self.needs_noise and routed.noisy_logits is routed.logits:
            return False
        needed = MODALITIES if self.term.compares_modalities else (self.modality,)
        return all(name in routed.valid for name in needed)

    def settings(self) -> dict:
        """Its settings besides the function."""
        # Without those of no effect, as in files that are older than these.
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
            "Give either `soft_minimum`, the number of experts, or `threshold`, "
            f"its logarithm. Received: soft_minimum={soft_minimum}, "
            f"threshold={threshold}."
        )
    if threshold is None:
        if not 0 < soft_minimum < math.inf:
            raise ValueError(
                "`soft_minimum` is a number of experts: it must be positive and "
                f"finite. Received: soft_minimum={soft_minimum}. For no minimum leave "
                "the loss out."
            )
        threshold = math.log(soft_minimum)
    if not math.isfinite(threshold):
        raise ValueError(
            "`threshold` must be a finite number. Received: "
            f"threshold={threshold}. For no minimum leave the loss out."
        )
    return float(threshold)


def classic_losses(by_modality: bool = False) -> tuple:
    """Importance, load and z-loss, which take no entropy into account.

    The load loss is about the noise of a router: one whose `noise_std` is 0 refuses it;
    give it importance and z-loss.

    Args:
        by_modality: bool, whether each is computed for images and for text apart
            (six losses), or once for all tokens as in the paper (three).

    Returns:
        tuple of `RoutingLoss`.

    Source: LIMoE, section 4.1 ("classic") and appendix B.1.

    Examples:
        >>> losses = ksm.routers.classic_losses(by_modality=True)
        >>> router = ksm.routers.LIMoERouter(num_experts=8, losses=losses)
    """
    functions = (ops.importance_loss, ops.load_loss, ops.z_loss)
    modalities = MODALITIES if by_modality else (None,)
    return tuple(RoutingLoss(f, modality) for f in functions for modality in modalities)


def entropy_losses(
    num_experts: int,
    text_experts: float | None = None,
    image_experts: float | None = None,
    num_selected_experts: int = 1,
) -> tuple:
    """The local entropy of text, and the global entropies of text and images.

    Where a token chooses several experts, the merged entropy takes the place of the
    local one, which would leave it one.

    Args:
        num_experts: int, number of experts of the router.
        text_experts: float, soft minimum of experts for text, see `RoutingLoss`.
            9 of 32 if `None`, as in most ablations; the paper's models with 4 to 64
            experts (figure 12) have `0.6 * num_experts`.
        image_experts: float, soft minimum of experts for images. 20 of 32 if `None`; in
            figure 12 `0.2 * num_experts`, which is under one for 4 experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.

    Returns:
        tuple of `RoutingLoss`.

    Raises:
        ValueError: if a soft minimum is not positive, or `num_selected_experts` is not
            in `[1, num_experts]`.

    Source: LIMoE, section 4.1 ("entropy"), appendices A.2 (thresholds), E.1 (K > 1) and
    E.2 (thresholds grow with the number of experts), table 5.

    Examples:
        >>> losses = ksm.routers.entropy_losses(num_experts=32, text_experts=4)
        >>> router = ksm.routers.LIMoERouter(num_experts=32, losses=losses)
    """
    check_num_selected_experts(num_selected_experts, num_experts)
    if text_experts is None:
        text_experts = max(1.0, _TEXT_SHARE * num_experts)
    if image_experts is None:
        image_experts = max(1.0, _IMAGE_SHARE * num_experts)
    merges = num_selected_experts > 1
    local = ops.merged_entropy_loss if merges else ops.local_entropy_loss
    return (
        RoutingLoss(local, "text"),
        RoutingLoss(ops.global_entropy_loss, "text", soft_minimum=text_experts),
        RoutingLoss(ops.global_entropy_loss, "image", soft_minimum=image_experts),
    )


def checked_losses(losses, num_experts, noise_std):
    """Tuple of the losses of a router, which may be given in serialized form.

    Raises:
        ValueError: if they are no losses, one is given twice, or one makes no sense for
            the router.
    """
    losses = [
        keras.saving.deserialize_keras_object(loss) if isinstance(loss, dict) else loss
        for loss in losses
    ]
    wrong = [loss for loss in losses if not isinstance(loss, RoutingLoss)]
    if wrong:
        raise ValueError(
            "`losses` are objects like `RoutingLoss(ops.importance_loss, weight=0.005)`"
            " from `keras_softmoe.routers`, or the sets that `classic_losses` and "
            f"`entropy_losses` return. Received: losses with {wrong}."
        )
    if len(set(losses)) < len(losses):
        raise ValueError(f"Each loss is given once. Received: losses={losses}.")
    for loss in losses:
        loss.check(num_experts, noise_std)
    return tuple(losses)
