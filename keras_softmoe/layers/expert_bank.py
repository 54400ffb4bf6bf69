"""One dense layer per expert, with LoRA and quantization of each expert."""

import math
import re
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_whole_numbers, received
from keras_softmoe.keras_adapter import layers
from keras_softmoe.ops.kernels import reshape

# Modes of `quantize`, and the reason why other modes of Keras are refused.
_MODES = ("int8", "int4", "float8")
_REFUSED = {
    mode: "Keras takes the longest axis of a kernel with three for the width of a "
    "token, so that it would calibrate experts together or mix their rows. "
    for mode in ("gptq", "awq")
}
# Names of the kernels of layers with LoRA, other than `kernel`.
_KERNELS = {keras.layers.Embedding: "embeddings"}

# Extremes of the integers of four bits.
_LOWEST_INT4, _HIGHEST_INT4 = -8, 7


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ExpertBank(layers.QuantizedByExpert, keras.layers.EinsumDense):
    """A dense layer for each expert: `keras.layers.EinsumDense` on a stack of kernels.

    LoRA and quantization of Keras treat a kernel with three axes as heads of attention.
    Experts share nothing: each has its own factors of LoRA, and scales if quantized.

    Args:
        equation: str of the form `"end,edh->enh"`, for `n` slots of `e` experts each.
        **kwargs: as in `keras.layers.EinsumDense`.

    Maps `(E, N, D)` to `(E, N, H)`; `kernel` is `(E, D, H)`, `bias` `(E, 1, H)`.

    Raises:
        ValueError: if the equation has another form.
    """

    def build(self, input_shape):
        if not re.fullmatch(r"(\w)(\w)(\w),\1\3(\w)->\1\2\4", self.equation):
            raise ValueError(
                "An expert bank needs an equation of the form 'end,edh->enh'. "
                + received(equation=self.equation)
            )
        super().build(input_shape)

    @property
    def kernel(self):
        """The kernels, `(E, D, H)`, with the update of LoRA, dequantized from int4.

        In int8 they are the stored integers, as in Keras, without the update of LoRA.
        """
        if not self.built:
            raise AttributeError("An expert bank has a `kernel` once it is built.")
        kernel = self._kernel
        if self.quantization_mode == "int4":
            stored = kernel, self.kernel_scale, self.kernel_zero
            tensors = map(ops.convert_to_tensor, stored)
            units = self.original_kernel_shape[-1]
            kernel = _from_int4(*tensors, units, self._block_rows)
        if not self.lora_enabled or self.quantization_mode == "int8":
            return kernel
        # Not in the `compute_dtype`, which would round the kernel in a saved file.
        return ops.cast(kernel + _lora_update(self), kernel.dtype)

    # === LoRA ===

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: str = "he_uniform",
        b_initializer: str = "zeros",
    ):
        """Freeze the kernels and train two small factors for each instead.

        An expert computes with `kernel + lora_alpha / rank * A @ B`. Keras' own layers
        share `B` among the experts. In int8 and in int4 the factors stay floats.

        Args:
            rank: int, axis `r` of `A` `(E, D, r)` and `B` `(E, r, H)`, often 4 to 16.
            lora_alpha: float, `rank` if `None`.
            a_initializer: initializer of `A`, with the fans of one expert.
            b_initializer: initializer of `B`. Zeros change nothing before training.

        Raises:
            ValueError: if the rank is no positive int, or the bank is not built, has
                factors already or computes in float8.

        Source: Hu et al. 2021 (LoRA), section 4.1.
        """
        check_whole_numbers(1, rank=rank)
        if self.lora_enabled:
            raise ValueError(
                f"The bank {self.path!r} has LoRA factors already. Received: "
                f"rank={rank}. Fold those into the kernels first: `merge_lora`."
            )
        if self.quantization_mode == "float8":
            raise ValueError(_float8_with_lora(self))
        initializers = per_expert(a_initializer), per_expert(b_initializer)
        super().enable_lora(rank, lora_alpha, *initializers)

    def add_weight(self, shape=None, initializer=None, **kwargs):
        # Keras creates the factors. Each expert gets its own second factor (r, H).
        if kwargs.get("name") == "lora_kernel_b":
            shape = (self.lora_kernel_a.shape[0], *shape)
        return super().add_weight(shape, initializer, **kwargs)

    def merge_lora(self) -> None:
        """Merge the factors into the kernels, for the same outputs without LoRA.

        In int8 and in int4 the sum is rounded to the bits of the kernels.
        """
        merge_lora(self)

    # === Quantization ===

    def check_quantization(self, mode: str | None, config: Any = None) -> None:
        """Raise the errors of `quantize` before anything is changed."""
        mode, config = _resolved(mode, config)
        if mode not in _MODES:
            raise ValueError(
                f"Expert banks are not quantized by {mode!r}. {_REFUSED.get(mode, '')}"
                f"Received: mode={mode!r} for {self.path!r}. Take 'int8' or 'int4', or "
                "leave the experts out: `quantize(..., filters=lambda layer: 'experts' "
                "not in str(layer.path))`."
            )
        if mode == "float8" and self.lora_enabled:
            raise ValueError(_float8_with_lora(self))
        quantizers = [
            name
            for name in ("weight_quantizer", "activation_quantizer")
            if mode == "int4" and getattr(config, name, None) is not None
        ]
        if quantizers:
            raise ValueError(
                "Expert banks in int4 use their own rounding, and inputs in "
                f"floats. Received: a config with {' and '.join(quantizers)} for "
                f"{self.path!r}. Leave that out, or take 'int8'."
            )

    def quantize(self, mode: str | None = None, type_check: bool = True, config=None):
        """Quantize the kernels.

        - `"int8"`: as in Keras. Scales for each expert and output; int8 inputs, too.
        - `"int4"`: the kernels only, dequantized where they are used. A scale and a
          zero point for each expert, output and block of inputs (128, see
          `keras.quantizers.Int4QuantizationConfig`), which experts share in Keras.
        - `"float8"`: as in Keras, for training, with one scale for all of a bank.

        Args:
            mode: str, one of these, or `None` with a config.
            type_check: as in `keras.layers.EinsumDense`.
            config: `keras.quantizers.QuantizationConfig`, or `None`.

        Raises:
            ValueError: for another mode, float8 with LoRA, or own quantizers in int4.
        """
        self.check_quantization(mode, config)
        mode, config = _resolved(mode, config)
        if mode != "int4":
            super().quantize(mode, type_check=False, config=config)
            return
        with layers.changed_by_quantization(self, mode):
            # Values are computed before the weights of floats are deleted.
            kernel = self._kernel
            values = _to_int4(kernel, _rows(config.block_size, kernel.shape[1]))
            self.quantization_config = config
            del self._kernel
            self.quantized_build(kernel.shape, mode, config)
            variables = self._kernel, self.kernel_scale, self.kernel_zero
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        if self.dtype_policy.quantization_mode is None:
            # From which Keras builds the layer again when it reads a file
            name = f"int4/{config.block_size or -1}_from_{self.dtype_policy.name}"
            self.dtype_policy = name

    def quantized_build(self, kernel_shape, mode, config=None):
        self.check_quantization(mode, config)
        if mode != "int4":
            super().quantized_build(kernel_shape, mode, config)
            return
        policy = self.dtype_policy
        if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
            policy = policy[self.path]
        # In a file the dtype policy contains the block size.
        block_size = getattr(config or policy, "block_size", None)
        num_experts, width, units = self.original_kernel_shape = tuple(kernel_shape)
        self._block_rows = _rows(block_size, width)
        blocks = (num_experts, math.ceil(width / self._block_rows), units)
        self._kernel = self.add_weight(
            name="kernel",
            # Two values in a byte
            shape=(num_experts, width, math.ceil(units / 2)),
            initializer="zeros",
            dtype="int8",
            trainable=False,
        )
        self.kernel_scale = self.add_weight(
            name="kernel_scale", shape=blocks, initializer="ones", trainable=False
        )
        self.kernel_zero = self.add_weight(
            name="kernel_zero",
            shape=blocks,
            initializer="zeros",
            dtype="int8",
            trainable=False,
        )
        # The block of each row, which Keras keeps in a variable
        self.g_idx = np.arange(width) // self._block_rows
        self._is_quantized = True

    def quantized_call(self, *args, **kwargs):
        if self.quantization_mode == "int4":
            return self.call(*args, **kwargs)
        return super().quantized_call(*args, **kwargs)

    # === Files ===

    @property
    def variable_serialization_spec(self):
        spec = super().variable_serialization_spec
        modes = (None, *_MODES)
        return {m: [name for name in spec[m] if name != "g_idx"] for m in modes}

    def save_own_variables(self, store):
        if not (self.lora_enabled and self.quantization_mode == "int4"):
            super().save_own_variables(store)
            return
        # LoRA is merged in a file: the sum is rounded anew.
        kernel, scale, zero = _to_int4(self.kernel, self._block_rows)
        # In the order of Keras' `variable_serialization_spec`
        values = [kernel, self.bias, scale, zero]
        values = [value for value in values if value is not None]
        for index, value in enumerate(values):
            store[str(index)] = value

    def load_own_variables(self, store):
        first = ops.copy(self.lora_kernel_a) if self.lora_enabled else None
        super().load_own_variables(store)
        if first is not None:
            # Keras sets both factors to zero, and neither could be trained again.
            self.lora_kernel_a.assign(first)


