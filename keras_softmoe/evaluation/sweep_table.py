"""Scores under many settings: a table of rows that draws itself."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_softmoe.evaluation.sweep_figure import draw_sweep
from keras_softmoe.types import Figure


class SweepRow(NamedTuple):
    """Scores and costs under one combination of settings.

    Attributes:
        settings: dict from the name of a setting to its value.
        scores: dict from the name of a score, such as `"accuracy"`, to its values,
            `(seeds,)` numbers.
        gflop_per_image: float, as in `Cost`. `None` if unknown.
        seconds_per_image: float, the median of the measured times to predict all
            images, divided by their number. `None` if not measured.
        relative_time: float, the median of the ratios of these times to those of the
            model before its settings were changed; below 1 is faster. `None` if not
            measured.
    """

    settings: dict
    scores: dict
    gflop_per_image: float | None = None
    seconds_per_image: float | None = None
    relative_time: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """Scores by settings, of one model under many of them or of many models.

    `routing_sweep` and `pruning_curve` return one. A loop over trained models makes one
    from pairs of settings and scores.

    Args:
        rows: sequence of pairs of settings and scores, or of rows as `routing_sweep`
            makes them, which have costs too.
        baselines: dict from names to scores without settings, `(seeds,)` numbers: a
            dense twin, the model before it was pruned. They are drawn as dashed lines.

    Examples:
        >>> sweep = ksm.evaluation.Sweep(
        ...     [
        ...         ({"width": width, "normalize": normalize}, {"accuracy": [0.5, 0.6]})
        ...         for width in (32, 128)
        ...         for normalize in (True, False)
        ...     ]
        ... )
        >>> figure = sweep.plot("width", by="normalize")
    """

    rows: Sequence
    baselines: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        rows = (row if isinstance(row, SweepRow) else _row(*row) for row in self.rows)
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
        """Draw scores against a setting or a cost, a line per value of another setting.

        Points are means over the seeds, error bars reach one standard deviation up and
        down (not below 0 or above 1 where all scores lie between). Settings that save
        compute fall from left to right on a logarithmic scale. Settings that are not
        numbers stand side by side, without lines.

        Against a cost the Pareto front is drawn as steps, and numbered; the legend
        names its settings. Other points are hollow. With `by` each value has a front of
        its own.

        Args:
            x: str, a setting of all rows, or a cost: `"gflop_per_image"`,
                `"seconds_per_image"` or `"relative_time"`.
            y: str, the name of a score, or a sequence of names: one panel for each.
            by: str, the setting that tells lines apart, or `None` for a single line.
            baselines: dict from names to scores (a number, or one per seed), or to
                functions of `x`, drawn as dashed lines beside `self.baselines`.

        Returns:
            `matplotlib.figure.Figure`.

        Raises:
            ValueError: if there are no rows, a row lacks `x`, `y` or `by`, or rows
                agree in `x` and `by` or differ in further settings.

        Source: V-MoE, figures 2, 3, 6, 27, 28 and 33 to 35; Soft MoE, figures 3, 8 to
        11, 13 and 14; LIMoE, figures 9, 10, 14 and 15.

        Examples:
            >>> sweep = ksm.evaluation.routing_sweep(
            ...     sparse,
            ...     (images, labels),
            ...     priority=("max", "position"),
            ...     capacity_factor=(1.05, 0.25),
            ... )
            >>> figure = sweep.plot("capacity_factor", by="priority")
            >>> figure = sweep.plot("gflop_per_image", by="priority")
        """
        return draw_sweep(self, x, y, by, {**self.baselines, **(baselines or {})})

    def pareto(self, cost: str = "gflop_per_image", y: str = "accuracy") -> "Sweep":
        """Return the rows that no other row beats in both score and cost.

        A row is on the front if no other one has at least its mean score and at most
        its cost, and is better in one of the two. Means are compared as they are:
        differences within the spread of the seeds count as well.

        Args:
            cost: `"gflop_per_image"`, `"seconds_per_image"` or `"relative_time"`.
            y: str, the name of the score.

        Returns:
            `Sweep` of the rows on the front, the cost rising.

        Raises:
            ValueError: if there are no rows, or a row lacks the cost or the score.

        Source: V-MoE, figures 2 and 3; Soft MoE, section 3.3 (figure 3).

        Examples:
            >>> sweep = ksm.evaluation.routing_sweep(
            ...     sparse, (images, labels), capacity_factor=(1.05, 0.25)
            ... )
            >>> [row.settings for row in sweep.pareto().rows]
        """
        costs = self.costs(cost)
        means = np.array([values.mean() for values in self.scores(y)])
        # (rows, rows): whether the one of the column beats that of the row
        no_worse = (costs <= costs[:, None]) & (means >= means[:, None])
        better = (costs < costs[:, None]) | (means > means[:, None])
        beaten = (no_worse & better).any(axis=1)
        order = np.argsort(costs, kind="stable")
        return Sweep([self.rows[i] for i in order if not beaten[i]], self.baselines)

    def scores(self, y: str = "accuracy") -> list:
        """Return the values of a score, `(seeds,)` for each row.

        Raises:
            ValueError: if there are no rows, or a row lacks the score.
        """
        if not self.rows or any(y not in row.scores for row in self.rows):
            known = dict.fromkeys(name for row in self.rows for name in row.scores)
            raise ValueError(
                "Each row of a sweep must have the score. The rows have: "
                f"{', '.join(known)}. Received: {len(self.rows)} rows, y={y!r}."
            )
        return [row.scores[y] for row in self.rows]

    def costs(self, cost: str = "gflop_per_image") -> np.ndarray:
        """Return the cost of each row, `(rows,)` float64.

        Raises:
            ValueError: if there are no rows, or the cost of one is unknown.
        """
        accepted = SweepRow._fields[2:]
        if not self.rows or cost not in accepted:
            raise ValueError(
                f"The costs of a row are {', '.join(map(repr, accepted))}. Received: "
                f"{len(self.rows)} rows, cost={cost!r}."
            )
        costs = [getattr(row, cost) for row in self.rows]
        if None in costs:
            raise ValueError(
                "Each row of a sweep must have the cost. Received: "
                f"cost={cost!r} and {self.rows[costs.index(None)]}. "
                "`routing_sweep(..., time_repeats=5)` measures times."
            )
        return np.array(costs, "float64")


def _row(settings, scores, *costs):
    scores = {name: np.atleast_1d(values) for name, values in scores.items()}
    return SweepRow(settings, scores, *costs)
