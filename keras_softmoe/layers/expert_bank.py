"""One dense layer per expert, with LoRA and quantization of each expert."""

import re
from typing import Any

import keras
from keras import ops

from keras_softmoe.checks import check_whole_numbers, received
from keras_softmoe.keras_adapter import layers

# Modes of `quantize`, and the reason why other modes of Keras are refused.
_MODES = ("int8", "float8")
_REFUSED = {
    mode: "Keras takes the longest axis of a kernel with three for the width of a "
    "token, so that it would calibrate experts together or mix their rows. "
    for mode in ("int4", "gptq", "awq")
}
# Names of the kernels of layers with LoRA, other than `kernel`.
_KERNELS = {keras.layers.Embedding: "embeddings"}


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
        share `B` among the experts. In int8 the factors stay floats.

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

        In int8 the sum is rounded to the bits of the kernels.
        """
        merge_lora(self)

    # === Quantization ===

    def check_quantization(self, mode: str | None, config: Any = None) -> None:
        """Raise the errors of `quantize` before anything is changed."""
        mode, config = _resolved(mode, config)
        if mode not in _MODES:
            raise ValueError(
                f"Expert banks are not quantized by {mode!r}. {_REFUSED.get(mode, '')}"
                f"Received: mode={mode!r} for {self.path!r}. Take 'int8' or 'float8', "
                "or leave the experts out: `quantize(..., filters=lambda layer: "
                "'experts' not in str(layer.path))`."
            )
        if mode == "float8" and self.lora_enabled:
            raise ValueError(_float8_with_lora(self))

    def quantize(self, mode: str | None = None, type_check: bool = True, config=None):
        """Quantize the kernels.

        - `"int8"`: as in Keras. Scales for each expert and output; int8 inputs, too.
        - `"float8"`: as in Keras, for training, with one scale for all of a bank.

        Args:
            mode: str, one of these, or `None` with a config.
            type_check: as in `keras.layers.EinsumDense`.
            config: `keras.quantizers.QuantizationConfig`, or `None`.

        Raises:
            ValueError: for another mode, or float8 with LoRA.
        """
        self.check_quantization(mode, config)
        mode, config = _resolved(mode, config)
        super().quantize(mode, type_check=False, config=config)

    def quantized_build(self, kernel_shape, mode, config=None):
        self.check_quantization(mode, config)
        super().quantized_build(kernel_shape, mode, config)

    # === Files ===

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
    return mode or getattr(config, "mode", None), config


def _float8_with_lora(bank):
    return (
        "Keras does not support LoRA in float8. Received: both for "
        f"{bank.path!r}. Fold the factors into the kernels first (`merge_lora`), or "
        "take 'int8'."
    )


# === LoRA ===


def merge_lora(layer):
    """Merge the LoRA factors of any layer of Keras into its kernel.

    The layer computes the same, but for rounding in int8, and is trained as before
    `enable_lora`.
    """
    merged, kernel_name = {}, _KERNELS.get(type(layer), "kernel")
    factors = [f"lora_{kernel_name}_{factor}" for factor in "ab"]
    if layer.quantization_mode:
        # The kernels as they would be saved
        layer.save_own_variables(merged)
    else:
        added = layers.lora_update(layer, *(getattr(layer, name) for name in factors))
    for name in factors:
        # This also removes it from the variables of the layer.
        delattr(layer, name)
    layer.lora_enabled = False
    layer.lora_rank = layer.lora_alpha = None
    if merged:
        layer.load_own_variables(merged)
        return
    kernel = getattr(layer, kernel_name)
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
