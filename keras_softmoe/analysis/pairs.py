"""Pairs of image and caption on their way through a LIMoE, batch by batch."""

from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe.evaluation.routing import backbone_of, prepared

PADDING = 0


class RoutedBatch(NamedTuple):
    """Some pairs and what the routers decided for them.

    Its tokens are in groups, the last of which may end in padding: `S` tokens are
    those of one pair after the other, first the image's.

    Attributes:
        images: `(B, height, width, channels)` float32 array in `[-1, 1]`, or `None`.
        token_ids: `(B, sequence_length)` int array, or `None`.
        decisions: dict from each MoE block to its `routers.Decision`.
        members: dict from each modality that is there to a `(G, S)` bool array, which
            tokens are its own.
        is_padding: `(G, S)` bool array, which of the text tokens fill a caption up.
    """

    images: np.ndarray | None
    token_ids: np.ndarray | None
    decisions: dict
    members: dict
    is_padding: np.ndarray


class PairRoutes:
    """Routes pairs (or images alone, or captions alone), batch by batch.

    Args:
        model: `LIMoEBackbone`, or a task that has one.
        images: `(N, height, width, channels)` array or `None`.
        captions: `N` str or `(N, sequence_length)` ints, or `None`.
        preprocessor: `None` or a `LIMoEPreprocessor`. By default a task's own.

    Raises:
        ValueError: if the model routes no pairs, its tokens do not choose experts,
            there is nothing to route, or images and captions differ in number.
    """

    def __init__(self, model, images, captions, preprocessor):
        self.backbone, self.preprocessor = backbone_of(model, preprocessor)
        _check_routers(self.backbone)
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
    def tokenizer(self):
        """What cut the captions into tokens, `None` if they came as ids."""
        return getattr(self.preprocessor, "tokenizer", None)

    def batches(self, batch_size, verbose):
        """Yield a `RoutedBatch` after the other.

        Args:
            batch_size: int, pairs at a time, rounded up to whole groups.
            verbose: as in `keras.utils.Progbar`.
        """
        group = self.backbone.group_images or 1
        batch_size = -(-batch_size // group) * group
        bar = keras.utils.Progbar(self.num_pairs, verbose=verbose, unit_name="pair")
        for start in range(0, self.num_pairs, batch_size):
            rows = slice(start, start + batch_size)
            yield self._routed(rows)
            bar.update(min(start + batch_size, self.num_pairs))

    def _routed(self, rows):
        images = token_ids = None
        if self.images is not None:
            convert = getattr(self.preprocessor, "convert", None)
            images = prepared(self.backbone, self.images[rows], convert)
        if self.captions is not None:
            token_ids = self._token_ids(self.captions[rows])
        decisions = self.backbone.route(images, token_ids)
        count = len(token_ids if images is None else images)
        return RoutedBatch(
            images, token_ids, decisions, *self._members(count, token_ids)
        )

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

    def _members(self, count, token_ids):
        group = self.backbone.group_images or count
        padded = -(-count // group) * group
        is_real = (np.arange(padded) < count)[:, None]
        is_padding = {"image": False}
        if token_ids is not None:
            is_padding["text"] = np.zeros((padded, token_ids.shape[1]), bool)
            is_padding["text"][:count] = token_ids == PADDING

        def in_groups(of_modality):
            # (pairs, tokens of a pair) to (G, S)
            parts = [
                np.broadcast_to(of_modality[name] & is_real, (padded, tokens))
                for name, tokens in self.tokens_of.items()
            ]
            return np.concatenate(parts, axis=1).reshape(padded // group, -1)

        members = {
            name: in_groups({other: other == name for other in self.tokens_of})
            for name in self.tokens_of
        }
        return members, in_groups(is_padding)


def by_pair(values, num_pairs, num_tokens):
    """`(G, S, ...)` to `(B, tokens of a pair, ...)`, without the padding of groups."""
    return values.reshape(-1, num_tokens, *values.shape[2:])[:num_pairs]


def check_block(backbone, layer):
    """The block, the first MoE block if `None`.

    Raises:
        ValueError: if it is no MoE block.
    """
    if layer is None:
        return backbone.moe_layers[0]
    if layer not in backbone.moe_layers:
        raise ValueError(
            f"Only the blocks {tuple(backbone.moe_layers)} are mixtures of experts. "
            f"Received: layer={layer}."
        )
    return layer


def _check_routers(backbone):
    routers = getattr(backbone, "routers", {})
    choose = all(hasattr(r, "num_selected_experts") for r in routers.values())
    if not (routers and choose and hasattr(backbone, "sequence_length")):
        raise ValueError(
            "Pass a `LIMoEBackbone` with `moe_layers` whose tokens choose their "
            "experts, as with a `LIMoERouter`, or a task that has one. Received: "
            f"{type(backbone).__name__} with the routers "
            f"{sorted({type(router).__name__ for router in routers.values()})}."
        )
