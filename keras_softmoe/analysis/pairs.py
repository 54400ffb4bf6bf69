"""Batches of pairs of image and caption, as a LIMoE takes them."""

import numpy as np

from keras_softmoe.analysis.streaming import (
    backbone_of,
    is_limoe,
    prepared,
    routers_of,
    stream,
    tokens_choose,
)

PADDING = 0
# The kind of word of padding.
PADDING_TAG = "padding"
# SentencePiece's sign at the beginning of a word.
WORD_BEGINS = "▁"


def pairs_of(model, images, captions, preprocessor):
    """Return the `Pairs` of a LIMoE's data, `None` for other models and data."""
    is_array = images is None or hasattr(images, "shape")
    if captions is None and not (is_limoe(backbone_of(model)[0]) and is_array):
        return None
    return Pairs(model, images, captions, preprocessor)


class Pairs:
    """Images and captions (or one of them alone) and the LIMoE that routes them.

    Args:
        model: `LIMoEBackbone`, or a task that has one.
        images: `(N, height, width, channels)` array or `None`.
        captions: `N` str or `(N, sequence_length)` ints, or `None`.
        preprocessor: `None` or a `LIMoEPreprocessor`. By default a task's own.

    Raises:
        ValueError: if the model routes no pairs, there is nothing to route, or images
            and captions differ in number.
    """

    def __init__(self, model, images, captions, preprocessor):
        self.backbone, self.preprocessor = backbone_of(model, preprocessor)
        if not is_limoe(self.backbone):
            raise ValueError(
                "Only a `LIMoEBackbone`, or a task that has one, routes captions. "
                f"Received: {type(self.backbone).__name__}."
            )
        self.routers = routers_of(self.backbone)
        counts = {len(x) for x in (images, captions) if x is not None}
        if len(counts) != 1 or 0 in counts:
            found = (
                "none" if x is None else f"{len(x)} {name}"
                for name, x in (("images", images), ("captions", captions))
            )
            raise ValueError(
                "Pass images and as many captions, or `None` for one of them; at least "
                f"one. Received: {', '.join(found)}."
            )
        (self.num_pairs,) = counts
        self.images, self.captions = images, captions
        rows, columns = self.backbone.patch_grid
        # In the order of a pair's tokens.
        self.tokens_of = {}
        if images is not None:
            self.tokens_of["image"] = rows * columns
        if captions is not None:
            self.tokens_of["text"] = self.backbone.sequence_length

    @property
    def tokens_choose(self):
        """Whether the tokens choose among the experts in all blocks."""
        return all(map(tokens_choose, self.routers.values()))

    @property
    def tokenizer(self):
        """The tokenizer of the preprocessor, `None` if there is none."""
        return getattr(self.preprocessor, "tokenizer", None)

    def observe(self, reducers, batch_size, verbose):
        """Route all pairs in one pass and return the results of reducers, a tuple.

        As `analysis.observe`, but `batch_size` is rounded up to whole groups.
        """
        group = self.backbone.group_images or 1
        batch_size = -(-batch_size // group) * group
        starts = range(0, self.num_pairs, batch_size)
        batches = (self._inputs(slice(start, start + batch_size)) for start in starts)
        model = self.backbone
        if len(self.tokens_of) == 1:
            (modality,) = self.tokens_of
            model = getattr(model, f"{modality}_encoder")
        stream(model, self.routers, batches, reducers, len(starts), verbose)
        return tuple(reducer.result() for reducer in reducers)

    def halves(self, inputs):
        """Return images and token ids of a batch, `None` if missing."""
        if isinstance(inputs, dict):
            return inputs["images"], inputs["token_ids"]
        return (inputs, None) if "image" in self.tokens_of else (None, inputs)

    def modality_masks(self, valid, token_ids):
        """Return masks of the tokens of images, of text, and of its padding.

        A group is the tokens of one pair after the other, first the image's.

        Args:
            valid: `(G, S)` bool array, `False` for the padding of groups, and for that
                of text where the model masks it.
            token_ids: `(B, sequence_length)` int array, or `None` without captions.

        Returns:
            dict from each modality to a `(G, S)` bool array, and a `(G, S)` bool array
            of padding. Tokens that the model masks are in none of them.
        """
        # (tokens of a pair,)
        modality = np.repeat(list(self.tokens_of), list(self.tokens_of.values()))
        modality = np.tile(modality, valid.shape[1] // len(modality))
        masks = {name: valid & (modality == name) for name in self.tokens_of}
        is_padding = np.zeros_like(valid)
        if token_ids is not None:
            self.by_pair(is_padding, "text", len(token_ids))[:] = token_ids == PADDING
        return masks, is_padding & valid

    def by_pair(self, values, modality, num_pairs):
        """Return the values of the tokens of a modality, pair by pair.

        Args:
            values: `(G, S, ...)` array, of the tokens of groups.
            modality: str, one of `tokens_of`.
            num_pairs: int `B`, the pairs that do not only fill up groups.

        Returns:
            `(B, T, ...)` view of the array.
        """
        names, counts = list(self.tokens_of), list(self.tokens_of.values())
        first = sum(counts[: names.index(modality)])
        pairs = values.reshape(-1, sum(counts), *values.shape[2:])
        return pairs[:num_pairs, first : first + self.tokens_of[modality]]

    def _inputs(self, rows):
        # On first use, since `models` imports KerasHub.
        from keras_softmoe.models.arguments import check_pairs

        images = token_ids = None
        if self.images is not None:
            convert = getattr(self.preprocessor, "convert", None)
            images = prepared(self.backbone, self.images[rows], convert)
        if self.captions is not None:
            token_ids = self._token_ids(self.captions[rows])
        check_pairs(self.backbone, images, token_ids)
        if len(self.tokens_of) == 2:
            return {"images": images, "token_ids": token_ids}
        return token_ids if images is None else images

    def _token_ids(self, captions):
        if np.asarray(captions).dtype.kind in "iu":
            return np.asarray(captions)
        if self.preprocessor is None:
            raise ValueError(
                "Without a preprocessor there is no tokenizer: pass token ids, "
                f"(N, {self.backbone.sequence_length}) ints, or the task in place of "
                f"its backbone. Received: captions of type {type(captions).__name__}, "
                "preprocessor=None."
            )
        return self.preprocessor.tokenize(captions)
