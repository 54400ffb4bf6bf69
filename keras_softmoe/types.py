"""Names of types that signatures share.

A tensor is one of the backend in use, `jax.Array`, `tf.Tensor` or `torch.Tensor`, a
symbolic `keras.KerasTensor`, or an array that Keras converts. They have no type in
common.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Tensor: TypeAlias = Any
Texts: TypeAlias = Sequence[str] | np.ndarray
