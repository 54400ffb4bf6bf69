"""Figures of one trained model under other settings of its routers."""

import numpy as np

from keras_softmoe.analysis import drawing

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
# Accuracies lie between them.
_LIMITS = (0.0, 1.0)


def plot_sweep(rows, x="capacity_factor", by="priority", baselines=None):
    """Show accuracy against one setting of the routers, a line per value of another.

    Points are means over the seeds, error bars reach one standard deviation up and
    down, but not below 0 or above 100%. What is cut down to save compute (capacity, the
    fraction of tokens kept) falls from left to right, on a logarithmic scale; other
    numbers rise. Settings that are not numbers stand side by side, without lines.

    Args:
        rows: what `evaluation.routing_sweep` returns.
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

    Source: V-MoE, section 4.2 (figure 6: `C`, batch prioritized and vanilla) and
    appendix E.4 (figures 33 to 35: `K`).

    Example:

    >>> rows = ksm.evaluation.routing_sweep(
    ...     classifier, (images, labels), seeds=5,
    ...     priority=("max", "position"), capacity_factor=(1.05, 0.5, 0.25),
    ... )
    >>> figure = ksm.analysis.plot_sweep(rows)
    """
    drawing.import_matplotlib()
    lines, fixed = _lines(list(rows), x, by)
    values = list(dict.fromkeys(value for line in lines.values() for value in line))
    numeric = all(drawing.is_number(value) for value in values)
    places = values = sorted(values) if numeric else values
    if not numeric:
        places = range(len(values))
    where = dict(zip(values, places, strict=True))

    named = by is not None or baselines
    figure = drawing.new_figure(6.6 if named else 4.8, 3.6)
    ax = figure.subplots()
    styles = drawing.line_styles(lines)
    for index, (name, line) in enumerate(lines.items()):
        shift = 0.0 if numeric else 0.08 * (index - (len(lines) - 1) / 2)
        found = [value for value in values if value in line]
        drawing.draw_seeds(
            ax,
            [where[value] + shift for value in found],
            [line[value] for value in found],
            _LIMITS,
            label=None if by is None else _value_name(by, name),
            ls=drawing.DASHES[index % len(drawing.DASHES)] if numeric else "none",
            # Smaller and smaller, for those upon each other.
            **{**styles[index], "ms": 7 - 3 * index / len(lines)},
        )
    handles = list(ax.containers) if by is not None else []
    for index, (name, accuracies) in enumerate((baselines or {}).items()):
        color = drawing.PALETTE[-1 - index % len(drawing.PALETTE)]
        handles.append(_draw_level(ax, accuracies, name, color))

    if x in _CUT_DOWN and numeric:
        ax.set_xscale("log")
        ax.invert_xaxis()
    names = [_value_name(x, value).replace(" (", "\n(") for value in values]
    drawing.name_ticks(ax.xaxis, places, names)
    ax.minorticks_off()
    drawing.plain_axes(ax)
    drawing.as_percentages(ax.yaxis)
    drawing.label_axes(ax, _NAMES.get(x, x), _accuracy_label(rows))
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
    around the learned accuracy reach one standard deviation up and down, but not below
    0 or above 100%.

    Args:
        ablation: what `evaluation.random_routers` returns.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if there is no block in `ablation`.

    Source: V-MoE, appendix E.1 (figures 27 and 28).

    Example:

    >>> ablation = ksm.evaluation.random_routers(classifier, (images, labels))
    >>> figure = ksm.analysis.plot_random_routers(ablation)
    """
    drawing.import_matplotlib()
    if not ablation.single or list(ablation.single) != list(ablation.cumulative):
        raise ValueError(
            "`ablation` must have accuracies of the same blocks, and of at least one, "
            "with a single router and with several at random. Received: "
            f"single of the blocks {list(ablation.single)}, "
            f"cumulative of the blocks {list(ablation.cumulative)}."
        )
    names = [str(layer) for layer in ablation.single]
    figure = drawing.new_figure(max(5.6, 3.2 + 0.32 * len(names)), 3.1)
    axes = figure.subplots(1, 2, sharey=True)
    panels = (
        ("One router at random", "block of the router", ablation.single),
        ("All routers up to a block at random", "last block", ablation.cumulative),
    )
    for ax, (title, label, accuracies) in zip(axes, panels, strict=True):
        _draw_level(ax, ablation.learned, "all learned", drawing.PALETTE[1])
        drawing.draw_seeds(
            ax,
            range(len(names)),
            accuracies.values(),
            _LIMITS,
            ls="-" if accuracies is ablation.cumulative else "none",
            label="random",
            color=drawing.PALETTE[0],
            marker="o",
        )
        ax.set_title(title, fontsize=9)
        drawing.label_axes(ax, label)
        drawing.name_ticks(ax.xaxis, range(len(names)), names)
        ax.margins(x=0.5 / max(len(names) - 1, 1))
        drawing.plain_axes(ax)
    drawing.as_percentages(axes[0].yaxis)
    spread = " (± standard deviation)" if np.size(ablation.learned) > 1 else ""
    drawing.label_axes(axes[0], y=f"accuracy{spread}")
    axes[1].legend(fontsize=8)
    return figure


# === Data ===


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


def _draw_level(ax, accuracies, label, color):
    """A dashed horizontal line at the mean, in the band of the seeds; returns it."""
    mean, spread = np.mean(accuracies), drawing.spread_of(accuracies)
    if spread:
        ends = np.clip([mean - spread, mean + spread], *_LIMITS)
        ax.axhspan(*ends, color=color, alpha=0.15, lw=0)
    return ax.axhline(mean, color=color, ls="--", lw=1.0, label=label, zorder=1)


def _accuracy_label(rows):
    """Says what the error bars are, if there are any."""
    counts = sorted({np.size(row.accuracies) for row in rows})
    if counts == [1]:
        return "accuracy"
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"accuracy (± standard deviation of {seeds} seeds)"


def _value_name(setting, value):
    if setting == "priority":
        return drawing.PRIORITY_NAMES.get(value, value)
    return f"{value:g}" if drawing.is_number(value) else str(value)
