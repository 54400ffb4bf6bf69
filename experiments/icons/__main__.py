"""Make the bank of icons and the page of attributions.

    python -m experiments.icons                   # npm fetches the collection, 104 MB
    python -m experiments.icons --folder FOLDER   # where it is unpacked

Needs the packages `resvg-py` and `pillow`, and npm without `--folder`. Takes four
minutes of two cores. The bank is written to `build/icons/bank.npz`.
"""

import argparse
import textwrap
from pathlib import Path

import numpy as np

from experiments.icons import bank as banks, sources
from experiments.lib.runs import write_json
from keras_softmoe.files import atomic_file

ROOT = Path(__file__).resolve().parents[2]
WORK = Path("build", "icons")
PAGE = ROOT / "docs" / "results" / "icons.md"
_TITLE = "# Icons: sets and attributions"
_LEARNED = "that presets `*_icons` learned from or are tested on"
_TEXT = """
Drawings and names of the icons {which} are of {sets} sets of the collection Iconify:
{icons} icons of {concepts} concepts. Only sets under an open licence are taken
({licences}). Icons were drawn in one colour at 32 x 32 pixels, their names split into
words. Logos, emoji, animations and icons of several colours are left out. The page is
written by `python -m experiments.{program}`.
"""
_HEAD = """
| set | author | licence | icons used |
|---|---|---|---|
"""


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.icons", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, help="the unpacked collection")
    parser.add_argument("--work", type=Path, default=WORK, help=f"[{WORK}]")
    parser.add_argument("--page", type=Path, default=PAGE, help="of attributions")
    arguments = parser.parse_args(arguments)
    sources.check_renderer()
    folder = arguments.folder or sources.fetch(arguments.work)
    bank = banks.make_bank(folder)
    banks.write(bank, arguments.work / "bank.npz")
    write_json(arguments.work / "bank.json", bank.summary())
    write_page(bank, arguments.page)
    print(bank.summary())


def write_page(bank, path, rows=slice(None), which=_LEARNED, program="icons"):
    """Write a page of attributions: one row for each set that icons are from.

    Args:
        bank: `Bank`.
        path: path of the page.
        rows: int array, the rows of these icons.
        which: str, which icons they are.
        program: str, the module of `experiments` that writes the page.
    """
    used, counts = np.unique(bank.set[rows], return_counts=True)
    sets = bank.sets[used]
    text = _TEXT.format(
        which=which,
        sets=len(sets),
        icons=f"{counts.sum():,}",
        concepts=f"{len(np.unique(bank.label[rows])):,}",
        licences=", ".join(sorted(set(sets[:, 3]))),
        program=program,
    )
    text = f"{_TITLE}\n\n{textwrap.fill(' '.join(text.split()), 88)}\n{_HEAD}"
    for (_, name, author, licence, url), count in zip(sets, counts, strict=True):
        linked = f"[{_plain(name)}]({url})" if url else _plain(name)
        text += f"| {linked} | {_plain(author)} | {licence} | {count:,} |\n"
    with atomic_file(path) as aside:
        Path(aside).write_text(text, encoding="utf-8")


def _plain(text):
    """Text that Markdown leaves as it is in a table."""
    return "".join("\\" + c if c in "|[]*_<>`" else c for c in text)


if __name__ == "__main__":
    main()