def _resolved(mode, config):
    """Return mode and config of `quantize`, where the mode may be in the config."""
    if isinstance(config, str):
        mode, config = config, None
    if config is None and mode == "int4":
        config = keras.quantizers.Int4QuantizationConfig()
    return mode or getattr(config, "mode", None), config


def _rows(block_size, width):
    """Return the number of inputs of an expert that share a scale, an int."""
    return width if block_size in (None, -1) else min(block_size, width)


def _float8_with_lora(bank):
    return (
        "Keras does not support LoRA in float8. Received: both for "
        f"{bank.path!r}. Fold the factors into the kernels first (`merge_lora`), or "
        "take 'int8' or 'int4'."
    )


# === LoRA ===


def _lora_update(layer):
    """Return the update of a layer's kernel by LoRA, `alpha / rank * A @ B`."""
    first, second = (getattr(layer, name) for name in _lora_names(layer))
    return layer.lora_alpha / layer.lora_rank * ops.matmul(first, second)


def merge_lora(layer):
    """Merge the LoRA factors of any layer of Keras into its kernel.

    The layer computes the same, but for rounding in int8 and int4, and is trained as
    before `enable_lora`.
    """
    merged = {}
    if layer.quantization_mode:
        # The kernels as they would be saved
        layer.save_own_variables(merged)
    else:
        added = _lora_update(layer)
    for name in _lora_names(layer):
        # This also removes it from the variables of the layer.
        delattr(layer, name)
    layer.lora_enabled = False
    layer.lora_rank = layer.lora_alpha = None
    if merged:
        layer.load_own_variables(merged)
        return
    kernel = getattr(layer, _KERNELS.get(type(layer), "kernel"))
    kernel.assign_add(ops.cast(added, kernel.dtype))
    kernel.trainable = layer.trainable


