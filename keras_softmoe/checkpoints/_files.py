"""Opening files, wherever they are."""

import contextlib
import os

from keras_softmoe.checkpoints._remote import open_url, web_address
from keras_softmoe.checkpoints._stream import CheckpointError


@contextlib.contextmanager
def open_file(path):
    """Open a local file, or one on the web or in a bucket (`gs://...`).

    Other kinds of URLs are left to TensorFlow's `tf.io.gfile`.

    Args:
        path: str.

    Yields:
        A binary file that can seek, and its size in bytes.

    Raises:
        CheckpointError: if there is no such file, or it cannot be read.
    """
    if web_address(path) is not None:
        with open_url(path) as opened:
            yield opened
        return
    failures = (OSError,)
    if is_remote(path):
        # Seconds and hundreds of MB, for those who read from a bucket.
        import tensorflow as tf

        failures = (OSError, tf.errors.OpError)
    try:
        if is_remote(path):
            file = tf.io.gfile.GFile(path, "rb")
            size = file.size()
        else:
            # A pipe or a device would keep the reader waiting.
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
            "in one place. Fetch what is missing."
        ) from error


def is_remote(path):
    """Whether a path is a URL (`gs://bucket/name`)."""
    return "://" in path
