"""Numbers beside tensors: ends of the range of a dtype, conditions, and noise.

Keras on PyTorch makes a tensor of each number that is given beside a tensor, which is a
copy to the device, and of `floatx`: -1e30 is -inf if that is float16. The functions
here give PyTorch the number itself, and other backends a tensor of the right dtype.
"""

import weakref

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_softmoe.types import Tensor


def lowest(x):
    """Return half of the lowest number of a tensor's dtype: a logit that never wins.

    Infinity would lead to NaN if all logits are infinite, and in gradients. An ordinary
    number can be subtracted from this one.
    """
    return least(x) / 2


def least(x):
    """Return the lowest number of a tensor's dtype."""
    return float(_finfo(x.dtype).min)


def tiny(x):
    """Return a number that is small, but with finite logarithm and inverse in a dtype.

    It is at least 1e-30: the inverse may be multiplied by a gradient.
    """
    return max(1e-30, smallest(x.dtype))


def smallest(dtype):
    """Return the smallest positive normal number of a dtype."""
    return float(_finfo(dtype).smallest_normal)


def _finfo(dtype):
    if keras.backend.backend() == "torch":
        # `torch.compile` cannot trace the other.
        if not isinstance(dtype, torch.dtype):
            dtype = getattr(torch, keras.backend.standardize_dtype(dtype))
        return torch.finfo(dtype)
    return ml_dtypes.finfo(keras.backend.standardize_dtype(dtype))


def where(condition, x, number):
    """Return `keras.ops.where(condition, x, number)` in the dtype of `x`."""
    if keras.backend.backend() == "torch":
        if number == 0 and not x.is_floating_point():
            return x * condition
        return x.masked_fill(~condition, number)
    return ops.where(condition, x, ops.convert_to_tensor(number, x.dtype))


def at_least(x, number):
    """Return `keras.ops.maximum(x, number)` in the dtype of `x`."""
    if keras.backend.backend() == "torch":
        return x.clamp(min=number)
    return ops.maximum(x, ops.convert_to_tensor(number, x.dtype))


def clip(x, largest):
    """Return `keras.ops.clip(x, -largest, largest)`."""
    if keras.backend.backend() == "torch":
        return x.clamp(-largest, largest)
    return ops.clip(x, -largest, largest)


# The dtype of indices. PyTorch converts others in every operation that uses them.
INDEX = "int64" if keras.backend.backend() == "torch" else "int32"


def positions(count, like):
    """Return 0, 1, ... `count - 1` of the dtype `INDEX`, on the device of a tensor."""
    if keras.backend.backend() == "torch":
        return torch.arange(count, device=like.device)
    return ops.arange(count, dtype=INDEX)


def count_true(mask, axis, keepdims=False, dtype=INDEX):
    """Return the numbers of `True` along an axis or axes."""
    if keras.backend.backend() == "torch":
        return mask.sum(axis, keepdim=keepdims, dtype=getattr(torch, dtype))
    return ops.sum(ops.cast(mask, dtype), axis=axis, keepdims=keepdims)


def variance_and_mean(x):
    """Return the variance and the mean over the last axis, which is kept."""
    if keras.backend.backend() == "torch" and x.shape[0]:
        return torch.var_mean(x, -1, correction=0, keepdim=True)
    mean = ops.mean(x, axis=-1, keepdims=True)
    # Not `ops.var`, with which PyTorch warns of an empty batch.
    return ops.mean(ops.square(x - mean), axis=-1, keepdims=True), mean


class Constant:
    """An array of fixed values, which PyTorch copies to each device once."""

    def __init__(self, array):
        self.array = np.asarray(array)
        self._copies = {}

    def on(self, like):
        """Return the tensor on the device of another one."""
        if keras.backend.backend() != "torch":
            return ops.convert_to_tensor(self.array)
        copy = self._copies.get(like.device)
        if copy is None:
            copy = torch.from_numpy(self.array).to(like.device)
            # Tensors of compilers and of tests live no longer than these.
            if type(like) is torch.Tensor and not torch.compiler.is_compiling():
                self._copies[like.device] = copy
        return copy


# === Noise ===


def normal_like(
    x: Tensor, seed: keras.random.SeedGenerator, stddev: float = 1.0
) -> Tensor:
    """Return normal noise of the shape and dtype of a tensor."""
    if keras.backend.backend() == "torch":
        if torch.compiler.is_compiling():
            return stddev * _draw(seed.state.value, x)
        if generator := _generator(seed, x):
            known = {"generator": generator, "dtype": x.dtype, "device": x.device}
            return torch.normal(0.0, stddev, x.shape, **known)
    dtype = keras.backend.standardize_dtype(x.dtype)
    return keras.random.normal(ops.shape(x), stddev=stddev, dtype=dtype, seed=seed)


def uniform(shape, like, seed):
    """Return uniform float32 numbers in `[0, 1)`, on the device of a tensor."""
    if keras.backend.backend() == "torch" and not torch.compiler.is_compiling():
        if generator := _generator(seed, like):
            known = {"generator": generator, "dtype": torch.float32}
            return torch.rand(shape, device=like.device, **known)
    return keras.random.uniform(shape, 0, 1, "float32", seed)


if keras.backend.backend() == "torch":
    import torch

    # What was last read of the states of generators: the tensor, its version, the seed
    # and the number of draws
    _STATES = weakref.WeakKeyDictionary()

    def _generator(seed, like):
        """Return the generator that Keras would make for the next draw, or `None`.

        Keras reads the state in every draw, and waits for the device. Here it is read
        only if something else has changed it since the last draw.
        """
        if not isinstance(seed, keras.random.SeedGenerator):
            return None
        state = seed.state.value
        if like.is_meta or hasattr(state, "placements") or state.is_inference():
            return None
        known = _STATES.get(seed)
        if known is None or known[0]() is not state or known[1] != state._version:
            known = (None, None, *state.tolist())
        first, draws = known[2:]
        generator = torch.Generator(device=like.device)
        generator.manual_seed((first + draws) & 0xFFFFFFFF)
        # As `SeedGenerator.next`, which makes the tensor (0, 1) of numbers of Python
        one_draw = torch.arange(2, dtype=state.dtype, device=state.device)
        seed.state.assign(state + one_draw)
        # In a stateless call the next state is another tensor.
        state = seed.state.value
        _STATES[seed] = weakref.ref(state), state._version, first, draws + 1
        return generator

    # `torch.compile` cannot trace a generator, and Keras leaves the graph to make one.
    # With a graph for each side of every draw, the functions of Keras that each layer
    # calls would be compiled for a few layers only, up to Dynamo's limit.
    @torch.library.custom_op("keras_softmoe::normal_like", mutates_args=("state",))
    def _draw(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        # The seed and the next state are those of `keras.random.normal`.
        seed = int(state.sum()) & 0xFFFFFFFF
        state[1] += 1
        dtype = keras.backend.standardize_dtype(x.dtype)
        return keras.random.normal(tuple(x.shape), dtype=dtype, seed=seed)

    @_draw.register_fake
    def _(state, x):
        return torch.empty_like(x)
