"""Bicubic resampling as PyTorch does it, one number after the other."""

import math

import numpy as np


def _kernel(distance, a):
    x = abs(distance)
    if x <= 1.0:
        return (a + 2.0) * x**3 - (a + 3.0) * x**2 + 1.0
    if x < 2.0:
        return a * x**3 - 5.0 * a * x**2 + 8.0 * a * x - 4.0 * a
    return 0.0


def _plain(line, at):
    """Four neighbours, the ends repeated."""
    first = math.floor(at) - 1
    total = 0.0
    for place in range(first, first + 4):
        total = (
            total + _kernel(at - place, -0.75) * line[min(max(place, 0), len(line) - 1)]
        )
    return total


def _smooth(line, at, step):
    """All neighbours under a kernel that is wider by the step, if that is over one."""
    weights = [
        _kernel((at - place) / max(step, 1.0), -0.5) for place in range(len(line))
    ]
    return sum(w * x for w, x in zip(weights, line, strict=True)) / sum(weights)


def resample(grid, height, width, antialias):
    """`(h, w, D)` to `(height, width, D)`."""
    grid = np.asarray(grid, "float64")
    for axis, size in enumerate((height, width)):
        line = np.moveaxis(grid, axis, 0)
        step = len(line) / size
        places = [(i + 0.5) * step - 0.5 for i in range(size)]
        new = [
            _smooth(line, at, step) if antialias else _plain(line, at) for at in places
        ]
        grid = np.moveaxis(np.stack(new), 0, axis)
    return grid
