"""The figure of a sweep: scores against a setting or a cost."""

import numpy as np

from keras_softmoe import drawing

COSTS = {
    "gflop_per_image": "GFLOP per image",
    "seconds_per_image": "time per image (ms)",
    "relative_time": "time / that of the unchanged model",
}
# Settings that save compute: drawn falling, and on a scale of ratios.
_SAVING = ("capacity_factor", "eval_capacity_factor", "experts_kept", "keep_fraction")
_NAMES = {
    "capacity_factor": "capacity factor C",
    "eval_capacity_factor": "capacity factor C outside training",
    "experts_kept": "experts kept in each block",
    "keep_fraction": "fraction of tokens kept",
    "layers": "blocks",
    "normalize_gates": "gates normalized",
    "num_selected_experts": "experts per token K",
    "random_logits": "random logits",
}
# Where there is little room.
_SYMBOLS = {"capacity_factor": "C", "num_selected_experts": "K"}
# The largest number along an axis, in smallest ones.
_MOST_ON_A_LINEAR_AXIS = {"setting": 5, "cost": 10}


def draw_sweep(sweep, x, y, by, baselines):
    """Draw the figure of `Sweep.plot`, with the same arguments."""
    drawing.import_matplotlib()
    names = [y] if isinstance(y, str) else list(y)
    draw = _draw_fronts if x in COSTS else _draw_lines
    with_legend = by is not None or baselines or x in COSTS
    width = 4.8 if len(names) == 1 else 3.0 * len(names)
    beside = 2.4 if x in COSTS else 1.8
    figure = drawing.new_figure(width + (beside if with_legend else 0), 3.6)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        limits = _limits(sweep.scores(name), baselines)
        legend = draw(ax, sweep, x, name, by, limits)
        for index, (label, level) in enumerate(baselines.items()):
            color = drawing.PALETTE[-1 - index % len(drawing.PALETTE)]
            legend[label] = _draw_baseline(ax, level, limits, color)
        drawing.plain_axes(ax)
        if np.isfinite(limits).all():
            drawing.as_percentages(ax.yaxis)
        drawing.label_axes(
            ax, COSTS.get(x) or _NAMES.get(x, x), _score_label(sweep, name)
        )
    if with_legend:
        figure.legend(
            legend.values(),
            legend.keys(),
            title=by and _NAMES.get(by, by),
            loc="outside right upper",
            fontsize=8,
            title_fontsize=8,
        )
    return figure


def _draw_lines(ax, sweep, x, y, by, limits):
    """Draw scores against a setting; returns handles for the legend."""
    lines, fixed = _lines(sweep.rows, x, y, by)
    values = list(dict.fromkeys(value for line in lines.values() for value in line))
    numeric = all(drawing.is_number(value) for value in values)
    places = values = sorted(values) if numeric else values
    if not numeric:
        places = range(len(values))
    where = dict(zip(values, places, strict=True))
    legend = {}
    styles = drawing.line_styles(lines)
    for index, (name, line) in enumerate(lines.items()):
        shift = 0.0 if numeric else 0.08 * (index - (len(lines) - 1) / 2)
        found = [value for value in values if value in line]
        label = None if by is None else _value_name(by, name)
        handle = drawing.draw_seeds(
            ax,
            [where[value] + shift for value in found],
            [line[value] for value in found],
            limits,
            label=label,
            ls=drawing.DASHES[index % len(drawing.DASHES)] if numeric else "none",
            # Smaller and smaller, for those upon each other.
            **{**styles[index], "ms": 7 - 3 * index / len(lines)},
        )
        if by is not None:
            legend[label] = handle
    if numeric:
        _scale(ax, values, "setting", always=x in _SAVING)
    if x in _SAVING:
        ax.invert_xaxis()
    shown = [_value_name(x, value).replace(" (", "\n(") for value in values]
    drawing.name_ticks(ax.xaxis, places, shown)
    ax.minorticks_off()
    if fixed:
        settings = (f"{name} = {value}" for name, value in fixed.items())
        ax.set_title(f"with {', '.join(settings)}", fontsize=9)
    return legend


