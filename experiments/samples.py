"""Write the samples that `keras_softmoe.datasets.sample` reads.

    python -m experiments.samples            # all of them
    python -m experiments.samples letters    # without the bank of icons

No preset was trained on them. Another release of NumPy, Pillow or matplotlib may round
some grey values of letters differently.
"""

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np

import keras_softmoe as ksm
from experiments.icons import __main__ as icons, bank as banks, measures
from experiments.icons.pictures import plain
from experiments.letters.bank import make_bank
from experiments.letters.measures import TEST_SEED
from experiments.letters.pictures import Letters
from keras_softmoe.files import atomic_file

DIRECTORY = Path(ksm.datasets.__file__).parent / "samples"
NUM_LETTERS = 512
ATTRIBUTIONS = "ATTRIBUTIONS.md"


def letters():
    """The sample of letters. Takes half a minute."""
    bank = make_bank()
    images, labels = Letters(bank, "anywhere").take(NUM_LETTERS, TEST_SEED)
    names = np.array(list(bank.characters))[~bank.new]
    return {
        # The channels are equal.
        "images": images[..., :1],
        "labels": labels,
        "class_names": names,
        "captions": names[labels],
    }


def icon_rows(bank):
    """Rows of the bank of each sample of icons, their labels, and names of classes."""
    trained = np.array(measures.names_in_training(bank))
    rows, labels = measures.searched(bank)
    found = {"icons": (rows, labels, trained)}
    parts, concepts = measures.new_concept_rows(bank)
    names = ("new_icons", "other_new_icons")
    for name, (rows, labels) in zip(names, parts, strict=True):
        found[name] = rows, labels, bank.concepts[bank.held_out][concepts]
    return found


def icon_samples(bank, found):
    """Samples of icons, a dict from names to arrays, of what `icon_rows` found."""
    return {
        name: {
            "images": plain(bank.pictures[rows])[..., :1],
            "labels": labels.astype("int32"),
            "class_names": names,
            "captions": np.array([bank.captions_of(row)[0] for row in rows]),
        }
        for name, (rows, labels, names) in found.items()
    }


def write(path, arrays):
    """Write an `.npz` that `np.load` reads, a third smaller than NumPy would."""
    with (
        atomic_file(path) as aside,
        zipfile.ZipFile(aside, "w", zipfile.ZIP_LZMA) as file,
    ):
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            # No date: equal arrays are equal files.
            info = zipfile.ZipInfo(f"{name}.npy")
            file.writestr(info, content.getvalue(), zipfile.ZIP_LZMA)


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.samples", description=__doc__.splitlines()[0]
    )
    parser.add_argument("only", nargs="?", choices=("letters", "icons"))
    parser.add_argument("--bank", type=Path, default=icons.WORK / "bank.npz")
    arguments = parser.parse_args(arguments)
    DIRECTORY.mkdir(exist_ok=True)
    samples = {} if arguments.only == "icons" else {"letters": letters()}
    if arguments.only != "letters":
        bank = banks.load(arguments.bank)
        found = icon_rows(bank)
        samples |= icon_samples(bank, found)
        rows = np.concatenate([rows for rows, *_ in found.values()])
        page = DIRECTORY / ATTRIBUTIONS
        icons.write_page(bank, page, rows, "of the samples", "samples")
    for name, arrays in samples.items():
        write(DIRECTORY / f"{name}.npz", arrays)


if __name__ == "__main__":
    main()
