"""Files and directories that appear whole or not at all.

What is written goes to a temporary neighbour, which takes the place of the target when
all of it is written. Where writing fails, what was there before stays as it was; what
processes leave behind that are killed is cleared away by the next that writes there.
"""

import contextlib
import ctypes
import errno
import glob
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

# Of the neighbours: `.NAME.aside-MACHINE-PROCESS-RANDOM`.
_ASIDE = f"aside-{platform.node()}"
# How long a process waits for another one, between two looks, in seconds.
_PATIENCE = 0.2
# What a system says that will not have something written.
_REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    errno.ENAMETOOLONG,
}


class NotWritten(OSError, ValueError):
    """A file or directory that could not be written. What was there before still is."""


@contextlib.contextmanager
def explain_refusals(path):
    """Turn what a system says that will not have a path written into `NotWritten`.

    Args:
        path: str or path.
    """
    try:
        yield
    except NotWritten:
        raise
    except (OSError, RuntimeError) as error:
        # When it closes a file HDF5 knows the reason only in words.
        number = re.search(r"errno = (\d+)", str(error))
        number = getattr(error, "errno", None) or (number and int(number[1]))
        if number not in _REFUSALS:
            raise
        raise NotWritten(
            f"'{path}' cannot be written ({os.strerror(number)}); what was there "
            "before is unchanged. Make room, or choose a directory that this program "
            f"may write to. Reason: {error}"
        ) from error


@contextlib.contextmanager
def replaced_file(path, room=0):
    """Write a file aside and put it in place when all of it is written.

    What is written beside it, because a file of that kind consists of several, is put
    in place before it.

    Args:
        path: str or path. Its directory is made if it does not exist.
        room: int, the bytes that there has to be room for before anything is written.
            HDF5 does not get over a write that the system refuses: the process dies.

    Yields:
        `pathlib.Path` of the file to write, with the same suffixes.

    Raises:
        NotWritten: (an `OSError` and a `ValueError`) if the system refuses.
    """
    path = Path(path)
    with explain_refusals(path), _aside(path) as aside:
        _check_room(aside, room)
        new = Path(aside, path.name)
        yield new
        for other in Path(aside).iterdir():
            if other != new:
                os.replace(other, path.with_name(other.name))
        os.replace(new, path)


@contextlib.contextmanager
def replaced_directory(directory, keep=lambda path: True, room=0):
    """Write a directory aside and put it in place when all of it is written.

    Where the system can exchange two directories in one step (Linux), there is no
    moment without the one or the other. Elsewhere a process that is killed between two
    steps leaves the old one aside, from where `recover` brings it back.

    Args:
        directory: str or path, made if it does not exist.
        keep: callable from the relative `pathlib.Path` of a file that is there already
            and was not written again, to whether it is kept. All are, by default. It is
            called when the new files are written.
        room: int, see `replaced_file`.

    Yields:
        `pathlib.Path` of an empty directory to write to.

    Raises:
        NotWritten: (an `OSError` and a `ValueError`) if the system refuses.
    """
    directory = Path(directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(explain_refusals(directory))
        recover(directory)
        aside = stack.enter_context(_aside(directory))
        _check_room(aside, room)
        new, old = Path(aside, "new"), Path(aside, "old")
        new.mkdir()
        yield new
        if not directory.exists():
            new.rename(directory)
            return
        _copy_missing(directory, new, keep)
        if _exchange(new, directory):
            return
        directory.rename(old)
        try:
            new.rename(directory)
        except OSError:
            old.rename(directory)
            raise


def recover(directory):
    """Bring a directory back that a killed process has left aside, if it is missing.

    Args:
        directory: str or path.
    """
    directory = Path(directory)
    # Which is not so sure to be a path that it may raise an error.
    if os.path.exists(directory):
        return
    for aside, target in _asides_of_the_dead(directory.parent):
        if target != directory:
            continue
        # If both are there, it was killed between its two steps.
        if (aside / "old").is_dir():
            with contextlib.suppress(OSError):
                (aside / "old").rename(directory)
                return


def read_whole(directory, read):
    """Read a directory that others may be replacing, all of it from one version.

    Args:
        directory: str or path.
        read: callable without arguments that reads it. It is called again if the
            directory was replaced meanwhile.

    Returns:
        What `read` returns.
    """
    for _ in range(9):
        before = _identity(directory)
        try:
            found = read()
        except Exception:
            # Perhaps it found parts of two versions.
            if _identity(directory) == before:
                raise
            continue
        if _identity(directory) == before:
            return found
    return read()


@contextlib.contextmanager
def one_process(path, waiting=None):
    """Scope that only one process is in at a time; the others wait.

    The system ends it with the process. (On Windows nobody waits.)

    Args:
        path: str or path of a file that stands for the scope, and is there as long.
        waiting: str or `None`, what to print if there is somebody to wait for.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    print(waiting)
                    waiting = None
                time.sleep(_PATIENCE)
                continue
            if _identity(path) != _identity(file.fileno()):
                # Who had it before has removed it.
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def _aside(path):
    """A temporary neighbour of a path; those of dead processes are removed first.

    Of all paths beside it: a process that is killed just after it has put a file in
    place may have been the last one to write that file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left, target in _asides_of_the_dead(path.parent):
        if target.exists() or not (left / "old").is_dir():
            shutil.rmtree(left, ignore_errors=True)
    prefix = f".{path.name}.{_ASIDE}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as aside:
        yield aside


def _check_room(directory, size):
    """Raise an `OSError` if so many bytes cannot be written in a directory."""
    if not size:
        return
    with tempfile.TemporaryFile(dir=directory) as file:
        if not _allocate(file.fileno(), size):
            if shutil.disk_usage(directory).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(file, size):
    """Give an empty file its size, without writing; `False` where nobody can.

    Unlike the free space of the disk this knows of quotas and limits.
    """
    if sys.platform != "linux":
        return False
    try:
        allocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return False
    allocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if not allocate(file, 0, 0, size):
        return True
    number = ctypes.get_errno()
    if number in _REFUSALS:
        raise OSError(number, os.strerror(number))
    return False


def _asides_of_the_dead(folder):
    """What processes of this machine have left that run no more, and beside what.

    Yields:
        Two `pathlib.Path`s, the directory aside and the path that it belongs to.
    """
    for found in folder.glob(f".*.{glob.escape(_ASIDE)}-*-*"):
        name, _, process = found.name[1:].rpartition(f".{_ASIDE}-")
        process = process.partition("-")[0]
        if process.isdigit() and not _runs(int(process)):
            yield found, folder / name


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


def _exchange(first, second):
    """Exchange two directories in one step; `False` where the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2
    return not rename(here, os.fsencode(first), here, os.fsencode(second), exchange)


def _identity(path):
    """What tells one version of a path from the next, `None` if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _copy_missing(source, target, keep):
    for path in source.rglob("*"):
        copy = target / path.relative_to(source)
        if path.is_file() and not copy.exists() and keep(path.relative_to(source)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
