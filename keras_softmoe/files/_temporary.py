"""Temporary directories beside what is written, or inside of it."""

import contextlib
import glob
import os
import platform
import shutil
import tempfile
from pathlib import Path

# Part of their names: `.NAME.aside-MACHINE-PROCESS-RANDOM` beside a path of that name,
# `..aside-MACHINE-PROCESS-RANDOM` inside of a directory.
ASIDE = f"aside-{platform.node()}"
# The longest part of a name that is repeated in them, in bytes. File systems allow 255
# for all of it.
_LABEL = 100


@contextlib.contextmanager
def aside(folder, name=""):
    """Make a temporary directory; those of dead processes are removed first.

    Of all names in the folder: a process that is killed just after it has put a file
    in place may have been the last one to write that file.

    Args:
        folder: `pathlib.Path`, made if it does not exist.
        name: str, that of a path in the folder; empty for the folder itself.

    Yields:
        `pathlib.Path`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in of_the_dead(folder):
        if not (left / "ready").is_dir() and all(
            (folder / old.name).exists() for old in left.glob("old/*")
        ):
            shutil.rmtree(left, ignore_errors=True)
    label = os.fsdecode(os.fsencode(name)[:_LABEL])
    prefix = f".{label}.{ASIDE}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as directory:
        yield Path(directory)


def of_the_dead(folder):
    """The temporary directories in a folder whose processes, of this machine, ended.

    Yields:
        `pathlib.Path`.
    """
    for found in folder.glob(f".*.{glob.escape(ASIDE)}-*-*"):
        process = found.name.rpartition(f".{ASIDE}-")[2].partition("-")[0]
        if process.isdigit() and not _runs(int(process)):
            yield found


def _runs(process):
    if process == os.getpid() or os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # Of another user
        return True
    return True
