"""LIMoE's router and the sets of losses of its paper."""

import functools
from collections.abc import Sequence
from typing import ClassVar, Unpack

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import (
    check_bools,
    check_numbers,
    check_whole_numbers,
    received,
)
from keras_softmoe.ops import router_losses
from keras_softmoe.ops.assignment import (
    PRIORITIES,
    assign_choices,
    check_num_selected_experts,
)
from keras_softmoe.ops.kernels import matmul
from keras_softmoe.ops.numbers import Constant, lowest, positions, where
from keras_softmoe.routers.assignment import TokenChoice
from keras_softmoe.routers.losses import MODALITIES, RoutingLoss
from keras_softmoe.routers.scores import Softmax, live, policy
from keras_softmoe.routers.sparse import SparseRouter, SparseSettings

# The thresholds of the ablations, 9 text and 20 image experts of 32, for any number.
_TEXT_SHARE, _IMAGE_SHARE = 9 / 32, 20 / 32


def classic_losses(by_modality: bool = False) -> tuple:
    """Return the importance, load and z-loss. The load loss needs a router with noise.

    Args:
        by_modality: bool, whether each is computed separately for images and text (six
            losses) or once for all tokens, as in the paper (three).

    Returns:
        tuple of `RoutingLoss`.

    Source: LIMoE, section 4.1 ("classic") and appendix B.1.

    Examples:
        >>> losses = ksm.routers.classic_losses(by_modality=True)
        >>> router = ksm.routers.LIMoERouter(num_experts=8, losses=losses)
    """
    functions = (
        router_losses.importance_loss,
        router_losses.load_loss,
        router_losses.z_loss,
    )
    modalities = MODALITIES if by_modality else (None,)
    return tuple(RoutingLoss(f, modality) for f in functions for modality in modalities)


def entropy_losses(
    num_experts: int,
    text_experts: float | None = None,
    image_experts: float | None = None,
    num_selected_experts: int = 1,
) -> tuple:
    """Return the local entropy of text, and the global entropies of text and images.

    If a token chooses several experts, the merged entropy replaces the local one, which
    would leave it a single expert.

    Args:
        num_experts: int, number of experts of the router.
        text_experts: float, soft minimum of experts for text, see `RoutingLoss`. By
            default 9 of 32, as in most ablations; in figure 12 `0.6 * num_experts`.
        image_experts: float, soft minimum of experts for images. By default 20 of 32;
            in figure 12 `0.2 * num_experts`.
        num_selected_experts: int, the number `K` of experts that a token chooses.

    Returns:
        tuple of `RoutingLoss`.

    Raises:
        ValueError: if a soft minimum is not positive, or `num_selected_experts` is not
            in `[1, num_experts]`.

    Source: LIMoE, section 4.1 ("entropy"), appendices A.2, E.1 (K > 1) and E.2, table
    5.

    Examples:
        >>> losses = ksm.routers.entropy_losses(num_experts=32, text_experts=4)
        >>> router = ksm.routers.LIMoERouter(num_experts=32, losses=losses)
    """
    check_num_selected_experts(num_selected_experts, num_experts)
    if text_experts is None:
        text_experts = max(1.0, _TEXT_SHARE * num_experts)
    if image_experts is None:
        image_experts = max(1.0, _IMAGE_SHARE * num_experts)
    local = router_losses.local_entropy_loss
    if num_selected_experts > 1:
        local = router_losses.merged_entropy_loss
    of_all = router_losses.global_entropy_loss
    return (
        RoutingLoss(local, "text"),
        RoutingLoss(of_all, "text", soft_minimum=text_experts),
        RoutingLoss(of_all, "image", soft_minimum=image_experts),
    )


