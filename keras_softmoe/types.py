"""Names of types that signatures share.

A tensor is one of the backend in use, `jax.Array`, `tf.Tensor` or `torch.Tensor`, a
symbolic `keras.KerasTensor`, or an array that Keras converts. They have no type in
common. Nor have the data that `fit` takes: arrays, a `tf.data.Dataset`, a
`keras.utils.PyDataset`, a `DataLoader` of PyTorch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np

Tensor: TypeAlias = Any
Data: TypeAlias = Any
DType: TypeAlias = str | keras.DTypePolicy | None
Texts: TypeAlias = Sequence[str] | np.ndarray

# Matplotlib is loaded when something is drawn.
if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any
