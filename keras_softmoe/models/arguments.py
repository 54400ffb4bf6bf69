"""Checks of the arguments and the inputs of models."""

import functools
import inspect

from keras_softmoe.checks import check_names, keyword_names, quote


@functools.cache
def arguments_of(cls):
    """Return the names of all arguments of a constructor and of its base classes."""
    names = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(base.__init__).parameters.values()
        names += keyword_names(base.__init__)
        if "kwargs" not in [p.name for p in parameters if p.kind is p.VAR_KEYWORD]:
            break
    return tuple(names)


def offer_names(cls):
    """Class decorator: the error for a misspelt argument suggests the right one."""
    init, known = cls.__init__, arguments_of(cls)

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        check_names(f"`{cls.__name__}`", kwargs, known)
        init(self, *args, **kwargs)

    # Keras recognizes constructors of functional models by their signature.
    __init__.__signature__ = inspect.signature(init)
    cls.__init__ = __init__
    return cls


def check_kind(name, value, kind):
    """Raise unless an argument is an instance of a class."""
    if not isinstance(value, kind):
        raise ValueError(
            f"`{name}` must be a `{kind.__name__}`, made or loaded with its "
            f"`from_preset`. Received: {name}={quote(value)}."
        )


def check_images(images, image_shape, any_size=False, grey=False):
    """Raise unless a batch of images has the shape that a model expects.

    Data without a shape (a dataset) and unknown dimensions pass. With `any_size` images
    are resized afterwards, with `grey` one channel is repeated.
    """
    shape = getattr(images, "shape", None)
    if shape is None or getattr(shape, "rank", 0) is None:
        return
    shape, expected = tuple(shape), (None, *image_shape)
    accepted = (None, None, None, image_shape[-1]) if any_size else expected
    if grey and len(shape) == 4 and shape[-1] == 1:
        accepted = (*accepted[:3], 1)
    pairs = zip(shape, accepted, strict=True)
    if len(shape) != 4 or any(None not in (a, b) and a != b for a, b in pairs):
        raise ValueError(
            "The model expects images of shape (batch, height, width, channels) = "
            f"{expected}. Received: images of shape {shape}. "
            f"{_remedy(shape, image_shape)}"
        )
    if getattr(images.dtype, "kind", "f") in "OSU":
        raise ValueError(
            f"Images are arrays of numbers. Received: images of dtype {images.dtype}. "
            "Read the files first, for example with PIL's `Image.open`."
        )


def _remedy(shape, image_shape):
    channels = image_shape[-1]
    if len(shape) == 3 and shape[-1] in (1, 3, 4, channels):
        return (
            "Make a batch of one of a single image, `images[None]`, and batches of a "
            "dataset of single images, `dataset.batch(32)`."
        )
    if len(shape) == 3:
        return "Give grey images an axis of channels: `images[..., None]`."
    if len(shape) != 4:
        return "Give them four axes."
    if shape[-1] == channels:
        return "Resize them, or load the model with another `image_shape`."
    if shape[1] == channels:
        return "Put the channels last: `numpy.moveaxis(images, 1, -1)`."
    if shape[-1] == 4 and channels == 3:
        return "Leave the alpha channel out: `images[..., :3]`."
    if channels == 1:
        return "Make them grey: `images.mean(-1, keepdims=True)`."
    return f"Repeat a grey channel: `numpy.repeat(images, {channels}, axis=-1)`."


def check_token_ids(token_ids, sequence_length):
    """Raise unless a batch of texts has the length that a model expects."""
    shape = getattr(token_ids, "shape", None)
    if shape is None or getattr(shape, "rank", 0) is None:
        return
    if len(shape) != 2 or shape[1] not in (None, sequence_length):
        raise ValueError(
            "The model expects token ids of shape (batch, sequence length) = "
            f"{(None, sequence_length)}. Received: token ids of shape {tuple(shape)}."
        )


def check_vocabulary(token_ids, backbone):
    """Raise unless a NumPy array of int token ids is of a backbone's vocabulary."""
    size = getattr(backbone, "text_backbone", backbone).vocabulary_size
    if token_ids.dtype.kind not in "iu" or not token_ids.size:
        return
    least, largest = token_ids.min(), token_ids.max()
    if least < 0 or largest >= size:
        raise ValueError(
            f"Token ids must be from 0 to {size - 1}, the model's vocabulary. "
            f"Received: token ids from {least} to {largest}."
        )


def check_pairs(backbone, images, token_ids):
    """Raise unless images, texts or both are batches that a model accepts."""
    if images is None and token_ids is None:
        raise ValueError("There is nothing to encode. Received: images=token_ids=None.")
    check_images(images, backbone.image_shape)
    check_token_ids(token_ids, backbone.sequence_length)
    shapes = [getattr(x, "shape", None) for x in (images, token_ids)]
    counts = [shape[0] if shape is not None else None for shape in shapes]
    if None not in counts and counts[0] != counts[1]:
        raise ValueError(
            "Images and texts come in pairs and must be equally many. Received: "
            f"{counts[0]} images, {counts[1]} texts."
        )
