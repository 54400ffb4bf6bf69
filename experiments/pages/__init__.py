"""What is generated in the documentation, by `__main__` and when the site is built.

`__main__` writes the tables of README.md and of pages below `docs`, which have one
where they say so, `<!-- TITLE: begin -->`, and the heads of the cards of presets, from
their metadata. The API reference, the guides, long tables and pages of the experiments
are added to the site by `hook`.
"""

from pathlib import Path

from benchmarks import tables as speed
from experiments import versions
from experiments.pages import letters, presets, results

ROOT = Path(__file__).resolve().parents[2]


def written():
    """Dict from paths below the root to texts: what is generated and committed."""
    pages = presets.cards()
    tables = {
        **presets.tables(),
        **results.tables(),
        **speed.tables(),
        **letters.tables(),
        "versions": versions.table(),
    }
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = file.read_text(encoding="utf-8")
        if ": begin -->" in text:
            pages[file.relative_to(ROOT).as_posix()] = versions.filled(text, tables)
    return pages
