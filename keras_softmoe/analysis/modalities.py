"""Routing of images, text and kinds of words by a LIMoE, summed up over pairs."""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_softmoe.analysis.blocks import experts_of_tokens
from keras_softmoe.analysis.figures import figure_method
from keras_softmoe.analysis.streaming import PADDING, PADDING_TAG, WORD_BEGINS
from keras_softmoe.checks import check_numbers
from keras_softmoe.ops import token_choice
from keras_softmoe.ops.assignment import PRIORITIES
from keras_softmoe.ops.routing import to_slots

NUM_BINS = 50
# Bins of the queue for an expert if all experts are chosen equally often.
_BINS_OF_EVEN_QUEUE = 50


class WordStatistics(NamedTuple):
    """The tokens of text at one block by the tag of their word.

    Attributes:
        tags: tuple of `T` str, the most frequent first, `"padding"` last.
        num_tokens: `(T,)` int64 array, tokens with each tag.
        assigned: `(T, E)` int64 array, how many of them each expert processes.
    """

    tags: tuple
    num_tokens: np.ndarray
    assigned: np.ndarray

    @property
    def share(self):
        """`(T, E)` float64 array, the share of each tag in the text of each expert."""
        return self.assigned / np.maximum(self.assigned.sum(axis=0), 1)


class ModalityStatistics(NamedTuple):
    """Routing at one block by modality, summed up over pairs of image and text.

    Each dict has the keys `"image"` and `"text"`, or one of them if only images or only
    captions were given. Text includes padding, unless the model masks it.

    Attributes:
        block: int or str, the block, see `observe`.
        num_tokens: dict to int.
        routed: dict to `(E,)` int64 array, tokens with the expert as first choice.
        chosen: dict to `(E,)` int64 array, tokens with the expert among `K` choices.
        assigned: dict to `(E,)` int64 array, tokens that each expert processes.
        padding: `(E,)` int64 array, how many of `assigned["text"]` are padding.
        dropped: dict to float, the share of tokens that no expert takes.
        capacity: float, slots of an expert in one group, the mean over groups: those
            with padding have fewer.
        num_groups: int, groups of pairs that were routed together.
        queue: dict to `(E, bins)` int64 array, tokens by their place in the queue for
            each expert. In groups without padding those before `capacity` get slots.
        queue_step: int, places in a bin.
        probability: dict to `(E,)` float64 array, mean routing probability.
        confidence_mean: dict to float, mean of a token's largest routing probability.
        confidence_std: dict to float, its standard deviation over tokens.
        confidence_histogram: dict to `(50,)` int64 array, counts in bins from 0 to 1.
        transitions: dict to `(E, E)` int64 array, tokens by their first choices here
            (rows) and in the next MoE block. `None` at the last one.
        words: `WordStatistics`, `None` without a tagger.

    Examples:
        >>> routing = ksm.analysis.analyze(limoe, images, captions=captions)
        >>> block = routing.modalities[3]
        >>> block.dropped, block.experts_needed(0.9)
        >>> figure = block.plot("modality_load")
    """

    block: int | str
    num_tokens: dict
    routed: dict
    chosen: dict
    assigned: dict
    padding: np.ndarray
    dropped: dict
    capacity: float
    num_groups: int
    queue: dict
    queue_step: int
    probability: dict
    confidence_mean: dict
    confidence_std: dict
    confidence_histogram: dict
    transitions: dict | None
    words: WordStatistics | None = None

    plot = figure_method("modalities")

    @property
    def slots(self) -> int:
        """Int, the slots of an expert in all groups together."""
        return round(self.capacity * self.num_groups)

    @property
    def entropy(self) -> dict:
        """Dict to float: entropy in nats of the mean routing probabilities.

        Source: LIMoE, appendix B.2 (figure 9, top).
        """
        return {name: _entropy(p) for name, p in self.probability.items()}

    @property
    def dispatch_entropy(self) -> dict:
        """Dict to float: entropy in nats of how the processed tokens are distributed.

        NaN where none is processed. Source: LIMoE, appendix B.2 (figure 9, bottom).
        """
        return {name: _entropy(count) for name, count in self.assigned.items()}

    @property
    def coverage(self) -> dict:
        """Dict to `(E,)` float64 array: the share that the most used experts serve.

        Entry `m - 1` is the share of tokens whose first choice is one of the `m` most
        chosen experts. Source: LIMoE, appendix E.4 (figure 13).
        """
        return {
            name: np.cumsum(-np.sort(-count)) / count.sum()
            for name, count in self.routed.items()
        }

    def experts_needed(self, share: float = 0.9) -> dict:
        """Return the number of experts whose `coverage` is a share, a dict to int.

        Source: LIMoE, appendix B.2 (figure 10).
        """
        check_numbers(over=0, most=1, share=share)
        # Less a rounding error of the quotient.
        return {
            name: int(np.argmax(coverage >= share - 1e-12)) + 1
            for name, coverage in self.coverage.items()
        }


