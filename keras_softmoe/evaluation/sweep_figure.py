"""The figure of a sweep: scores against a setting or the cost."""

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.checks import is_number

COST = "gflop_per_image"
# Settings that save compute: drawn falling, and on a scale of ratios.
_SAVING = ("capacity_factor", "eval_capacity_factor", "experts_kept", "keep_fraction")
_NAMES = {
    COST: "GFLOP per image",
    "capacity_factor": "capacity factor C",
    "eval_capacity_factor": "capacity factor C outside training",
    "experts_kept": "experts kept in each block",
    "keep_fraction": "fraction of tokens kept",
    "layers": "blocks",
    "normalize_gates": "gates normalized",
    "num_selected_experts": "experts per token K",
    "random_logits": "random logits",
}


def draw_sweep(sweep, x, y, by, baselines):
    """Draw the figure of `Sweep.plot`, with the same arguments."""
    drawing.import_matplotlib()
    names = [y] if isinstance(y, str) else list(y)
    draw = _draw_fronts if x == COST else _draw_lines
    with_legend = by is not None or baselines or x == COST
    width = 4.8 if len(names) == 1 else 3.0 * len(names)
    figure = drawing.new_figure(width + (1.8 if with_legend else 0), 3.6)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        scores = sweep.scores(name)
        levels = [level for level in baselines.values() if not callable(level)]
        every = np.concatenate([np.ravel(values) for values in [*scores, *levels]])
        # Error bars of accuracies end at 0 and 1.
        inside = every.min() >= 0 and every.max() <= 1
        limits = (0, 1) if inside else (-np.inf, np.inf)
        legend = draw(ax, sweep, x, name, by, limits)
        for index, (label, level) in enumerate(baselines.items()):
            color = drawing.PALETTE[-1 - index % len(drawing.PALETTE)]
            legend[label] = _draw_baseline(ax, level, limits, color)
        drawing.plain_axes(ax)
        if inside:
            drawing.as_percentages(ax.yaxis)
        counts = sorted({len(values) for values in scores})
        if counts != [1]:
            seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
            name = f"{name} (± standard deviation of {seeds} seeds)"
        drawing.label_axes(ax, _NAMES.get(x, x), name)
    if with_legend:
        title = by and _NAMES.get(by, by)
        style = {"fontsize": 8, "title_fontsize": 8, "loc": "outside right upper"}
        figure.legend(legend.values(), legend.keys(), title=title, **style)
    return figure


def _draw_lines(ax, sweep, x, y, by, limits):
    """Draw scores against a setting; return handles for the legend."""
    lines, fixed = _lines(sweep.rows, x, y, by)
    values = list(dict.fromkeys(value for line in lines.values() for value in line))
    numeric = all(is_number(value) for value in values)
    values = sorted(values) if numeric else values
    places = values if numeric else range(len(values))
    where = dict(zip(values, places, strict=True))
    legend = {}
    styles = drawing.line_styles(lines)
    for index, (name, line) in enumerate(lines.items()):
        # Names that are no numbers are drawn side by side, without lines.
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
            # Smaller and smaller, so that markers on top of each other show.
            **{**styles[index], "ms": 7 - 3 * index / len(lines)},
        )
        if by is not None:
            legend[label] = handle
    if numeric:
        _scale(ax, values, 5, always=x in _SAVING)
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
    """Draw scores against the cost, with Pareto fronts; return handles."""
    groups = {}
    for row in sweep.rows:
        if by is not None and by not in row.settings:
            raise ValueError(
                "`by` must be a setting of all rows, or `None` for a single front. "
                f"Received: by={by!r} and a row with {', '.join(row.settings)}."
            )
        groups.setdefault(None if by is None else row.settings[by], []).append(row)
    legend = {}
    styles = drawing.line_styles(groups)
    for (value, rows), style in zip(groups.items(), styles, strict=True):
        front = type(sweep)(rows).pareto(y).rows
        on_front = [row.settings for row in front]
        beaten = [row for row in rows if row.settings not in on_front]
        label = "Pareto front" if by is None else _value_name(by, value)
        kinds = (
            (beaten, {"ls": "none", "mfc": "white", "label": "_"}),
            (front, {"drawstyle": "steps-post", "label": label}),
        )
        for drawn, kind in kinds:
            if drawn:
                legend[label] = drawing.draw_seeds(
                    ax,
                    [row.gflop_per_image for row in drawn],
                    [row.scores[y] for row in drawn],
                    limits,
                    **{**style, **kind},
                )
    _scale(ax, [row.gflop_per_image for row in sweep.rows], 10)
    return legend


def _draw_baseline(ax, level, limits, color):
    """Draw a dashed line, in the band of its seeds, or a curve; return it."""
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


def _scale(ax, values, ratio, always=False):
    """Make the horizontal axis logarithmic if values differ by more than a ratio."""
    if min(values) > 0 and (always or max(values) > ratio * min(values)):
        ax.set_xscale("log")


def _lines(rows, x, y, by):
    """Dict from `by` to dict from `x` to scores, and the other settings."""
    names = [x] if by is None else [x, by]
    if by == x:
        raise ValueError(f"`x` and `by` must differ. Received: x={x!r}, by={by!r}.")
    lines, fixed = {}, None
    for row in rows:
        if any(name not in row.settings for name in names):
            raise ValueError(
                "`x` and `by` must be settings of all rows (`by=None` for a single "
                f"line). Received: x={x!r}, by={by!r} and a row with "
                f"{', '.join(row.settings)}."
            )
        others = {k: v for k, v in row.settings.items() if k not in names}
        fixed = others if fixed is None else fixed
        if others != fixed:
            raise ValueError(
                "Rows that are drawn together may only differ in `x` and `by`. "
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


def _value_name(setting, value):
    if setting == "priority":
        return drawing.PRIORITY_NAMES.get(value, value)
    if setting == "layers":
        return ", ".join(map(str, value))
    return f"{value:g}" if is_number(value) else str(value)
