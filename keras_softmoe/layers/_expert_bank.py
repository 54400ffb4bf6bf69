"""One dense layer per expert, with LoRA and quantization."""

import math
import re
from typing import Any

import keras
from keras import ops

from keras_softmoe.layers._int4 import from_int4, to_int4
from keras_softmoe.layers.lora import merge_lora, per_expert, update

# Modes of `quantize`, and the reason why other modes of Keras are refused.
_MODES = ("int8", "int4", "float8")
_REFUSED = {
    mode: "Keras takes the longest axis of a kernel with three for the width of a "
    "token, so that it would calibrate experts together or mix their rows. "
    for mode in ("gptq", "awq")
}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ExpertBank(keras.layers.EinsumDense):
    """A dense layer for each expert: `keras.layers.EinsumDense` on a stack of kernels.

    LoRA and quantization of Keras treat a kernel with three axes as heads of attention.
    Here the experts of a bank share nothing: each has its own factors of LoRA, and its
    own scales after `quantize`.

    Args:
        equation: str of the form `"end,edh->enh"`, for `n` slots of each of `e`
            experts.
        **kwargs: as in `keras.layers.EinsumDense`.

    Maps `(E, N, D)` to `(E, N, H)`; `kernel` is `(E, D, H)`, `bias` `(E, 1, H)`.

    Raises:
        ValueError: if the equation has another form.

    Examples:
        >>> bank = ksm.layers.ExpertBank("end,edh->enh", (None, 64), bias_axes="h")
        >>> bank(np.zeros((4, 10, 32))).shape
        (4, 10, 64)
        >>> tuple(bank.kernel.shape)
        (4, 32, 64)
    """

    def build(self, input_shape):
        if not re.fullmatch(r"(\w)(\w)(\w),\1\3(\w)->\1\2\4", self.equation):
            raise ValueError(
                "An expert bank has a kernel for each expert: an equation of the form "
                f"'end,edh->enh'. Received: equation={self.equation!r}. For others "
                "take `keras.layers.EinsumDense`."
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
            kernel = self._from_int4()
        if not self.lora_enabled or self.quantization_mode == "int8":
            return kernel
        # Not in the `compute_dtype`, which would round the kernel in a saved file.
        return ops.cast(kernel + update(self), kernel.dtype)

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
            rank: int, the inner axis `r` of `A` `(E, D, r)` and `B` `(E, r, H)`.
            lora_alpha: float, `rank` if `None`.
            a_initializer: initializer of `A`, with the fans of one expert.
            b_initializer: initializer of `B`. Zeros change nothing before training.

        Raises:
            ValueError: if the rank is not a positive int, or the bank is not built yet,
                has factors already or computes in float8.

        Source: Hu et al. 2021 (LoRA), section 4.1.
        """
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(
                "The rank of LoRA is an int of at least one; 4 to 16 are usual. "
                f"Received: rank={rank!r}."
            )
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
        if mode not in _MODES:
            raise ValueError(
                f"Expert banks are not quantized by {mode!r}. {_REFUSED.get(mode, '')}"
                f"Received: mode={mode!r} for {self.path!r}. Take 'int8' or 'int4', or "
                "leave the experts out: `quantize(..., filters=lambda layer: not "
                "isinstance(layer, ksm.layers.ExpertBank))`."
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

        - `"int8"`: as in Keras. A scale for each expert and output, and inputs in int8
          too, with a scale for each slot.
        - `"int4"`: the kernels only, dequantized where they are used. A scale and a
          zero point for each expert, output and block of inputs (128, see
          `keras.quantizers.Int4QuantizationConfig`). In Keras weights of several
          experts would share them.
        - `"float8"`: as in Keras, for training: kernels, slots and their gradients are
          rounded to float8, with one scale for all experts of a bank.

        Args:
            mode: str, one of these, or `None` with a config.
            type_check: as in `keras.layers.EinsumDense`.
            config: `keras.quantizers.QuantizationConfig`, or `None`.

        Raises:
            ValueError: for another mode, for float8 together with LoRA, and for custom
                quantizers in int4.
        """
        self.check_quantization(mode, config)
        if mode != "int4":
            super().quantize(mode, type_check=False, config=config)
            return
        kernel = self._kernel
        values = to_int4(kernel, _rows(config.block_size, kernel.shape[1]))
        self.quantization_config = config
        del self._kernel
        self.quantized_build(kernel.shape, mode, config)
        variables = self._kernel, self.kernel_scale, self.kernel_zero
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        if self.dtype_policy.quantization_mode is None:
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
        self._is_quantized = True

    def quantized_call(self, *args, **kwargs):
        if self.quantization_mode == "int4":
            return self.call(*args, **kwargs)
        return super().quantized_call(*args, **kwargs)

    def _from_int4(self):
        stored = self._kernel, self.kernel_scale, self.kernel_zero
        units = self.original_kernel_shape[-1]
        tensors = map(ops.convert_to_tensor, stored)
        return from_int4(*tensors, units, self._block_rows)

    # === Files ===

    def save_own_variables(self, store):
        if not (self.lora_enabled and self.quantization_mode == "int4"):
            super().save_own_variables(store)
            return
        kernel, scale, zero = to_int4(self.kernel, self._block_rows)
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


def _rows(block_size, width):
    """Return the number of inputs of an expert that share a scale, an int."""
    return width if block_size in (None, -1) else min(block_size, width)


def _float8_with_lora(bank):
    return (
        "Keras does not support LoRA in float8. Received: both for "
        f"{bank.path!r}. Fold the factors into the kernels first (`merge_lora`), or "
        "take 'int8' or 'int4'."
    )
