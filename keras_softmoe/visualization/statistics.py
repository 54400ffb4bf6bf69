"""Pictures of how routers treat tokens and images, from their statistics."""

import numpy as np

from keras_softmoe.visualization.drawing import (
    MARKERS,
    as_percentages,
    block_panels,
    check_statistics,
    chosen_blocks,
    import_matplotlib,
    line_colors,
    new_figure,
    plain_axes,
)

_CHOICES = ("largest", "2nd largest", "3rd largest")


def plot_choice_weights(statistics, layers=None):
    """Show how large the largest router weights of the tokens are.

    One panel for each MoE block: how the largest, the second largest, ... weight that
    the router gives a token is distributed, as many as tokens choose experts (at most
    two where experts choose or mix). A dotted line marks `1/E`, the least that the
    largest of `E` probabilities can be: a router that piles up there is indifferent.

    Args:
        statistics: what `evaluation.routing_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share their axes.

    Raises:
        ValueError: if these are not statistics of these blocks.
        ImportError: if matplotlib is missing.

    Source: V-MoE, appendix E.3 (figure 31).

    Example:

    >>> statistics = ksm.evaluation.routing_statistics(classifier, images)
    >>> figure = ksm.visualization.plot_choice_weights(statistics)
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(statistics, layers)
    figure, axes = block_panels(matplotlib, blocks, 2.3, 2.0, sharex=True, sharey=True)
    for ax, block in zip(axes, blocks.values(), strict=True):
        histogram = block.choice_histogram
        edges = np.linspace(0, 1, histogram.shape[1] + 1)
        names = [*_CHOICES, *(f"{k}th largest" for k in range(4, len(histogram) + 1))]
        names = names[: len(histogram)]
        colors = line_colors(matplotlib, names)
        for counts, name, color in zip(histogram, names, colors, strict=True):
            shares = counts / max(counts.sum(), 1)
            ax.stairs(shares, edges, fill=True, color=color, alpha=0.2)
            ax.stairs(shares, edges, color=color, lw=1.2, label=name)
        ax.axvline(1 / len(block.load), color="0.3", ls=":", lw=1, label="1/E")
        plain_axes(ax, 7)
    # Once all is drawn: it ends the search for limits that show everything.
    axes[0].set(xlim=(0, 1), ylim=(0, None))
    as_percentages(matplotlib, axes[0].yaxis)
    axes[0].legend(fontsize=7, title="weight", title_fontsize=7)
    figure.supxlabel("router weight", fontsize=9)
    figure.supylabel("tokens", fontsize=9)
    return figure


def plot_experts_per_image(statistics, layers=None):
    """Show how many experts work on an image, over all its tokens.

    One panel for each MoE block: the share of images on which that many experts work,
    from none to all, and a dashed line at the mean.

    Args:
        statistics: what `evaluation.routing_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share their axes.

    Raises:
        ValueError: if these are not statistics of these blocks.
        ImportError: if matplotlib is missing.

    Source: V-MoE, appendix E.3 (figure 32).

    Example:

    >>> statistics = ksm.evaluation.routing_statistics(classifier, images)
    >>> figure = ksm.visualization.plot_experts_per_image(statistics)
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(statistics, layers)
    figure, axes = block_panels(matplotlib, blocks, 2.3, 2.0, sharex=True, sharey=True)
    color, mean_color = line_colors(matplotlib, ["images", "mean"])
    for ax, block in zip(axes, blocks.values(), strict=True):
        used, num_experts = block.experts_per_image, len(block.load)
        shares = np.bincount(used, minlength=num_experts + 1) / len(used)
        ax.bar(range(num_experts + 1), shares, width=0.9, color=color)
        label = f"mean {used.mean():.1f} of {num_experts}"
        ax.axvline(used.mean(), color=mean_color, ls="--", lw=1.2, label=label)
        ax.legend(fontsize=7)
        plain_axes(ax, 7)
    axes[0].xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    as_percentages(matplotlib, axes[0].yaxis)
    figure.supxlabel("experts that take a token of the image", fontsize=9)
    figure.supylabel("images", fontsize=9)
    return figure


def plot_dropped_tokens(statistics_by_num_experts):
    """Show the share of dropped tokens against the number of experts, block by block.

    A token is dropped if no expert of the block takes it. The models differ in their
    number of experts, and in nothing else if the figure is to tell something.

    Args:
        statistics_by_num_experts: dict from a number of experts to what
            `evaluation.routing_statistics` returns for a model that has as many. Or a
            dict from names to such dicts ("tokens choose", "experts choose"): one panel
            each, on the same axes.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not such statistics, or a model has another number of
            experts than it is said to have.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, appendix B (figures 8 to 11).

    Example:

    >>> statistics = {
    ...     model.router.num_experts: ksm.evaluation.routing_statistics(model, images)
    ...     for model in (with_8_experts, with_16_experts, with_32_experts)
    ... }
    >>> figure = ksm.visualization.plot_dropped_tokens(statistics)
    """
    matplotlib = import_matplotlib()
    named = statistics_by_num_experts
    if not (named and all(isinstance(name, str) for name in named)):
        named = {None: named}
    for by_num_experts in named.values():
        _check_num_experts(by_num_experts)
    counts = sorted({count for by_count in named.values() for count in by_count})
    layers = sorted(
        {
            layer
            for by_count in named.values()
            for statistics in by_count.values()
            for layer in statistics
        }
    )
    figure = new_figure(matplotlib, 1.6 + 2.9 * len(named), 3.2)
    axes = figure.subplots(1, len(named), squeeze=False, sharex=True, sharey=True)[0]
    colors = line_colors(matplotlib, layers)
    for ax, (name, by_num_experts) in zip(axes, named.items(), strict=True):
        for index, layer in enumerate(layers):
            line = {
                count: by_num_experts[count][layer].dropped
                for count in sorted(by_num_experts)
                if layer in by_num_experts[count]
            }
            ax.plot(
                list(line),
                list(line.values()),
                color=colors[index],
                marker=MARKERS[index % len(MARKERS)],
                ms=4.5,
                lw=1.4,
                label=f"block {layer}",
            )
        ax.set_title(name or "", fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, counts)
        ax.minorticks_off()
        ax.set_xlabel("experts", fontsize=9)
        plain_axes(ax)
    as_percentages(matplotlib, axes[0].yaxis)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("dropped tokens", fontsize=9)
    figure.legend(
        *axes[-1].get_legend_handles_labels(), loc="outside right center", fontsize=8
    )
    return figure


def _check_num_experts(by_num_experts):
    if not isinstance(by_num_experts, dict) or not by_num_experts:
        raise ValueError(
            "`statistics_by_num_experts` must be a dict from numbers of experts to "
            "statistics, or from names to such dicts, not empty. "
            f"Received: {by_num_experts!r}."
        )
    for num_experts, statistics in by_num_experts.items():
        check_statistics(statistics)
        for layer, block in statistics.items():
            if len(block.load) != num_experts:
                raise ValueError(
                    "The keys of `statistics_by_num_experts` must be the number of "
                    f"experts of each model. Received: {num_experts!r} for a model "
                    f"with {len(block.load)} experts in block {layer}."
                )
