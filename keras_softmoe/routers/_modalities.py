"""Policies of LIMoE: images and text may differ in kernels, experts and capacity."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from keras import ops

from keras_softmoe.checks import check_bools, check_numbers, check_whole_numbers
from keras_softmoe.ops.assignment import PRIORITIES
from keras_softmoe.ops.constants import lowest
from keras_softmoe.routers._losses import MODALITIES
from keras_softmoe.routers._policies import TokenChoice, live


@dataclass(frozen=True)
class OneKind:
    """Tokens of one kind: one kernel, and all experts for all tokens."""

    # Names of the weights that map tokens to logits
    kernels = ("kernel",)
    is_pruned = False
    num_predicted_experts = None

    def check(self, num_experts, choices):
        """Raise unless the policies of a router go together."""

    def masks(self, group_tokens, modalities):
        """Dict from modalities to the `(1, S)` bool tensors of their tokens."""
        if modalities:
            raise ValueError(
                "Only a `LIMoERouter` tells the tokens of images and text apart. "
                f"Received: modalities={modalities}. Leave them out."
            )
        return {}

    def logits(self, tokens, kernels, masks):
        """`(G, S, E)` products of the tokens and the weights in `kernels`."""
        return ops.matmul(tokens, kernels[0])

    def allowed(self, logits, masks):
        """The logits, the lowest where a modality must not use an expert."""
        return logits

    def left(self, probabilities):
        """The probabilities of the experts that are left."""
        return probabilities


@dataclass(frozen=True)
class Modalities(OneKind):
    """Tokens of images and text, which may differ in kernels, experts and capacity."""

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
        if not self.per_modality:
            return ("kernel",)
        return tuple(f"{name}_kernel" for name in MODALITIES)

    @property
    def is_pruned(self):
        return self.kept_experts is not None

    def check(self, num_experts, choices):
        self._check_kept_experts(num_experts)
        counts = {"image": self.image_experts, "text": self.text_experts}
        total = self.num_predicted_experts or num_experts
        for name, count in counts.items():
            if count is not None and not choices <= count <= total:
                raise ValueError(
                    f"`{name}_experts` must lie between the number of choices, "
                    f"{choices}, and that of experts, {total}. Received: "
                    f"{name}_experts={count}."
                )
        if sum(total if c is None else c for c in counts.values()) < total:
            raise ValueError(
                "Some experts would be used by neither modality: `image_experts` and "
                f"`text_experts` must add up to at least {total}. Received: "
                f"image_experts={self.image_experts}, "
                f"text_experts={self.text_experts}."
            )

    def _check_kept_experts(self, num_experts):
        kept_experts, total = self.kept_experts, self.num_predicted_experts
        if kept_experts is None:
            if total not in (None, num_experts):
                raise ValueError(
                    "A router that predicts more experts than there are has to know "
                    "which of them are left. Received: kept_experts=None, "
                    f"num_experts={num_experts}, num_predicted_experts={total}."
                )
            return
        total = total or num_experts
        inside = set(kept_experts) <= set(range(total))
        if list(kept_experts) != sorted(set(kept_experts)) or not inside:
            raise ValueError(
                "`kept_experts` counts the experts that are left from 0, ascending, "
                f"under {total}. Received: kept_experts={kept_experts}."
            )
        if len(kept_experts) != num_experts:
            raise ValueError(
                "`num_experts` is the number of experts that are left. Received: "
                f"num_experts={num_experts}, kept_experts={kept_experts}."
            )

    def masks(self, group_tokens, modalities):
        names = [name for name, count in modalities for _ in range(count)]
        if not names or set(names) - set(MODALITIES) or group_tokens % len(names):
            raise ValueError(
                "This router has to know which tokens are of images and which of text: "
                "call `layers.MoE` on a dict with `'image'`, `'text'` or both, or pass "
                "`modalities=(('image', 64), ('text', 16))`. Received: "
                f"modalities={modalities} for {group_tokens} tokens in a group."
            )
        names = np.tile(names, group_tokens // len(names))
        return {
            name: ops.convert_to_tensor((names == name)[None]) for name, _ in modalities
        }

    def logits(self, tokens, kernels, masks):
        if not self.per_modality:
            return ops.matmul(tokens, kernels[0])
        kernels = dict(zip(MODALITIES, kernels, strict=True))
        if len(masks) == 1:
            (name,) = masks
            return ops.matmul(tokens, kernels[name])
        image, text = (ops.matmul(tokens, kernels[name]) for name in MODALITIES)
        return ops.where(ops.expand_dims(masks["image"], -1), image, text)

    def allowed(self, logits, masks):
        for name, mask in masks.items():
            barred = self._barred(name, logits.shape[-1])
            if barred.any():
                # (1, S, E)
                barred = ops.logical_and(ops.expand_dims(mask, -1), barred)
                # No noise brings it back.
                logits = ops.where(barred, lowest(logits), logits)
        return logits

    def _barred(self, modality, num_experts):
        """`(E,)` bool array: the experts that a modality must not use."""
        index = np.arange(num_experts)
        if modality == "image":
            return index >= (self.image_experts or num_experts)
        return index < num_experts - (self.text_experts or num_experts)

    def left(self, probabilities):
        if not self.is_pruned:
            return probabilities
        return ops.take(probabilities, np.array(self.kept_experts), axis=-1)


@dataclass(frozen=True)
class ModalityTokenChoice(TokenChoice):
    """Every token chooses its best experts, one modality before the other if wanted."""

    # Not settings of LIMoE's router
    keep_fraction: ClassVar[float] = 1.0
    normalize_gates: ClassVar[bool] = False
    priorities: ClassVar[tuple] = (*PRIORITIES, "image_first", "text_first")

    def rank(self, selection, masks):
        modality, _, is_first = self.priority.rpartition("_")
        if is_first != "first":
            return self.priority
        if modality not in masks:
            return "position"
        return ops.zeros_like(selection[..., 0]) + ops.cast(masks[modality], "float32")
