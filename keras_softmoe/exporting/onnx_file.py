"""ONNX files after the converter: names of open axes, and small integers as int8."""

import numpy as np

# Arrays of fewer values stay as they are.
_LEAST_VALUES = 1024


def tidy(filepath):
    """Rewrite an ONNX file in less space, with the axis of the batch called "batch".

    TensorFlow multiplies the int8 kernels of experts in float32. The converter makes
    float32 constants of them, and more constants of which only the shape is used.

    Args:
        filepath: str or path of the file.
    """
    import onnx

    model = onnx.load(filepath)
    graph = model.graph
    for value in (*graph.input, *graph.output):
        axes = value.type.tensor_type.shape.dim
        if axes and axes[0].dim_param:
            axes[0].dim_param = "batch"
    _fold_shapes(graph)
    _store_as_int8(graph)
    onnx.save(model, filepath)


def _fold_shapes(graph):
    """Replace shapes of constants by their values, and drop constants without use."""
    from onnx import numpy_helper

    shapes = {constant.name: constant.dims for constant in graph.initializer}
    for node in list(graph.node):
        if node.op_type == "Shape" and not node.attribute and node.input[0] in shapes:
            value = np.array(shapes[node.input[0]], "int64")
            graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
            graph.node.remove(node)
    used = {name for node in _nodes(graph) for name in node.input}
    used |= {output.name for output in graph.output}
    for constant in list(graph.initializer):
        if constant.name not in used:
            graph.initializer.remove(constant)


def _nodes(graph):
    """Yield the nodes of a graph and of the branches and loops in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else []
            for each in (*inner, *attribute.graphs):
                yield from _nodes(each)


def _store_as_int8(graph):
    """Store float32 constants that are int8 numbers as such, followed by a cast."""
    from onnx import TensorProto, helper, numpy_helper

    for constant in graph.initializer:
        if constant.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(constant)
        if values.size < _LEAST_VALUES or np.abs(values).max() > 127:
            continue
        whole = values.astype("int8")
        if np.array_equal(whole, values):
            name = constant.name
            constant.CopyFrom(numpy_helper.from_array(whole, f"{name}/int8"))
            cast = helper.make_node(
                "Cast", [f"{name}/int8"], [name], to=TensorProto.FLOAT
            )
            graph.node.insert(0, cast)
