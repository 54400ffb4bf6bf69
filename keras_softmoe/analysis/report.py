"""The page of a `Routing`: a table and all figures, in one HTML file."""

import base64
import html
import io
import re
from pathlib import Path

from keras_softmoe import drawing
from keras_softmoe.analysis.figures import FIGURES
from keras_softmoe.checks import table
from keras_softmoe.files import atomic_file, check_file

# Part of `Routing` -> heading and text of its section.
_PARTS = {
    "blocks": (
        "Load and specialization",
        "How much each expert has to do. A token is dropped if no expert takes it; it "
        "then passes the block unchanged.",
    ),
    "soft": (
        "Weights of tokens and slots",
        "A slot is an average of all tokens (dispatch weights), the result for a token "
        "an average of all slots' outputs (combine weights). Where all weights are "
        "equal the layer does not route.",
    ),
    "modalities": (
        "Images and text",
        "Tokens of images and of text choose among the same experts. A token is "
        "dropped if none of the experts that it chose has a free slot.",
    ),
    "maps": (
        "Examples",
        "Some inputs, patch by patch, at the first and the last block with experts.",
    ),
}
_DPI = 110
# The labels of figures are then about as large as the text of the page.
_PIXELS_PER_INCH = 105

# The policy forbids resources outside the file. Browsers request a missing icon.
_PAGE = """<!DOCTYPE html>
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
pre {{ overflow-x: auto; }}
figure {{ margin: 1.25rem 0 2rem; }}
figure img {{ max-width: 100%; height: auto; }}
figcaption {{ color: #444; font-size: .9rem; max-width: 46rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def write_report(routing, path, title, class_names):
    """Write the page of `Routing.save`, with the same arguments."""
    drawing.import_matplotlib()
    # An error about the path comes before the work.
    check_file(path)
    parts = [f"<pre>{html.escape(text_of(routing))}</pre>"]
    for part, (heading, text) in _PARTS.items():
        if getattr(routing, part):
            parts.append(f"<h2>{heading}</h2>\n<p>{html.escape(text)}</p>")
        for name in routing.figures:
            if FIGURES[name].part == part:
                options = {"class_names": class_names} if name == "by_class" else {}
                parts += _figures(routing, name, options)
    title = html.escape(f"How {routing.model} routes" if title is None else title)
    with atomic_file(path) as aside:
        page = _PAGE.format(title=title, body="\n".join(parts))
        aside.write_text(page, encoding="utf-8")
        # Readable by other users.
        aside.chmod(0o644)
    return Path(path)


def _figures(routing, name, options):
    """Yield the HTML of a figure; one of a single block for the first and the last."""
    row = FIGURES[name]
    if not row.is_of_one_block:
        yield _image(routing.plot(name, **options), row.caption)
        if name == "concentration":
            yield _image(routing.plot(name, weights="combine"), row.caption)
        return
    found = [b for b, maps in getattr(routing, row.part).items() if row.applies(maps)]
    for block in dict.fromkeys((found[0], found[-1])):
        # Each pair has a figure of its own.
        shown = [{}]
        if name == "pair":
            shown = [{"index": i} for i in range(len(routing.maps[block].images))]
        for index in shown:
            figure = routing.plot(name, [block], **index)
            yield _image(figure, f"{drawing.block_title(block)}: {row.caption}")


def _image(figure, text):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    inches = figure.get_size_inches()
    width, height = (round(_PIXELS_PER_INCH * side) for side in inches)
    text = html.escape(text)
    return (
        f'<figure>\n<img src="data:image/png;base64,{data}" width="{width}" '
        f'height="{height}" alt="{text}">\n<figcaption>{text}</figcaption>\n</figure>'
    )


def name_of(model):
    """Return the name of a model if it was given one, else its class."""
    kind = type(model).__name__
    # Names that Keras made up: `vi_t_mo_e_backbone_1`.
    if re.sub(r"_|\d", "", model.name) != kind.lower():
        return model.name
    return "this model" if kind in ("Functional", "Sequential") else kind


def text_of(routing):
    """Return the numbers of a `Routing` as text, a line for each block."""
    rows = [["block", "tokens", "dropped", "load", "demand", "experts used"]]
    for name, block in routing.blocks.items():
        wanted = block.demand_imbalance
        wanted = "" if wanted is None else f"{wanted:.2f}×"
        used = f"{block.experts_used} of {len(block.load)}"
        dropped = f"{100 * block.dropped:.3g}%", f"{block.imbalance:.2f}×"
        rows.append([str(name), f"{block.num_tokens:,}", *dropped, wanted, used])
    parts = [f"Routing of {routing.model}", table(rows, left=0)]
    parts.append("load, demand: largest over mean, with and without limits of capacity")
    if routing.soft:
        rows = [["block", "dispatch sharpness", "combine sharpness"]]
        for name, s in routing.soft.items():
            peaks = s.dispatch_sharpness, s.combine_sharpness
            rows.append([str(name), *(f"{peak:.2f}×" for peak in peaks)])
        parts.append(table(rows, left=0))
    return "\n".join(parts)
