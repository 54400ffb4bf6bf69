"""Write a model with the backend in use."""

import contextlib
import functools
import logging

import keras
import numpy as np
from keras import ops

from keras_softmoe.architecture import moe_layers_of
from keras_softmoe.files import atomic_directory, atomic_file
from keras_softmoe.keras_adapter import exports


def write(model, filepath, format, input_signature, preprocessing, options):
    """Write a model with the backend in use, which must be the format's.

    Arguments are as in `export_model`; `options` are those of `keras.Model.export`.
    """
    if preprocessing:
        (spec,) = input_signature
        model, pixels = FromPixels(model, spec.shape), {"dtype": spec.dtype}
        model(keras.KerasTensor(spec.shape, **pixels, name="pixels"))  # builds it
        input_signature = [keras.InputSpec(shape=spec.shape, **pixels, name="pixels")]
    replaced = atomic_file
    if format == "tf_saved_model":
        replaced = functools.partial(atomic_directory, marks=["saved_model.pb"])
    batch = keras.tree.flatten(input_signature)[0].shape[0]
    with replaced(filepath) as aside, _quiet(), _fixed_shapes(model, batch):
        if format == "torch":
            _write_torch(model, aside, input_signature, options)
            return
        # Not `model.export`, which is `export_model` again.
        keras.Model.export(
            model,
            str(aside),
            format=format,
            verbose=False,
            input_signature=input_signature,
            **options,
        )
        if format == "onnx":
            _tidy_onnx(aside)


def image_converter(model):
    """Return the image converter of a model, whose only input must be images."""
    converter = getattr(getattr(model, "preprocessor", None), "image_converter", None)
    if converter is None or not isinstance(model.input, keras.KerasTensor):
        raise ValueError(
            "`preprocessing=True` needs a model with images as its only input and a "
            "preprocessor with an image converter. Received: "
            f"{model.name!r}, a `{type(model).__name__}`."
        )
    return converter


class FromPixels(keras.Model):
    """Model with its image converter, as plain operations on tensors."""

    def __init__(self, model, pixels_shape):
        super().__init__(name=model.name)
        self.model = model
        self.converter = image_converter(model)
        self.resizes = tuple(pixels_shape[1:3]) != tuple(model.input.shape[1:3])
        if self.resizes and self.converter.image_size is None:
            raise ValueError(
                "The image converter of this model does not resize. Received: pixels "
                f"of shape {pixels_shape}, images of shape {model.input.shape}."
            )

    def call(self, pixels):
        x = self.converter.resizing(pixels) if self.resizes else pixels
        x = ops.cast(x, "float32")
        if self.converter.scale is not None:
            x = x * ops.convert_to_tensor(self.converter.scale, "float32")
        if self.converter.offset is not None:
            x = x + ops.convert_to_tensor(self.converter.offset, "float32")
        return self.model(x, training=False)


def _write_torch(model, filepath, input_signature, options):
    """Write a `.pt2` file. Keras' exporter traces too few groups."""
    import torch

    groups = [layer.group_images for layer in moe_layers_of(model)]
    traced_batch = 2 * max(filter(None, groups), default=1) + 1
    batch = torch.export.Dim("batch", min=1)

    def example(spec):
        shape = [traced_batch, *spec.shape[1:]] if spec.shape[0] is None else spec.shape
        dtype = getattr(torch, spec.dtype)
        return torch.zeros([64 if n is None else n for n in shape], dtype=dtype)

    def open_axes(spec):
        axes = [axis for axis, size in enumerate(spec.shape) if size is None]
        return {a: torch.export.Dim.AUTO if a else batch for a in axes}

    examples = tuple(keras.tree.map_structure(example, input_signature))
    shapes = tuple(keras.tree.map_structure(open_axes, input_signature))

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return model(*inputs, training=False)

    arguments = {
        # `*inputs` is one argument.
        "dynamic_shapes": (shapes,),
        "strict": False,
        "prefer_deferred_runtime_asserts_over_guards": True,
        **options,
    }
    with exports.sizes_may_be_one():
        # The weights are constants of the function. A module's would be written twice.
        exported = torch.export.export(Module(), examples, **arguments)
    exports.drop_assertions_of_more_than_one(exported.graph_module.graph)
    torch.export.save(exported, filepath)


@contextlib.contextmanager
def _fixed_shapes(model, batch):
    """Inside this context, groups and slots of experts have a fixed number.

    `group_images=None` becomes the batch size, and without a capacity experts have a
    slot for each token.
    """
    layers = moe_layers_of(model)
    whole = [layer for layer in layers if layer.group_images is None]
    dropless = [layer.router for layer in layers if layer.router.num_rows(1)]
    for layer in whole:
        layer.group_images = batch
    for router in dropless:
        router.pads_rows = True
    try:
        yield
    finally:
        for layer in whole:
            layer.group_images = None
        for router in dropless:
            router.pads_rows = False


@contextlib.contextmanager
def _quiet():
    """Silence the progress logs of the ONNX converter inside this context."""
    logger = logging.getLogger("tf2onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _tidy_onnx(filepath):
    """Rewrite an ONNX file in less space, with the axis of the batch called "batch"."""
    import onnx

    model = onnx.load(filepath)
    for value in (*model.graph.input, *model.graph.output):
        axes = value.type.tensor_type.shape.dim
        if axes and axes[0].dim_param:
            axes[0].dim_param = "batch"
    _fold_shapes(model.graph)
    _store_as_int8(model.graph)
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
        # Small arrays stay as they are.
        if values.size < 1024 or np.abs(values).max() > 127:
            continue
        whole = values.astype("int8")
        if np.array_equal(whole, values):
            name = constant.name
            constant.CopyFrom(numpy_helper.from_array(whole, f"{name}/int8"))
            cast = helper.make_node(
                "Cast", [f"{name}/int8"], [name], to=TensorProto.FLOAT
            )
            graph.node.insert(0, cast)
