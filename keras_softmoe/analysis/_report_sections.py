"""The sections of a routing report that depend on the kind of the model."""

import math

from keras_softmoe.analysis import (
    _plot_heat_maps as plot_heat_maps,
)
from keras_softmoe.analysis import (
    _plot_images as plot_images,
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
from keras_softmoe.analysis import (
    _plot_statistics as plot_statistics,
)
from keras_softmoe.analysis import (
    drawing,
)
from keras_softmoe.analysis._by_modality import modality_statistics
from keras_softmoe.analysis._modality_examples import expert_examples
from keras_softmoe.analysis._slots import slot_correlation
from keras_softmoe.routers import IdentityRouter, SoftRouter


def add_pictures(page, backbone, images, preprocessor):
    """Show some images, patch by patch, at the first and the last MoE block."""
    layers = dict.fromkeys((backbone.moe_layers[0], backbone.moe_layers[-1]))
    page.section("Images")
    for layer in layers:
        page.figure(
            plot_images.plot_experts(
                backbone, images, layer, preprocessor=preprocessor
            ),
            f"The expert that each patch listens to most, block {layer}. Hatched "
            "patches are dropped. The bars count patches.",
        )
    for layer in layers:
        # The slot of a sparse router holds one token at most: most pictures are empty.
        if backbone.routers[layer].mixes_tokens:
            page.figure(
                plot_images.plot_slots(
                    backbone, images, layer, preprocessor=preprocessor
                ),
                f"What some slots take in, block {layer}: patches that the slot gives "
                "more than an even share of its weight. The slots that differ most are "
                "shown.",
            )


def add_specialization(page, backbone, statistics, class_names):
    """Show what experts are for, and how routers that choose distribute weight."""
    sparse = [
        layer
        for layer, router in backbone.routers.items()
        if not isinstance(router, SoftRouter | IdentityRouter)
    ]
    if sparse:
        page.section("Choices")
        page.figure(
            plot_statistics.plot_choice_weights(statistics, sparse),
            "The largest weights that the router gives to the experts of a token. Near "
            "1/E all experts are alike to it, near 1 it is sure.",
        )
        page.figure(
            plot_statistics.plot_experts_per_image(statistics, sparse),
            "How many experts work on an image, over all its tokens.",
        )
    page.section("Specialization")
    page.figure(
        plot_heat_maps.plot_experts_by_position(
            statistics, patch_grid=backbone.patch_grid
        ),
        "Where in the images each expert works: mean weight of its output, patch by "
        "patch. Experts that choose by position come first.",
    )
    if any(block.weight_by_class is not None for block in statistics.values()):
        page.figure(
            plot_heat_maps.plot_experts_by_class(statistics, class_names),
            "How much each expert works on the images of each class. Stairs that lead "
            "down are experts with classes of their own.",
        )


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
        "largest weights are means and the numbers for 90% medians; behind them what a "
        "uniform average would give.",
    )
    page.table(
        [
            "block",
            "largest dispatch weight",
            "tokens for 90% of a slot",
            "largest combine weight",
            "slots for 90% of a token",
            "most and least important expert",
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
                f"{block.experts_needed(0.9)[name]} of {len(block.padding)}",
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
        *_concentrated(block.dispatch_peak, block.dispatch),
        *_concentrated(block.combine_peak, block.combine),
        f"{contribution.argmax()} and {contribution.argmin()}, "
        f"{contribution.max() / contribution[contribution > 0].min():.3g}× apart",
    ]


def _concentrated(peak, concentration):
    """The largest weight and the number for 90%, each beside a uniform average's."""
    count, share = len(concentration.mean), 0.9
    return [
        f"{100 * peak:.3g}% (uniform {100 / count:.3g}%)",
        f"{concentration.needed(share)} of {count} "
        f"(uniform {math.ceil(round(share * count, 6))})",
    ]