class ModalityReducer:
    """Reducer of a pass over `Pairs`: from each block to its `ModalityStatistics`."""

    def __init__(self, pairs):
        self._pairs = pairs
        self._sums = {name: _Sums(router) for name, router in pairs.routers.items()}
        # The sums of the block that was last seen, and the first choices of its tokens.
        self._before = None, None

    def update(self, name, decision, inputs):
        sums, valid = self._sums[name], decision.summary["valid"]
        masks, is_padding = self._pairs.modality_masks(valid, inputs)
        # (G, S)
        first = sums.add(decision, masks, is_padding)
        if name != next(iter(self._sums)):
            before, choices = self._before
            shape = before.router.num_experts, sums.router.num_experts
            for modality, mask in masks.items():
                steps = np.zeros(shape, "int64")
                np.add.at(steps, (choices[mask], first[mask]), 1)
                before.sum(modality, transitions=steps)
        self._before = sums, first

    def result(self):
        return {name: sums.statistics(name) for name, sums in self._sums.items()}


class _Sums:
    """Running sums over the tokens of one block."""

    def __init__(self, router):
        self.router = router
        self.num_groups = self.num_slots = self.padding = 0
        # Name of the sum -> modality -> the sum so far.
        self.sums = {}

    def add(self, decision, masks, is_padding):
        """Add a batch and return the first choices of its tokens, `(G, S)`."""
        routing, summary = decision
        # (G, S, E)
        probabilities, selection = summary["probabilities"], summary["selection"]
        num_tokens = selection.shape[1]
        # (G, E, C)
        routing = to_slots(routing, num_tokens)
        slots = [ops.convert_to_numpy(x) for x in (routing.token, routing.filled)]
        num_groups, num_experts, capacity = slots[0].shape
        self.num_groups += num_groups
        # Padding takes no slot, and gives none.
        self.num_slots += np.sum(summary.get("capacity", num_groups * capacity))
        self.padding += _places(is_padding, *slots).sum((0, 2))
        # (G, E, S)
        queue = _queue(self.router, selection, masks)
        even = num_tokens * self.router.num_selected_experts / num_experts
        self.queue_step = max(1, int(even / _BINS_OF_EVEN_QUEUE))
        starts = range(0, num_tokens, self.queue_step)
        first = selection.argmax(-1)
        # On some backends a softmax may round to a little more than one.
        confidence = np.minimum(probabilities.max(-1), 1.0).astype("float64")
        for name, mask in masks.items():
            places = _places(mask, *queue).sum(0)
            sure = confidence[mask]
            self.sum(
                name,
                num_tokens=mask.sum(),
                dropped=summary["dropped"][mask].sum(),
                routed=np.bincount(first[mask], minlength=num_experts),
                chosen=places.sum(-1),
                assigned=_places(mask, *slots).sum((0, 2)),
                queue=np.add.reduceat(places, starts, axis=-1),
                probability=probabilities[mask].sum(0, dtype="float64"),
                confidence=sure.sum(),
                squared_confidence=np.square(sure).sum(),
                confidence_histogram=np.histogram(sure, NUM_BINS, (0.0, 1.0))[0],
            )
        return first

    def sum(self, modality, **values):
        for name, value in values.items():
            sums = self.sums.setdefault(name, {})
            sums[modality] = sums.get(modality, 0) + value

    def statistics(self, block):
        sums = self.sums
        num_tokens = {name: int(n) for name, n in sums["num_tokens"].items()}

        def mean(name):
            return {m: sums[name][m] / count for m, count in num_tokens.items()}

        confidence, squared = mean("confidence"), mean("squared_confidence")
        std = {m: np.sqrt(max(squared[m] - x * x, 0.0)) for m, x in confidence.items()}
        names = "routed", "chosen", "assigned", "queue", "confidence_histogram"
        return ModalityStatistics(
            block=block,
            num_tokens=num_tokens,
            padding=self.padding,
            dropped={name: float(share) for name, share in mean("dropped").items()},
            capacity=float(self.num_slots / self.num_groups),
            num_groups=self.num_groups,
            queue_step=self.queue_step,
            probability=mean("probability"),
            confidence_mean={name: float(x) for name, x in confidence.items()},
            confidence_std={name: float(x) for name, x in std.items()},
            transitions=sums.get("transitions"),
            **{name: sums[name] for name in names},
        )


