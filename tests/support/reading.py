"""What a figure or a page shows, read back from it."""

import base64
import html.parser
import io
import pathlib

import numpy as np


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=40)
    return buffer.getvalue()


def lines(ax):
    """Dict from the label to points `(n, 2)` and error bars `(n, 2)` (low, high)."""
    found = {}
    for bars in ax.containers:
        data, _, spreads = bars.lines
        spread = None
        if spreads:
            spread = np.array(spreads[0].get_segments())[:, :, 1]
        found[bars.get_label()] = (data.get_xydata(), spread)
    return found


def tick_names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def legend_names(legend):
    return [text.get_text() for text in legend.get_texts()]


class Reading(html.parser.HTMLParser):
    """What is on a page of HTML; fails on tags that are not closed in order.

    Attributes:
        title: str, its heading.
        headings: list of the texts of its sections.
        captions: list of what is written below its figures.
        images: list of its PNG files, as bytes.
        references: list of all that it refers to but images in the page itself.
    """

    _ALONE = ("meta", "link", "img")

    def __init__(self, path):
        super().__init__()
        self.title = ""
        self.headings, self.captions, self.images = [], [], []
        self.references = []
        self.open = []
        self.feed(pathlib.Path(path).read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            if name in attributes:
                self._refer(attributes[name])
        if tag not in self._ALONE:
            self.open.append(tag)
        kinds = {"h2": self.headings, "figcaption": self.captions}
        if tag in kinds:
            kinds[tag].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else None
        assert inside != "style" or "url(" not in data and "@import" not in data
        if inside == "h1":
            self.title += data
        elif inside == "h2":
            self.headings[-1] += data
        elif inside == "figcaption":
            self.captions[-1] += data

    def _refer(self, reference):
        start = "data:image/png;base64,"
        if reference.startswith(start):
            self.images.append(base64.b64decode(reference.removeprefix(start)))
        else:
            self.references.append(reference)
