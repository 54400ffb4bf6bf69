"""Temporary directories beside or inside the path that is written."""

import contextlib
import glob
import os
import platform
import shutil
import tempfile
from pathlib import Path

# Part of their names: `.NAME.aside-MACHINE-PROCESS-RANDOM` beside a path of that name,
# `..aside-MACHINE-PROCESS-RANDOM` inside a directory.
ASIDE = f"aside-{platform.node()}"
# Maximum length in bytes of NAME. File systems allow 255 for the whole name.
_LABEL = 100


@contextlib.contextmanager
def aside(folder, name=""):
    """Create a temporary directory, and remove those of dead processes first.

    Those of all names in the folder are removed: perhaps no other process will ever
    write a file that a killed process had just moved into place.

    Args:
        folder: `pathlib.Path`, created if it does not exist.
        name: str, the name of a path in the folder; empty for the folder itself.

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
    """Yield temporary directories in a folder left by dead processes of this machine.

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
        # The process of another user
        return True
    return True
