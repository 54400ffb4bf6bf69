"""A LIMoE for tests, and what its routers decide, token by token, in plain Python."""

from typing import NamedTuple

import numpy as np

from keras_softmoe import ops, routers
from tests.support import tiny, tiny_limoe
from tests.support.references import to_numpy

BLOCKS = (0, 1)
NUM_PATCHES, SEQUENCE_LENGTH, VOCABULARY_SIZE = 4, 3, 7
# Three pairs in groups of two: the last group is half padding.
NUM_PAIRS, GROUP_PAIRS = 3, 2
TOKENS_OF = {"image": NUM_PATCHES, "text": SEQUENCE_LENGTH}


SCARCE = routers.LIMoERouter(4, capacity_factor=0.75)


def limoe(router=SCARCE, **overrides):
    """Two blocks, both mixtures of four experts, by default so that tokens drop."""
    sizes = {"vocabulary_size": VOCABULARY_SIZE, "sequence_length": SEQUENCE_LENGTH}
    sizes |= {"group_images": GROUP_PAIRS, "moe_layers": BLOCKS}
    return tiny_limoe.backbone(router=router, **{**sizes, **overrides})


def images():
    return tiny.images(NUM_PAIRS)


def token_ids():
    """Of the last caption all but a word is padding."""
    return np.array([[3, 1, 5], [1, 6, 0], [2, 0, 0]], "int32")


class Token(NamedTuple):
    """What a router decided for one token of a pair."""

    group: int
    # Among the tokens of the group
    place: int
    pair: int
    modality: str
    # Among those of its modality in the pair
    index: int
    is_padding: bool
    probabilities: np.ndarray
    selection: np.ndarray
    # Expert -> weight of its output
    gates: dict


def routed_tokens(backbone, images, token_ids):
    """Dict from each MoE block to the list of its tokens, without those of padding."""
    layout = [
        (name, index)
        for name, values in (("image", images), ("text", token_ids))
        if values is not None
        for index in range(TOKENS_OF[name])
    ]
    found = {}
    for block, (routing, summary) in backbone.route(images, token_ids).items():
        probabilities, selection = map(
            to_numpy, (summary["probabilities"], summary["selection"])
        )
        num_groups, num_tokens, num_experts = probabilities.shape
        dispatch, combine = map(to_numpy, ops.to_dense(routing, num_tokens))
        tokens = []
        for group, place in np.ndindex(num_groups, num_tokens):
            pair = group * GROUP_PAIRS + place // len(layout)
            modality, index = layout[place % len(layout)]
            if pair >= NUM_PAIRS:
                assert not dispatch[group, place].any()
                continue
            token = Token(
                group,
                place,
                pair,
                modality,
                index,
                modality == "text" and token_ids[pair, index] == 0,
                probabilities[group, place],
                selection[group, place],
                {
                    e: combine[group, place, e].sum()
                    for e in range(num_experts)
                    if dispatch[group, place, e].any()
                },
            )
            tokens.append(token)
        found[block] = tokens
    return found
