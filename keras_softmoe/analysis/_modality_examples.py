"""Examples of what experts of a LIMoE take: patches, words, the tokens of a pair."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.analysis._inputs import check_block
from keras_softmoe.analysis._pairs import Pairs
from keras_softmoe.analysis._streaming import LastDecision
from keras_softmoe.types import Texts


class ExpertExamples(NamedTuple):
    """The patches and words that are sent to each expert of a block most surely.

    Attributes:
        layer: int, the block.
        share: dict from `"image"` and `"text"`, as there were images and captions, to
            an `(E,)` float64 array: the share of tokens whose first choice it is.
        patches: list of `E` arrays `(n, height, width, channels)` float32 in `[-1, 1]`:
            patches whose first choice it is, surest first. `None` without images.
        patch_probabilities: list of `E` float32 arrays `(n,)`, their routing
            probabilities. `None` without images.
        words: list of `E` lists of str, pieces of the vocabulary as the tokenizer
            writes them (`"▁"` begins a word), or their ids if there is no tokenizer:
            those whose first choice it is at least once and whose probability is no
            less than an even share `1/E`, surest first. `None` without captions.
        word_probabilities: list of `E` float64 arrays, their routing probabilities, on
            average over all places where the piece stands. `None` without captions.
    """

    layer: int
    share: dict
    patches: list | None
    patch_probabilities: list | None
    words: list | None
    word_probabilities: list | None


class PairRouting(NamedTuple):
    """Which expert of a block takes which token of an image and its caption.

    With several choices per token, the expert whose output counts most.

    Attributes:
        layer: int, the block.
        num_experts: int, number of experts.
        image: `(height, width, channels)` float32 array, the image in `[-1, 1]`.
        patch_experts: `(rows, columns)` int array, -1 where no expert takes the patch.
        words: list of `sequence_length` str, the pieces of the caption and its padding,
            or their ids if there is no tokenizer.
        word_experts: `(sequence_length,)` int array, -1 where no expert takes the
            piece.
    """

    layer: int
    num_experts: int
    image: np.ndarray
    patch_experts: np.ndarray
    words: list
    word_experts: np.ndarray


def expert_examples(
    model: keras.Model,
    images: ArrayLike | None = None,
    captions: Texts | None = None,
    layer: int | None = None,
    num_patches: int = 12,
    num_words: int = 12,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> ExpertExamples:
    """Find the patches and words that are sent to each expert of a block most surely.

    A patch counts by its routing probability, and of an image only the most probable
    one for each expert, so that many images are shown. A word counts by its mean
    routing probability over all places where it stands: words that always go to the
    expert come first, however rare they are. Padding is a word like others.

    Args:
        model: `LIMoEBackbone`, or a task that has one (its `preprocessor`, if any, is
            applied to images and captions).
        images: `(N, height, width, channels)` array, or `None` for text alone.
        captions: `N` str, or `(N, sequence_length)` ints, or `None` for images alone.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        num_patches: int, the most patches of an expert.
        num_words: int, the most words of an expert.
        batch_size: int, pairs routed at a time, rounded up to whole groups.
        preprocessor: as in `analysis.modality_statistics`.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        `ExpertExamples`.

    Raises:
        ValueError: as `analysis.modality_statistics`, or if the block is not one of
            the MoE blocks.

    Source: LIMoE, appendix F.2 (figures 23 to 25).

    Examples:
        >>> examples = ksm.analysis.expert_examples(limoe, scenes, captions, layer=3)
        >>> examples.words  # lists of them, for example ['▁red', '▁green']
    """
    pairs = Pairs(model, images, captions, preprocessor)
    reducer = ExampleReducer(pairs, layer, num_patches, num_words)
    (found,) = pairs.observe([reducer], batch_size, verbose)
    return found


class ExampleReducer:
    """Reducer to the `ExpertExamples` of one block.

    Args:
        pairs: `Pairs`, whose decisions it will see.
        layer: as in `expert_examples`.
        num_patches: as in `expert_examples`.
        num_words: as in `expert_examples`.

    Raises:
        ValueError: if the block is not one of the MoE blocks.
    """

    def __init__(self, pairs, layer=None, num_patches=12, num_words=12):
        backbone = pairs.backbone
        self._pairs = pairs
        self._layer = check_block(backbone, layer)
        self._num_words = num_words
        num_experts = backbone.routers[self._layer].num_experts
        self._patches = [_Surest(num_patches) for _ in range(num_experts)]
        self._words = _WordCounts(backbone.vocabulary_size, num_experts)
        self._routed = dict.fromkeys(pairs.tokens_of, 0)

    def update(self, name, decision, inputs):
        if name != self._layer:
            return
        images, token_ids = self._pairs.halves(inputs)
        num_pairs = len(token_ids if images is None else images)
        for modality in self._pairs.tokens_of:
            # (B, T), and twice (B, T, E)
            valid, probabilities, selection = (
                self._pairs.by_pair(decision.summary[name], modality, num_pairs)
                for name in ("valid", "probabilities", "selection")
            )
            first = selection.argmax(-1)
            self._routed[modality] += np.bincount(
                first[valid], minlength=len(self._patches)
            )
            if modality == "text":
                self._words.add(token_ids[valid], probabilities[valid], first[valid])
                continue
            cut = _patches(images, self._pairs.backbone.patch_grid)
            for expert, surest in enumerate(self._patches):
                probability = probabilities[..., expert]
                surest.add(cut, np.where(first == expert, probability, -1.0))

    def result(self):
        found = dict.fromkeys(ExpertExamples._fields[2:])
        if "image" in self._routed:
            found["patches"] = [surest.patches for surest in self._patches]
            found["patch_probabilities"] = [x.probabilities for x in self._patches]
        if "text" in self._routed:
            ids, found["word_probabilities"] = self._words.surest(self._num_words)
            found["words"] = [_pieces(self._pairs.tokenizer, i) for i in ids]
        share = {name: count / count.sum() for name, count in self._routed.items()}
        return ExpertExamples(self._layer, share, **found)


def pair_routing(
    model: keras.Model,
    image: ArrayLike,
    caption: str | ArrayLike,
    layer: int | None = None,
    preprocessor: Callable | None = None,
) -> PairRouting:
    """Which expert of a block takes which token of one image and its caption.

    The pair is routed by itself, so that no other tokens compete for its slots.

    Args:
        model: `LIMoEBackbone`, or a task that has one (its `preprocessor`, if any, is
            applied to image and caption).
        image: `(height, width, channels)` array.
        caption: str, or `(sequence_length,)` ints.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        preprocessor: as in `analysis.modality_statistics`.

    Returns:
        `PairRouting`.

    Raises:
        ValueError: as `analysis.expert_examples`.

    Source: LIMoE, appendix F.3 (figures 26 to 29).

    Examples:
        >>> routing = ksm.analysis.pair_routing(limoe, scenes[0], captions[0], layer=3)
        >>> routing.word_experts[:3]
    """
    captions = [caption] if isinstance(caption, str) else np.asarray(caption)[None]
    pairs = Pairs(model, np.asarray(image)[None], captions, preprocessor)
    layer = check_block(pairs.backbone, layer)
    reducers = [LastDecision(layer)]
    ((decision, inputs),) = pairs.observe(reducers, batch_size=1, verbose=0)
    image, token_ids = (values[0] for values in pairs.halves(inputs))
    token, filled, gate = (values[0] for values in decision.routing)
    num_experts, num_patches = len(token), pairs.tokens_of["image"]
    # (tokens of the pair, E), lower than any gate where the token has no slot
    weight = np.full((sum(pairs.tokens_of.values()), num_experts), -1.0)
    for expert, is_taken in enumerate(filled):
        weight[token[expert, is_taken], expert] = gate[expert, is_taken]
    experts = np.where(weight.max(-1) < 0, -1, weight.argmax(-1))
    return PairRouting(
        layer,
        num_experts,
        image,
        experts[:num_patches].reshape(pairs.backbone.patch_grid),
        _pieces(pairs.tokenizer, token_ids),
        experts[num_patches:],
    )


class _Surest:
    """The patches with the highest probabilities among those seen so far."""

    def __init__(self, count):
        self.count = count
        self.patches = self.probabilities = None

    def add(self, patches, probabilities):
        """`(B, T, h, w, channels)`, and `(B, T)`, -1 for patches that do not count."""
        best = probabilities.argmax(-1)
        images = np.arange(len(best))
        found, probabilities = patches[images, best], probabilities[images, best]
        if self.patches is not None:
            found = np.concatenate([self.patches, found])
            probabilities = np.concatenate([self.probabilities, probabilities])
        # Stable: of equals the first.
        order = np.argsort(-probabilities, kind="stable")[: self.count]
        order = order[probabilities[order] >= 0]
        self.patches = found[order]
        self.probabilities = probabilities[order].astype("float32")


class _WordCounts:
    """Mean probabilities and first choices of all pieces of the vocabulary."""

    def __init__(self, vocabulary_size, num_experts):
        self.count = np.zeros(vocabulary_size, "int64")
        self.probability = np.zeros((vocabulary_size, num_experts))
        self.chosen = np.zeros((vocabulary_size, num_experts), bool)

    def add(self, token_ids, probabilities, first):
        """`(N,)`, `(N, E)` and `(N,)`."""
        np.add.at(self.count, token_ids, 1)
        np.add.at(self.probability, token_ids, probabilities)
        self.chosen[token_ids, first] = True

    def surest(self, count):
        """For each expert ids and mean probabilities, falling."""
        ids, probabilities = [], []
        for chosen, total in zip(self.chosen.T, self.probability.T, strict=True):
            (candidates,) = np.nonzero(chosen)
            mean = total[candidates] / self.count[candidates]
            even = mean >= 1 / self.chosen.shape[1]
            candidates, mean = candidates[even], mean[even]
            # Of equals the more frequent.
            order = np.lexsort((-self.count[candidates], -mean))[:count]
            ids.append(candidates[order])
            probabilities.append(mean[order])
        return ids, probabilities


def _patches(images, grid):
    """`(B, height, width, channels)` to `(B, T, height / rows, ..., channels)`."""
    batch, height, width, channels = images.shape
    rows, columns = grid
    size = height // rows, width // columns
    cut = images.reshape(batch, rows, size[0], columns, size[1], channels)
    return cut.swapaxes(2, 3).reshape(batch, rows * columns, *size, channels)


def _pieces(tokenizer, ids):
    if tokenizer is None:
        return [str(i) for i in ids]
    return [tokenizer.id_to_token(int(i)) for i in ids]
