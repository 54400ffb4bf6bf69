"""Files and directories that appear whole or not at all.

What is written goes to a temporary neighbour, which takes the place of the target when
all of it is written. Where writing fails, what was there before stays as it was.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path


@contextlib.contextmanager
def replaced_file(path):
    """Write a file aside and put it in place when all of it is written.

    What is written beside it, because a file of that kind consists of several, is put
    in place before it.

    Args:
        path: str or path. Its directory is made if it does not exist.

    Yields:
        `pathlib.Path` of the file to write, with the same suffixes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as aside:
        new = Path(aside, path.name)
        yield new
        for other in Path(aside).iterdir():
            if other != new:
                os.replace(other, path.with_name(other.name))
        os.replace(new, path)


@contextlib.contextmanager
def replaced_directory(directory, keep=lambda path: True):
    """Write a directory aside and put it in place when all of it is written.

    Args:
        directory: str or path, made if it does not exist.
        keep: callable from the relative `pathlib.Path` of a file that is there already
            and was not written again, to whether it is kept. All are, by default. It is
            called when the new files are written.

    Yields:
        `pathlib.Path` of an empty directory to write to.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=directory.parent, prefix=f".{directory.name}."
    ) as aside:
        new, old = Path(aside, "new"), Path(aside, "old")
        new.mkdir()
        yield new
        if directory.exists():
            _copy_missing(directory, new, keep)
            directory.rename(old)
        try:
            new.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise


def _copy_missing(source, target, keep):
    for path in source.rglob("*"):
        copy = target / path.relative_to(source)
        if path.is_file() and not copy.exists() and keep(path.relative_to(source)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