@policy
class Modalities:
    """Images and text, which may differ in kernels, experts and capacity."""

    per_modality: bool = False
    image_experts: int | None = None
    text_experts: int | None = None
    single_modality_capacity_factor: float = live(default=16.0)
    kept_experts: tuple | None = None
    num_predicted_experts: int | None = None

    def __post_init__(self):
        check_bools(per_modality=self.per_modality)
        names = ("image_experts", "text_experts", "num_predicted_experts")
        counts = {name: getattr(self, name) for name in names}
        check_whole_numbers(1, **{k: n for k, n in counts.items() if n is not None})
        factor = self.single_modality_capacity_factor
        check_numbers(over=0, single_modality_capacity_factor=factor)
        if self.kept_experts is not None:
            kept_experts = tuple(int(expert) for expert in self.kept_experts)
            object.__setattr__(self, "kept_experts", kept_experts)

    @property
    def kernels(self):
        """Names of the weights that map tokens to logits."""
        if not self.per_modality:
            return ("kernel",)
        return tuple(f"{name}_kernel" for name in MODALITIES)

    def check(self, num_experts, choices):
        """Raise unless the policies of a router fit together."""
        self._check_kept_experts(num_experts)
        # Each modality needs an expert for each choice, and each expert a modality.
        counts = {"image": self.image_experts, "text": self.text_experts}
        total = self.num_predicted_experts or num_experts
        for name, count in counts.items():
            if count is not None and not choices <= count <= total:
                raise ValueError(
                    f"`{name}_experts` must be from {choices}, the number of choices, "
                    f"to {total}, the number of experts. "
                    + received(**{f"{name}_experts": count})
                )
        if sum(total if c is None else c for c in counts.values()) < total:
            raise ValueError(
                "Some experts would be used by neither modality: `image_experts` and "
                f"`text_experts` must add up to at least {total}. "
                + received(
                    image_experts=self.image_experts, text_experts=self.text_experts
                )
            )

    def _check_kept_experts(self, num_experts):
        kept_experts, total = self.kept_experts, self.num_predicted_experts
        found = received(
            kept_experts=kept_experts,
            num_experts=num_experts,
            num_predicted_experts=total,
        )
        if kept_experts is None:
            if total not in (None, num_experts):
                raise ValueError(
                    "A router that predicts more experts than it has needs "
                    f"`kept_experts`. {found}"
                )
            return
        total = total or num_experts
        inside = set(kept_experts) <= set(range(total))
        if list(kept_experts) != sorted(set(kept_experts)) or not inside:
            raise ValueError(
                "`kept_experts` are indices of experts, ascending, from 0 to "
                f"{total - 1}. {found}"
            )
        if len(kept_experts) != num_experts:
            raise ValueError(f"`num_experts` is the number of kept experts. {found}")

    def masks(self, tokens, modalities):
        """Return a dict from modalities to the `(1, S)` bool masks of their tokens."""
        known = tuple((name, count) for name, count in modalities)
        masks = _masks(tokens.shape[1], known)
        return {name: mask.on(tokens) for name, mask in masks.items()}

    def logits(self, tokens, kernels, masks):
        """Return the `(G, S, E)` products of tokens and kernels."""
        if not self.per_modality:
            return matmul(tokens, kernels[0])
        kernels = dict(zip(MODALITIES, kernels, strict=True))
        if len(masks) == 1:
            (name,) = masks
            return matmul(tokens, kernels[name])
        # Both products of every token, as compilers need shapes: only half are used.
        image, text = (matmul(tokens, kernels[name]) for name in MODALITIES)
        return ops.where(ops.expand_dims(masks["image"], -1), image, text)

    def allowed(self, logits, masks):
        """Return the logits, the lowest for experts closed to a modality."""
        num_experts = logits.shape[-1]
        experts = positions(num_experts, logits)
        # Images have the first experts, text the last; in between they share. Barred
        # logits are lower than with any noise, and have a probability of zero.
        if "image" in masks and self.image_experts:
            is_open = ~masks["image"][..., None] | (experts < self.image_experts)
            logits = where(is_open, logits, lowest(logits))
        if "text" in masks and self.text_experts:
            first = num_experts - self.text_experts
            is_open = ~masks["text"][..., None] | (experts >= first)
            logits = where(is_open, logits, lowest(logits))
        return logits

    def kept(self, probabilities):
        """Return the probabilities of the experts that were not pruned."""
        if self.kept_experts is None:
            return probabilities
        # After the softmax over all, so that gates stay as large as in training
        index = _kept_experts(self.kept_experts).on(probabilities)
        if keras.backend.backend() == "torch":
            return probabilities.index_select(-1, index)
        return ops.take(probabilities, index, axis=-1)


@policy
class ModalityTokenChoice(TokenChoice):
    """Token choice with the priorities `"image_first"` and `"text_first"`."""

    # Not settings of LIMoE's router
    keep_fraction: ClassVar[float] = 1.0
    normalize_gates: ClassVar[bool] = False
    priorities: ClassVar[tuple] = (*PRIORITIES, "image_first", "text_first")

    def assign(self, selection, chosen, slots, *, valid, masks, seed, sharded):
        priority = self.priority
        # Only one of the two may be in a call: then all tokens go by position.
        modality, _, is_first = priority.rpartition("_")
        if is_first == "first":
            priority = "position"
            if modality in masks:
                # 1 for tokens of the modality, 0 for others: ties go by position.
                mask = ops.cast(masks[modality], "float32")
                priority = ops.broadcast_to(mask, ops.shape(selection)[:2])
        return assign_choices(
            selection, chosen, slots, priority, valid, seed=seed, sharded=sharded
        )


