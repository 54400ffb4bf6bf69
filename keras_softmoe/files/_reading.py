"""Reading beside processes that write, and waiting for them."""

import contextlib
import errno
import glob
import os
import time
from pathlib import Path

from keras_softmoe.files._placing import identity
from keras_softmoe.files._replacing import recover
from keras_softmoe.files._temporary import ASIDE

# How long a process waits for another one between two looks, in seconds, and how often
# a reader looks.
_PATIENCE = 0.2
_LOOKS = 25
# How a file system says that it has no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


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
        before = _version(directory)
        try:
            found = read()
        except Exception:
            # Perhaps it found parts of two versions.
            if _version(directory) == before:
                raise
            continue
        if _version(directory) == before:
            return found
    return read()


@contextlib.contextmanager
def one_process(path, waiting=None):
    """Scope that only one process is in at a time; the others wait.

    The system ends it with the process. (Nobody waits on Windows, or where a file
    system has no locks.)

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
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if identity(path) != identity(file.fileno()):
                # Who had it before has removed it.
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _version(directory):
    """What tells one version of a directory from the next, `None` if there is none."""
    if identity(directory) is None:
        return None
    for _ in range(_LOOKS):
        # Files that are just replaced one by one
        if not any(Path(directory).glob(f"..{glob.escape(ASIDE)}-*/ready")):
            break
        time.sleep(_PATIENCE)
        recover(directory)
    with contextlib.suppress(OSError):
        return identity(directory), os.stat(directory).st_mtime_ns
    return None
