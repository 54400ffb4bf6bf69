"""A `Routing` of made-up statistics, to draw from."""

from keras_softmoe.analysis import Routing
from keras_softmoe.analysis.figures import FIGURES


def routing(**parts):
    """A `Routing` with some parts, dicts from blocks to statistics."""
    none = {"blocks": {}, "soft": {}, "modalities": {}, "maps": {}}
    return Routing(**{**none, **parts}, model="model")


def plot(figure, given, blocks=None, **options):
    """Draw a figure of the statistics that it is of."""
    return routing(**{FIGURES[figure].part: given}).plot(figure, blocks, **options)
