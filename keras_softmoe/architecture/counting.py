"""Counts of a model that has no values: weights by shape, products by a trace."""

import math
import random
import re
from typing import NamedTuple

import keras

from keras_softmoe.keras_adapter.layers import flatten_layers, without_values
from keras_softmoe.keras_adapter.surgery import call_symbolically, counted_products
from keras_softmoe.layers import MLP, Experts
from keras_softmoe.layers.attention import Attention
from keras_softmoe.layers.template import Templates
from keras_softmoe.layers.template_experts import TemplateExperts


class Weight(NamedTuple):
    """A weight: its path (`"block_1/moe/router/kernel"`), size and dtype."""

    path: str
    numbers: int
    dtype: str

    @property
    def bytes(self) -> int:
        """Int, its size in bytes."""
        return self.numbers * itemsize(self.dtype)


class Counts(NamedTuple):
    """Weights of a model, and multiply-adds in the matrix products of a batch."""

    weights: list
    products: int

    @property
    def parameters(self) -> int:
        """Int, numbers in all weights."""
        return sum(weight.numbers for weight in self.weights)


def count(settings, batch_size: int | None = None) -> Counts:
    """Count the weights and products of an encoder with its embeddings and pooling.

    `settings` is a `ViT`, `TextTower` or `LIMoE`; `batch_size` defaults to a group.
    """
    # One block of each kind: there may be a hundred.
    kinds = {}
    for index in range(settings.num_layers):
        kinds.setdefault(id(settings.routers.get(index)), []).append(index)
    blocks = list(kinds.values())
    routers = [settings.routers.get(first) for first, *_ in blocks]
    routed = [index for index, router in enumerate(routers) if router is not None]
    once = settings.replace(
        num_layers=len(blocks),
        moe_layers=routed,
        router=[routers[index] for index in routed] or None,
    )
    # Layers that are never used draw no seeds from those of the program.
    state = random.getstate()
    try:
        with without_values():
            layers = once.layers()
            parts = keras.tree.flatten([vars(layers), vars(layers.encoder)])
            parts = [part for part in parts if isinstance(part, keras.Layer)]
            times = {
                id(block): len(indices)
                for block, indices in zip(layers.encoder.blocks, blocks, strict=True)
            }
            inputs = once.inputs(batch_size or settings.group_size)
            products = count_products(layers, parts, inputs, times)
    finally:
        random.setstate(state)
    weights = []
    for weight in (weight for part in parts for weight in part.weights):
        block = re.match(r"block_(\d+)/", weight.path)
        numbers, dtype = math.prod(weight.shape), weight.dtype
        for index in blocks[int(block[1])] if block else [None]:
            path = re.sub(r"^block_\d+", f"block_{index}", weight.path)
            weights.append(Weight(path, numbers, dtype))
    return Counts(weights, products)


def count_products(call, layers, inputs, times=None) -> int:
    """Return the multiply-adds in the matrix products of a call on shapes.

    `inputs` are (structures of) `keras.KerasTensor`, `layers` those that `call` calls,
    `times` a dict from their ids to how often they count.
    """
    with without_values(), counted_products() as products:

        def instead(layer):
            def around(call, x, tokens=None, *args, **kwargs):
                with products.paused():
                    found = _own_products(layer, x, tokens)
                products.total += found
                # Each of these layers returns a tensor of the shape of its input.
                return x

            return around

        def repeated(count):
            def around(call, *args, **kwargs):
                before = products.total
                outputs = call(*args, **kwargs)
                products.total += (count - 1) * (products.total - before)
                return outputs

            return around

        around = {key: repeated(count) for key, count in (times or {}).items()}
        parts = [part for layer in layers for part in flatten_layers(layer)]
        kinds = Attention | MLP | Experts | TemplateExperts
        around |= {id(part): instead(part) for part in parts if isinstance(part, kinds)}
        call_symbolically(call, inputs, around, products.restart, parts)
        return products.total


def _own_products(layer, x, tokens):
    """Return the multiply-adds of a layer that uses functions of the backend."""
    if isinstance(layer, Attention):
        batch, num_queries, width = x.shape
        num_tokens = tokens.shape[1]
        # Queries and outputs, keys and values; logits and means
        dense = 2 * (num_queries + num_tokens) * width
        return batch * width * (dense + 2 * num_queries * num_tokens)
    if isinstance(layer, TemplateExperts):
        # All slots are counted as those of one expert.
        template, shape = Templates(layer.expert).build(x.shape[3:])
        rows = math.prod(x.shape) // math.prod(shape)
        slots = keras.KerasTensor((rows, *shape), x.dtype)
        return count_products(template, [template], slots)
    return math.prod(x.shape) * (2 + layer.gated) * layer.mlp_dim


def itemsize(dtype) -> int:
    """Return the bytes of a number."""
    bits = re.search(r"\d+", keras.backend.standardize_dtype(dtype))
    return int(bits[0]) // 8 if bits else 1
