"""Reading while other processes write, and waiting for them."""

import contextlib
import errno
import glob
import os
import time
from pathlib import Path

from keras_softmoe.files.writing import ASIDE, restore_interrupted

# Seconds between two attempts of a waiting process, and attempts of a reader.
_PATIENCE = 0.2
_LOOKS = 25
# Errors of file systems without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


def read_whole(directory, read):
    """Read one version of a directory whose files other processes may be replacing.

    Args:
        directory: str or path.
        read: callable without arguments that reads it. It is called again if files were
            replaced meanwhile.

    Returns:
        The result of `read`.
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
    """Hold a lock that one process has at a time; the others wait.

    The lock ends with the process. (No process waits on Windows, or where a file system
    has no locks.)

    Args:
        path: str or path of the lock file, which exists while the lock is held.
        waiting: str or `None`, message to print when the process has to wait.
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
