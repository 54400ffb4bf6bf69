"""Pages of the experiments as parts of pages of the site.

A page has `<!-- page: PATH -->` where a page of the repository belongs. It is put there
when the site is built, so that its text and its figures exist once.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Directory below `docs` in which the site has a figure -> files of the repository.
FIGURES = {"results/figures": ROOT / "experiments" / "router_study" / "small"}


def figures():
    """Dict from paths below `docs` to the figures of embedded pages."""
    return {
        f"{directory}/{file.name}": file
        for directory, source in FIGURES.items()
        for file in sorted(source.glob("*.png"))
    }


def with_pages(text):
    """The text of a page with the pages that it names in their places."""
    return re.sub(
        r"<!-- page: (\S+) -->",
        lambda match: _embedded((ROOT / match[1]).read_text(encoding="utf-8")),
        text,
    )


def _embedded(text):
    """A page as part of another: no title, headings one level lower.

    Figures are those of `figures`; of other relative links only the text stays.
    """
    text = re.sub(r"^# .*\n", "", text).strip()
    text = re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE)
    text = re.sub(r"!\[(.*?)\]\(([^):]+)\)", r"![\1](figures/\2)", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!http|#)[^)]*\)", r"\1", text)
