"""Images of all kinds as arrays: arrays of any library, PIL images, lists of them."""

import sys

import keras
import numpy as np


def as_arrays(data):
    """Convert numbers, strings or images to NumPy arrays.

    Args:
        data: array or tensor of any library; PIL image, which becomes a batch of one;
            list of them; or a dict of all this.

    Raises:
        ValueError: if the images of a list differ in size.
    """
    if isinstance(data, dict):
        return {name: as_arrays(value) for name, value in data.items()}
    if _is_pil(data):
        return as_arrays([data])
    if isinstance(data, (list, tuple)):
        return _stacked(data)
    return _array(data)


def _stacked(values):
    pictures = [value for value in values if _is_pil(value)]
    if pictures:
        # Grey images stay grey unless some have colours.
        is_grey = all(picture.mode in ("1", "L") for picture in pictures)
        mode = "L" if is_grey else "RGB"
        values = [v.convert(mode) if _is_pil(v) else v for v in values]
    values = [_array(value) for value in values]
    shapes = list(dict.fromkeys(value.shape for value in values))
    if len(shapes) > 1:
        raise ValueError(
            "The items of a list are put into one array and must have the same shape. "
            f"Received: shapes {', '.join(map(str, shapes[:4]))}. Resize images first, "
            "for example `image.resize((224, 224))` of PIL."
        )
    array = np.stack(values) if values else np.zeros(0, "float32")
    return array[..., None] if pictures and is_grey else array


def _array(value):
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    if is_torch:
        value = value.detach().cpu()
    array = np.asarray(value)
    # `tf.data` takes strings of this dtype.
    return array.astype(object) if array.dtype.kind == "U" else array


def _is_pil(value):
    # Unless PIL is imported, there are no such images.
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def without_pil(images):
    """Convert a PIL image, or those in a list, to arrays; return others unchanged."""
    if _is_pil(images):
        return as_arrays(images)[0]
    if isinstance(images, (list, tuple)) and any(map(_is_pil, images)):
        return [without_pil(image) for image in images]
    return images


def repeat_grey(images, channels):
    """Repeat the channel of grey images; return others unchanged.

    Args:
        images: array or tensor, also of TensorFlow in a pipeline on another backend.
        channels: int.
    """
    shape = getattr(images, "shape", ())
    if channels == 1 or len(shape) != 4 or shape[-1] != 1:
        return images
    if isinstance(images, np.ndarray):
        return np.repeat(images, channels, axis=-1)
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(images):
        return tf.repeat(images, channels, axis=-1)
    return keras.ops.repeat(images, channels, axis=-1)
