"""Errors of writing: those of the operating system, and checks made beforehand."""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import tempfile

# Error numbers of a system that refuses to write.
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
    # Other links are followed.
    stat.S_IFLNK: "a link in a circle",
}


class WriteError(OSError, ValueError):
    """Error of writing a file or directory, whose old content is unchanged."""


@contextlib.contextmanager
def wrap_os_errors(path):
    """Raise `WriteError` in place of an `OSError` of writing a path.

    Args:
        path: str or path.
    """
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


def check_kind(path, kind):
    """Raise if a path exists and is not of the expected kind.

    For example, a directory never replaces a device or a file.

    Args:
        path: `pathlib.Path`, resolved.
        kind: `stat.S_IFREG` for a file, or `stat.S_IFDIR`.

    Returns:
        bool, whether the path exists.
    """
    try:
        found = stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    if found != kind:
        raise WriteError(
            f"'{path}' cannot be written as {_KINDS[kind]}: it is "
            f"{_KINDS.get(found, 'something else')}, and stays as it was. Choose "
            "another path, or a directory that does not exist yet; or remove it first."
        )
    return True


def check_room(directory, size):
    """Raise an `OSError` if a directory has no room for that many bytes."""
    if not size:
        return
    with tempfile.TemporaryFile(dir=directory) as file:
        if not _allocate(file.fileno(), size):
            if shutil.disk_usage(directory).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(file, size):
    """Allocate an empty file without writing; return `False` where unsupported.

    Unlike the free space of the disk, this respects quotas and limits.
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
