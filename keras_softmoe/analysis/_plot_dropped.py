"""Figures of dropped tokens: patches that no expert takes, and how many there are."""

from collections.abc import Callable, Sequence

import keras
from numpy.typing import ArrayLike

from keras_softmoe.analysis import _pictures as pictures
from keras_softmoe.analysis import drawing
from keras_softmoe.analysis._inputs import backbone_of, check_has_routers
from keras_softmoe.analysis._maps import routing_maps
from keras_softmoe.analysis._statistics import RoutingStatistics
from keras_softmoe.evaluation.sweeps import keep_settings
from keras_softmoe.types import Figure


def plot_discarded_patches(
    model: keras.Model,
    images: ArrayLike,
    capacity_factors: Sequence = (1.0, 0.5, 0.25, 0.1),
    layer: int | None = None,
    priority: str | None = None,
    preprocessor: Callable | None = None,
) -> Figure:
    """Show which patches no expert of a block takes, as the capacity falls.

    One row for each image: the picture, then one copy of it for each capacity, on which
    the discarded patches are hatched grey; below it, their share. The capacity is
    changed in all blocks and put back at the end, also after an error.

    Patches compete with those of the same group: give images of several kinds together
    and, under `group_images > 1`, in the order in which they are to be grouped.

    Args:
        model: `ViTMoEBackbone`, or a task that has one, whose routers have a capacity.
        images: `(B, height, width, channels)` array, a few images, routed as one batch.
        capacity_factors: sequence of floats, the columns from left to right. The
            routers round the slots of an expert as their configuration says.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        priority: whose choices get slots first, see `ops.token_choice`. The model's
            own priority if `None`.
        preprocessor: as in `analysis.routing_maps`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: as `analysis.routing_maps` and `set_routing`, if the routers have
            no capacity, or there are no capacities to show.

    Source: V-MoE, section 4.1 and appendix D (figure 4).

    Examples:
        >>> figure = ksm.analysis.plot_discarded_patches(
        ...     sparse, images[:2], capacity_factors=(1.0, 0.25), priority="max"
        ... )
        >>> figure.savefig("discarded.png")
    """
    drawing.import_matplotlib()
    capacity_factors = tuple(capacity_factors)
    backbone, _ = backbone_of(model)
    _check_has_capacity(backbone)
    if not capacity_factors:
        raise ValueError(
            "`capacity_factors` must have at least one number, for example "
            f"(1.0, 0.5). Received: capacity_factors={capacity_factors}."
        )
    columns = []
    with keep_settings(backbone):
        if priority is not None:
            backbone.set_routing(priority=priority)
        for factor in capacity_factors:
            # Not `capacity_factor`, which a model may have replaced by this one.
            backbone.set_routing(eval_capacity_factor=factor)
            maps = routing_maps(model, images, layer, preprocessor)
            columns.append(maps.dispatch.sum(axis=(-2, -1)) == 0)
        priority = getattr(backbone.routers[maps.layer], "priority", None)
    names = [f"C = {factor:g}" for factor in capacity_factors]
    extra_height = 0.12 * len(maps.images) + 0.7
    figure, axes = pictures.image_rows(maps.images, names, extra_height=extra_height)
    for column, discarded in zip(axes.T, columns, strict=True):
        for ax, image, patches in zip(column, maps.images, discarded, strict=True):
            pictures.draw_picture(ax, image)
            pictures.hatch_patches(ax, image, patches)
            share = f"{patches.mean():.0%} discarded"
            ax.set_xlabel(share, fontsize=7, labelpad=2)
    title = f"Patches that no expert takes\nblock {maps.layer}"
    if priority is not None:
        title += f", priority {drawing.PRIORITY_NAMES.get(priority, priority)}"
    figure.suptitle(title, fontsize=10)
    return figure


def plot_dropped_tokens(statistics_by_num_experts: dict) -> Figure:
    """Show the share of dropped tokens against the number of experts, block by block.

    A token is dropped if no expert of the block takes it. The models differ in their
    number of experts, and in nothing else if the figure is to tell something.

    Args:
        statistics_by_num_experts: dict from a number of experts to what
            `analysis.routing_statistics` returns for a model that has as many. Or a
            dict from names to such dicts ("tokens choose", "experts choose"): one panel
            each, on the same axes.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not such statistics, or a model has another number of
            experts than it is said to have.

    Source: Soft MoE, appendix B (figures 8 to 11).

    Examples:
        >>> statistics = {16: ksm.analysis.routing_statistics(sparse, images)}
        >>> figure = ksm.analysis.plot_dropped_tokens(statistics)
    """
    drawing.import_matplotlib()
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
    figure = drawing.new_figure(1.6 + 2.9 * len(named), 3.2)
    axes = figure.subplots(1, len(named), squeeze=False, sharex=True, sharey=True)[0]
    styles = drawing.line_styles(layers)
    for ax, (name, by_num_experts) in zip(axes, named.items(), strict=True):
        for layer, style in zip(layers, styles, strict=True):
            line = {
                count: by_num_experts[count][layer].dropped
                for count in sorted(by_num_experts)
                if layer in by_num_experts[count]
            }
            label = drawing.block_title(layer)
            ax.plot(list(line), list(line.values()), label=label, **style)
        ax.set_title(name or "", fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, counts)
        ax.minorticks_off()
        drawing.label_axes(ax, "experts")
        drawing.plain_axes(ax)
    drawing.as_percentages(axes[0].yaxis)
    axes[0].set_ylim(bottom=0)
    drawing.label_axes(axes[0], y="dropped tokens")
    drawing.legend_beside(figure, drawing.labelled(axes[-1]))
    return figure


def _check_has_capacity(backbone):
    check_has_routers(backbone)
    for layer, router in backbone.routers.items():
        if "eval_capacity_factor" not in router.mutable_settings:
            raise ValueError(
                "Only routers with a capacity discard patches: those in which tokens "
                f"or experts choose. Received: block {layer} with "
                f"{type(router).__name__}."
            )


def _check_num_experts(by_num_experts):
    if not isinstance(by_num_experts, dict) or not by_num_experts:
        raise ValueError(
            "`statistics_by_num_experts` must be a dict from numbers of experts to "
            "statistics, or from names to such dicts, not empty. "
            f"Received: {by_num_experts!r}."
        )
    for num_experts, statistics in by_num_experts.items():
        drawing.check_statistics(statistics, RoutingStatistics)
        for layer, block in statistics.items():
            if len(block.load) != num_experts:
                raise ValueError(
                    "The keys of `statistics_by_num_experts` must be the number of "
                    f"experts of each model. Received: {num_experts!r} for a model "
                    f"with {len(block.load)} experts in block {layer}."
                )
