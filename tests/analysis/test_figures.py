"""The table of figures: each has a caption, a source and a part of `Routing`."""

import inspect
import re

import pytest

from keras_softmoe.analysis import Routing
from keras_softmoe.analysis.figures import FIGURES

# What the papers draw of the routing of one model.
OF_PAPERS = {
    "V-MoE": {4, 7, 29, 30, 31, 32},
    "Soft MoE": {24, 25, 26, 27, 28, 29, 30},
    "LIMoE": {10, 13, *range(17, 33), *range(32, 41)},
}


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_described(name):
    row = FIGURES[name]
    assert row.part in Routing._fields[:4]
    assert row.caption.endswith(".") and row.source
    first, *options = inspect.signature(row.draw).parameters.values()
    assert first.name == ("maps" if row.is_of_one_block else "blocks")
    # They can be left out.
    assert all(option.default is not option.empty for option in options)
    assert row.options == tuple(option.name for option in options)


def test_the_figures_of_the_papers():
    found = {paper: set() for paper in OF_PAPERS}
    for row in FIGURES.values():
        for part in row.source.split("; "):
            (paper,) = (name for name in found if re.search(rf"\b{name},", part))
            for low, high in re.findall(r"(\d+)(?: to (\d+))?", part):
                found[paper] |= set(range(int(low), int(high or low) + 1))
    found["V-MoE"].discard(5)
    assert found == OF_PAPERS
