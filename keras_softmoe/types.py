"""Names of types that signatures share.

A tensor is one of the backend in use, `jax.Array`, `tf.Tensor` or `torch.Tensor`, a
symbolic `keras.KerasTensor`, or an array that Keras converts: no type is common to them.
"""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any
