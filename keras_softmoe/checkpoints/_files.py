"""Opening of local and remote files."""

import contextlib
import os

from keras_softmoe.checkpoints._remote import open_url, web_address
from keras_softmoe.checkpoints._stream import CheckpointError


@contextlib.contextmanager
def open_file(path):
    """Open a file on this machine, on the web or in a bucket (`gs://...`).

    Other kinds of URLs are left to TensorFlow's `tf.io.gfile`.

    Args:
        path: str.

    Yields:
        A binary file that can seek, and its size in bytes.

    Raises:
        CheckpointError: if the file does not exist or cannot be read.
    """
    if web_address(path) is not None:
        with open_url(path) as opened:
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
