"""Policies of modalities: the differences between images and text."""

import numpy as np
from keras import ops

from keras_softmoe.checks import check_bools, check_numbers, check_whole_numbers
from keras_softmoe.ops.numbers import lowest
from keras_softmoe.routers.losses import MODALITIES
from keras_softmoe.routers.scores import live, policy


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

    @property
    def is_pruned(self):
        return self.kept_experts is not None

    def check(self, num_experts, choices):
        """Raise unless the policies of a router fit together."""
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
                    "A router that predicts more experts than it has needs "
                    "`kept_experts`. Received: kept_experts=None, "
                    f"num_experts={num_experts}, num_predicted_experts={total}."
                )
            return
        total = total or num_experts
        inside = set(kept_experts) <= set(range(total))
        if list(kept_experts) != sorted(set(kept_experts)) or not inside:
            raise ValueError(
                "`kept_experts` are indices of experts, ascending, from 0 to "
                f"{total - 1}. Received: kept_experts={kept_experts}."
            )
        if len(kept_experts) != num_experts:
            raise ValueError(
                "`num_experts` is the number of kept experts. Received: "
                f"num_experts={num_experts}, kept_experts={kept_experts}."
            )

    def masks(self, group_tokens, modalities):
        """Return a dict from modalities to the `(1, S)` bool masks of their tokens."""
        names = [name for name, count in modalities for _ in range(count)]
        if not names or set(names) - set(MODALITIES) or group_tokens % len(names):
            raise ValueError(
                "This router needs the modality of each token: pass "
                "`modalities=(('image', 64), ('text', 16))`. Received: "
                f"modalities={modalities} for {group_tokens} tokens in a group."
            )
        names = np.tile(names, group_tokens // len(names))
        return {
            name: ops.convert_to_tensor((names == name)[None]) for name, _ in modalities
        }

    def logits(self, tokens, kernels, masks):
        """Return the `(G, S, E)` products of tokens and kernels."""
        if not self.per_modality:
            return ops.matmul(tokens, kernels[0])
        kernels = dict(zip(MODALITIES, kernels, strict=True))
        if len(masks) == 1:
            (name,) = masks
            return ops.matmul(tokens, kernels[name])
        image, text = (ops.matmul(tokens, kernels[name]) for name in MODALITIES)
        return ops.where(ops.expand_dims(masks["image"], -1), image, text)

    def allowed(self, logits, masks):
        """Return the logits, the lowest for experts closed to a modality."""
        for name, mask in masks.items():
            barred = self._barred(name, logits.shape[-1])
            if barred.any():
                # (1, S, E)
                barred = ops.logical_and(ops.expand_dims(mask, -1), barred)
                # Lower than any noise
                logits = ops.where(barred, lowest(logits), logits)
        return logits

    def _barred(self, modality, num_experts):
        """Return an `(E,)` bool array of the experts closed to a modality."""
        index = np.arange(num_experts)
        if modality == "image":
            return index >= (self.image_experts or num_experts)
        return index < num_experts - (self.text_experts or num_experts)

    def kept(self, probabilities):
        """Return the probabilities of the experts that were not pruned."""
        if not self.is_pruned:
            return probabilities
        return ops.take(probabilities, np.array(self.kept_experts), axis=-1)
