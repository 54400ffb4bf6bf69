"""Routing of some inputs, patch by patch and word by word, and examples of experts."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.analysis.blocks import experts_of_tokens
from keras_softmoe.analysis.figures import figure_method
from keras_softmoe.analysis.streaming import tokens_per_input
from keras_softmoe.ops import to_dense
from keras_softmoe.ops.routing import to_slots

# Patches and words of each expert.
_MOST_PATCHES = 10
_MOST_EXAMPLES = 12


class ExpertPatches(NamedTuple):
    """The patches that each expert of a block takes with the largest weights.

    Attributes:
        share: `(E,)` float64 array, shares of all patches that are taken.
        images: list of `E` arrays `(n, 3 h, 3 w, channels)` float32 in `[-1, 1]`, a
            patch of `h` by `w` pixels and its surroundings, NaN outside the image.
        weights: list of `E` arrays `(n,)`, the weights of the expert's output, falling.
    """

    share: np.ndarray
    images: list
    weights: list


class ExpertExamples(NamedTuple):
    """The patches and words with the highest routing probabilities for each expert.

    Attributes of images or captions are `None` if there were none.

    Attributes:
        share: dict from modalities to `(E,)` float64 arrays: shares of first choices.
        patches: list of `E` arrays `(n, height, width, channels)` float32 in `[-1, 1]`:
            patches with this first choice, most probable first, at most one an image.
        patch_probabilities: list of `E` float32 arrays `(n,)`.
        words: list of `E` lists of str, pieces of the vocabulary (`"▁"` begins a word)
            or their ids: those with this first choice at least once and a mean
            probability of at least `1/E`, most probable first.
        word_probabilities: list of `E` float64 arrays, means over all occurrences.
    """

    share: dict
    patches: list | None
    patch_probabilities: list | None
    words: list | None
    word_probabilities: list | None


class RoutingMaps(NamedTuple):
    """Routing of `B` images at one block, laid out on the grid of patches.

    The class token is left out. Attributes that do not apply are `None`.

    Attributes:
        block: int or str, the block, see `observe`.
        group_tokens: int, tokens of a group.
        num_experts: int, `E`.
        mixes_tokens: bool, `True` if slots hold mixtures of tokens.
        images: `(B, height, width, channels)` float32 array, in `[-1, 1]`.
        dispatch: `(B, rows, columns, E, C)` float32 array, the share of each patch in
            slot `c` of expert `e`: weights of soft routers, 0 or 1 of sparse ones.
        combine: array of the same shape, weights of the slots' outputs for each patch.
        words: list of `B` lists of str, the pieces of each caption and its padding.
        word_experts: `(B, sequence_length)` int array, main experts, -1 where dropped.
        patches: `ExpertPatches` of all images of the pass, for sparse routers.
        examples: `ExpertExamples` of all pairs of the pass, for LIMoE.
        discarded: dict from capacity factors to `(B, rows, columns)` bool arrays.
        priority: str, the priority of the router.

    Examples:
        >>> routing = ksm.analysis.analyze(sparse, images, num_pictures=8)
        >>> maps = routing.maps[3]
        >>> maps.dispatch.shape[:4]
        (8, 4, 4, 8)
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
    def main_experts(self) -> np.ndarray | None:
        """`(B, rows, columns)` int array: the expert with the largest combine weight.

        -1 where no expert takes the patch. `None` without images.
        """
        if self.combine is None:
            return None
        return _main_experts(self.dispatch, self.combine)

    plot = figure_method("maps")


