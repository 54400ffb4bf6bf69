"""Pictures of one trained model under other settings of its routers."""

import numpy as np

from keras_softmoe.evaluation.routing import (
    backbone_of,
    check_has_routers,
    routing_maps,
)
from keras_softmoe.evaluation.sweeps import settings_kept
from keras_softmoe.visualization.drawing import (
    DASHES,
    DROPPED,
    MARKERS,
    PALETTE,
    as_percentages,
    draw_level,
    draw_map,
    draw_picture,
    import_matplotlib,
    is_number,
    line_colors,
    new_figure,
    picture_figure,
    plain_axes,
    spread_of,
)

# What is cut down to save compute: drawn falling, and on a scale of ratios.
_CUT_DOWN = ("capacity_factor", "eval_capacity_factor", "keep_fraction")
_NAMES = {
    "capacity_factor": "capacity factor C",
    "eval_capacity_factor": "capacity factor C outside training",
    "keep_fraction": "fraction of tokens kept",
    "normalize_gates": "gates normalized",
    "num_selected_experts": "experts per token K",
    "random_logits": "random logits",
}
_PRIORITIES = {"max": "max (batch prioritized)", "position": "position (vanilla)"}
# More numbers than these do not fit under an axis.
_MOST_TICKS = 12


def plot_discarded_patches(
    model,
    images,
    capacity_factors=(1.0, 0.5, 0.25, 0.1),
    layer=None,
    priority=None,
    preprocessor=None,
):
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
        priority: whose choices are seated first, see `ops.token_choice`. The model's
            own priority if `None`.
        preprocessor: as in `evaluation.routing_maps`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: as `evaluation.routing_maps` and `set_routing`, if the routers have
            no capacity, or there are no capacities to show.
        ImportError: if matplotlib is missing.

    Source: V-MoE, section 4.1 and appendix D (figure 4).

    Example:

    >>> figure = ksm.visualization.plot_discarded_patches(
    ...     classifier, images[:4], capacity_factors=(1.0, 0.25), priority="max"
    ... )
    >>> figure.savefig("discarded.png")
    """
    matplotlib = import_matplotlib()
    capacity_factors = tuple(capacity_factors)
    backbone, _ = backbone_of(model)
    _check_has_capacity(backbone)
    if not capacity_factors:
        raise ValueError(
            "`capacity_factors` must have at least one number, for example "
            f"(1.0, 0.5). Received: capacity_factors={capacity_factors}."
        )
    columns = []
    with settings_kept(backbone):
        if priority is not None:
            backbone.set_routing(priority=priority)
        for factor in capacity_factors:
            # Not `capacity_factor`, which a model may have replaced by this one.
            backbone.set_routing(eval_capacity_factor=factor)
            maps = routing_maps(model, images, layer, preprocessor)
            columns.append(maps.dispatch.sum(axis=(-2, -1)) == 0)
        seated_first = getattr(backbone.routers[maps.layer], "priority", None)

    rows = len(maps.images)
    figure = picture_figure(matplotlib, rows, 1 + len(columns), 0.0, 0.12 * rows + 0.7)
    axes = figure.subplots(rows, 1 + len(columns), squeeze=False)
    axes[0, 0].set_title("image", fontsize=9)
    for row, image in enumerate(maps.images):
        draw_picture(axes[row, 0], image)
    for column, (factor, discarded) in enumerate(
        zip(capacity_factors, columns, strict=True), start=1
    ):
        axes[0, column].set_title(f"C = {factor:g}", fontsize=9)
        for ax, image, patches in zip(
            axes[:, column], maps.images, discarded, strict=True
        ):
            _draw_discarded(matplotlib, ax, image, patches)
    title = f"Patches that no expert takes\nblock {maps.layer}"
    if seated_first is not None:
        title += f", priority {_value_name('priority', seated_first)}"
    figure.suptitle(title, fontsize=10)
    return figure


def plot_sweep(rows, x="capacity_factor", by="priority", baselines=None):
    """Show accuracy against one setting of the routers, a line per value of another.

    Points are means over the seeds, error bars reach one standard deviation up and
    down. What is cut down to save compute (capacity, the fraction of tokens kept) falls
    from left to right, on a logarithmic scale; other numbers rise. Settings that are
    not numbers stand side by side, without lines.

    Args:
        rows: list of `evaluation.SweepRow`, what `evaluation.routing_sweep` returns.
            All settings but `x` and `by` are the same in all rows.
        x: str, the setting along the axis.
        by: str, the setting that tells the lines apart, or `None` for a single line.
        baselines: optional dict from a name to an accuracy (or the accuracies of some
            seeds), drawn as a dashed line: the model as trained, its dense twin.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if there are no rows, a row lacks `x` or `by`, or rows agree in both
            or differ in further settings.
        ImportError: if matplotlib is missing.

    Source: V-MoE, section 4.2 (figure 6: `C`, batch prioritized and vanilla) and
    appendix E.4 (figures 33 to 35: `K`).

    Example:

    >>> rows = ksm.evaluation.routing_sweep(
    ...     classifier, (images, labels), seeds=5,
    ...     priority=("max", "position"), capacity_factor=(1.05, 0.5, 0.25),
    ... )
    >>> figure = ksm.visualization.plot_sweep(rows)
    """
    matplotlib = import_matplotlib()
    lines, fixed = _lines(list(rows), x, by)
    values = list(dict.fromkeys(value for line in lines.values() for value in line))
    numeric = all(is_number(value) for value in values)
    places = values = sorted(values) if numeric else values
    if not numeric:
        places = range(len(values))
    where = dict(zip(values, places, strict=True))

    named = by is not None or baselines
    figure = new_figure(matplotlib, 6.6 if named else 4.8, 3.6)
    ax = figure.subplots()
    colors = line_colors(matplotlib, list(lines))
    for index, (name, line) in enumerate(lines.items()):
        shift = 0.0 if numeric else 0.08 * (index - (len(lines) - 1) / 2)
        found = [value for value in values if value in line]
        _draw_line(
            ax,
            [where[value] + shift for value in found],
            [line[value] for value in found],
            ls=DASHES[index % len(DASHES)] if numeric else "none",
            color=colors[index],
            marker=MARKERS[index % len(MARKERS)],
            # Smaller and smaller, for those upon each other.
            ms=7 - 3 * index / len(lines),
            label=None if by is None else _value_name(by, name),
        )
    handles = list(ax.containers) if by is not None else []
    for index, (name, accuracies) in enumerate((baselines or {}).items()):
        color = PALETTE[-1 - index % len(PALETTE)]
        level = draw_level(ax, np.mean(accuracies), name, color, spread_of(accuracies))
        handles.append(level)

    if x in _CUT_DOWN and numeric:
        ax.set_xscale("log")
        ax.invert_xaxis()
    shown = slice(None, None, -(-len(values) // _MOST_TICKS))
    names = [_value_name(x, value).replace(" (", "\n(") for value in values]
    ax.set_xticks(list(places)[shown], names[shown])
    ax.minorticks_off()
    plain_axes(ax)
    as_percentages(matplotlib, ax.yaxis)
    ax.set_xlabel(_NAMES.get(x, x), fontsize=9)
    ax.set_ylabel(_accuracy_label(rows), fontsize=9)
    if named:
        figure.legend(
            handles=handles,
            title=by and _NAMES.get(by, by),
            loc="outside right upper",
            fontsize=8,
            title_fontsize=8,
        )
    if fixed:
        settings = ", ".join(f"{name} = {value}" for name, value in fixed.items())
        ax.set_title(f"with {settings}", fontsize=9)
    return figure


def plot_random_routers(ablation):
    """Show the accuracy with routers that choose at random beside the learned one.

    On the left one router at a time is random, on the right those of a block and all
    MoE blocks before it. Points are means over the seeds, error bars and the band
    around the learned accuracy reach one standard deviation up and down.

    Args:
        ablation: `evaluation.RouterAblation`, what `evaluation.random_routers` returns.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if there is no block in `ablation`.
        ImportError: if matplotlib is missing.

    Source: V-MoE, appendix E.1 (figures 27 and 28).

    Example:

    >>> ablation = ksm.evaluation.random_routers(classifier, (images, labels))
    >>> figure = ksm.visualization.plot_random_routers(ablation)
    """
    matplotlib = import_matplotlib()
    if not ablation.single or list(ablation.single) != list(ablation.cumulative):
        raise ValueError(
            "`ablation` must have accuracies of the same blocks, and of at least one, "
            "with a single router and with several at random. Received: "
            f"single of the blocks {list(ablation.single)}, "
            f"cumulative of the blocks {list(ablation.cumulative)}."
        )
    names = [str(layer) for layer in ablation.single]
    figure = new_figure(matplotlib, max(5.6, 3.2 + 0.32 * len(names)), 3.1)
    axes = figure.subplots(1, 2, sharey=True)
    panels = (
        ("One router at random", "block of the router", ablation.single),
        ("All routers up to a block at random", "last block", ablation.cumulative),
    )
    learned = ablation.learned
    for ax, (title, label, accuracies) in zip(axes, panels, strict=True):
        draw_level(ax, np.mean(learned), "all learned", PALETTE[1], spread_of(learned))
        _draw_line(
            ax,
            range(len(names)),
            list(accuracies.values()),
            ls="-" if accuracies is ablation.cumulative else "none",
            color=PALETTE[0],
            marker="o",
            ms=5,
            label="random",
        )
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(label, fontsize=9)
        shown = slice(None, None, -(-len(names) // _MOST_TICKS))
        ax.set_xticks(list(range(len(names)))[shown], names[shown])
        ax.margins(x=0.5 / max(len(names) - 1, 1))
        plain_axes(ax)
    as_percentages(matplotlib, axes[0].yaxis)
    axes[0].set_ylabel(
        "accuracy" + (" (± standard deviation)" if np.size(learned) > 1 else ""),
        fontsize=9,
    )
    axes[1].legend(fontsize=8)
    return figure


# === Data ===


def _check_has_capacity(backbone):
    check_has_routers(backbone)
    for layer, router in backbone.routers.items():
        if "eval_capacity_factor" not in router.mutable_settings:
            raise ValueError(
                "Only routers with a capacity discard patches: those in which tokens "
                f"or experts choose. Received: block {layer} with "
                f"{type(router).__name__}."
            )


def _lines(rows, x, by):
    """Dict from `by` to dict from `x` to accuracies, and the other settings."""
    names = [x] if by is None else [x, by]
    if not rows or by == x:
        raise ValueError(
            "A sweep is drawn from the rows that `evaluation.routing_sweep` returns, "
            "against one of their settings, `x`, and by another, `by`. Received: "
            f"{len(rows)} rows, x={x!r}, by={by!r}."
        )
    lines, fixed = {}, None
    for row in rows:
        for name in names:
            if name not in row.settings:
                raise ValueError(
                    "`x` and `by` must be settings of all rows (`by=None` for a single "
                    f"line). A row has: {', '.join(row.settings)}. "
                    f"Received: x={x!r}, by={by!r}."
                )
        others = {k: v for k, v in row.settings.items() if k not in names}
        fixed = others if fixed is None else fixed
        if others != fixed:
            raise ValueError(
                "Rows that are drawn together may only differ in `x` and `by`. Pick "
                "those that agree in the other settings. "
                f"Received: x={x!r}, by={by!r} and rows with {fixed} and {others}."
            )
        line = lines.setdefault(None if by is None else row.settings[by], {})
        if row.settings[x] in line:
            raise ValueError(
                "Each point is drawn from one row; more seeds belong into its "
                f"`accuracies`. Received: two rows with {row.settings}."
            )
        line[row.settings[x]] = row.accuracies
    return lines, fixed


# === Drawing ===


def _draw_discarded(matplotlib, ax, image, discarded):
    """The picture with discarded patches `(rows, columns)` hatched grey."""
    draw_picture(ax, image)
    rows, columns = discarded.shape
    grey = matplotlib.colors.ListedColormap([DROPPED])
    covered = np.ma.masked_where(~discarded, discarded)
    # Under the hatching, or the picture would shine through between its patches.
    draw_map(ax, image, covered, cmap=grey)
    ax.pcolor(
        np.linspace(0, image.shape[1], columns + 1),
        np.linspace(0, image.shape[0], rows + 1),
        covered,
        cmap=grey,
        edgecolor="grey",
        hatch="////",
        linewidth=0,
    )
    ax.set_xlabel(f"{discarded.mean():.0%} discarded", fontsize=7, labelpad=2)


def _draw_line(ax, places, accuracies, **kwargs):
    means = [np.mean(values) for values in accuracies]
    spreads = [spread_of(values) for values in accuracies]
    ax.errorbar(
        places,
        means,
        yerr=spreads if any(spreads) else None,
        lw=1.4,
        capsize=3,
        elinewidth=1,
        **kwargs,
    )


def _accuracy_label(rows):
    """Says what the error bars are, if there are any."""
    counts = sorted({np.size(row.accuracies) for row in rows})
    if counts == [1]:
        return "accuracy"
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"accuracy (± standard deviation of {seeds} seeds)"


def _value_name(setting, value):
    if setting == "priority":
        return _PRIORITIES.get(value, value)
    return f"{value:g}" if is_number(value) else str(value)