def _queue(router, scores, masks):
    """Return the queue for each expert, `(G, E, S)` tokens and the taken places."""
    priority = router.priority
    if priority not in PRIORITIES:
        # One modality first; where it is missing, by position.
        none = np.zeros(scores.shape[:2])
        priority = masks.get(priority.removesuffix("_first"), none).astype("float32")
    queue = token_choice(
        scores,
        router.num_selected_experts,
        capacity=scores.shape[1],
        priority=priority,
        valid=np.any(list(masks.values()), axis=0),
        keep_fraction=getattr(router, "keep_fraction", 1.0),
        seed=0,
    )
    return [ops.convert_to_numpy(x) for x in queue]


def _places(mask, token, filled):
    """Return which places hold tokens of a `(G, S)` mask, `(G, E, C)` bool."""
    return filled & np.take_along_axis(mask[:, None], token, axis=-1)


def _entropy(weights):
    """Return the entropy in nats of weights of any sum, NaN if all are zero."""
    total = weights.sum()
    share = weights[weights > 0] / total
    return float(-(share * np.log(share)).sum()) if total > 0 else float("nan")


class WordReducer:
    """Reducer of a pass over `Pairs`: from each block to its `WordStatistics`."""

    def __init__(self, pairs, tagger):
        if pairs.tokenizer is None or pairs.captions is None:
            kind = type(pairs.captions).__name__
            raise ValueError(
                "`tagger` needs captions and a tokenizer: pass a task or its "
                f"preprocessor. Received: captions of type {kind}, "
                f"preprocessor={pairs.preprocessor!r}."
            )
        self._pairs = pairs
        self._tagger = tagger
        # The last batch and the tags of its tokens.
        self._batch = None, None
        # Block -> tag -> tokens, and (E,) tokens in slots.
        self._sums = {}

    def update(self, name, decision, inputs):
        _, token_ids = self._pairs.halves(inputs)
        if inputs is not self._batch[0]:
            # Once for all blocks.
            self._batch = inputs, np.array([self._tags(ids) for ids in token_ids])
        tags = self._batch[1]
        # (B, T), and (B, T, E)
        valid, taken = (
            self._pairs.by_pair(values, "text", len(token_ids))
            for values in (decision.summary["valid"], experts_of_tokens(decision)[0])
        )
        sums = self._sums.setdefault(name, {})
        for tag in dict.fromkeys(tags.ravel().tolist()):
            has_tag = valid & (tags == tag)
            count, assigned = sums.get(tag, (0, 0))
            sums[tag] = count + has_tag.sum(), assigned + taken[has_tag].sum(axis=0)

    def result(self):
        found = {}
        for name, sums in self._sums.items():
            tags = sorted(sums, key=lambda tag: (tag == PADDING_TAG, -sums[tag][0]))
            counts = zip(*(sums[tag] for tag in tags), strict=True)
            found[name] = WordStatistics(tuple(tags), *map(np.array, counts))
        return found

    def _tags(self, token_ids):
        """Return the tag of each token of a caption, a list."""
        words, word_of = _words(self._pairs.tokenizer, token_ids)
        tags = list(self._tagger(list(words)))
        if len(tags) != len(words):
            raise ValueError(
                "The tagger must return one tag for each word. Received: "
                f"{len(tags)} tags, {tags}, for the words {words}."
            )
        return [PADDING_TAG if w is None else str(tags[w]) for w in word_of]


def _words(tokenizer, token_ids):
    """Return the words of a caption, and the word of each token, `None` for padding."""
    words, word_of = [], []
    joins = False
    for token_id in token_ids:
        if token_id == PADDING:
            word_of.append(None)
            continue
        piece = tokenizer.id_to_token(int(token_id))
        text = piece.removeprefix(WORD_BEGINS)
        # A comma, or a special piece such as `</s>`
        is_sign = not any(map(str.isalnum, text)) or text[0] + text[-1] == "<>"
        is_new = piece.startswith(WORD_BEGINS) or is_sign or not joins
        # A word may have begun with a piece that is nothing else.
        if not words or (is_new and words[-1]):
            words.append("")
        words[-1] += text
        word_of.append(len(words) - 1)
        joins = not is_sign or not text
    return [word or WORD_BEGINS for word in words], word_of
