"""The patches and words that the experts of a block take with the largest weights."""

from typing import NamedTuple

import numpy as np

from keras_softmoe.analysis._blocks import experts_of_tokens
from keras_softmoe.analysis._streaming import tokens_per_input

# Patches and words of each expert.
MOST_PATCHES = 10
_MOST_EXAMPLES = 12


class ExpertPatches(NamedTuple):
    """The patches that each expert of a block takes with the largest weights.

    Attributes:
        share: `(E,)` float64 array, the share of each expert of all patches that are
            taken.
        pictures: list of `E` arrays `(n, 3 h, 3 w, channels)` float32 in `[-1, 1]`, a
            patch of `h` by `w` pixels and its surroundings, NaN outside the image.
        weights: list of `E` arrays `(n,)`, the weights of the expert's output, falling.
    """

    share: np.ndarray
    pictures: list
    weights: list


class ExpertExamples(NamedTuple):
    """The patches and words with the highest routing probabilities for each expert.

    Patches are ranked by their routing probability, with at most one patch per image
    and expert, so that many images are shown. Words are ranked by their mean routing
    probability over all occurrences: words always routed to the expert come first, even
    rare ones. Padding is treated like any other word.

    Attributes:
        share: dict from `"image"` and `"text"`, as there were images and captions, to
            an `(E,)` float64 array: the share of tokens whose first choice it is.
        patches: list of `E` arrays `(n, height, width, channels)` float32 in `[-1, 1]`:
            patches with this expert as first choice, most probable first. `None`
            without images.
        patch_probabilities: list of `E` float32 arrays `(n,)`, their routing
            probabilities. `None` without images.
        words: list of `E` lists of str, pieces of the vocabulary as the tokenizer
            writes them (`"▁"` begins a word), or their ids if there is no tokenizer:
            those with the expert as first choice at least once and a probability of at
            least the even share `1/E`, most probable first. `None` without captions.
        word_probabilities: list of `E` float64 arrays, their mean routing
            probabilities over all occurrences. `None` without captions.
    """

    share: dict
    patches: list | None
    patch_probabilities: list | None
    words: list | None
    word_probabilities: list | None


class PatchReducer:
    """Reducer to a dict from each block to its `ExpertPatches`.

    Args:
        backbone: `ViTMoEBackbone`.
        blocks: sequence of blocks.
    """

    def __init__(self, backbone, blocks):
        self._grid = backbone.patch_grid
        self._num_tokens = tokens_per_input(backbone)
        experts = {block: backbone.routers[block].num_experts for block in blocks}
        self._count = {block: np.zeros(count) for block, count in experts.items()}
        self._best = {
            block: [_Best(MOST_PATCHES) for _ in range(count)]
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

        def picture(index):
            image, patch = index
            place = np.unravel_index(patch, self._grid)
            return _with_neighbours(inputs[image], place, self._grid)

        for expert, best in enumerate(self._best[name]):
            best.add(weights[..., expert], picture)

    def result(self):
        return {
            block: ExpertPatches(
                self._count[block] / max(self._count[block].sum(), 1),
                [x.pictures for x in best],
                [x.weights for x in best],
            )
            for block, best in self._best.items()
        }


class ExampleReducer:
    """Reducer to a dict from each block to its `ExpertExamples`.

    Args:
        pairs: `Pairs`, whose decisions it will see.
        count: int, the most patches, and the most words, of an expert.
    """

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
            first = selection.argmax(-1)
            self._routed[name][modality] += np.bincount(
                first[valid], minlength=selection.shape[-1]
            )
            if modality == "text":
                words = self._words[name]
                words.add(token_ids[valid], probabilities[valid], first[valid])
                continue
            cut = _patches(images, self._pairs.backbone.patch_grid)
            for expert, best in enumerate(self._patches[name]):
                probability = probabilities[..., expert]
                chosen = np.where(first == expert, probability, -1.0)
                best.add(chosen, cut.__getitem__)

    def result(self):
        return {block: self._examples(block) for block in self._routed}

    def _examples(self, block):
        routed = self._routed[block]
        found = dict.fromkeys(ExpertExamples._fields[1:])
        if "image" in routed:
            found["patches"] = [best.pictures for best in self._patches[block]]
            found["patch_probabilities"] = [
                best.weights.astype("float32") for best in self._patches[block]
            ]
        if "text" in routed:
            ids, found["word_probabilities"] = self._words[block].surest(self._count)
            found["words"] = [pieces(self._pairs.tokenizer, i) for i in ids]
        share = {name: count / count.sum() for name, count in routed.items()}
        return ExpertExamples(share, **found)


def pieces(tokenizer, ids):
    """Return the pieces of text with some ids, or the ids if there is no tokenizer."""
    if tokenizer is None:
        return [str(i) for i in ids]
    return [tokenizer.id_to_token(int(i)) for i in ids]


class _Best:
    """The patches with the largest weights so far, of an image one at most."""

    def __init__(self, count):
        self._count = count
        # Pairs of weight and picture, the largest weight first.
        self._found = []

    def add(self, weights, picture):
        """Add patches of some images.

        Args:
            weights: `(B, T)` array, -1 for patches that do not count.
            picture: callable from a pair, the indices of image and patch, to a picture.
        """
        patches = weights.argmax(axis=-1)
        best = weights[np.arange(len(weights)), patches]
        # Stable: of equals the first.
        for image in np.argsort(-best, kind="stable")[: self._count]:
            if best[image] >= 0:
                found = picture((image, patches[image]))
                self._found.append((best[image], found))
        self._found.sort(key=lambda pair: -pair[0])
        del self._found[self._count :]

    @property
    def pictures(self):
        return np.array([picture for _, picture in self._found])

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


def _with_neighbours(image, place, grid):
    """Return the patch at a place of the grid and the eight around it, NaN outside."""
    height, width = image.shape[0] // grid[0], image.shape[1] // grid[1]
    top, left = place[0] * height, place[1] * width
    around = ((height, height), (width, width), (0, 0))
    padded = np.pad(image, around, constant_values=np.nan)
    return padded[top : top + 3 * height, left : left + 3 * width]
