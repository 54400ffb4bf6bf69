"""Scores under many settings: a table of rows that draws itself."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe import drawing
from keras_softmoe.checks import is_number
from keras_softmoe.evaluation.model_cost import gflop_per_image
from keras_softmoe.routers.scores import DROPLESS
from keras_softmoe.types import Figure

COST = "gflop_per_image"
_EVAL = "eval_capacity_factor"
# Settings that save compute: drawn falling, and on a scale of ratios.
_SAVING = ("capacity_factor", _EVAL, "experts_kept", "keep_fraction")
_NAMES = {
    COST: "GFLOP per image",
    "capacity_factor": "capacity factor C",
    _EVAL: "capacity factor C outside training",
    "experts_kept": "experts kept in each block",
    "keep_fraction": "fraction of tokens kept",
    "layers": "blocks",
    "normalize_gates": "gates normalized",
    "num_selected_experts": "experts per token K",
    "random_logits": "random logits",
}


class SweepRow(NamedTuple):
    """Scores under one combination of settings.

    `settings` and `scores` are dicts from names to values, for scores `(seeds,)`
    numbers; `gflop_per_image` is as in `Cost`, `None` if unknown.
    """

    settings: dict
    scores: dict
    gflop_per_image: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """Scores by settings, of one model under many of them or of many models.

    Args:
        rows: sequence of pairs of settings and scores (and GFLOP per image, if known),
            as a loop over trained models makes them, or of `SweepRow`s.
        baselines: dict from names to scores without settings, `(seeds,)` numbers: a
            dense twin, the model before it was pruned. They are drawn as dashed lines.

    Examples:
        >>> settings = [{"width": w, "K": k} for w in (32, 128) for k in (1, 2)]
        >>> rows = [(row, {"accuracy": [0.5, 0.6]}) for row in settings]
        >>> figure = ksm.evaluation.Sweep(rows).plot("width", by="K")
    """

    rows: Sequence
    baselines: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        rows = []
        for settings, scores, *gflop in self.rows:
            scores = {name: np.atleast_1d(values) for name, values in scores.items()}
            rows.append(SweepRow(settings, scores, *gflop))
        object.__setattr__(self, "rows", tuple(rows))

    def __add__(self, other: "Sweep") -> "Sweep":
        """Join the rows of two sweeps."""
        return Sweep(self.rows + other.rows, {**self.baselines, **other.baselines})

    def plot(
        self,
        x: str,
        y: str | Sequence = "accuracy",
        by: str | None = None,
        baselines: dict | None = None,
    ) -> Figure:
        """Draw scores against a setting or the cost, a line per value of another one.

        Points are means over the seeds, error bars one standard deviation. Settings
        that save compute fall from left to right on a logarithmic scale. Against the
        cost the Pareto front is drawn as steps; other points are hollow.

        Args:
            x: str, a setting of all rows, or `"gflop_per_image"`.
            y: str, the name of a score, or a sequence of names: one panel for each.
            by: str, the setting that tells lines or fronts apart. `None` for one.
            baselines: dict from names to scores (a number, or one per seed), or to
                functions of `x`, drawn as dashed lines beside `self.baselines`.

        Raises:
            ValueError: if there are no rows, a row lacks `x`, `y` or `by`, or rows
                agree in `x` and `by` or differ in further settings.

        Source: V-MoE, figures 2, 3, 6, 27, 28 and 33 to 35; Soft MoE, figures 3, 8 to
        11, 13 and 14; LIMoE, figures 9, 10, 14 and 15.
        """
        return _draw_sweep(self, x, y, by, {**self.baselines, **(baselines or {})})

    def pareto(self, y: str = "accuracy") -> "Sweep":
        """Return the rows that no other row beats in both mean score and cost.

        A row is beaten by one with at least its mean score and at most its GFLOP per
        image that is better in one of the two. Returns a `Sweep`, the cost rising.

        Source: V-MoE, figures 2 and 3; Soft MoE, section 3.3 (figure 3).
        """
        means = np.array([values.mean() for values in self.scores(y)])
        if any(row.gflop_per_image is None for row in self.rows):
            raise ValueError("Rows must have a cost. Received: gflop_per_image=None.")
        costs = np.array([row.gflop_per_image for row in self.rows])
        # (rows, rows): True where the column's row beats the row's.
        no_worse = (costs <= costs[:, None]) & (means >= means[:, None])
        better = (costs < costs[:, None]) | (means > means[:, None])
        beaten = (no_worse & better).any(axis=1)
        order = np.argsort(costs, kind="stable")
        return Sweep([self.rows[i] for i in order if not beaten[i]], self.baselines)

    def scores(self, y: str = "accuracy") -> list:
        """Return the values of a score, `(seeds,)` for each row."""
        if not self.rows or any(y not in row.scores for row in self.rows):
            known = dict.fromkeys(name for row in self.rows for name in row.scores)
            raise ValueError(
                "Each row of a sweep must have the score. The rows have: "
                f"{', '.join(known)}. Received: {len(self.rows)} rows, y={y!r}."
            )
        return [row.scores[y] for row in self.rows]


def routing_sweep(
    classifier: keras.Model,
    test: tuple,
    seeds: int = 1,
    batch_size: int = 64,
    verbose: int = 1,
    layers: Sequence | None = None,
    **grid,
) -> Sweep:
    """Measure a classifier under each combination of router settings.

    Nothing is trained. Where groups span several images, whether a token gets a slot
    depends on the images beside it, which a seed orders. Settings are restored.

    Args:
        classifier: `ViTMoEImageClassifier` with MoE blocks.
        test: pair of `(N, H, W, C)` images, as for `predict`, and `(N,)` int labels.
        seeds: int, number of orders of the images (seeds 0, 1, ...).
        batch_size: int, images in a batch.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.
        layers: sequence of int, the MoE blocks whose routers change; `None` for all.
        **grid: sequence of values for each setting of `set_routing`.
            `random_logits=(False, True, "permuted")` compares learned routers with
            random ones and with ones whose logits are permuted for each token.

    Returns:
        `Sweep` of `"accuracy"` by seed, and costs. The last of `grid` varies fastest.

    Raises:
        ValueError: if images and labels differ in number, the grid is empty, or
            `set_routing` refuses a setting (before anything is evaluated).

    Source: V-MoE, section 4.2, appendices C.2, E.4 and E.1 (`random_logits`).

    Examples:
        >>> sweep = ksm.evaluation.routing_sweep(
        ...     sparse,
        ...     (images, labels),
        ...     priority=("max", "position"),
        ...     capacity_factor=(1.05, 0.25),
        ... )
        >>> sweep.rows[0].settings, sweep.rows[0].scores["accuracy"].mean()
        >>> figure = sweep.plot("capacity_factor", by="priority")
        >>> figure = sweep.plot("gflop_per_image", by="priority")
        >>> [row.settings for row in sweep.pareto().rows]
    """
    if not grid or not all(len(values) for values in grid.values()):
        raise ValueError(
            "A sweep needs settings and values, for example "
            f"`capacity_factor=(1.0, 0.5)`. Received: {grid}."
        )
    others = [getattr(r, _EVAL, None) for r in classifier.routers.values()]
    # `set_routing` gives predictions without a capacity the one of training.
    is_free = set(others) in (set(), {None}, {DROPLESS})
    if not is_free and "capacity_factor" in grid and _EVAL not in grid:
        raise ValueError(
            f"Outside training `{_EVAL}` is the capacity of this model: sweep that "
            f"instead of `capacity_factor`. Received: {grid} with {_EVAL}={others}."
        )
    images, labels = (np.asarray(array) for array in test)
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            "A test set has one label for each image, and at least one image. "
            f"Received: {len(images)} images, {len(labels)} labels."
        )
    chosen = {} if layers is None else {"layers": tuple(layers)}
    combinations = [
        {**chosen, **dict(zip(grid, values, strict=True))}
        for values in itertools.product(*grid.values())
    ]
    costs, rows = [], []
    with keep_settings(classifier):
        # Settings that are refused end the sweep before images are classified.
        for settings in combinations:
            classifier.set_routing(**settings)
            costs.append(gflop_per_image(classifier))
        count = len(combinations)
        bar = keras.utils.Progbar(count, verbose=verbose, unit_name="setting")
        for settings, gflop in zip(combinations, costs, strict=True):
            classifier.set_routing(**settings)
            accuracies = []
            for seed in range(seeds):
                order = np.random.default_rng(seed).permutation(len(images))
                logits = classifier.predict(images[order], batch_size, verbose=0)
                accuracies.append(np.mean(np.argmax(logits, axis=-1) == labels[order]))
            rows.append((settings, {"accuracy": accuracies}, gflop))
            bar.add(1, [("accuracy", np.mean(accuracies))])
    return Sweep(rows)


@contextlib.contextmanager
def keep_settings(model):
    """Restore the mutable settings of all routers at the end of a `with` block."""
    before = {
        layer: {name: getattr(router, name) for name in router.mutable_settings}
        for layer, router in model.routers.items()
    }
    try:
        yield
    finally:
        for layer, settings in before.items():
            model.set_routing(layers=[layer], **settings)


# === The figure ===


def _draw_sweep(sweep, x, y, by, baselines):
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
        front = Sweep(rows).pareto(y).rows
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
