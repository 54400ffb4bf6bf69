"""Counts what a model really holds and multiplies.

For the products each backend is asked in its own way: JAX for the traced program,
TensorFlow for the graph, PyTorch for what runs.
"""

import json
import math

import keras
import pytest

from keras_softmoe.architecture.counting import count_products
from keras_softmoe.evaluation import cost


def count(model):
    """Parameters and bytes of the weights that are there."""
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}
    sizes = [(math.prod(weight.shape), weight.dtype) for weight in model.weights]
    return (
        sum(size for size, _ in sizes),
        sum(size * itemsize[dtype] for size, dtype in sizes),
    )


def counted(layer, shape):
    """Numbers in the weights of a layer, and multiply-adds that `cost` finds."""
    layer.build(shape)
    numbers = sum(math.prod(weight.shape) for weight in layer.weights)
    return numbers, count_products(layer, [layer], keras.KerasTensor(shape))


def multiply_adds(model, inputs):
    """Multiply-adds of one call of `model` on an array, or a dict of arrays."""
    count = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
    return count[keras.backend.backend()](model, inputs)


def _jax(model, inputs):
    import jax

    program = jax.make_jaxpr(lambda x: model(x, training=False))(inputs)
    return sum(_jax_equations(program.jaxpr))


def _jax_equations(jaxpr):
    for equation in jaxpr.eqns:
        outputs = math.prod(equation.outvars[0].aval.shape)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            yield outputs * math.prod(shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            spec = equation.params["dimension_numbers"].rhs_spec
            yield outputs * math.prod(kernel) // kernel[spec[0]]
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _jax_equations(inner)


def _torch(model, inputs):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    # Fused attention on the CPU is not counted; its products are the same.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(inputs, training=False)
    return counter.get_total_flops() // 2


def _tensorflow(model, inputs):
    import tensorflow as tf

    run = tf.function(lambda x: model(x, training=False), autograph=False)
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), inputs)
    graph = run.get_concrete_function(specs).graph
    for function in graph.as_graph_def().library.function:
        # Loops and branches, whose products would be counted once or not at all
        assert not any(_is_product(node.op) for node in function.node_def)
    operations = [o for o in graph.get_operations() if _is_product(o.type)]
    return sum(map(_tensorflow_operation, operations))


def _is_product(kind):
    return "MatMul" in kind or "Einsum" in kind or kind.startswith("Conv")


def _tensorflow_operation(operation):
    first, second = (tensor.shape for tensor in operation.inputs)
    outputs = math.prod(operation.outputs[0].shape)
    if operation.type == "Conv2D":
        return outputs * math.prod(second[:3])
    if operation.type == "Einsum":
        terms = operation.get_attr("equation").decode().split("->")[0].split(",")
        sizes = dict(zip(terms[0], first, strict=True))
        sizes |= dict(zip(terms[1], second, strict=True))
        return math.prod(sizes.values())
    flag = "transpose_a" if operation.type == "MatMul" else "adj_x"
    return outputs * first[-2 if operation.get_attr(flag) else -1]


def check_cost(model, inputs, num_images=1):
    """Return the cost of a model, after it was compared with the model's own numbers.

    Also the cost of its arguments, without the model.
    """
    found = cost(model)
    assert (found.parameters, found.weight_bytes) == count(model)
    expected = 2e-9 * multiply_adds(model, inputs) / num_images
    assert found.gflop_per_image == pytest.approx(expected, rel=1e-9)
    assert cost(json.loads(json.dumps(model.get_config()))) == found
    return found
