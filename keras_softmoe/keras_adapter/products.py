"""Counting the matrix products of any model."""

import contextlib
import math

from keras.src import backend as keras_backend


@contextlib.contextmanager
def counted_products():
    """Count the multiply-adds of Keras' matrix products in this context.

    They are those of `keras.ops.matmul`, `dot`, `tensordot`, `einsum` and
    `dot_product_attention` and of convolutions, in any layer, also in a symbolic call.
    Would be replaced by: a public count of operations in Keras.
    """
    products = Products()
    numpy, nn = keras_backend.numpy, keras_backend.nn
    counters = {
        (numpy, "matmul"): _of_matmul,
        (numpy, "dot"): _of_matmul,
        (numpy, "tensordot"): _of_tensordot,
        (numpy, "einsum"): _of_einsum,
        (nn, "conv"): _of_conv,
        (nn, "depthwise_conv"): _of_depthwise_conv,
        (nn, "separable_conv"): _of_separable_conv,
        (nn, "conv_transpose"): _of_conv_transpose,
        (nn, "dot_product_attention"): _of_attention,
    }
    with contextlib.ExitStack() as stack:
        for (module, name), counter in counters.items():
            function = getattr(module, name)
            stack.callback(setattr, module, name, function)
            setattr(module, name, products.counting(function, counter))
        yield products


class Products:
    """A count that can be paused.

    Would be replaced by: see `counted_products`.
    """

    def __init__(self):
        self.total, self._is_paused = 0, False

    @contextlib.contextmanager
    def paused(self):
        """Count nothing in this context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def restart(self):
        """Count from zero."""
        self.total = 0

    def counting(self, function, counter):
        """Return a function that also counts, with `counter(outputs, *arguments)`."""

        def counted(*args, **kwargs):
            if self._is_paused:
                return function(*args, **kwargs)
            # One may call another.
            with self.paused():
                outputs = function(*args, **kwargs)
            self.total += counter(outputs, *args, **kwargs)
            return outputs

        return counted


def _of_matmul(outputs, x1, x2, *args, **kwargs):
    return math.prod(outputs.shape) * (x1.shape[-1] if len(x1.shape) else 1)


def _of_tensordot(outputs, x1, x2, axes=2):
    # Sizes of both are those of the output times the square of the summed ones.
    both = math.prod(x1.shape) * math.prod(x2.shape)
    summed = math.isqrt(both // max(math.prod(outputs.shape), 1))
    return math.prod(outputs.shape) * summed


def _of_einsum(outputs, subscripts, *operands, **kwargs):
    if len(operands) < 2:
        return 0
    sizes, most = {}, 1
    for term, x in zip(subscripts.split("->")[0].split(","), operands, strict=True):
        letters = term.replace(" ", "")
        shape = tuple(x.shape)
        if "..." in letters:
            before, after = map(len, letters.split("..."))
            end = len(shape) - after
            most = max(most, math.prod(shape[before:end]))
            shape, letters = shape[:before] + shape[end:], letters.replace("...", "")
        sizes |= dict(zip(letters, shape, strict=True))
    return most * math.prod(sizes.values())


def _of_conv(outputs, inputs, kernel, *args, **kwargs):
    return math.prod(outputs.shape) * math.prod(kernel.shape[:-1])


def _of_depthwise_conv(outputs, inputs, kernel, *args, **kwargs):
    return math.prod(outputs.shape) * math.prod(kernel.shape[:-2])


def _of_separable_conv(outputs, inputs, depthwise_kernel, pointwise_kernel, *a, **k):
    *size, channels, multiplier = depthwise_kernel.shape
    units = pointwise_kernel.shape[-1]
    places = math.prod(outputs.shape) // units
    return places * channels * multiplier * (math.prod(size) + units)


def _of_conv_transpose(outputs, inputs, kernel, *args, **kwargs):
    return math.prod(inputs.shape) * math.prod(kernel.shape[:-1])


def _of_attention(outputs, query, key, value, *args, **kwargs):
    batch, queries, heads, width = query.shape
    keys = key.shape[1]
    return batch * queries * keys * heads * (width + value.shape[-1])
