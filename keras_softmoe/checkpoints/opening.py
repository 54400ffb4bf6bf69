"""Opening of files on this machine, on web servers and in public buckets.

`gs://bucket/name` is read as `https://storage.googleapis.com/bucket/name`: since
version 2.20 TensorFlow's reader of buckets is a separate package.
"""

import contextlib
import io
import os
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import keras

from keras_softmoe.checkpoints.msgpack_stream import CheckpointError

_BUCKETS = "https://storage.googleapis.com/"
# Timeout for a server's answer, in seconds
_PATIENCE = 10.0
_BUFFER = 1 << 20


def web_address(path):
    """Return the URL of a path on the web, or `None`.

    Args:
        path: str. Those with `gs://`, `https://` and `http://` are on the web.
    """
    if path.startswith("gs://"):
        return _BUCKETS + path.removeprefix("gs://")
    return path if path.startswith(("https://", "http://")) else None


def download(path, folder, verbose=1):
    """Copy a file from the web into a folder, with `keras.utils.get_file`.

    Args:
        path: str, `gs://bucket/name` or a URL.
        folder: str or path of an existing directory, without files of an interrupted
            download.
        verbose: 0 or 1, whether to show a progress bar.

    Returns:
        str, path of the copy.

    Raises:
        CheckpointError: (a `ValueError`) if the server does not answer within ten
            seconds, or the copy is incomplete.
    """
    url = web_address(path)
    size = _size(url)
    output = contextlib.nullcontext()
    if not verbose:
        output = contextlib.redirect_stdout(io.StringIO())
    try:
        with output, _timeout():
            copy = keras.utils.get_file(
                Path(url).name, url, cache_dir=str(folder), cache_subdir=""
            )
    # `get_file` raises plain `Exception`.
    except Exception as error:
        raise _error(url, error) from error
    if size is not None and os.path.getsize(copy) != size:
        os.remove(copy)
        raise _error(url, f"the copy does not have {size:,} bytes")
    return str(copy)


@contextlib.contextmanager
def _open_url(url):
    """Open a file on the web, of which only the parts that are read are fetched."""
    size = _size(url)
    if size is None:
        raise _error(url, "the server does not send the size of the file")
    with io.BufferedReader(_Ranges(url, size), _BUFFER) as file:
        yield file, size


class _Ranges(io.RawIOBase):
    """File on the web, read by requests for ranges of bytes."""

    def __init__(self, url, size):
        self._url = url
        self._size = size
        self._place = 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}
        self._place = start[whence] + offset
        return self._place

    def readinto(self, target):
        count = min(len(target), self._size - self._place)
        if count <= 0:
            return 0
        end = self._place + count - 1
        request = urllib.request.Request(
            self._url, headers={"Range": f"bytes={self._place}-{end}"}
        )
        try:
            with _answer(request) as answer:
                # The answer must not be the whole file.
                if answer.status != 206:
                    raise OSError("the server does not send parts of files")
                content = answer.read(count)
        except OSError as error:
            raise _error(self._url, error) from error
        target[: len(content)] = content
        self._place += len(content)
        return len(content)


def _size(url):
    """Return the size in bytes of a file on the web, or `None` if unknown.

    In a thread, because the DNS look-up has no timeout.
    """
    found = []

    def ask():
        request = urllib.request.Request(url, method="HEAD")
        try:
            with _answer(request) as answer:
                length = answer.headers.get("Content-Length")
                found.append(None if length is None else int(length))
        except (OSError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if not found:
        raise _error(url, f"no answer within {_PATIENCE:.0f} seconds")
    if isinstance(found[0], Exception):
        raise _error(url, found[0]) from found[0]
    return found[0]


def _answer(request):
    try:
        return urllib.request.urlopen(request, timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        # It keeps the connection open.
        error.close()
        raise


@contextlib.contextmanager
def _timeout():
    """Scope with a timeout of sockets, for which `get_file` has no argument."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _error(url, reason):
    if isinstance(reason, Exception):
        reason = f"{type(reason).__name__}: {reason}"
    return CheckpointError(f"'{url}' cannot be fetched. Reason: {reason}.")


@contextlib.contextmanager
def open_file(path):
    """Open a file on this machine, on the web or in a bucket (`gs://...`).

    Other kinds of URLs are left to TensorFlow's `tf.io.gfile`.

    Args:
        path: str.

    Yields:
        A binary file that can seek, and its size in bytes.

    Raises:
        CheckpointError: if the file does not exist or cannot be read, or a server does
            not answer within ten seconds or does not send parts of files.
    """
    url = web_address(path)
    if url is not None:
        with _open_url(url) as opened:
            yield opened
        return
    failures = (OSError,)
    if is_remote(path):
        # This import takes seconds and hundreds of MB.
        import tensorflow as tf

        failures = (OSError, tf.errors.OpError)
    try:
        if is_remote(path):
            file = tf.io.gfile.GFile(path, "rb")
            size = file.size()
        else:
            # Reading a pipe or a device could block forever.
            if not os.path.isfile(path):
                raise FileNotFoundError("no such file")
            file = open(path, "rb")
            size = os.path.getsize(path)
        with file:
            yield file, size
    except failures as error:
        raise CheckpointError(
            f"The file '{path}' cannot be read ({type(error).__name__}: {error}). A "
            "sharded checkpoint is PREFIX.index and all of PREFIX.data-00000-of-..., "
            "in one place. Fetch missing files."
        ) from error


def is_remote(path):
    """Return whether a path is a URL (`gs://bucket/name`)."""
    return "://" in path
