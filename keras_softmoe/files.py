"""Atomic writing of files and directories, and reading beside writers.

New content is written to a temporary directory, from which files are moved into place
when all are complete. If writing fails, the old content is unchanged. What killed
processes leave is completed or removed by the next process that reads or writes there.
"""

import contextlib
import errno
import glob
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

# Error numbers of a system that refuses to write.
_REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EBUSY, errno.ETXTBSY),
}
# By the first character of their modes. Links that lead anywhere are followed.
_KINDS = {
    **{"-": "a file", "d": "a directory", "p": "a named pipe", "s": "a socket"},
    **{"c": "a device", "b": "a device", "l": "a link in a circle"},
}
# Part of the names of temporary directories: `.NAME.aside-MACHINE-PROCESS-RANDOM`
# beside a path of that name, `..aside-MACHINE-PROCESS-RANDOM` inside a directory.
ASIDE = f"aside-{platform.node()}"
# Maximum length in bytes of NAME. File systems allow 255 for the whole name.
_LABEL = 100
# Seconds between two attempts of a waiting process, and attempts of a reader.
_PATIENCE = 0.2
_LOOKS = 25
# Errors of file systems without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


@contextlib.contextmanager
def atomic_file(path, room=0):
    """Write a file aside and move it into place when it is complete.

    Other files written beside it are moved first. Links are followed, mode and owner
    kept. `room` are bytes that must be free. Yields the path to write, with the same
    suffixes. Raises `WriteError` if the system refuses, or a path is of another kind.
    """
    with wrap_os_errors(path):
        target = _resolved(path)
        is_there = _exists(target, "a file")
        with _aside(target.parent, target.name) as temporary:
            _check_room(temporary, room)
            new = temporary / Path(path).name
            yield new
            names = sorted({file.name for file in temporary.iterdir()} - {new.name})
            for name in names:
                other = _resolved(Path(path).with_name(name))
                if _exists(other, "a file") and not is_there:
                    raise WriteError(
                        f"'{path}' cannot be written: it consists of several files, "
                        f"and '{other}' is another one, which stays as it was."
                    )
            for name in (*names, new.name):
                place = Path(path).with_name(name)
                _make_like(temporary / name, place)
                move(temporary / name, place)


def check_file(path):
    """Raise `WriteError` where `atomic_file` would, before there is any content."""
    with wrap_os_errors(path):
        target = _resolved(path)
        _exists(target, "a file")
        with _aside(target.parent, target.name):
            pass


@contextlib.contextmanager
def atomic_directory(directory, marks, keep=lambda path: True, room=0):
    """Write a directory aside and move it into place when it is complete.

    A new directory appears atomically. In an existing one files are replaced by rename,
    one after the other, and others are kept; if the process is killed meanwhile,
    `restore_interrupted` replaces the rest. Symbolic links are followed.

    Existing files are replaced only in a directory with a file that matches one of the
    patterns `marks`. `keep` takes the relative path of an existing file that was not
    written again, and returns whether to keep it. `room` is as in `atomic_file`.

    Yields an empty directory to write to. Raises `WriteError` if the system refuses, a
    path is of another kind, or a file would be replaced where there is no mark.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(wrap_os_errors(directory))
        target = _resolved(directory)
        is_there = _exists(target, "a directory")
        place = (target,) if is_there else (target.parent, target.name)
        temporary = stack.enter_context(_aside(*place))
        _check_room(temporary, room)
        new = temporary / "new"
        new.mkdir()
        yield new
        if not is_there:
            try:
                new.rename(target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            # Another process has created it meanwhile.
            temporary = stack.enter_context(_aside(target))
            new = Path(shutil.move(new, temporary / "new"))
        _check_replaced(new, target, marks)
        _replace_files(new, target, keep)


def restore_interrupted(directory):
    """Complete the replacement of files by killed processes, and remove their rest."""
    # `os.path` also accepts what is no valid path.
    found = Path(directory) if os.path.isdir(directory) else None
    for left in found.glob(f".*.{glob.escape(ASIDE)}-*-*") if found else ():
        process = left.name.rpartition(f".{ASIDE}-")[2].partition("-")[0]
        if os.name != "posix" or not process.isdigit() or int(process) == os.getpid():
            continue
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            # This process may have no permission to write.
            with contextlib.suppress(OSError), _one_writer(directory):
                if (left / "ready").is_dir():
                    _finish(left / "ready", found)
                shutil.rmtree(left)
        except OSError:
            # It runs, and belongs to another user.
            continue


# === Reading, and waiting ===


def read_whole(directory, read):
    """Read one version of a directory whose files other processes may be replacing.

    `read` is called again if files were replaced meanwhile; its result is returned.
    """
    for _ in range(9):
        before = _version(directory)
        try:
            found = read()
        except Exception:
            # It may have read parts of two versions.
            if _version(directory) == before:
                raise
            continue
        if _version(directory) == before:
            return found
    return read()


def _version(directory):
    """Return a value that differs between versions, `None` without a directory."""
    for _ in range(_LOOKS):
        # Files are being replaced one by one.
        if not any(Path(directory).glob(f"..{glob.escape(ASIDE)}-*/ready")):
            break
        time.sleep(_PATIENCE)
        restore_interrupted(directory)
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        # Renaming changes the inode of a file, and the time of its folder.
        return {
            (entry.name, entry.inode(), entry.stat().st_mtime_ns)
            for entry in entries
            if not entry.name.startswith(f"..{ASIDE}-")
        }
    return None


@contextlib.contextmanager
def one_process(path, waiting=None):
    """Hold a lock that one process has at a time; others print `waiting` and wait."""
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
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            try:
                is_current = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                is_current = False
            if not is_current:
                # The previous holder has removed it.
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


# === Errors ===


class WriteError(OSError, ValueError):
    """Error of writing a file or directory, whose old content is unchanged."""


@contextlib.contextmanager
def wrap_os_errors(path):
    """Raise `WriteError` in place of an `OSError` of writing a path."""
    try:
        yield
    except WriteError:
        raise
    except (OSError, RuntimeError) as error:
        # On closing a file HDF5 gives the error number only in its message.
        number = re.search(r"errno = (\d+)", str(error))
        number = getattr(error, "errno", None) or (number and int(number[1]))
        if number not in _REFUSALS:
            raise
        raise WriteError(
            f"'{path}' cannot be written ({os.strerror(number)}); its old content is "
            "unchanged. Make room, or choose a directory that this program may write "
            f"to. Reason: {error}"
        ) from error


def _exists(path, kind):
    """Return whether a resolved path exists; raise if it is of another kind."""
    try:
        found = _KINDS.get(stat.filemode(path.lstat().st_mode)[0], "something else")
    except FileNotFoundError:
        return False
    if found != kind:
        raise WriteError(
            f"'{path}' cannot be written as {kind}: it is {found}, and stays as it "
            "was. Choose another path."
        )
    return True


def _check_room(directory, size):
    """Raise an `OSError` if a directory has no room for a file of a size in bytes.

    HDF5 crashes the process when a write fails.
    """
    if not hasattr(os, "posix_fallocate"):
        if shutil.disk_usage(directory).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif size:
        with tempfile.TemporaryFile(dir=directory) as file:
            try:
                # Unlike the free space of the disk, this respects quotas and limits.
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                # Some file systems cannot allocate.
                if error.errno in _REFUSALS:
                    raise


# === Temporary directories ===


@contextlib.contextmanager
def _aside(folder, name=""):
    """Create a temporary directory in a folder, for a path there or for the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Those of all names: perhaps no other process will ever write this one again.
    restore_interrupted(folder)
    label = os.fsdecode(os.fsencode(name)[:_LABEL])
    prefix = f".{label}.{ASIDE}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as directory:
        yield Path(directory)