class MapReducer:
    """Reducer to a dict from each block to `RoutingMaps` of the first inputs."""

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
            block=name,
            group_tokens=decision.summary["valid"].shape[1],
            num_experts=router.num_experts,
            mixes_tokens=router.mixes_tokens,
            priority=getattr(router, "priority", None),
            **self._fields(decision, inputs, count),
        )

    def result(self):
        return self._maps

    def _fields(self, decision, inputs, count):
        """Return the attributes of images and text, a dict."""
        grid = self._backbone.patch_grid
        num_patches = grid[0] * grid[1]
        if self._pairs is None:
            images, token_ids = inputs, None
            num_tokens = tokens_per_input(self._backbone)
            # After the class token and registers
            patches = slice(num_tokens - num_patches, num_tokens)
        else:
            images, token_ids = self._pairs.halves(inputs)
            num_tokens = sum(self._pairs.tokens_of.values())
            patches = slice(num_patches)
        weights = _weights(decision, num_tokens, count)
        found = {}
        if images is not None:
            found["images"] = images[:count]
            found["dispatch"], found["combine"] = (
                x[:, patches].reshape(count, *grid, *x.shape[2:]) for x in weights
            )
        if token_ids is not None:
            text = [x[:, -self._pairs.tokens_of["text"] :] for x in weights]
            found["word_experts"] = _main_experts(*text)
            tokenizer = self._pairs.tokenizer
            found["words"] = [pieces(tokenizer, ids) for ids in token_ids[:count]]
        return found


