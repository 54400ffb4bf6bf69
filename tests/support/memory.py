"""How much memory a piece of code takes."""

import contextlib
import tracemalloc


@contextlib.contextmanager
def peak_memory():
    """Yields a list, which at the end holds the largest number of bytes in use.

    Counted is what Python, NumPy and msgpack allocate in the block, claimed but
    untouched memory included.
    """
    peak = []
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
