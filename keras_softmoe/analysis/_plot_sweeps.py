"""Figures of trained models under other settings of their routers."""

from collections.abc import Sequence

import numpy as np

from keras_softmoe.analysis import drawing
from keras_softmoe.analysis._plot_ablations import draw_level
from keras_softmoe.evaluation import pareto_front
from keras_softmoe.evaluation.sweeps import SweepRow, costs_of
from keras_softmoe.types import Figure

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
# Where there is little room.
_SYMBOLS = {"capacity_factor": "C", "num_selected_experts": "K"}
_COST_NAMES = {
    "gflop_per_image": "GFLOP per image",
    "seconds_per_image": "time per image (ms)",
    "relative_time": "time / that of the unchanged model",
}
# The largest cost in smallest ones.
_MOST_ON_A_LINEAR_AXIS = 10.0
# Accuracies lie between them.
_LIMITS = (0.0, 1.0)


def plot_sweep(
    rows: Sequence[SweepRow],
    x: str = "capacity_factor",
    by: str | None = "priority",
    baselines: dict | None = None,
) -> Figure:
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

    Examples:
        >>> rows = ksm.evaluation.routing_sweep(
        ...     sparse,
        ...     (images, labels),
        ...     seeds=1,
        ...     priority=("max", "position"),
        ...     capacity_factor=(1.05, 0.25),
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
        level = draw_level(ax, accuracies, label=name, color=color)
        handles.append(level)

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


def plot_pareto(
    rows: Sequence[SweepRow], cost: str = "gflop_per_image", by: str | None = None
) -> Figure:
    """Show accuracy against cost, and the Pareto front.

    Points are means over the seeds, error bars reach one standard deviation up and
    down, but not below 0 or above 100%. Those on the front, see
    `evaluation.pareto_front`, are filled, joined by steps and numbered, and the legend
    names the settings in which the rows differ; the others are hollow. With `by` each
    of its values has a front of its own.

    Args:
        rows: what `evaluation.routing_sweep` returns. Rows of several models are told
            apart by a setting: `row._replace(settings={"model": name})`.
        cost: `"gflop_per_image"`, `"seconds_per_image"` or `"relative_time"`. The axis
            is logarithmic where costs differ more than tenfold.
        by: str, the setting that tells fronts apart, or `None` for a single front.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if there are no rows, or a row lacks the cost or `by`.

    Source: V-MoE, figures 2 and 3 (numbers in tables 10 and 11); Soft MoE, section 3.3
    (figure 3).

    Examples:
        >>> rows = ksm.evaluation.routing_sweep(
        ...     sparse,
        ...     (images, labels),
        ...     time_repeats=1,
        ...     priority=("max", "position"),
        ...     capacity_factor=(1.05, 0.25),
        ... )
        >>> figure = ksm.analysis.plot_pareto(rows, "relative_time", by="priority")
    """
    drawing.import_matplotlib()
    rows = list(rows)
    costs = costs_of(rows, cost)
    groups = _groups(rows, by)
    varied = [
        name
        for name in dict.fromkeys(name for row in rows for name in row.settings)
        if name != by and len({str(row.settings.get(name)) for row in rows}) > 1
    ]
    figure = drawing.new_figure(7.2, 3.6)
    ax = figure.subplots()
    legend, number = {}, 0
    styles = drawing.line_styles(groups)
    for (value, group), style in zip(groups.items(), styles, strict=True):
        front = pareto_front(group, cost)
        beaten = [row for row in group if not any(row is best for best in front)]
        label = "Pareto front" if by is None else _value_name(by, value)
        kinds = (
            (beaten, {"ls": "none", "mfc": "white", "label": "_"}),
            (front, {"drawstyle": "steps-post", "label": label}),
        )
        for drawn, kind in kinds:
            if drawn:
                legend[label] = drawing.draw_seeds(
                    ax,
                    [getattr(row, cost) for row in drawn],
                    [row.accuracies for row in drawn],
                    _LIMITS,
                    **{**style, **kind},
                )
        points = {}
        for row in front:
            point = getattr(row, cost), np.mean(row.accuracies)
            points.setdefault(point, []).append(_settings_name(row, varied))
        for point, names in points.items():
            number += 1
            ax.annotate(
                *(str(number), point, (-3, 4)),
                textcoords="offset points",
                ha="right",
                fontsize=7,
                color=style["color"],
            )
            (legend[f"{number}: {' or '.join(names)}"],) = ax.plot([], [], ls="none")
    if costs.min() > 0 and costs.max() > _MOST_ON_A_LINEAR_AXIS * costs.min():
        ax.set_xscale("log")
    drawing.plain_axes(ax)
    drawing.as_percentages(ax.yaxis)
    if cost == "seconds_per_image":
        drawing.format_ticks(ax.xaxis, lambda seconds: f"{1000 * seconds:.4g}")
    drawing.label_axes(ax, _COST_NAMES[cost], _accuracy_label(rows))
    figure.legend(
        legend.values(),
        legend.keys(),
        title=by and _NAMES.get(by, by),
        loc="outside right upper",
        fontsize=8,
        title_fontsize=8,
    )
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


def _groups(rows, by):
    """Dict from the values of a setting to their rows, `None` to all without one."""
    groups = {}
    for row in rows:
        if by is not None and by not in row.settings:
            raise ValueError(
                "`by` must be a setting of all rows (`by=None` for a single front). A "
                f"row has: {', '.join(row.settings)}. Received: by={by!r}."
            )
        groups.setdefault(None if by is None else row.settings[by], []).append(row)
    return groups


# === Names ===


def _accuracy_label(rows):
    """Says what the error bars are, if there are any."""
    counts = sorted({np.size(row.accuracies) for row in rows})
    if counts == [1]:
        return "accuracy"
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"accuracy (± standard deviation of {seeds} seeds)"


def _settings_name(row, names):
    """Those of the settings of a row that have these names."""
    return ", ".join(
        f"{_SYMBOLS.get(name, name)} = {_value_name(name, value)}"
        for name, value in row.settings.items()
        if name in names
    )


def _value_name(setting, value):
    if setting == "priority":
        return drawing.PRIORITY_NAMES.get(value, value)
    return f"{value:g}" if drawing.is_number(value) else str(value)
