"""The table of figures: statistics, drawing function, caption and source of each."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from keras_softmoe import drawing
from keras_softmoe.analysis import (
    panels_blocks as of_blocks,
    panels_examples as of_examples,
    panels_maps as of_maps,
    panels_modalities as of_modalities,
    panels_soft as of_soft,
)
from keras_softmoe.checks import check_choice, check_names
from keras_softmoe.types import Figure


class FigureRow(NamedTuple):
    """A figure of the routing of a model.

    Attributes:
        part: str, the attribute of `Routing` with the statistics that are drawn.
        draw: callable from a list of statistics of blocks (of one block, where
            `is_of_one_block`) and options to a `matplotlib.figure.Figure`.
        caption: str, for the report and the documentation.
        source: str, the papers and their figures.
        applies: callable from the statistics of a block to a bool, whether they can be
            drawn.
        least_blocks: int, the fewest blocks.
    """

    part: str
    draw: Callable
    caption: str
    source: str
    applies: Callable = lambda block: True
    least_blocks: int = 1

    @property
    def is_of_one_block(self):
        """Bool, whether it is of one block alone, as all figures of pictures are."""
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
        "Tokens that each expert takes, in even shares (dashed line). Of routers that "
        "mix tokens, the sum of its combine weights.",
        "V-MoE, section 5; Soft MoE, appendices B and H",
    ),
    "choice_weights": FigureRow(
        "blocks",
        of_blocks.choice_weights,
        "The largest weights that the router gives to the experts of a token. Near 1/E "
        "(dotted line) all experts are alike to it, near 1 it is sure.",
        "V-MoE, figure 31",
        lambda block: block.chooses and block.choice_histogram is not None,
    ),
    "experts_per_image": FigureRow(
        "blocks",
        of_blocks.experts_per_image,
        "How many experts work on an image, over all its tokens, and their mean "
        "(dashed line).",
        "V-MoE, figure 32",
        lambda block: block.chooses and block.experts_per_image is not None,
    ),
    "by_position": FigureRow(
        "blocks",
        of_blocks.by_position,
        "Where in the images each expert works: mean weight of its output, patch by "
        "patch. Experts that choose by position come first. The white line on the "
        "scale is the weight that each would have everywhere if all were alike.",
        "V-MoE, figure 30",
        lambda b: b.weight_by_position is not None and b.patch_grid is not None,
    ),
    "by_class": FigureRow(
        "blocks",
        of_blocks.by_class,
        "How much each expert works on the images of each class. Stairs that lead down "
        "are experts with classes of their own. The white line on the scale is the "
        "weight if all were alike.",
        "V-MoE, figures 7 and 29",
        lambda block: block.weight_by_class is not None,
    ),
    # === Soft routers ===
    "token_weights": FigureRow(
        "soft",
        of_soft.token_weights,
        "How much tokens count for all slots together (dispatch weights summed over "
        "slots). Where the line falls slowly, some tokens count far more than others. "
        "The dotted line is the mean.",
        "Soft MoE, figure 24, left",
    ),
    "contributions": FigureRow(
        "soft",
        of_soft.contributions,
        "How much experts count for the output: their mean combine weight, relative to "
        "the least important expert of the block.",
        "Soft MoE, figure 24, center",
    ),
    "tokens_per_slot": FigureRow(
        "soft",
        of_soft.tokens_per_slot,
        "How many tokens each slot mixes: a line for each slot, its weight by the "
        "tokens that count most. In colour the slots that need the fewest or the most "
        "of them. The dashed line is a uniform average.",
        "Soft MoE, figure 24, right",
    ),
    "concentration": FigureRow(
        "soft",
        of_soft.concentration,
        "How few tokens make up a slot, over all slots and images (or, by combine "
        "weights, how few slots the output of a token): the mean, and where the "
        "central parts of the distribution lie. The dashed line is a uniform average.",
        "Soft MoE, figures 26 and 27",
    ),
    "slot_correlation": FigureRow(
        "soft",
        of_soft.slot_correlation,
        "Cosines between the parameters of the slots. Red squares along the diagonal "
        "are experts whose slots take in the same mixture.",
        "Soft MoE, figures 28 to 30",
        lambda block: block.slot_directions is not None,
    ),
    # === Images and text ===
    "modality_load": FigureRow(
        "modalities",
        of_modalities.modality_load,
        "How many tokens of text and of images queue for each expert. Hatched: "
        "dropped. Dashed: the capacity, which holds in each group of pairs, so that an "
        "expert may drop tokens in one group and have free slots in another.",
        "LIMoE, figures 17 to 22 and 39",
    ),
    "coverage": FigureRow(
        "modalities",
        of_modalities.coverage,
        "The share of the tokens whose first choice is among the experts that are used "
        "most. The dotted line is experts in equal use.",
        "LIMoE, figures 10 and 13",
    ),
    "confidence": FigureRow(
        "modalities",
        of_modalities.confidence,
        "The largest routing probability of each token: mean, standard deviation and "
        "distribution, text to the left of its block and images to the right. The "
        "dotted line is 1/E.",
        "LIMoE, figure 38",
    ),
    "priorities": FigureRow(
        "modalities",
        of_modalities.priorities,
        "The order in which tokens queue for the experts, in one group of pairs. "
        "Tokens to the right of the dashed line, the capacity, are dropped.",
        "LIMoE, figures 32 to 37",
    ),
    "trajectories": FigureRow(
        "modalities",
        of_modalities.trajectories,
        "From the experts of one block to those of the next, by first choices. Lines "
        "are as wide as the share of the tokens of their modality.",
        "LIMoE, figures 30 and 31",
        least_blocks=2,
    ),
    "words": FigureRow(
        "modalities",
        of_modalities.words,
        "The kinds of words of which the text of each expert consists, and all text. "
        "The number above a bar is the expert's share of all text.",
        "LIMoE, figure 40",
        lambda block: block.words is not None,
    ),
    # === Pictures ===
    "experts": FigureRow(
        "maps",
        of_maps.experts,
        "The expert of the largest weight for each patch: the paler a patch, the more "
        "alike it listens to all. Hatched patches are dropped. The bars count patches, "
        "in full colour those whose main expert has at least twice an even share of "
        "their weight; on the dashed line all experts would have equally many.",
        "V-MoE, section 5 and appendix D",
        lambda maps: maps.images is not None,
    ),
    "slots": FigureRow(
        "maps",
        of_maps.slots,
        "The patches that some slots take in (orange: more than an even share of the "
        "slot's weight) and ignore (blue: less). Maps without colour are slots that "
        "take in the mean of all patches. The slots that differ most are shown.",
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
        of_examples.patches,
        "The patches that the busiest experts take with the largest weights (below "
        "each), one of an image at most, and their surroundings (light blue outside "
        "the image).",
        "as LIMoE, figures 23 to 25",
        lambda maps: maps.patches is not None,
    ),
    "examples": FigureRow(
        "maps",
        of_examples.examples,
        "The patches and words of each expert with the highest routing probabilities.",
        "LIMoE, figures 23 to 25",
        lambda maps: maps.examples is not None,
    ),
    "pair": FigureRow(
        "maps",
        of_examples.pair,
        "The expert that takes each patch and each word of one pair.",
        "LIMoE, figures 26 to 29",
        lambda maps: maps.images is not None and maps.words is not None,
    ),
}


def draw(figure, blocks, options):
    """Draw a figure of `FIGURES`.

    Args:
        figure: str, its name.
        blocks: list of statistics of blocks to which it applies.
        options: dict of the options of the figure.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if the figure has no such option, or is of another number of blocks.
    """
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
    """Return the method `plot` of the statistics of a block.

    Args:
        part: str, the attribute of `Routing` that has them.
    """

    def plot(self, figure: str, **options) -> Figure:  # noqa: D417
        """Draw one block.

        Args:
            figure: str, a name out of the table of figures.
            **options: the options of the figure, see the table.

        Returns:
            `matplotlib.figure.Figure`.

        Raises:
            ValueError: if the figure is unknown, or not one of these statistics.
        """
        rows = ((name, row) for name, row in FIGURES.items() if row.part == part)
        check_choice(
            "figure", figure, [name for name, row in rows if row.applies(self)]
        )
        return draw(figure, [self], options)

    return plot
