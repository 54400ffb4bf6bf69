"""The table of figures: statistics, drawing function, caption and source of each."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from keras_softmoe import drawing
from keras_softmoe.analysis import (
    panels_blocks as of_blocks,
    panels_maps as of_maps,
    panels_modalities as of_modalities,
)
from keras_softmoe.checks import check_choice, check_names
from keras_softmoe.types import Figure


class FigureRow(NamedTuple):
    """A figure of the routing of a model.

    `draw` maps statistics (a list of those of blocks, but of one of `maps`) and options
    to a figure, `applies` the statistics of a block to a bool. `part` is the attribute
    of `Routing` with the statistics, `least_blocks` the fewest blocks.
    """

    part: str
    draw: Callable
    caption: str
    source: str
    applies: Callable = lambda block: True
    least_blocks: int = 1

    @property
    def is_of_one_block(self):
        """Bool, `True` for figures of images, which show one block alone."""
        return self.part == "maps"

    @property
    def options(self):
        """Tuple of str, the names of the options."""
        return tuple(inspect.signature(self.draw).parameters)[1:]


FIGURES = {
    # === Any router ===
    "load": FigureRow(
        "blocks",
        of_blocks.load,
        "Tokens that each expert takes, in even shares (dashed line). For routers that "
        "mix tokens, the sum of its combine weights.",
        "V-MoE, section 5; Soft MoE, appendices B and H",
    ),
    "choice_weights": FigureRow(
        "blocks",
        of_blocks.choice_weights,
        "The largest weights that the router gives to the experts of a token, from 1/E "
        "(dotted line) to 1.",
        "V-MoE, figure 31",
        lambda block: block.chooses and block.choice_histogram is not None,
    ),
    "experts_per_image": FigureRow(
        "blocks",
        of_blocks.experts_per_image,
        "How many experts work on an image, and their mean (dashed line).",
        "V-MoE, figure 32",
        lambda block: block.chooses and block.experts_per_image is not None,
    ),
    "by_position": FigureRow(
        "blocks",
        of_blocks.by_position,
        "Mean weight of each expert's output, patch by patch. Experts that choose by "
        "position come first. White line on the scale: the weight if all were alike.",
        "V-MoE, figure 30",
        lambda b: b.weight_by_position is not None and b.patch_grid is not None,
    ),
    "by_class": FigureRow(
        "blocks",
        of_blocks.by_class,
        "Mean weight of each expert on the images of each class. Stairs that lead down "
        "are specialized experts. White line on the scale: the weight if all were "
        "alike.",
        "V-MoE, figures 7 and 29",
        lambda block: block.weight_by_class is not None,
    ),
    # === Soft routers ===
    "token_weights": FigureRow(
        "soft",
        of_blocks.token_weights,
        "Dispatch weights of tokens, summed over slots. Where the line falls slowly, "
        "some tokens count far more than others. The dotted line is the mean.",
        "Soft MoE, figure 24, left",
    ),
    "contributions": FigureRow(
        "soft",
        of_blocks.contributions,
        "Mean combine weights of experts, relative to the smallest of the block.",
        "Soft MoE, figure 24, center",
    ),
    "tokens_per_slot": FigureRow(
        "soft",
        of_blocks.tokens_per_slot,
        "How many tokens each slot mixes: the sum of its largest weights, a line for "
        "each slot, in colour for those that need the fewest and the most tokens. The "
        "dashed line is a uniform average.",
        "Soft MoE, figure 24, right",
    ),
    "concentration": FigureRow(
        "soft",
        of_blocks.concentration,
        "How few tokens make up a slot (or slots the output of a token): mean and "
        "central parts of the distribution. The dashed line is a uniform average.",
        "Soft MoE, figures 26 and 27",
    ),
    "slot_correlation": FigureRow(
        "soft",
        of_blocks.slot_correlation,
        "Cosines between the parameters of the slots. Red squares along the diagonal "
        "are experts whose slots are alike.",
        "Soft MoE, figures 28 to 30",
        lambda block: block.slot_directions is not None,
    ),
    # === Images and text ===
    "modality_load": FigureRow(
        "modalities",
        of_modalities.modality_load,
        "How many tokens of text and of images choose each expert. Hatched: dropped. "
        "Dashed: the capacity, the sum over groups of pairs.",
        "LIMoE, figures 17 to 22 and 39",
    ),
    "coverage": FigureRow(
        "modalities",
        of_modalities.coverage,
        "The share of the tokens whose first choice is among the most used experts. "
        "The dotted line is experts in equal use.",
        "LIMoE, figures 10 and 13",
    ),
    "confidence": FigureRow(
        "modalities",
        of_modalities.confidence,
        "The largest routing probability of each token: mean, standard deviation and "
        "distribution (left text, right images). The dotted line is 1/E.",
        "LIMoE, figure 38",
    ),
    "priorities": FigureRow(
        "modalities",
        of_modalities.priorities,
        "The order in which tokens queue for the experts of a group. They are dropped "
        "beyond the capacity (dashed, the mean over groups).",
        "LIMoE, figures 32 to 37",
    ),
    "trajectories": FigureRow(
        "modalities",
        of_modalities.trajectories,
        "First choices of tokens from block to block. The width of a line is the share "
        "of the tokens of its modality.",
        "LIMoE, figures 30 and 31",
        least_blocks=2,
    ),
    "words": FigureRow(
        "modalities",
        of_modalities.words,
        "The kinds of words in the text of each expert, and in all text. The number "
        "above a bar is the expert's share of all text.",
        "LIMoE, figure 40",
        lambda block: block.words is not None,
    ),
    # === Images ===
    "experts": FigureRow(
        "maps",
        of_maps.experts,
        "The expert with the largest combine weight; pale patches weight all experts "
        "alike, hatched ones are dropped. The bars count patches, in full colour those "
        "whose main expert has at least twice an even share; the dashed line is the "
        "mean.",
        "V-MoE, section 5 and appendix D",
        lambda maps: maps.images is not None,
    ),
    "slots": FigureRow(
        "maps",
        of_maps.slots,
        "The patches that some slots take in (orange: more than an even share of the "
        "slot's weight) and ignore (blue: less). A map without colour is the mean of "
        "all patches.",
        "Soft MoE, figure 25",
        lambda maps: maps.images is not None and maps.mixes_tokens,
    ),
    "discarded": FigureRow(
        "maps",
        of_maps.discarded,
        "The patches that no expert takes (hatched), as the capacity falls.",
        "V-MoE, figure 4",
        lambda maps: maps.discarded is not None,
    ),
    "patches": FigureRow(
        "maps",
        of_maps.patches,
        "The patches that the busiest experts take with the largest weights (below "
        "each), and their surroundings (light blue outside the image).",
        "as LIMoE, figures 23 to 25",
        lambda maps: maps.patches is not None,
    ),
    "examples": FigureRow(
        "maps",
        of_maps.examples,
        "The patches and words of each expert with the highest routing probabilities.",
        "LIMoE, figures 23 to 25",
        lambda maps: maps.examples is not None,
    ),
    "pair": FigureRow(
        "maps",
        of_maps.pair,
        "The expert that takes each patch and each word of one pair.",
        "LIMoE, figures 26 to 29",
        lambda maps: maps.images is not None and maps.words is not None,
    ),
}


def draw(figure, blocks, options):
    """Draw a figure of `FIGURES` from a list of statistics of blocks."""
    drawing.import_matplotlib()
    row = FIGURES[figure]
    check_names(f"The figure {figure!r}", options, row.options)
    if len(blocks) < row.least_blocks or (row.is_of_one_block and len(blocks) > 1):
        wanted = "one block" if row.is_of_one_block else "two blocks or more"
        raise ValueError(
            f"The figure {figure!r} is of {wanted}. Received: "
            f"blocks={[block.block for block in blocks]}."
        )
    return row.draw(blocks[0] if row.is_of_one_block else blocks, **options)


def figure_method(part):
    """Return the method `plot` of the statistics of a block in a part of `Routing`."""

    def plot(self, figure: str, **options) -> Figure:  # noqa: D417
        """Draw one block by the name of a figure, with options of that figure."""
        rows = ((name, row) for name, row in FIGURES.items() if row.part == part)
        check_choice(
            "figure", figure, [name for name, row in rows if row.applies(self)]
        )
        return draw(figure, [self], options)

    return plot
