"""Losses of routers: which quantity, of which tokens, with which weight."""

import math

import keras

from keras_softmoe.checks import check_numbers, quote
from keras_softmoe.ops import entropy
from keras_softmoe.ops import losses as balance
from keras_softmoe.ops.assignment import check_num_selected_experts
from keras_softmoe.ops.backend import softmax
from keras_softmoe.sharding import is_distributed

MODALITIES = ("image", "text")

# The thresholds of the ablations, 9 text and 20 image experts of 32, for any number.
_TEXT_SHARE, _IMAGE_SHARE = 9 / 32, 20 / 32


class Routed:
    """What a loss may look at.

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
        # At once, and not when first asked for: `torch.compile` could not look into
        # `functools.cached_property`.
        self.probabilities = self.noisy_probabilities = softmax(logits, axis=-1)
        if noisy_logits is not logits:
            self.noisy_probabilities = softmax(noisy_logits, axis=-1)


class RoutingLoss:
    """Base class of the losses of routers.

    A subclass implements `__call__`.

    Args:
        modality: `"image"`, `"text"` or `None` for all tokens. Only a `LIMoERouter`
            knows modalities.
        weight: float, factor of the loss in the router's sum.

    Raises:
        ValueError: if the modality is none of these.

    Examples:
        >>> class LogitLoss(ksm.routers.RoutingLoss):
        ...     # Mean square of the logits.
        ...
        ...     def __call__(self, routed):
        ...         return keras.ops.mean(routed.logits**2, axis=(1, 2))
        >>> router = ksm.routers.LIMoERouter(8, losses=[LogitLoss(weight=0.01)])
    """

    def __init__(self, modality: str | None = None, weight: float = 1.0):
        if modality not in (None, *MODALITIES):
            raise ValueError(
                "Unknown modality. Accepted: 'image', 'text', or `None` for the tokens "
                f"of both. Received: modality={quote(modality)}. Pass one of these."
            )
        check_numbers(weight=weight)
        self.modality = modality
        self.weight = weight

    def __call__(self, routed):
        """The loss of each group, `(G,)`, before it is multiplied by its weight."""
        raise TypeError(
            f"`{type(self).__name__}` is abstract: it measures nothing. Use one of the "
            "losses in `keras_softmoe.routers`, or implement `__call__`."
        )

    def check(
        self, num_experts: int, num_selected_experts: int, noise_std: float
    ) -> None:
        """Raise `ValueError` if the loss makes no sense for a router."""

    def applies(self, routed: Routed) -> bool:
        """Whether what was routed has the tokens (and the noise) that it is about."""
        return self.modality in routed.valid

    def get_config(self) -> dict:
        # As in files that are older than the weight.
        weight = {} if self.weight == 1.0 else {"weight": self.weight}
        return {"modality": self.modality, **weight}

    @classmethod
    def from_config(cls, config: dict) -> "RoutingLoss":
        return cls(**config)

    def __eq__(self, other):
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((type(self), *self.get_config().values()))

    def __repr__(self):
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


def serialize_loss(loss):
    """What `keras.saving.serialize_keras_object` returns, without its imports.

    Keras would import TensorFlow, for every layer that clones its router.
    """
    cls = type(loss)
    return {
        "module": cls.__module__,
        "class_name": cls.__name__,
        "config": loss.get_config(),
        "registered_name": keras.saving.get_registered_name(cls),
    }


def checked_losses(losses, num_experts, num_selected_experts, noise_std):
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
            "`losses` are objects like `ImportanceLoss(weight=0.005)` from "
            "`keras_softmoe.routers`, or the sets that `classic_losses` and "
            f"`entropy_losses` return. Received: losses with {wrong}."
        )
    if len(set(losses)) < len(losses):
        raise ValueError(f"Each loss is given once. Received: losses={losses}.")
    for loss in losses:
        loss.check(num_experts, num_selected_experts, noise_std)
    return tuple(losses)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ImportanceLoss(RoutingLoss):
    """`ops.importance_loss`: all experts equally probable, over many tokens.

    Args:
        modality: as in `RoutingLoss`.
        weight: as in `RoutingLoss`.

    Source: V-MoE, appendix A ("importance loss").

    Examples:
        >>> losses = [ksm.routers.ImportanceLoss(weight=0.5)]
        >>> router = ksm.routers.LIMoERouter(num_experts=8, losses=losses)
    """

    def __call__(self, routed):
        return balance.importance_loss(
            routed.probabilities, routed.valid[self.modality]
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LoadLoss(RoutingLoss):
    """`ops.load_loss`: all experts equally likely to be chosen. Only with noise.

    Args:
        modality: as in `RoutingLoss`.
        weight: as in `RoutingLoss`.

    Raises:
        ValueError: when a router is made with it whose `noise_std` is 0.

    Source: V-MoE, appendix A ("load loss").

    Examples:
        >>> losses = [ksm.routers.LoadLoss(weight=0.5)]
        >>> router = ksm.routers.LIMoERouter(
        ...     num_experts=8, losses=losses, noise_std=1.0
        ... )
    """

    def __call__(self, routed):
        return balance.load_loss(
            routed.logits,
            routed.noisy_logits,
            routed.num_selected_experts,
            routed.noise_std,
            routed.valid[self.modality],
            sharded=is_distributed(),
        )

    def check(
        self, num_experts: int, num_selected_experts: int, noise_std: float
    ) -> None:
        if not noise_std > 0:
            raise ValueError(
                "The load loss is about the noise of the router. Received: "
                f"losses with {self!r}, noise_std={noise_std}. Make the noise positive "
                "or leave the loss out."
            )

    def applies(self, routed: Routed) -> bool:
        noisy = routed.noisy_logits is not routed.logits
        return noisy and super().applies(routed)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class GShardLoss(RoutingLoss):
    """`ops.gshard_loss`: no expert both chosen often and probable.

    Args:
        modality: as in `RoutingLoss`.
        weight: as in `RoutingLoss`.

    Source: Lepikhin et al. 2020 (GShard), section 2.2; router study, appendix A.

    Examples:
        >>> losses = [ksm.routers.GShardLoss(weight=0.01)]
        >>> router = ksm.routers.LIMoERouter(num_experts=8, losses=losses)
    """

    def __call__(self, routed):
        return balance.gshard_loss(
            routed.noisy_probabilities, routed.valid[self.modality]
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ZLoss(RoutingLoss):
    """`ops.z_loss`: small logits.

    Args:
        modality: as in `RoutingLoss`.
        weight: as in `RoutingLoss`.

    Source: Zoph et al. 2022 (ST-MoE), section 3; LIMoE, appendices.

    Examples:
        >>> losses = [ksm.routers.ZLoss(weight=0.001)]
        >>> router = ksm.routers.LIMoERouter(num_experts=8, losses=losses)
    """

    def __call__(self, routed):
        return balance.z_loss(routed.logits, routed.valid[self.modality])


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LocalEntropyLoss(RoutingLoss):
    """`ops.local_entropy_loss`: each token sure of its expert.

    Args:
        modality: as in `RoutingLoss`.
        weight: as in `RoutingLoss`.

    Source: LIMoE, section 2.2.2 ("local entropy").

    Examples:
        >>> losses = [ksm.routers.LocalEntropyLoss("text")]
        >>> router = ksm.routers.LIMoERouter(num_experts=8, losses=losses)
    """

    def __call__(self, routed):
        return entropy.local_entropy_loss(
            routed.probabilities, routed.valid[self.modality]
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TargetEntropyLoss(RoutingLoss):
    """`ops.target_entropy_loss`: each token undecided between `K` experts.

    Args:
        modality: as in `RoutingLoss`.
        weight: as in `RoutingLoss`.

    Source: LIMoE, appendix E.1 ("target entropy").

    Examples:
        >>> losses = [ksm.routers.TargetEntropyLoss("text")]
        >>> router = ksm.routers.LIMoERouter(8, num_selected_experts=2, losses=losses)
    """

    def __call__(self, routed):
        return entropy.target_entropy_loss(
            routed.probabilities,
            routed.num_selected_experts,
            routed.valid[self.modality],
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class MergedEntropyLoss(RoutingLoss):
    """`ops.merged_entropy_loss`: each token sure of its `K` experts together.

    Args:
        modality: as in `RoutingLoss`.
        weight: as in `RoutingLoss`.

    Source: LIMoE, appendix E.1 ("merged entropy").

    Examples:
        >>> losses = [ksm.routers.MergedEntropyLoss("text")]
        >>> router = ksm.routers.LIMoERouter(8, num_selected_experts=2, losses=losses)
    """

    def __call__(self, routed):
        return entropy.merged_entropy_loss(
            routed.probabilities,
            routed.num_selected_experts,
            routed.valid[self.modality],
            sharded=is_distributed(),
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class GlobalEntropyLoss(RoutingLoss):
    """`ops.global_entropy_loss`: a modality on at least so many experts.

    Give one of the two numbers. Under one expert nothing is asked for: the loss is zero
    whatever the routing, and only counts among those that a `LIMoERouter` averages.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
        soft_minimum: positive float `S`, experts that have to be used (evenly; more,
            if unevenly) for the loss to be zero.
        threshold: float, its logarithm, in nats. May be negative.
        weight: as in `RoutingLoss`.

    Raises:
        ValueError: if both or none are given, or `S` is not positive and finite.

    Source: LIMoE, appendix B.2: `S = exp(threshold)`; table 5 (runs of figure 12) has
    `log(0.8)`.

    Examples:
        >>> loss = ksm.routers.GlobalEntropyLoss("text", soft_minimum=9)
        >>> loss.threshold
        2.197...
    """

    def __init__(
        self,
        modality: str | None = None,
        soft_minimum: float | None = None,
        threshold: float | None = None,
        weight: float = 1.0,
    ):
        super().__init__(modality, weight)
        if (soft_minimum is None) == (threshold is None):
            raise ValueError(
                "Give either `soft_minimum`, the number of experts, or `threshold`, "
                f"its logarithm. Received: soft_minimum={soft_minimum}, "
                f"threshold={threshold}."
            )
        if threshold is None:
            if not 0 < soft_minimum < math.inf:
                raise ValueError(
                    "`soft_minimum` is a number of experts that has a logarithm: it "
                    "must be positive and finite. Received: "
                    f"soft_minimum={soft_minimum}. To ask for nothing, leave the loss "
                    "out."
                )
            threshold = math.log(soft_minimum)
        if not math.isfinite(threshold):
            raise ValueError(
                "`threshold` must be a finite number. Received: "
                f"threshold={threshold}. To ask for nothing, leave the loss out."
            )
        self.threshold = float(threshold)

    def __call__(self, routed):
        return entropy.global_entropy_loss(
            routed.probabilities, self.threshold, routed.valid[self.modality]
        )

    def check(
        self, num_experts: int, num_selected_experts: int, noise_std: float
    ) -> None:
        if self.threshold > math.log(num_experts) + 1e-6:
            raise ValueError(
                f"With {num_experts} experts the entropy of routing is at most "
                f"log({num_experts}) = {math.log(num_experts):.4f}, so no more can be "
                f"asked for. Received: num_experts={num_experts} and a threshold of "
                f"{self.threshold:.4f} for {self.modality or 'all'} tokens, a soft "
                f"minimum of {math.exp(self.threshold):.4g} experts. Lower it or add "
                "experts."
            )

    def get_config(self) -> dict:
        return {**super().get_config(), "threshold": self.threshold}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class MutualInformationLoss(RoutingLoss):
    """`ops.mutual_information_loss`: the modality tells the expert.

    It compares the modalities, so it is there only where both are.

    Args:
        weight: as in `RoutingLoss`.

    Source: LIMoE, appendix B.1 ("mutual-information loss").

    Examples:
        >>> losses = [ksm.routers.MutualInformationLoss()]
        >>> router = ksm.routers.LIMoERouter(num_experts=8, losses=losses)
    """

    def __init__(self, weight: float = 1.0):
        super().__init__(None, weight)

    def __call__(self, routed):
        masks = [routed.valid[name] for name in MODALITIES]
        return entropy.mutual_information_loss(
            [routed.probabilities] * len(masks), masks
        )

    def applies(self, routed: Routed) -> bool:
        return all(name in routed.valid for name in MODALITIES)

    def get_config(self) -> dict:
        config = super().get_config()
        del config["modality"]
        return config


def classic_losses(by_modality: bool = False) -> tuple:
    """The losses that know of no entropy: importance, load and z-loss.

    The load loss is about the noise of a router: one whose `noise_std` is 0 refuses it,
    and takes `(ImportanceLoss(), ZLoss())`.

    Args:
        by_modality: bool, whether each is computed for images and for text apart
            (six losses), or once for all tokens as in the paper (three).

    Returns:
        tuple of `RoutingLoss`.

    Source: LIMoE, section 4.1 ("classic") and appendix B.1.

    Examples:
        >>> losses = ksm.routers.classic_losses(by_modality=True)
        >>> router = ksm.routers.LIMoERouter(
        ...     num_experts=8, losses=losses, noise_std=1.0
        ... )
    """
    kinds = (ImportanceLoss, LoadLoss, ZLoss)
    modalities = MODALITIES if by_modality else (None,)
    return tuple(kind(modality) for kind in kinds for modality in modalities)


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
        text_experts: float, soft minimum of experts for text, see `GlobalEntropyLoss`.
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
    local = LocalEntropyLoss if num_selected_experts == 1 else MergedEntropyLoss
    return (
        local("text"),
        GlobalEntropyLoss("text", soft_minimum=text_experts),
        GlobalEntropyLoss("image", soft_minimum=image_experts),
    )
