"""The cost of any Keras model, from a symbolic call."""

import math
import re

import keras

from keras_softmoe.architecture import moe_layers_of
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.keras_adapter.products import counted_products
from keras_softmoe.keras_adapter.surgery import call_symbolically
from keras_softmoe.layer_cost import cost_of


def traced_products(model):
    """Return the multiply-adds that a model takes for one input, a float.

    Layers of this library count themselves, as in a model of ours. Elsewhere each
    product counts that goes through Keras.

    Args:
        model: built `keras.Model`.
    """
    # On first use, since `models` imports KerasHub.
    from keras_softmoe.models.with_experts.token_shapes import example_inputs

    batch = max([moe.group_images or 1 for moe in moe_layers_of(model)], default=1)
    ours = {
        id(layer): layer
        for layer in flatten_layers(model)
        if type(layer).__module__.startswith("keras_softmoe.")
        and hasattr(layer, "cost")
    }
    with counted_products() as products:

        def counting(layer):
            def around(call, inputs, *args, **kwargs):
                if not products.is_paused:
                    products.total += cost_of(
                        layer,
                        keras.tree.map_structure(lambda x: tuple(x.shape), inputs),
                    ).products
                with products.paused():
                    return call(inputs, *args, **kwargs)

            return around

        around = {key: counting(layer) for key, layer in ours.items()}
        inputs = example_inputs(model, batch)
        call_symbolically(model, inputs, around, products.restart)
    return products.total / batch


def weight_bytes(model):
    """Return the bytes of the weights of a model, an int."""
    return sum(math.prod(w.shape) * _itemsize(w.dtype) for w in model.weights)


def _itemsize(dtype):
    bits = re.search(r"\d+", keras.backend.standardize_dtype(dtype))
    return int(bits[0]) // 8 if bits else 1
