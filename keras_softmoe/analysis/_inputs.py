"""Batches of data, as models take them."""

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.routers import IdentityRouter, SoftRouter


def is_limoe(backbone):
    """Whether a backbone routes images and text through the same experts."""
    return hasattr(backbone, "sequence_length") and hasattr(backbone, "patch_grid")


def tokens_per_input(backbone):
    """Return the tokens of an image or text in a `ViTMoEBackbone` or `TextMoEBackbone`.

    `None` for other models, of which it is unknown.
    """
    outputs = getattr(backbone, "output", None)
    if not isinstance(outputs, dict) or "sequence_output" not in outputs:
        return None
    return outputs["sequence_output"].shape[1]


def backbone_of(model, preprocessor=None):
    """Return the backbone of a task, or the model itself, and the preprocessor."""
    if isinstance(getattr(model, "backbone", None), keras.Model):
        return model.backbone, preprocessor or model.preprocessor
    return model, preprocessor


def tokens_choose(router):
    """Whether the tokens choose among the experts of a router."""
    return "num_selected_experts" in router.get_config()


def chooses(router):
    """Whether a router decides which tokens an expert takes."""
    return not isinstance(router, SoftRouter | IdentityRouter)


def prepared(backbone, images, preprocessor):
    """Return images as the backbone takes them, a float32 array.

    Raises:
        ValueError: if they are not a batch that the model takes, or not finite.
    """
    # On first use, since `models` imports KerasHub.
    from keras_softmoe.backbones.arguments import check_finite_images

    if preprocessor is not None:
        images = preprocessor(images)
    elif "int" in keras.backend.standardize_dtype(images.dtype):
        raise ValueError(
            "Integer images need a preprocessor that scales them to [-1, 1]. "
            f"Received: images of dtype={images.dtype}, preprocessor=None. Pass the "
            "preset's `ViTMoEImageConverter`, or the task in place of its backbone."
        )
    images = ops.convert_to_numpy(images).astype("float32")
    if images.shape[1:] != backbone.image_shape or not len(images):
        raise ValueError(
            f"The model takes batches of {backbone.image_shape} images. Received: "
            f"images of shape={images.shape}. Add the batch axis, or resize them "
            "first."
        )
    check_finite_images(images)
    return images


def batches_of(model, data, batch_size, preprocessor):
    """Return batches of inputs as a model takes them, and their number.

    Args:
        model: keras.Model, or a task with a `backbone`, whose own preprocessor is
            applied to images by default.
        data: as in `observe`.
        batch_size: int, inputs of an array at a time.
        preprocessor: callable applied to batches, or `None`.

    Returns:
        Generator of arrays or dicts of arrays, and their number: `None` if unknown.
    """
    backbone, own = backbone_of(model)
    if isinstance(data, keras.utils.PyDataset):
        count = len(data)
        batches = (data[i] for i in range(count))
    elif isinstance(data, dict) or hasattr(data, "shape"):
        check_whole_numbers(1, batch_size=batch_size)
        starts = range(0, len(keras.tree.flatten(data)[0]), batch_size)
        count = len(starts)
        batches = (_rows(data, start, start + batch_size) for start in starts)
    else:
        count = len(data) if hasattr(data, "__len__") else None
        batches = iter(data)
    inputs = (_inputs(backbone, batch, preprocessor, own) for batch in batches)
    return inputs, count


def _rows(data, start, stop):
    return keras.tree.map_structure(lambda x: x[start:stop], data)


def _inputs(backbone, batch, preprocessor, own):
    if isinstance(batch, tuple | list):
        # Inputs and labels.
        batch = batch[0]
    if hasattr(backbone, "patch_grid") and not isinstance(batch, dict):
        return prepared(backbone, batch, preprocessor or own)
    if preprocessor is not None:
        batch = preprocessor(batch)
    # Tensors as they are; else an array, since it may be another framework's tensor.
    return keras.tree.map_structure(
        lambda x: x if ops.is_tensor(x) else np.asarray(x), batch
    )
