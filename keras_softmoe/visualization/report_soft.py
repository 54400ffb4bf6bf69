"""The part of a routing report that shows what a Soft MoE mixes."""

from keras_softmoe.evaluation.slots import slot_correlation
from keras_softmoe.evaluation.soft_statistics import soft_statistics
from keras_softmoe.keras_adapter import flatten_layers
from keras_softmoe.routers import SoftRouter
from keras_softmoe.visualization.drawing import block_title
from keras_softmoe.visualization.slots import plot_slot_correlation
from keras_softmoe.visualization.soft_statistics import (
    plot_concentration,
    plot_expert_contributions,
    plot_token_weights,
    plot_tokens_per_slot,
)


def add_soft(page, model, data, run):
    """Show what tokens give, what slots take and how alike slots are.

    Args:
        page: `Page`.
        model: keras.Model with soft routers.
        data: as in `evaluation.soft_statistics`.
        run: dict of its other arguments.
    """
    statistics = soft_statistics(model, data, **run)
    page.section(
        "What tokens give and slots take",
        "A slot takes in an average of all tokens (dispatch weights), and a token gets "
        "back an average of all slots' outputs (combine weights). In the table, the "
        "largest weights are means and the numbers for 90% medians.",
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
        [_row(layer, block) for layer, block in statistics.items()],
    )
    page.figure(
        plot_token_weights(statistics),
        "How much tokens count for all slots together (dispatch weights summed over "
        "slots). Where the line falls slowly, some tokens count far more than others.",
    )
    page.figure(
        plot_expert_contributions(statistics),
        "How much experts count for the output: their mean combine weight, relative to "
        "the least important expert of the block.",
    )
    page.figure(
        plot_tokens_per_slot(statistics),
        "How many tokens each slot mixes: a line for each slot, its weight by the "
        "tokens that count most. In colour: the slots that need the fewest or the most "
        "of them.",
    )
    for weights, text in (
        ("dispatch", "How few tokens make up a slot, over all slots and images"),
        ("combine", "How few slots make up the output of a token, over all tokens"),
    ):
        page.figure(
            plot_concentration(statistics, weights),
            f"{text}: the mean, and where the central parts of the distribution lie. "
            "The dashed line is a uniform average.",
        )
    if any(hasattr(router, "mu") for router in _soft_routers(model)):
        page.section("How alike slots are")
        page.figure(
            plot_slot_correlation(slot_correlation(model)),
            "Cosines between the parameters of the slots. Red squares along the "
            "diagonal are experts whose slots take in the same mixture.",
        )


def _soft_routers(model):
    return (x for x in flatten_layers(model) if isinstance(x, SoftRouter))


def _row(layer, block):
    contribution = block.expert_contribution
    return [
        block_title(layer),
        f"{100 * block.dispatch_peak:.3g}%",
        f"{block.dispatch.needed(0.9)} of {len(block.dispatch.mean)}",
        f"{100 * block.combine_peak:.3g}%",
        f"{block.combine.needed(0.9)} of {len(block.combine.mean)}",
        f"{contribution.argmax()} and {contribution.argmin()}, "
        f"{contribution.max() / contribution[contribution > 0].min():.3g}× apart",
    ]
