"""Writing a file or a directory aside, and replacing the old one when it is whole."""

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from keras_softmoe.files._placing import (
    check_files,
    exchange,
    finish,
    is_exchangeable,
    make_like,
    move,
    replace_files,
)
from keras_softmoe.files._refusals import (
    NotWritten,
    check_kind,
    check_room,
    explain_refusals,
)
from keras_softmoe.files._temporary import aside, of_the_dead


@contextlib.contextmanager
def replaced_file(path, room=0):
    """Write a file aside and put it in place when all of it is written.

    Files that are written beside it, because a file of that kind consists of several,
    are put in place before it. Of a symbolic link the target is written. A file that is
    replaced passes on its mode, and its owner where the system permits it.

    Args:
        path: str or path. Its directory is made if it does not exist.
        room: int, the bytes that there has to be room for before anything is written.
            HDF5 does not get over a write that the system refuses: the process dies.

    Yields:
        `pathlib.Path` of the file to write, with the same suffixes.

    Raises:
        NotWritten: (an `OSError` and a `ValueError`) if the system refuses, or the path
            is that of a directory, a pipe, a socket or a device.
    """
    with explain_refusals(path):
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
                    raise NotWritten(
                        f"'{path}' cannot be written: it consists of several files, "
                        f"and '{other}' is another one, which stays as it was. Choose "
                        "another name, or remove that file first."
                    )
            for name in (*names, new.name):
                make_like(temporary / name, Path(path).with_name(name))
                move(temporary / name, Path(path).with_name(name))


def check_file(path):
    """Raise `NotWritten` where `replaced_file` would, before what is written is known.

    Args:
        path: str or path. Its directory is made if it does not exist.
    """
    with explain_refusals(path):
        target = Path(os.path.realpath(path))
        check_kind(target, stat.S_IFREG)
        with aside(target.parent, target.name):
            pass


@contextlib.contextmanager
def replaced_directory(directory, marks, keep=lambda path: True, room=0):
    """Write a directory aside and put it in place when all of it is written.

    What lies in a directory already and is not written again stays as it is. Of a
    symbolic link the target is written. How whole the new content is:

    - A new directory appears in one step.
    - A directory that holds files only is exchanged in one step where the system can
      do that (Linux). Elsewhere a process that is killed between two steps leaves the
      old one aside, from where `recover` brings it back.
    - Another directory stays the same one: a mount point, one whose parent cannot be
      written to, one that holds links or other directories. Its files are replaced one
      by one, each in one step. If one of them cannot be, all are put back; if the
      process is killed, `recover` replaces the rest. Meanwhile `read_whole` waits, and
      other readers may find files of two versions.

    Args:
        directory: str or path, made if it does not exist.
        marks: list of patterns of names, for example `["*.weights.h5"]`. Only in a
            directory with a file that matches one of them files are replaced; to others
            new ones are added.
        keep: callable from the relative `pathlib.Path` of a file that is there already
            and was not written again, to whether it is kept. All are, by default. It is
            called when the new files are written.
        room: int, see `replaced_file`.

    Yields:
        `pathlib.Path` of an empty directory to write to.

    Raises:
        NotWritten: (an `OSError` and a `ValueError`) if the system refuses, the path is
            that of a file, a pipe, a socket or a device, or a file would be replaced in
            a directory without a mark.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(explain_refusals(directory))
        target = Path(os.path.realpath(directory))
        recover(target)
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
    """Put a directory where there is none; `False` if there is one."""
    if target.exists():
        return False
    try:
        new.rename(target)
    except OSError as error:
        # Another process was quicker.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def recover(directory):
    """Put in place what a killed process has left, or put back what it has removed.

    Args:
        directory: str or path.
    """
    directory = Path(directory)
    # Which is not so sure to be a path that it may raise an error.
    if os.path.isdir(directory):
        for left in of_the_dead(directory):
            if (left / "ready").is_dir():
                # Perhaps this process may only read.
                with contextlib.suppress(OSError):
                    finish(left / "ready", directory)
                    shutil.rmtree(left, ignore_errors=True)
    elif not os.path.lexists(directory):
        for left in of_the_dead(directory.parent):
            old = left / "old" / directory.name
            # If both are there, it was killed between its two steps.
            if old.is_dir():
                with contextlib.suppress(OSError):
                    old.rename(directory)
                    return
