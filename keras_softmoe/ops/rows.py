"""Adding up rows, where one backend has a faster way than Keras takes."""

import keras
from keras import ops


def add_rows(rows, index, num_rows):
    """Sum the rows that go to the same place.

    `keras.ops.segment_sum`, which is what this means and what other backends do. On
    PyTorch Keras first looks for indices out of range, and its gradient is slow.

    Args:
        rows: `(N, D)` tensor.
        index: `(N,)` int32 tensor, the place of each row, in `[0, num_rows)`.
        num_rows: int (or scalar int tensor), the number of places.

    Returns:
        `(num_rows, D)` tensor; zeros where no row goes.
    """
    if keras.backend.backend() == "torch":
        return rows.new_zeros((num_rows, rows.shape[1])).index_add(0, index, rows)
    return ops.segment_sum(rows, index, num_segments=num_rows)
