"""What a system refuses to write, and what is refused before it is asked."""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import tempfile

# Errors of a system that refuses to write.
_REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EBUSY, errno.ETXTBSY),
}
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    # Of a link to anything else the target is written.
    stat.S_IFLNK: "a link in a circle",
}


class NotWritten(OSError, ValueError):
    """A file or directory that could not be written. What was there before still is."""


@contextlib.contextmanager
def explain_refusals(path):
    """Turn the errors of a system that refuses to write a path into `NotWritten`.

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


def check_kind(path, kind):
    """Raise unless a path is free or of a kind.

    A device or somebody's file is never replaced with a directory, for example.

    Args:
        path: `pathlib.Path`, resolved.
        kind: `stat.S_IFREG` for a file, or `stat.S_IFDIR`.

    Returns:
        bool, whether there is something.
    """
    try:
        found = stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    if found != kind:
        raise NotWritten(
            f"'{path}' cannot be written as {_KINDS[kind]}: it is "
            f"{_KINDS.get(found, 'something else')}, and stays as it was. Choose "
            "another path, or a directory that does not exist yet; or remove it first."
        )
    return True


def check_room(directory, size):
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