# === Moving files ===


def _check_replaced(new, target, marks):
    """Raise unless the files of a new directory may be moved into an old one."""
    names = os.listdir(target)
    is_known = any(Path(name).match(mark) for name in names for mark in marks)
    for path in _files_below(new):
        for parent in list(path.parents)[:-1]:
            _exists(_resolved(target / parent), "a directory")
        if _exists(_resolved(target / path), "a file") and not is_known:
            raise WriteError(
                f"'{target}' cannot be written: '{path}' in it is another file, "
                "which stays as it was. Files are replaced only where one of "
                f"{', '.join(marks)} is among them."
            )


def _replace_files(new, target, keep):
    """Move all files of a directory inside of the target into the target, or none."""
    temporary, files = new.parent, _files_below(new)
    with _one_writer(target):
        there = {
            path.relative_to(target)
            for folder in {Path(), *(path.parent for path in files)}
            for path in (target / folder).glob("*")
            if path.is_file()
        }
        gone = [path for path in sorted(there.difference(files)) if not keep(path)]
        # Replaced and removed files are kept until the end.
        before = temporary / "before"
        for path in [*there.intersection(files), *gone]:
            place = _resolved(target / path)
            _make_like(new / path, place)
            (before / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(place, before / path)
            except OSError:
                shutil.copy2(place, before / path)
        names = [path.as_posix() for path in gone]
        (temporary / "gone").write_text(json.dumps(names), encoding="utf-8")
        # From here on a killed process is completed, before it is forgotten.
        ready = new.rename(temporary / "ready")
        try:
            _finish(ready, target)
        except BaseException:
            for path in _files_below(before):
                move(before / path, target / path)
            for path in set(files).difference(there, _files_below(ready)):
                (target / path).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _one_writer(directory):
    """Lock a directory, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            opened = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _finish(ready, target):
    """Move finished files into a directory and remove the files listed in `gone`."""
    for path in _files_below(ready):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        move(ready / path, target / path)
    for path in json.loads((ready.parent / "gone").read_text(encoding="utf-8")):
        (target / path).unlink(missing_ok=True)
    shutil.rmtree(ready)


def move(file, path):
    """Move a file to a path atomically."""
    place = _resolved(path)
    try:
        os.replace(file, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A link leads to another disk.
        with _aside(place.parent, place.name) as temporary:
            os.replace(shutil.copy2(file, temporary), place)
        file.unlink()


def _make_like(new, old):
    """Copy the owner and the mode of an old file, if any, to a new one."""
    with contextlib.suppress(OSError):
        found = old.stat()
        if hasattr(os, "chown"):
            with contextlib.suppress(OSError):
                os.chown(new, found.st_uid, found.st_gid)
        new.chmod(stat.S_IMODE(found.st_mode))


def _files_below(directory):
    """Return the sorted relative paths of all files below a directory."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory) for path in found)


def _resolved(path):
    """Return the path with symbolic links resolved, also those to nothing."""
    return Path(os.path.realpath(path))
