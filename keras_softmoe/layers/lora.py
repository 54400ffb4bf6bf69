"""LoRA: the update of a kernel by two factors, and how it is merged."""

import keras
from keras import ops


def update(layer):
    """Update of a kernel by LoRA, `alpha / rank * A @ B`.

    Args:
        layer: layer of Keras with `lora_enabled`.
    """
    return layer.lora_alpha / layer.lora_rank * ops.matmul(*_factors(layer))


def merge_lora(layer):
    """Fold the factors of a layer into its kernel, which is then an ordinary one.

    It computes what it did before, is trained as before `enable_lora`, and may be given
    factors again. In int8 and in int4 the sum is rounded to the bits of the kernel.

    Args:
        layer: layer of Keras with `lora_enabled`: `Dense`, `EinsumDense`, `Embedding`,
            a convolution, or `ExpertBank`.
    """
    merged = {}
    if layer.quantization_mode:
        # What a file would hold.
        layer.save_own_variables(merged)
    else:
        added = update(layer)
    for name in _names(layer):
        # Removed from the variables of the layer, too.
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
    """An initializer of a bank `(E, D, H)` with the fans of one expert.

    Without the axes it would take the experts for a receptive field and start each of
    them too small by the root of their number.

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
