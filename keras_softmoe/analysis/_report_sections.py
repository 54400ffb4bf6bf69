"""The sections of a routing report about soft routers and about LIMoE."""

import math

from keras_softmoe import drawing
from keras_softmoe.analysis import (
    _plot_heat_maps as plot_heat_maps,
)
from keras_softmoe.analysis import (
    _plot_modalities as plot_modalities,
)
from keras_softmoe.analysis import (
    _plot_modality_examples as plot_modality_examples,
)
from keras_softmoe.analysis import (
    _plot_modality_queues as plot_modality_queues,
)
from keras_softmoe.analysis import (
    _plot_soft as plot_soft,
)
from keras_softmoe.analysis._by_modality import modality_statistics
from keras_softmoe.analysis._modality_examples import expert_examples
from keras_softmoe.analysis._slots import slot_correlation
from keras_softmoe.routers import SoftRouter

_SHARE = 0.9


def add_soft(page, statistics, routers, model):
    """Show what tokens give, what slots take and how alike slots are.

    Args:
        page: `Page`.
        statistics: what `analysis.soft_statistics` returns.
        routers: dict from blocks to the routers of the model.
        model: keras.Model with soft routers.
    """
    page.section(
        "What tokens give and slots take",
        "A slot takes in an average of all tokens (dispatch weights), and a token gets "
        "back an average of all slots' outputs (combine weights). In the table, the "
        "largest weights are means and the numbers for 90% medians; behind them what "
        "an even average would give. Sharpness is the largest weight in even shares: "
        "at 1× every slot is the mean of all tokens, or every token gets the mean of "
        "all slots, and the layer does not route.",
    )
    page.table(
        [
            "block",
            "largest dispatch weight",
            "dispatch sharpness (even 1×)",
            "tokens for 90% of a slot",
            "largest combine weight",
            "combine sharpness (even 1×)",
            "slots for 90% of a token",
            "most and least important expert (even 1×)",
        ],
        [_soft_row(layer, block) for layer, block in statistics.items()],
    )
    page.figure(
        plot_soft.plot_token_weights(statistics),
        "How much tokens count for all slots together (dispatch weights summed over "
        "slots). Where the line falls slowly, some tokens count far more than others.",
    )
    page.figure(
        plot_soft.plot_expert_contributions(statistics),
        "How much experts count for the output: their mean combine weight, relative to "
        "the least important expert of the block.",
    )
    page.figure(
        plot_soft.plot_tokens_per_slot(statistics),
        "How many tokens each slot mixes: a line for each slot, its weight by the "
        "tokens that count most. In colour: the slots that need the fewest or the most "
        "of them.",
    )
    for weights, text in (
        ("dispatch", "How few tokens make up a slot, over all slots and images"),
        ("combine", "How few slots make up the output of a token, over all tokens"),
    ):
        page.figure(
            plot_soft.plot_concentration(statistics, weights),
            f"{text}: the mean, and where the central parts of the distribution lie. "
            "The dashed line is a uniform average.",
        )
    if any(isinstance(x, SoftRouter) and hasattr(x, "mu") for x in routers.values()):
        page.section("How alike slots are")
        page.figure(
            plot_heat_maps.plot_slot_correlation(slot_correlation(model)),
            "Cosines between the parameters of the slots. Red squares along the "
            "diagonal are experts whose slots take in the same mixture.",
        )


def add_modalities(page, backbone, images, captions, num_pictures, run):
    """Show load, confidence, paths and examples by modality.

    Args:
        page: `Page`.
        backbone: `LIMoEBackbone` whose tokens choose experts.
        images: `(N, height, width, channels)` array.
        captions: as in `analysis.modality_statistics`, or `None`.
        num_pictures: int, how many pairs are shown.
        run: dict of the other arguments of `analysis.modality_statistics`.
    """
    statistics = modality_statistics(backbone, images, captions, **run)
    page.section(
        "Load by modality",
        "Tokens of images and of text choose among the same experts. A token is "
        "dropped if none of the experts that it chose has a free slot.",
    )
    page.table(
        ["block", "modality", "tokens", "dropped", "experts that serve 90%"],
        [
            [
                drawing.block_title(layer),
                name,
                f"{block.num_tokens[name]:,}",
                f"{100 * block.dropped[name]:.3g}%",
                f"{block.experts_needed(_SHARE)[name]} of {len(block.padding)} "
                f"(even {_even_count(len(block.padding))})",
            ]
            for layer, block in statistics.items()
            for name in block.num_tokens
        ],
    )
    page.figure(
        plot_modalities.plot_modality_load(statistics),
        "How many tokens queue for each expert. Hatched: dropped. Dashed: capacity.",
    )
    page.figure(
        plot_modalities.plot_coverage(statistics),
        "What share of the tokens the experts serve that are used most.",
    )
    page.section("Confidence and priority")
    page.figure(
        plot_modalities.plot_routing_confidence(statistics),
        "The largest routing probability of each token: mean, standard deviation and "
        "distribution.",
    )
    page.figure(
        plot_modality_queues.plot_priorities(statistics),
        "In which order tokens queue for the experts. What is to the right of the "
        "dashed line is dropped.",
    )
    if len(statistics) > 1:
        page.section("Paths through the model")
        page.figure(
            plot_modality_queues.plot_trajectories(statistics),
            "From the experts of one block to those of the next, by first choices. "
            "Lines are as wide as the share of the tokens of their modality.",
        )
    last = list(statistics)[-1]
    page.section("Examples")
    examples = expert_examples(backbone, images, captions, last, **run)
    page.figure(
        plot_modality_examples.plot_expert_examples(examples),
        f"What the router sends to each expert of block {last} most surely.",
    )
    if captions is not None:
        for image, caption in zip(
            images[:num_pictures], captions[:num_pictures], strict=True
        ):
            page.figure(
                plot_modality_examples.plot_pair(
                    backbone, image, caption, last, run["preprocessor"]
                ),
                f"Which expert of block {last} takes which patches and words.",
            )


def _soft_row(layer, block):
    contribution = block.expert_contribution
    return [
        drawing.block_title(layer),
        *_concentrated(block.dispatch_peak, block.dispatch_sharpness, block.dispatch),
        *_concentrated(block.combine_peak, block.combine_sharpness, block.combine),
        f"{contribution.argmax()} and {contribution.argmin()}, "
        f"{contribution.max() / contribution[contribution > 0].min():.3g}× apart",
    ]


def _concentrated(peak, sharpness, concentration):
    """The largest weight and the number for 90%, each beside an even average's."""
    count = len(concentration.mean)
    return [
        f"{100 * peak:.3g}% (even {100 / count:.3g}%)",
        f"{sharpness:.2f}×",
        f"{concentration.needed(_SHARE)} of {count} (even {_even_count(count)})",
    ]


def _even_count(count):
    """How many of so many are needed for 90% where all have the same."""
    return math.ceil(round(_SHARE * count, 6))
