"""Writing files and directories aside and replacing the old ones when complete."""

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from keras_softmoe.files.placing import (
    check_files,
    exchange,
    finish,
    is_exchangeable,
    make_like,
    move,
    replace_files,
)
from keras_softmoe.files.refusals import (
    WriteError,
    check_kind,
    check_room,
    wrap_os_errors,
)
from keras_softmoe.files.temporary import aside, of_the_dead


@contextlib.contextmanager
def atomic_file(path, room=0):
    """Write a file aside and move it into place when it is complete.

    Other files written beside it, for formats of several files, are moved first.
    Symbolic links are followed. The new file gets the mode of the old one, and its
    owner where the system permits it.

    Args:
        path: str or path. Its directory is created if it does not exist.
        room: int, bytes that must be free before writing starts. HDF5 crashes the
            process when a write fails.

    Yields:
        `pathlib.Path` of the file to write, with the same suffixes.

    Raises:
        WriteError: (an `OSError` and a `ValueError`) if the system refuses, or the path
            is a directory, a pipe, a socket or a device.
    """
    with wrap_os_errors(path):
        target = Path(os.path.realpath(path))
        is_there = check_kind(target, stat.S_IFREG)
        with aside(target.parent, target.name) as temporary:
            check_room(temporary, room)
            new = temporary / Path(path).name
            yield new
            names = sorted({file.name for file in temporary.iterdir()} - {new.name})
            for name in names:
                other = Path(os.path.realpath(Path(path).with_name(name)))
                if check_kind(other, stat.S_IFREG) and not is_there:
                    raise WriteError(
                        f"'{path}' cannot be written: it consists of several files, "
                        f"and '{other}' is another one, which stays as it was. Choose "
                        "another name, or remove that file first."
                    )
            for name in (*names, new.name):
                make_like(temporary / name, Path(path).with_name(name))
                move(temporary / name, Path(path).with_name(name))


def check_file(path):
    """Raise `WriteError` where `atomic_file` would, before there is content to write.

    Args:
        path: str or path. Its directory is made if it does not exist.
    """
    with wrap_os_errors(path):
        target = Path(os.path.realpath(path))
        check_kind(target, stat.S_IFREG)
        with aside(target.parent, target.name):
            pass


@contextlib.contextmanager
def atomic_directory(directory, marks, keep=lambda path: True, room=0):
    """Write a directory aside and move it into place when it is complete.

    Existing files that are not written again are kept. Symbolic links are followed. How
    atomic the replacement is:

    - A new directory appears atomically.
    - A directory that contains only files is exchanged atomically on Linux. Elsewhere a
      process killed between two steps leaves the old one aside, for
      `restore_interrupted`.
    - Any other directory (a mount point, one whose parent is not writable, one that
      contains links or other directories) is kept, and its files are replaced
      atomically one by one. If one of them fails, all are restored; if the process is
      killed, `restore_interrupted` replaces the rest. Meanwhile `read_whole` waits, and
      other readers may see files of two versions.

    Args:
        directory: str or path, created if it does not exist.
        marks: list of patterns of names, for example `["*.weights.h5"]`. Existing files
            are replaced only in a directory with a file that matches one of them; new
            files are added to any directory.
        keep: callable that takes the relative `pathlib.Path` of an existing file that
            was not written again and returns whether to keep it. By default all are
            kept. It is called after the new files are written.
        room: int, see `atomic_file`.

    Yields:
        `pathlib.Path` of an empty directory to write to.

    Raises:
        WriteError: (an `OSError` and a `ValueError`) if the system refuses, the path is
            a file, a pipe, a socket or a device, or a file would be replaced in a
            directory without a mark.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(wrap_os_errors(directory))
        target = Path(os.path.realpath(directory))
        restore_interrupted(target)
        is_there = check_kind(target, stat.S_IFDIR)
        if is_there and not os.access(target, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        is_inside = is_there and not is_exchangeable(target)
        place = (target,) if is_inside else (target.parent, target.name)
        temporary = stack.enter_context(aside(*place))
        check_room(temporary, room)
        new = temporary / "new"
        new.mkdir()
        yield new
        if _appears(new, target):
            return
        check_files(new, target, marks)
        if not is_inside:
            if exchange(new, target, keep, temporary / "old" / target.name):
                return
            temporary = stack.enter_context(aside(target))
            new = Path(shutil.move(new, temporary / "new"))
        replace_files(new, target, keep)


def _appears(new, target):
    """Move a directory to a free path; return `False` if the path exists."""
    if target.exists():
        return False
    try:
        new.rename(target)
    except OSError as error:
        # Another process was faster.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def restore_interrupted(directory):
    """Complete or undo the replacement of a directory by a killed process.

    Args:
        directory: str or path.
    """
    directory = Path(directory)
    # `os.path`, because `directory` may be no valid path, and must not raise here.
    if os.path.isdir(directory):
        for left in of_the_dead(directory):
            if (left / "ready").is_dir():
                # This process may have no permission to write.
                with contextlib.suppress(OSError):
                    finish(left / "ready", directory)
                    shutil.rmtree(left, ignore_errors=True)
    elif not os.path.lexists(directory):
        for left in of_the_dead(directory.parent):
            old = left / "old" / directory.name
            # Both exist if it was killed between its two steps.
            if old.is_dir():
                with contextlib.suppress(OSError):
                    old.rename(directory)
                    return
