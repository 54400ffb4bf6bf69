"""The generated parts of README.md and of the pages below `docs`.

A page has tables where it says so, `<!-- TITLE: begin -->`; see `__main__`.
"""

import re
from pathlib import Path

from experiments.pages import api, gallery, guides, results, tables

ROOT = Path(__file__).resolve().parents[2]


def written():
    """Dict from paths below the root to texts: all that is generated, as it must be."""
    pages = {
        f"docs/{path}": text for path, text in (api.pages() | guides.pages()).items()
    }
    found = tables.tables() | results.tables() | {"gallery": gallery.gallery()}
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        path = file.relative_to(ROOT).as_posix()
        if path not in pages:
            text = file.read_text(encoding="utf-8")
            if "<!-- " in text:
                pages[path] = filled(text, found)
    return pages


def filled(text, found):
    """The text with the tables of these titles in their places.

    Raises:
        ValueError: if a place has a title of no table, or no end.
    """

    def fill(match):
        if match[1] not in found:
            raise ValueError(f"There are {sorted(found)}. Received: title={match[1]!r}")
        return (
            f"<!-- {match[1]}: begin -->\n\n{found[match[1]]}\n<!-- {match[1]}: end -->"
        )

    marked = r"<!-- ([^>]*?): begin -->\n.*?<!-- \1: end -->"
    if len(re.findall("<!-- [^>]*: (?:begin|end) -->", text)) != 2 * len(
        re.findall(marked, text, flags=re.DOTALL)
    ):
        raise ValueError("A place for a table lacks its beginning or its end.")
    return re.sub(marked, fill, text, flags=re.DOTALL)