class LIMoESettings(SparseSettings, total=False):
    """Keyword arguments of all sparse routers, and the capacity factor."""

    capacity_factor: float | None


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoERouter(SparseRouter):
    """LIMoE's router: tokens of images and text choose among the same experts.

    A token chooses its most probable experts, as in V-MoE; losses distinguish
    modalities.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        priority: as in `SoftmaxTokenChoiceRouter`; or `"image_first"` or
            `"text_first"`, one modality before the other, each by position.
        loss_weight: float, weight of the average of the losses.
        per_modality: bool, whether images and text have separate kernels,
            `image_kernel` and `text_kernel` instead of `kernel` `(D, E)`.
        image_experts: int, number of experts open to images, from the first; or `None`.
        text_experts: int, number of experts open to text, up to the last; or `None`.
        single_modality_capacity_factor: float, slots per choice if a call has only
            images or only text, which do not use all experts.
        noise_std: float, see `SoftmaxTokenChoiceRouter`.
        kept_experts: for a pruned router the kept experts: `num_experts` ascending ints
            under `num_predicted_experts`. The softmax is over all experts of the
            unpruned model, so gates are as large as in its training.
        num_predicted_experts: int, number of experts before pruning.
        **settings: `capacity_factor`, by default 1.05; the others as in
            `SoftmaxTokenChoiceRouter`. By default `losses` are
            `classic_losses() + entropy_losses(num_experts)`.

    Called on `(G, S, D)` tokens with `modalities`, pairs of a modality and its number
    of tokens, which repeat in a group, it returns a `Decision` with a `SlotRouting`.

    Raises:
        ValueError: if a threshold is over `log(num_experts)`, an expert is closed to
            both modalities, a modality has fewer experts than a token chooses, the
            modalities of a call are missing, or an argument has no accepted value.

    Source: LIMoE, section 2, appendices B, C (priorities), D.1 (one modality), E.1 to
    E.4.

    Examples:
        >>> router = ksm.routers.LIMoERouter(num_experts=8)
        >>> tokens = np.random.normal(size=(2, 24, 32))
        >>> decision = router(tokens, modalities=(("image", 16), ("text", 8)))
        >>> decision.routing.token.shape
        (2, 8, 3)
    """

    knows_modalities = True

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 1,
        *,
        priority: str = "sum",
        loss_weight: float = 0.04,
        per_modality: bool = False,
        image_experts: int | None = None,
        text_experts: int | None = None,
        single_modality_capacity_factor: float = 16.0,
        noise_std: float = 1.0,
        kept_experts: Sequence[int] | None = None,
        num_predicted_experts: int | None = None,
        **settings: Unpack[LIMoESettings],
    ):
        check_whole_numbers(1, num_experts=num_experts)
        check_numbers(loss_weight=loss_weight)
        assignment = ModalityTokenChoice(num_selected_experts, priority)
        modalities = Modalities(
            per_modality=per_modality,
            image_experts=image_experts,
            text_experts=text_experts,
            single_modality_capacity_factor=single_modality_capacity_factor,
            kept_experts=kept_experts,
            num_predicted_experts=num_predicted_experts,
        )
        if settings.get("losses") is None:
            # With the load loss, which raises an error without noise: nobody gets
            # fewer losses than the paper's without choosing so.
            settings["losses"] = classic_losses() + entropy_losses(
                num_predicted_experts or num_experts,
                num_selected_experts=num_selected_experts,
            )
        super().__init__(
            num_experts,
            Softmax(noise_std),
            assignment,
            modalities,
            loss_weight=loss_weight,
            **settings,
        )

    def call(self, tokens, valid=None, training=False, num_tokens=None, modalities=()):
        masks = self.modalities.masks(tokens, modalities)
        return self._decide(tokens, valid, training, num_tokens, masks)


@functools.lru_cache(maxsize=256)
def _masks(group_tokens, modalities):
    names = [name for name, count in modalities for _ in range(count)]
    if not names or set(names) - set(MODALITIES) or group_tokens % len(names):
        raise ValueError(
            "This router needs the modality of each token: pass "
            "`modalities=(('image', 64), ('text', 16))`. Received: "
            f"modalities={modalities} for {group_tokens} tokens in a group."
        )
    # A group has the tokens of several pairs, one after the other.
    names = np.tile(names, group_tokens // len(names))
    return {name: Constant((names == name)[None]) for name, _ in modalities}


@functools.lru_cache(maxsize=256)
def _kept_experts(kept_experts):
    return Constant(np.array(kept_experts, "int32"))
