"""A page of text, tables and figures in one HTML file that needs nothing else."""

import base64
import html
import io
from pathlib import Path

from keras_softmoe.files import atomic_file

# Small enough for e-mail.
MOST_BYTES = 5_000_000
# Dots per inch of the figures: the first at which the page is small enough.
_RESOLUTIONS = (144, 110, 80, 55, 40)
# Readable by other users.
_MODE = 0o644
# The labels of figures are then about as large as the text of the page.
_PIXELS_PER_INCH = 105

# The policy forbids resources outside the file. Without the empty icon browsers request
# one from the server.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; }}
h2 {{ font-size: 1.25rem; margin: 2.5rem 0 .5rem; border-bottom: 1px solid #ddd; }}
nav ol {{ padding-left: 1.3rem; }}
a {{ color: #0072b2; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; margin: .5rem 0; }}
th, td {{ border-bottom: 1px solid #ddd; padding: .3rem .75rem .3rem 0;
  text-align: left; vertical-align: top; }}
td:first-child {{ white-space: nowrap; }}
figure {{ margin: 1.25rem 0 2rem; }}
figure img {{ max-width: 100%; height: auto; }}
figcaption {{ color: #444; font-size: .9rem; max-width: 46rem; }}
</style>
</head>
<body>
"""


class Page:
    """Collect the sections, tables and figures of a page, then write it."""

    def __init__(self, title):
        self.title = title
        # Titles of the sections, and callables from a resolution to HTML.
        self.sections, self.parts = [], []

    def section(self, title, text=""):
        """Begin a section."""
        self.sections.append(title)
        name = f"section-{len(self.sections)}"
        self._add(f'<h2 id="{name}">{html.escape(title)}</h2>')
        if text:
            self.text(text)

    def text(self, text):
        """Add a paragraph."""
        self._add(f"<p>{html.escape(text)}</p>")

    def table(self, header, rows):
        """Add a table of str, a list for each row."""
        lines = ['<div class="wide"><table>', _row("th", header)]
        lines += [_row("td", row) for row in rows]
        self._add("\n".join([*lines, "</table></div>"]))

    def figure(self, figure, text):
        """Add a `matplotlib.figure.Figure` and its caption."""
        self.parts.append(lambda resolution: _picture(figure, text, resolution))

    def write(self, path):
        """Write the page, whole or not at all; returns its path.

        Raises:
            ValueError: if the page is too large even with coarse figures.
        """
        for resolution in _RESOLUTIONS:
            content = self._html(resolution).encode("utf-8")
            if len(content) <= MOST_BYTES:
                with atomic_file(path) as aside:
                    aside.write_bytes(content)
                    aside.chmod(_MODE)
                return Path(path)
        raise ValueError(
            f"The page would have {len(content)} bytes, more than {MOST_BYTES}. Show "
            "fewer pictures on it."
        )

    def _add(self, text):
        self.parts.append(lambda resolution: text)

    def _html(self, resolution):
        title = html.escape(self.title)
        contents = "\n".join(
            f'<li><a href="#section-{number}">{html.escape(name)}</a></li>'
            for number, name in enumerate(self.sections, start=1)
        )
        return "\n".join(
            [
                _HEAD.format(title=title) + f"<h1>{title}</h1>",
                f"<nav><ol>\n{contents}\n</ol></nav>",
                *(part(resolution) for part in self.parts),
                "</body>\n</html>\n",
            ]
        )


def _row(kind, cells):
    cells = "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells)
    return f"<tr>{cells}</tr>"


def _picture(figure, text, resolution):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=resolution)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    inches = figure.get_size_inches()
    width, height = (round(_PIXELS_PER_INCH * side) for side in inches)
    text = html.escape(text)
    return (
        f'<figure>\n<img src="data:image/png;base64,{data}" width="{width}" '
        f'height="{height}" alt="{text}">\n<figcaption>{text}</figcaption>\n</figure>'
    )
