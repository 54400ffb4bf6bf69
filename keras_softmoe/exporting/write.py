"""Writing a model with the backend in use."""

import contextlib
import functools
import logging

import keras
from keras import ops

from keras_softmoe.architecture import moe_layers_of
from keras_softmoe.exporting import onnx_file
from keras_softmoe.files import atomic_directory, atomic_file
from keras_softmoe.keras_adapter.exports import (
    drop_assertions_of_more_than_one,
    sizes_may_be_one,
)


def write(model, filepath, format, input_signature, preprocessing, options):
    """Write a model with the backend in use, which must be that of the format.

    Args:
        model: `keras.Model`.
        filepath: str or path, replaced when the new file is complete.
        format: str, see `export_model`.
        input_signature: list of `keras.InputSpec`s, or of structures of them.
        preprocessing: bool, see `export_model`.
        options: dict of further arguments of `keras.Model.export`.
    """
    if preprocessing:
        model, input_signature = _from_pixels(model, input_signature)
    replaced = atomic_file
    if format == "tf_saved_model":
        replaced = functools.partial(atomic_directory, marks=["saved_model.pb"])
    batch = keras.tree.flatten(input_signature)[0].shape[0]
    with replaced(filepath) as aside, _quiet(), _groups_of(model, batch):
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
            onnx_file.tidy(aside)


def image_converter(model):
    """Return the image converter of a model, whose only input must be images.

    Raises:
        ValueError: if it has none.
    """
    preprocessor = getattr(model, "preprocessor", None)
    converter = getattr(preprocessor, "image_converter", None)
    if converter is None or not isinstance(model.input, keras.KerasTensor):
        raise ValueError(
            "`preprocessing=True` needs a model with images as its only input and a "
            "preprocessor with an image converter, such as an image classifier from a "
            f"preset. Received: {model.name!r}, a `{type(model).__name__}`. Leave it "
            "out, and preprocess the inputs before the exported model."
        )
    return converter


class FromPixels(keras.Model):
    """Model with its image converter, as plain operations on tensors.

    Args:
        model: `keras.Model` with an image converter.
        pixels_shape: `(B, height, width, channels)`, `None` where open. Pixels of
            another size than the model's are resized.

    Raises:
        ValueError: if the model has no image converter, or one that does not resize.
    """

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


def _from_pixels(model, input_signature):
    (spec,) = input_signature
    model = FromPixels(model, spec.shape)
    # This builds it.
    model(keras.KerasTensor(spec.shape, dtype=spec.dtype, name="pixels"))
    return model, [keras.InputSpec(dtype=spec.dtype, shape=spec.shape, name="pixels")]


def _write_torch(model, filepath, input_signature, options):
    """Write a `.pt2` file.

    Keras' exporter traces a batch of two images. In a model that routes several images
    together that is one group, and PyTorch would assume a single group.
    """
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
    with sizes_may_be_one():
        # The weights are constants of the function. Those of a module would be written
        # twice.
        exported = torch.export.export(Module(), examples, **arguments)
    drop_assertions_of_more_than_one(exported.graph_module.graph)
    torch.export.save(exported, filepath)


@contextlib.contextmanager
def _groups_of(model, batch):
    """Scope in which `group_images=None` is replaced by the batch size.

    TensorFlow also traces a model for batches of any size.
    """
    whole = [layer for layer in moe_layers_of(model) if layer.group_images is None]
    for layer in whole:
        layer.group_images = batch
    try:
        yield
    finally:
        for layer in whole:
            layer.group_images = None


@contextlib.contextmanager
def _quiet():
    """Scope without the progress logs of converters."""
    logger = logging.getLogger("tf2onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
