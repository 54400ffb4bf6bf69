"""Errors of writing: those of the operating system, and checks made beforehand."""

import contextlib
import errno
import os
import re
import shutil
import stat
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
            "another path, or remove it first."
        )
    return True


def check_room(directory, size):
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
