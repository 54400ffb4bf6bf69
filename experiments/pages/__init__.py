"""What is generated in the documentation, by `__main__` and when the site is built.

`__main__` writes the tables of README.md and of pages below `docs`, which have one
where they say so, `<!-- TITLE: begin -->`, all claims among them, and the heads of the
cards of presets, from their metadata. The API reference, the guides and pages of the
experiments are added to the site by `hook`.
"""

from pathlib import Path

from experiments import claims, versions
from experiments.lib.filling import filled
from experiments.pages import evidence, gallery, gpu, letters, results, tables

ROOT = Path(__file__).resolve().parents[2]


def written():
    """Dict from paths below the root to texts: what is generated and committed."""
    pages, tables_by_title = gallery.cards(), found()
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = file.read_text(encoding="utf-8")
        if ": begin -->" in text:
            pages[file.relative_to(ROOT).as_posix()] = filled(text, tables_by_title)
    return pages


def found():
    """Dict from the titles of all tables to their texts."""
    return {
        **tables.tables(),
        **results.tables(),
        **gpu.tables(),
        **evidence.tables(),
        **letters.tables(),
        "gallery": gallery.gallery(),
        "claims": claims.text(),
        "versions": versions.table(),
    }
