"""The part of a routing report that shows how a LIMoE treats images and text."""

from keras_softmoe.evaluation.modalities import modality_statistics
from keras_softmoe.evaluation.modality_examples import expert_examples
from keras_softmoe.visualization.drawing import block_title
from keras_softmoe.visualization.modalities import (
    plot_coverage,
    plot_modality_load,
    plot_routing_confidence,
)
from keras_softmoe.visualization.modality_examples import (
    plot_expert_examples,
    plot_pair,
)
from keras_softmoe.visualization.modality_queues import (
    plot_priorities,
    plot_trajectories,
)


def add_modalities(page, backbone, images, captions, num_pictures, run):
    """Show load, confidence, ways and examples by modality.

    Args:
        page: `Page`.
        backbone: `LIMoEBackbone` whose tokens choose experts.
        images: `(N, height, width, channels)` array.
        captions: as in `evaluation.modality_statistics`, or `None`.
        num_pictures: int, how many pairs are shown.
        run: dict of the other arguments of `evaluation.modality_statistics`.
    """
    statistics = modality_statistics(backbone, images, captions, **run)
    page.section(
        "Load by modality",
        "Tokens of images and of text choose among the same experts. A token is "
        "dropped if none of the experts that it chose has a seat left.",
    )
    page.table(
        ["block", "modality", "tokens", "dropped", "experts that serve 90%"],
        [
            [
                block_title(layer),
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
        plot_modality_load(statistics),
        "How many tokens queue for each expert. Hatched: dropped. Dashed: capacity.",
    )
    page.figure(
        plot_coverage(statistics),
        "What share of the tokens the experts serve that are used most.",
    )
    page.section("Confidence and priority")
    page.figure(
        plot_routing_confidence(statistics),
        "The largest routing probability of each token: mean, standard deviation and "
        "distribution.",
    )
    page.figure(
        plot_priorities(statistics),
        "In which order tokens queue for the experts. What is to the right of the "
        "dashed line is dropped.",
    )
    if len(statistics) > 1:
        page.section("Ways through the model")
        page.figure(
            plot_trajectories(statistics),
            "From the experts of one block to those of the next, by first choices. "
            "Lines are as wide as the share of the tokens of their modality.",
        )
    last = list(statistics)[-1]
    page.section("Examples")
    examples = expert_examples(backbone, images, captions, last, **run)
    page.figure(
        plot_expert_examples(examples),
        f"What the router sends to each expert of block {last} most surely.",
    )
    if captions is not None:
        for image, caption in zip(
            images[:num_pictures], captions[:num_pictures], strict=True
        ):
            page.figure(
                plot_pair(backbone, image, caption, last, run["preprocessor"]),
                f"Which expert of block {last} takes which patches and words.",
            )
