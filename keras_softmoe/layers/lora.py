"""LoRA: the update of a kernel by its two factors, and merging it into the kernel."""

import keras
from keras import ops


def update(layer):
    """Return the update of a layer's kernel by LoRA, `alpha / rank * A @ B`.

    Args:
        layer: layer of Keras with `lora_enabled`.
    """
    return layer.lora_alpha / layer.lora_rank * ops.matmul(*_factors(layer))


def merge_lora(layer):
    """Merge the LoRA factors of a layer into its kernel.

    The layer computes the same, is trained as before `enable_lora`, and `enable_lora`
    may be called again. In int8 and in int4 the sum is rounded to the bits of the
    kernel.

    Args:
        layer: layer of Keras with `lora_enabled`: `Dense`, `EinsumDense`, `Embedding`,
            a convolution, or `ExpertBank`.
    """
    merged = {}
    if layer.quantization_mode:
        # The kernels as they would be saved
        layer.save_own_variables(merged)
    else:
        added = update(layer)
    for name in _names(layer):
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
    """Return an initializer of a bank `(E, D, H)` with the fans of one expert.

    Without the axes it would treat the experts as a receptive field, and the weights of
    each would be too small by the square root of the number of experts.

    Args:
        initializer: as `keras.initializers.get` takes it.
    """
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


_KERNELS = {keras.layers.Embedding: "embeddings"}


def _names(layer):
    kernel = _KERNELS.get(type(layer), "kernel")
    return f"lora_{kernel}_a", f"lora_{kernel}_b"


def _factors(layer):
    return [getattr(layer, name) for name in _names(layer)]