def _draw_fronts(ax, sweep, x, y, by, limits):
    """Draw scores against a cost, with Pareto fronts; returns handles."""
    varied = [
        name
        for name in dict.fromkeys(name for row in sweep.rows for name in row.settings)
        if name != by and len({str(row.settings.get(name)) for row in sweep.rows}) > 1
    ]
    costs = sweep.costs(x)
    groups = _groups(sweep, by)
    legend, number = {}, 0
    styles = drawing.line_styles(groups)
    for (value, group), style in zip(groups.items(), styles, strict=True):
        front = group.pareto(x, y).rows
        beaten = [row for row in group.rows if not any(row is best for best in front)]
        label = "Pareto front" if by is None else _value_name(by, value)
        kinds = (
            (beaten, {"ls": "none", "mfc": "white", "label": "_"}),
            (front, {"drawstyle": "steps-post", "label": label}),
        )
        for drawn, kind in kinds:
            if drawn:
                legend[label] = drawing.draw_seeds(
                    ax,
                    [getattr(row, x) for row in drawn],
                    [row.scores[y] for row in drawn],
                    limits,
                    **{**style, **kind},
                )
        points = {}
        for row in front:
            point = getattr(row, x), row.scores[y].mean()
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
    _scale(ax, costs, "cost")
    if x == "seconds_per_image":
        drawing.format_ticks(ax.xaxis, lambda seconds: f"{1000 * seconds:.4g}")
    return legend


def _draw_baseline(ax, level, limits, color):
    """Draw a dashed line, in the band of its seeds, or a curve; returns it."""
    style = {"color": color, "ls": "--", "lw": 1.0, "zorder": 1}
    if callable(level):
        ends = ax.get_xlim()
        along = np.geomspace(*ends) if ax.get_xscale() == "log" else np.linspace(*ends)
        (line,) = ax.plot(along, level(along), **style)
        ax.set_xlim(ends)
        return line
    mean, spread = np.mean(level), drawing.spread_of(level)
    if spread:
        ends = np.clip([mean - spread, mean + spread], *limits)
        ax.axhspan(*ends, color=color, alpha=0.15, lw=0)
    return ax.axhline(mean, **style)


def _scale(ax, values, kind, always=False):
    """Make the horizontal axis logarithmic where numbers are far apart."""
    least, most = min(values), max(values)
    if least > 0 and (always or most > _MOST_ON_A_LINEAR_AXIS[kind] * least):
        ax.set_xscale("log")


# === Data ===


def _lines(rows, x, y, by):
    """Dict from `by` to dict from `x` to scores, and the other settings."""
    names = [x] if by is None else [x, by]
    if by == x:
        raise ValueError(
            "A sweep is drawn against one setting, `x`, by another, `by`. Received: "
            f"x={x!r}, by={by!r}."
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
                f"`scores`. Received: two rows with {row.settings}."
            )
        line[row.settings[x]] = row.scores[y]
    return lines, fixed


def _groups(sweep, by):
    """Dict from the values of a setting to sweeps; `None` to all without one."""
    groups = {}
    for row in sweep.rows:
        if by is not None and by not in row.settings:
            raise ValueError(
                "`by` must be a setting of all rows (`by=None` for a single front). A "
                f"row has: {', '.join(row.settings)}. Received: by={by!r}."
            )
        groups.setdefault(None if by is None else row.settings[by], []).append(row)
    made = type(sweep)
    return {value: made(rows) for value, rows in groups.items()}


def _limits(scores, baselines):
    """Bounds of scores: 0 and 1 if all lie between, as accuracies, else none."""
    levels = [level for level in baselines.values() if not callable(level)]
    every = np.concatenate([np.ravel(values) for values in [*scores, *levels]])
    inside = every.min() >= 0 and every.max() <= 1
    return (0, 1) if inside else (-np.inf, np.inf)


# === Names ===


def _score_label(sweep, y):
    """The name of a score, and the meaning of its error bars, if it has any."""
    counts = sorted({len(values) for values in sweep.scores(y)})
    if counts == [1]:
        return y
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{y} (± standard deviation of {seeds} seeds)"


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
    if setting == "layers":
        return ", ".join(map(str, value))
    return f"{value:g}" if drawing.is_number(value) else str(value)
