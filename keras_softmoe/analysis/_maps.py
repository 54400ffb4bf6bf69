"""Routing of some images or pairs, patch by patch and word by word."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.analysis._examples import ExpertExamples, ExpertPatches, pieces
from keras_softmoe.analysis._figures import figure_method
from keras_softmoe.analysis._streaming import tokens_per_input
from keras_softmoe.ops import ChoiceRouting, DenseRouting, SlotRouting, to_dense
from keras_softmoe.ops.routing import to_slots


class RoutingMaps(NamedTuple):
    """Routing of `B` images at one block, laid out on the grid of patches.

    The class token, if the model has one, is left out. If a LIMoE routes text alone,
    attributes of images are `None`; if it routes images alone, those of text.

    Attributes:
        block: int or str, the block, see `observe`.
        group_tokens: int, tokens of a group, those of an image unless images are routed
            together.
        num_experts: int, `E`.
        mixes_tokens: bool, whether slots hold mixtures of tokens.
        images: `(B, height, width, channels)` float32 array, the images as the model
            saw them, in `[-1, 1]`.
        dispatch: `(B, rows, columns, E, C)` float32 array, the share of each patch in
            slot `c` of expert `e`. Soft routers: weights that sum to one over the
            tokens of the group. Sparse routers: 1 where the slot holds the patch,
            else 0.
        combine: `(B, rows, columns, E, C)` float32 array, the weight of that slot's
            output for each patch.
        words: list of `B` lists of str, the pieces of each caption and its padding, or
            their ids if there is no tokenizer.
        word_experts: `(B, sequence_length)` int array, the expert whose output counts
            most for each piece, -1 where no expert takes it.
        patches: `ExpertPatches` of all images of the pass. `None` for LIMoE, and for
            routers that mix tokens.
        examples: `ExpertExamples` of all pairs of the pass. `None` but for LIMoE.
        discarded: dict from capacity factors to `(B, rows, columns)` bool arrays, the
            patches that no expert takes at that capacity. `None` without
            `capacity_factors`.
        priority: str, the priority of the router, `None` if it has none.

    Examples:
        >>> routing = ksm.analysis.analyze(sparse, images, num_pictures=8)
        >>> maps = routing.maps[3]
        >>> maps.dispatch.shape[:4]
        (8, 8, 8, 16)
        >>> (maps.main_experts < 0).mean()  # share of dropped patches
        >>> figure = maps.plot("experts")
    """

    block: int | str
    group_tokens: int
    num_experts: int
    mixes_tokens: bool
    images: np.ndarray | None = None
    dispatch: np.ndarray | None = None
    combine: np.ndarray | None = None
    words: list | None = None
    word_experts: np.ndarray | None = None
    patches: ExpertPatches | None = None
    examples: ExpertExamples | None = None
    discarded: dict | None = None
    priority: str | None = None

    @property
    def main_experts(self) -> np.ndarray:
        """`(B, rows, columns)` int array: the expert with the largest combine weight.

        Summed over its slots; -1 where no expert takes the patch.
        """
        return _main_experts(self.dispatch, self.combine)

    plot = figure_method("maps")


class MapReducer:
    """Reducer to a dict from each block to its `RoutingMaps`.

    The first inputs of the first batch are kept.

    Args:
        backbone: keras.Model with the routers and a `patch_grid`.
        num_pictures: int, inputs to keep.
        pairs: `Pairs` of a LIMoE, `None` for a `ViTMoEBackbone`.
    """

    def __init__(self, backbone, num_pictures, pairs=None):
        self._backbone = backbone
        self._num_pictures = num_pictures
        self._pairs = pairs
        self._maps = {}

    def update(self, name, decision, inputs):
        if name in self._maps:
            return
        count = min(len(keras.tree.flatten(inputs)[0]), self._num_pictures)
        router = self._backbone.routers[name]
        self._maps[name] = RoutingMaps(
            name,
            decision.summary["valid"].shape[1],
            router.num_experts,
            router.mixes_tokens,
            priority=getattr(router, "priority", None),
            **self._fields(decision, inputs, count),
        )

    def result(self):
        return self._maps

    def _fields(self, decision, inputs, count):
        """Return the attributes of images and text, a dict."""
        grid = self._backbone.patch_grid
        if self._pairs is None:
            num_tokens = tokens_per_input(self._backbone)
            weights = _weights(decision, num_tokens, count)
            first = num_tokens - grid[0] * grid[1]
            dispatch, combine = (_on_grid(x[:, first:], grid) for x in weights)
            return {"images": inputs[:count], "dispatch": dispatch, "combine": combine}
        images, token_ids = self._pairs.halves(inputs)
        num_tokens = sum(self._pairs.tokens_of.values())
        weights = _weights(decision, num_tokens, count)
        found = {}
        if images is not None:
            num_patches = self._pairs.tokens_of["image"]
            dispatch, combine = (_on_grid(x[:, :num_patches], grid) for x in weights)
            found |= {
                "images": images[:count],
                "dispatch": dispatch,
                "combine": combine,
            }
        if token_ids is not None:
            text = [x[:, -self._pairs.tokens_of["text"] :] for x in weights]
            found["word_experts"] = _main_experts(*text)
            tokenizer = self._pairs.tokenizer
            found["words"] = [pieces(tokenizer, ids) for ids in token_ids[:count]]
        return found


def _weights(decision, num_tokens, count):
    """Return dispatch and combine weights of the first inputs, `(B, T, E, C)` each."""
    routing = decision.routing
    group_tokens = decision.summary["valid"].shape[1]
    if isinstance(routing, ChoiceRouting):
        routing = SlotRouting(*to_slots(routing, group_tokens))
    groups = -(-count * num_tokens // group_tokens)
    kind = DenseRouting if isinstance(routing, DenseRouting) else SlotRouting
    first = kind(*(ops.convert_to_numpy(x)[:groups] for x in routing))
    return [
        ops.convert_to_numpy(x).reshape(-1, num_tokens, *x.shape[2:])[:count]
        for x in to_dense(first, group_tokens)
    ]


def _on_grid(weights, grid):
    """Lay `(B, rows * columns, E, C)` out as `(B, rows, columns, E, C)`."""
    return weights.reshape(len(weights), *grid, *weights.shape[2:])


def _main_experts(dispatch, combine):
    """Return the expert of the largest weight, `(...)`, of `(..., E, C)` weights."""
    # (..., E)
    weight = combine.sum(axis=-1)
    dropped = dispatch.sum(axis=(-2, -1)) == 0
    return np.where(dropped, -1, weight.argmax(axis=-1))