def per_expert(initializer):
    """Return an initializer of a bank `(E, D, H)` with the fans of one expert."""
    # Without the axes it would treat the experts as a receptive field, and the weights
    # of each would be too small by the square root of the number of experts.
    initializer = keras.initializers.get(initializer)
    if not isinstance(initializer, keras.initializers.VarianceScaling):
        return initializer
    return keras.initializers.VarianceScaling(
        initializer.scale,
        initializer.mode,
        initializer.distribution,
        input_axes=[1],
        output_axes=[2],
        seed=initializer.seed,
    )


def _lora_names(layer):
    kernel = _KERNELS.get(type(layer), "kernel")
    return f"lora_{kernel}_a", f"lora_{kernel}_b"


# === Kernels in four bits ===


def _to_int4(kernel, block_size):
    """Round kernels to 16 values, evenly spaced between the extremes of a block.

    Args:
        kernel: `(E, D, H)` float tensor.
        block_size: int, number of the `D` inputs that share a scale.

    Returns:
        Tuple of `(E, D, ceil(H / 2))` int8, two values in each, and scale (float) and
        zero (int8), `(E, ceil(D / block_size), H)`: `v` is `(v - zero) * scale`.
    """
    num_experts, width, units = kernel.shape
    blocks = math.ceil(width / block_size)
    kernel = ops.cast(kernel, "float32")
    # Padding with zeros widens no range, as each contains zero; zeros remain zero.
    x = ops.pad(kernel, ((0, 0), (0, blocks * block_size - width), (0, 0)))
    x = reshape(x, (num_experts, blocks, block_size, units))
    # The range of each block and output, (E, blocks, 1, H)
    low = ops.minimum(ops.min(x, axis=2, keepdims=True), 0.0)
    high = ops.maximum(ops.max(x, axis=2, keepdims=True), 0.0)
    # 15 steps in the range. A block of zeros has a scale over zero, to divide by.
    scale = ops.maximum(high - low, 1e-30) / (_HIGHEST_INT4 - _LOWEST_INT4)
    zero = _LOWEST_INT4 - ops.round(low / scale)
    values = ops.clip(ops.round(x / scale) + zero, _LOWEST_INT4, _HIGHEST_INT4)
    values = reshape(values, (num_experts, -1, units))[:, :width]
    packed, _, _ = keras.quantizers.pack_int4(ops.cast(values, "int8"), axis=-1)
    return packed, ops.squeeze(scale, 2), ops.cast(ops.squeeze(zero, 2), "int8")


def _from_int4(packed, scale, zero, units, block_size):
    """Return the `(E, D, H)` kernels from the results of `_to_int4`, `units` is `H`."""
    # Two values in a byte: (E, D, ceil(H / 2)) -> (E, D, H)
    values = keras.quantizers.unpack_int4(packed, units, axis=-1)
    if scale.shape[1] > 1:
        # One scale for each row of a block; the last block may be shorter.
        width = packed.shape[1]
        parts = (ops.repeat(x, block_size, axis=1) for x in (scale, zero))
        scale, zero = (x[:, :width] for x in parts)
    return ops.cast(values - zero, scale.dtype) * scale
