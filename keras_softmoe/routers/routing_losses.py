"""The losses that a `LIMoERouter` averages: which quantity, of which modality."""

import math
from typing import Any, NamedTuple

import keras

from keras_softmoe.ops import entropy
from keras_softmoe.ops import losses as balance
from keras_softmoe.ops.assignment import check_num_selected_experts
from keras_softmoe.sharding import is_distributed

MODALITIES = ("image", "text")

# The thresholds of the ablations, 9 text and 20 image experts of 32, for any number.
_TEXT_SHARE, _IMAGE_SHARE = 9 / 32, 20 / 32


class Routed(NamedTuple):
    """What a loss may look at.

    Attributes:
        logits: `(G, S, E)` tensor, without noise.
        noisy_logits: `(G, S, E)` tensor; the same object where there is no noise.
        probabilities: `(G, S, E)` tensor, without noise.
        valid: dict from each modality that is there to the `(G or 1, S)` bool tensor of
            its tokens. Under the key `None` the tokens of all: a tensor, or `None`
            where none is padding.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        noise_std: float, standard deviation of the noise on the logits.
    """

    logits: Any
    noisy_logits: Any
    probabilities: Any
    valid: dict
    num_selected_experts: int
    noise_std: float


class RoutingLoss:
    """Base class: a loss on the routing of one modality, or of all tokens alike.

    A subclass implements `__call__`.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.

    Raises:
        ValueError: if the modality is none of these.
    """

    def __init__(self, modality=None):
        if modality not in (None, *MODALITIES):
            raise ValueError(
                "Unknown modality. Accepted: 'image', 'text', or `None` for the tokens "
                f"of both. Received: modality={modality!r}."
            )
        self.modality = modality

    def __call__(self, routed):
        """The loss of each group, `(G,)`, from what was `Routed`."""
        raise TypeError(
            f"`{type(self).__name__}` is abstract: it measures nothing. Use one of the "
            "losses in `keras_softmoe.routers`, or implement `__call__`."
        )

    def check(self, num_experts, num_selected_experts, noise_std):
        """Raise `ValueError` if the loss makes no sense for a router."""

    def applies(self, routed):
        """Whether what was routed has the tokens (and the noise) that it is about."""
        return self.modality in routed.valid

    def get_config(self):
        return {"modality": self.modality}

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __eq__(self, other):
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((type(self), *self.get_config().values()))

    def __repr__(self):
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ImportanceLoss(RoutingLoss):
    """`ops.importance_loss`: all experts equally probable, over many tokens.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
    """

    def __call__(self, routed):
        return balance.importance_loss(
            routed.probabilities, routed.valid[self.modality]
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LoadLoss(RoutingLoss):
    """`ops.load_loss`: all experts equally likely to be chosen. Only with noise.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
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

    def check(self, num_experts, num_selected_experts, noise_std):
        if not noise_std > 0:
            raise ValueError(
                "The load loss is about the noise of the router. Received: "
                f"losses with {self!r}, noise_std={noise_std}. Make the noise positive "
                "or leave the loss out."
            )

    def applies(self, routed):
        noisy = routed.noisy_logits is not routed.logits
        return noisy and super().applies(routed)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ZLoss(RoutingLoss):
    """`ops.z_loss`: small logits.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
    """

    def __call__(self, routed):
        return balance.z_loss(routed.logits, routed.valid[self.modality])


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LocalEntropyLoss(RoutingLoss):
    """`ops.local_entropy_loss`: each token sure of its expert.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
    """

    def __call__(self, routed):
        return entropy.local_entropy_loss(
            routed.probabilities, routed.valid[self.modality]
        )


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TargetEntropyLoss(RoutingLoss):
    """`ops.target_entropy_loss`: each token undecided between `K` experts.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
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
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
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

    Give one of the two numbers.

    Args:
        modality: `"image"`, `"text"` or `None` for the tokens of both together.
        soft_minimum: float `S`, experts that have to be used (evenly; more, if
            unevenly) for the loss to be zero.
        threshold: float, its logarithm, in nats.

    Raises:
        ValueError: if both or none are given, or under one expert is asked for.

    Source: LIMoE, appendix B.2: `S = exp(threshold)`.

    Example:

    >>> loss = ksm.routers.GlobalEntropyLoss("text", soft_minimum=9)
    >>> loss.threshold
    2.197...
    """

    def __init__(self, modality=None, soft_minimum=None, threshold=None):
        super().__init__(modality)
        if (soft_minimum is None) == (threshold is None):
            raise ValueError(
                "Give either `soft_minimum`, the number of experts, or `threshold`, "
                f"its logarithm. Received: soft_minimum={soft_minimum}, "
                f"threshold={threshold}."
            )
        if threshold is None:
            if not soft_minimum >= 1:
                raise ValueError(
                    "A modality uses at least one expert: `soft_minimum` must be 1 or "
                    f"more. Received: soft_minimum={soft_minimum}."
                )
            threshold = math.log(soft_minimum)
        if not threshold >= 0:
            raise ValueError(
                "An entropy is not negative: `threshold` must be 0 or more. "
                f"Received: threshold={threshold}."
            )
        self.threshold = float(threshold)

    def __call__(self, routed):
        return entropy.global_entropy_loss(
            routed.probabilities, self.threshold, routed.valid[self.modality]
        )

    def check(self, num_experts, num_selected_experts, noise_std):
        if self.threshold > math.log(num_experts) + 1e-6:
            raise ValueError(
                f"With {num_experts} experts the entropy of routing is at most "
                f"log({num_experts}) = {math.log(num_experts):.4f}, so no more can be "
                f"asked for. Received: num_experts={num_experts} and a threshold of "
                f"{self.threshold:.4f} for {self.modality or 'all'} tokens, a soft "
                f"minimum of {math.exp(self.threshold):.4g} experts. Lower it or add "
                "experts."
            )

    def get_config(self):
        return {**super().get_config(), "threshold": self.threshold}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class MutualInformationLoss(RoutingLoss):
    """`ops.mutual_information_loss`: the modality tells the expert.

    It compares the modalities, so it is there only where both are.
    """

    def __init__(self):
        super().__init__(modality=None)

    def __call__(self, routed):
        masks = [routed.valid[name] for name in MODALITIES]
        return entropy.mutual_information_loss(
            [routed.probabilities] * len(masks), masks
        )

    def applies(self, routed):
        return all(name in routed.valid for name in MODALITIES)

    def get_config(self):
        return {}


def classic_losses(by_modality=False):
    """The losses that know of no entropy: importance, load and z-loss.

    Args:
        by_modality: bool, whether each is computed for images and for text apart
            (six losses), or once for all tokens as in the paper (three).

    Returns:
        tuple of `RoutingLoss`.

    Source: LIMoE, section 4.1 ("classic") and appendix B.1.
    """
    kinds = (ImportanceLoss, LoadLoss, ZLoss)
    modalities = MODALITIES if by_modality else (None,)
    return tuple(kind(modality) for kind in kinds for modality in modalities)


def entropy_losses(
    num_experts, text_experts=None, image_experts=None, num_selected_experts=1
):
    """The local entropy of text, and the global entropies of text and images.

    Where a token chooses several experts, the merged entropy takes the place of the
    local one, which would leave it one.

    Args:
        num_experts: int, number of experts of the router.
        text_experts: float, soft minimum of experts for text. 9 of 32 if `None`.
        image_experts: float, soft minimum of experts for images. 20 of 32 if `None`.
        num_selected_experts: int, the number `K` of experts that a token chooses.

    Returns:
        tuple of `RoutingLoss`.

    Raises:
        ValueError: if a soft minimum is under one, or `num_selected_experts` is not in
            `[1, num_experts]`.

    Source: LIMoE, section 4.1 ("entropy"), appendices A.2 (thresholds), E.1 (K > 1) and
    E.2 (thresholds grow with the number of experts).

    Example:

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