def _weights(decision, num_tokens, count):
    """Return dispatch and combine weights of the first inputs, `(B, T, E, C)` each."""
    group_tokens = decision.summary["valid"].shape[1]
    routing = to_slots(decision.routing, group_tokens)
    groups = -(-count * num_tokens // group_tokens)
    first = type(routing)(*(ops.convert_to_numpy(x)[:groups] for x in routing))
    return [
        ops.convert_to_numpy(x).reshape(-1, num_tokens, *x.shape[2:])[:count]
        for x in to_dense(first, group_tokens)
    ]


def _main_experts(dispatch, combine):
    """Return the expert of the largest weight, `(...)`, of `(..., E, C)` weights."""
    dropped = dispatch.sum(axis=(-2, -1)) == 0
    return np.where(dropped, -1, combine.sum(axis=-1).argmax(axis=-1))


class PatchReducer:
    """Reducer to a dict from some blocks of a `ViTMoEBackbone` to `ExpertPatches`."""

    def __init__(self, backbone, blocks):
        self._grid = backbone.patch_grid
        self._num_tokens = tokens_per_input(backbone)
        experts = {block: backbone.routers[block].num_experts for block in blocks}
        self._count = {block: np.zeros(count) for block, count in experts.items()}
        self._best = {
            block: [_Best(_MOST_PATCHES) for _ in range(count)]
            for block, count in experts.items()
        }

    def update(self, name, decision, inputs):
        if name not in self._count:
            return
        num_patches = self._grid[0] * self._grid[1]
        # (images, patches, E) each, without a class token and padding
        taken, weights = (
            x.reshape(-1, self._num_tokens, x.shape[-1])[: len(inputs), -num_patches:]
            for x in experts_of_tokens(decision)[:2]
        )
        self._count[name] += taken.sum((0, 1))
        weights = np.where(taken, weights, -1.0)

        def cut(index):
            image, patch = index
            place = np.unravel_index(patch, self._grid)
            # The patch and the eight around it, NaN outside.
            height, width = np.array(inputs.shape[1:3]) // self._grid
            top, left = place[0] * height, place[1] * width
            around = ((height, height), (width, width), (0, 0))
            padded = np.pad(inputs[image], around, constant_values=np.nan)
            return padded[top : top + 3 * height, left : left + 3 * width]

        for expert, best in enumerate(self._best[name]):
            best.add(weights[..., expert], cut)

    def result(self):
        found = {}
        for block, best in self._best.items():
            share = self._count[block] / max(self._count[block].sum(), 1)
            images, weights = [x.images for x in best], [x.weights for x in best]
            found[block] = ExpertPatches(share, images, weights)
        return found


class ExampleReducer:
    """Reducer of a pass over `Pairs`: from each block to its `ExpertExamples`."""

    def __init__(self, pairs, count=_MOST_EXAMPLES):
        self._pairs = pairs
        self._count = count
        # The shares, patches and words of each block.
        self._routed, self._patches, self._words = {}, {}, {}
        for block, router in pairs.routers.items():
            experts = router.num_experts
            self._routed[block] = dict.fromkeys(pairs.tokens_of, 0)
            self._patches[block] = [_Best(count) for _ in range(experts)]
            self._words[block] = _WordCounts(pairs.backbone.vocabulary_size, experts)

    def update(self, name, decision, inputs):
        images, token_ids = self._pairs.halves(inputs)
        num_pairs = len(token_ids if images is None else images)
        for modality in self._pairs.tokens_of:
            # (B, T), and twice (B, T, E)
            valid, probabilities, selection = (
                self._pairs.by_pair(decision.summary[key], modality, num_pairs)
                for key in ("valid", "probabilities", "selection")
            )
            first, experts = selection.argmax(-1), selection.shape[-1]
            chosen = np.bincount(first[valid], minlength=experts)
            self._routed[name][modality] += chosen
            if modality == "text":
                words = self._words[name]
                words.add(token_ids[valid], probabilities[valid], first[valid])
                continue
            cut = _patches(images, self._pairs.backbone.patch_grid)
            for expert, best in enumerate(self._patches[name]):
                chosen = np.where(first == expert, probabilities[..., expert], -1.0)
                best.add(chosen, cut.__getitem__)

    def result(self):
        return {block: self._examples(block) for block in self._routed}

    def _examples(self, block):
        routed, found = self._routed[block], dict.fromkeys(ExpertExamples._fields[1:])
        if "image" in routed:
            best = self._patches[block]
            found["patches"] = [x.images for x in best]
            found["patch_probabilities"] = [x.weights.astype("float32") for x in best]
        if "text" in routed:
            ids, found["word_probabilities"] = self._words[block].surest(self._count)
            found["words"] = [pieces(self._pairs.tokenizer, i) for i in ids]
        share = {name: count / count.sum() for name, count in routed.items()}
        return ExpertExamples(share, **found)


def pieces(tokenizer, ids):
    """Return the pieces of text with some ids, or the ids without a tokenizer."""
    name = str if tokenizer is None else tokenizer.id_to_token
    return [name(int(i)) for i in ids]


class _Best:
    """The patches with the largest weights so far, at most one of an image."""

    def __init__(self, count):
        self._count = count
        # Pairs of weight and image of the patch, the largest weight first.
        self._found = []

    def add(self, weights, cut):
        """Add patches by `(B, T)` weights, -1 for none; `cut` gets image and patch."""
        patches = weights.argmax(axis=-1)
        best = weights[np.arange(len(weights)), patches]
        # Stable: of equals the first.
        for image in np.argsort(-best, kind="stable")[: self._count]:
            if best[image] >= 0:
                self._found.append((best[image], cut((image, patches[image]))))
        self._found.sort(key=lambda pair: -pair[0])
        del self._found[self._count :]

    @property
    def images(self):
        return np.array([image for _, image in self._found])

    @property
    def weights(self):
        return np.array([weight for weight, _ in self._found])


class _WordCounts:
    """Mean probabilities and first choices of all pieces of the vocabulary."""

    def __init__(self, vocabulary_size, num_experts):
        self.count = np.zeros(vocabulary_size, "int64")
        self.probability = np.zeros((vocabulary_size, num_experts))
        self.chosen = np.zeros((vocabulary_size, num_experts), bool)

    def add(self, token_ids, probabilities, first):
        """Add tokens: `(N,)` ids, `(N, E)` probabilities and `(N,)` first choices."""
        np.add.at(self.count, token_ids, 1)
        np.add.at(self.probability, token_ids, probabilities)
        self.chosen[token_ids, first] = True

    def surest(self, count):
        """Return ids and mean probabilities for each expert, falling."""
        ids, probabilities = [], []
        for chosen, total in zip(self.chosen.T, self.probability.T, strict=True):
            (candidates,) = np.nonzero(chosen)
            mean = total[candidates] / self.count[candidates]
            even = mean >= 1 / self.chosen.shape[1]
            candidates, mean = candidates[even], mean[even]
            # Ties go to the more frequent word.
            order = np.lexsort((-self.count[candidates], -mean))[:count]
            ids.append(candidates[order])
            probabilities.append(mean[order])
        return ids, probabilities


def _patches(images, grid):
    """Cut `(B, height, width, channels)` images into `(B, T, h, w, channels)`."""
    batch, height, width, channels = images.shape
    rows, columns = grid
    size = height // rows, width // columns
    cut = images.reshape(batch, rows, size[0], columns, size[1], channels)
    return cut.swapaxes(2, 3).reshape(batch, rows * columns, *size, channels)
