"""Replacement of an old directory by a new one: as a whole, or file by file."""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path

from keras_softmoe.files.refusals import WriteError, check_kind
from keras_softmoe.files.temporary import aside


def identity(path):
    """Return the device and inode of a path, or `None` if nothing exists there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def files_below(directory):
    """Return the sorted relative paths of all files below a directory."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory) for path in found)


def check_files(new, directory, marks):
    """Raise unless the files of a new directory may be moved into an old one.

    Args:
        new: `pathlib.Path`.
        directory: `pathlib.Path`, resolved.
        marks: see `atomic_directory`.
    """
    names = os.listdir(directory)
    is_known = any(Path(name).match(mark) for name in names for mark in marks)
    for path in files_below(new):
        for parent in list(path.parents)[:-1]:
            check_kind(_place(directory / parent), stat.S_IFDIR)
        if check_kind(_place(directory / path), stat.S_IFREG) and not is_known:
            raise WriteError(
                f"'{directory}' cannot be written: '{path}' in it is another file, "
                "which stays as it was. Files are replaced only where one of "
                f"{', '.join(marks)} is among them. Choose an empty directory, or one "
                "that does not exist yet."
            )


# === As a whole ===


def is_exchangeable(directory):
    """Return whether an old directory may be exchanged for a new one."""
    found = directory.stat()
    if hasattr(os, "geteuid"):
        groups = (os.getegid(), *os.getgroups())
        is_own = os.geteuid() == found.st_uid and found.st_gid in groups
        if os.geteuid() and not is_own:
            return False
    return (
        os.access(directory.parent, os.W_OK | os.X_OK)
        and not _is_mount_point(directory)
        and not _has_attributes(directory)
        # It must not be the working directory; those of other processes are unknown.
        and identity(directory) != identity(os.curdir)
    )


def _is_mount_point(directory):
    if os.path.ismount(directory):
        return True
    # Bind mounts within one file system
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    escaped = re.sub(
        rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], os.fsencode(directory)
    )
    return any(line.split()[4] == escaped for line in mounts)


def _has_attributes(directory):
    """Return whether extended attributes (such as access lists) would be lost."""
    with contextlib.suppress(OSError, AttributeError):
        names = os.listxattr(directory)
        return any(not name.startswith("security.") for name in names)
    return False


def exchange(new, directory, keep, old):
    """Exchange two directories, if the old one contains nothing but files.

    Args:
        new: `pathlib.Path`, to which missing files are added.
        directory: `pathlib.Path`, resolved.
        keep: see `atomic_directory`.
        old: `pathlib.Path`, where a killed process leaves the old directory.

    Returns:
        bool, whether the system permitted it.
    """
    if not _is_plain(directory, new):
        return False
    _keep_files(directory, new, keep)
    if _rename_both(new, directory):
        # Files created meanwhile
        _keep_files(new, directory, keep)
        return True
    old.parent.mkdir()
    try:
        directory.rename(old)
    except OSError:
        old.parent.rmdir()
        return False
    try:
        new.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    return True


def _is_plain(directory, new):
    """Return whether it contains only files, and directories that the new one has."""
    for entry in _entries(directory):
        if entry.is_dir(follow_symlinks=False):
            path, other = Path(entry.path), new / entry.name
            if not other.is_dir() or _is_mount_point(path):
                return False
            if not _is_plain(path, other):
                return False
        elif not entry.is_file(follow_symlinks=False):
            return False
    return True


def _entries(directory):
    with os.scandir(directory) as entries:
        return list(entries)


def _keep_files(directory, new, keep, below=Path()):
    """Copy the mode of an old directory and its missing files to a new one."""
    for entry in _entries(directory / below):
        path = below / entry.name
        if entry.is_dir(follow_symlinks=False):
            (new / path).mkdir(exist_ok=True)
            _keep_files(directory, new, keep, path)
        elif (new / path).exists():
            make_like(new / path, directory / path)
        elif keep(path):
            try:
                os.link(directory / path, new / path)
            except OSError:
                shutil.copy2(directory / path, new / path)
    make_like(new / below, directory / below)


def _rename_both(first, second):
    """Exchange two directories atomically; return `False` where unsupported."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchanged = -100, 2
    return not rename(here, os.fsencode(first), here, os.fsencode(second), exchanged)


def make_like(new, old):
    """Copy the owner and the mode of an old file or directory, if any, to a new one."""
    with contextlib.suppress(OSError):
        found = old.stat()
        if hasattr(os, "chown"):
            with contextlib.suppress(OSError):
                os.chown(new, found.st_uid, found.st_gid)
        new.chmod(stat.S_IMODE(found.st_mode))


# === File by file ===


def replace_files(new, directory, keep):
    """Move all files of a new directory into an old one, or none.

    Args:
        new: `pathlib.Path` in a temporary directory inside of the old one.
        directory: `pathlib.Path`, resolved.
        keep: see `atomic_directory`.
    """
    with _one_writer(directory):
        _replace_files(new, directory, keep)


def _replace_files(new, directory, keep):
    temporary, files = new.parent, files_below(new)
    folders = {Path(), *(path.parent for path in files)}
    there = {
        path.relative_to(directory)
        for folder in folders
        for path in (directory / folder).glob("*")
        if path.is_file()
    }
    gone = [path for path in sorted(there.difference(files)) if not keep(path)]
    # Replaced and removed files are kept until the end.
    before = temporary / "before"
    for path in [*there.intersection(files), *gone]:
        place = _place(directory / path)
        make_like(new / path, place)
        (before / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(place, before / path)
        except OSError:
            shutil.copy2(place, before / path)
    names = [path.as_posix() for path in gone]
    (temporary / "gone").write_text(json.dumps(names), encoding="utf-8")
    ready = new.rename(temporary / "ready")
    try:
        finish(ready, directory)
    except BaseException:
        for path in files_below(before):
            move(before / path, directory / path)
        for path in set(files).difference(there, files_below(ready)):
            (directory / path).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _one_writer(directory):
    """Context manager that locks a directory, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            opened = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def finish(ready, directory):
    """Move finished files into a directory and remove the files listed in `gone`."""
    for path in files_below(ready):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        move(ready / path, directory / path)
    gone = json.loads((ready.parent / "gone").read_text(encoding="utf-8"))
    for path in gone:
        (directory / path).unlink(missing_ok=True)
    shutil.rmtree(ready)


def move(file, path):
    """Move a file to a path atomically."""
    place = _place(path)
    try:
        os.replace(file, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with aside(place.parent, place.name) as temporary:
            os.replace(shutil.copy2(file, temporary), place)
        file.unlink()


def _place(path):
    """Return the path with symbolic links resolved."""
    return Path(os.path.realpath(path))
