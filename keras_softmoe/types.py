"""Names of types that signatures share.

A tensor is one of the backend in use, a symbolic `keras.KerasTensor`, or an array that
Keras converts. These have no type in common, nor have the data that `fit` takes.
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
