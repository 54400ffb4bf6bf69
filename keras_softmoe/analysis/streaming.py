"""One pass of data through a model, with its routing decisions shown to reducers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_finite, check_whole_numbers
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.keras_adapter.runs import without_gradients
from keras_softmoe.routers import Decision, IdentityRouter, Router, SoftRouter, record


class Reducer(Protocol):
    """Interface of a reducer for `observe`: any class with these methods.

    Example: the largest logit of each block.

    >>> class LargestLogit:
    ...     def __init__(self):
    ...         self.largest = {}
    ...
    ...     def update(self, name, decision, inputs):
    ...         largest = decision.summary["logits"].max()
    ...         self.largest[name] = max(self.largest.get(name, largest), largest)
    ...
    ...     def result(self):
    ...         return self.largest
    """

    def update(self, name: int | str, decision: Decision, inputs: Any) -> None:
        """Add the decision of one router about one batch; keep sums, not decisions.

        Args:
            name: int or str, the block, see `observe`.
            decision: `routers.Decision` of NumPy arrays. Its summary is complete:
                `decision.summary["valid"]` `(G, S)` is `False` for padding.
            inputs: the preprocessed batch, an array or a dict of arrays.
        """

    def result(self) -> dict:
        """Return the result, at the end of the pass."""


def observe(
    model: keras.Model,
    data: ArrayLike,
    reducers: Sequence,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> tuple:
    """Send data through a model once, and show each routing decision to reducers.

    Args:
        model: any built `keras.Model` with `layers.MoE` or `layers.SoftMoE`. It is
            called as `model(batch, training=False)`; of a task the backbone.
        data: an array of inputs, such as `(N, H, W, channels)` images; dict of arrays;
            or iterable of batches of inputs, or of tuples that begin with them.
        reducers: sequence of `Reducer`, which share the pass.
        batch_size: int, inputs of an array at a time.
        preprocessor: applied to each batch. By default a task's own, none for dicts.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        tuple of the results of the reducers, in their order. A block is named by its
        key in `model.routers`, such as its index, or by the name of its MoE layer.

    Examples:
        >>> class Groups:
        ...     count = 0
        ...
        ...     def update(self, name, decision, inputs):
        ...         self.count += len(decision.summary["valid"])
        ...
        ...     def result(self):
        ...         return self.count
        >>> (groups,) = ksm.analysis.observe(soft, images, [Groups()])
    """
    backbone, _ = backbone_of(model)
    routers = routers_of(backbone)
    given = () if data is None else data
    batches, count = batches_of(model, given, batch_size, preprocessor)
    if not stream(backbone, routers, batches, reducers, count, verbose):
        raise ValueError(
            "The data must have at least one batch (an iterator that was read before "
            f"has none). Received: data={data!r:.200}."
        )
    return tuple(reducer.result() for reducer in reducers)


def stream(model, routers, batches, reducers, count=None, verbose=1):
    """Call a model on batches, update reducers, and return the number of batches.

    `routers` is a dict from blocks to routers, `count` the number of batches or `None`.
    """
    # Several routers may have the same path.
    names = {id(router): name for name, router in routers.items()}
    bar = keras.utils.Progbar(count, verbose=verbose, unit_name="batch")
    seen = 0
    for seen, inputs in enumerate(batches, start=1):
        # Numbered, so that a router that is called twice is there twice.
        calls = itertools.count()
        with (
            without_gradients(),
            record(key=lambda r: (next(calls), names.get(id(r)))) as decisions,
        ):
            tensors = keras.tree.map_structure(ops.convert_to_tensor, inputs)
            model(tensors, training=False)
        for (_, name), decision in decisions.items():
            if name is None:
                continue
            decision = keras.tree.map_structure(ops.convert_to_numpy, decision)
            for reducer in reducers:
                reducer.update(name, decision, inputs)
        bar.update(seen)
    return seen


def routers_of(model):
    """Return the routers of a model by the names of their blocks."""
    if not model.built:
        raise ValueError(
            "The model must be built: call it once on data. Received: "
            f"{type(model).__name__} with built=False."
        )
    routers = getattr(model, "routers", None)
    if not isinstance(routers, dict):
        routers = _by_name(x for x in flatten_layers(model) if isinstance(x, Router))
    if not routers:
        raise ValueError(
            "Only the routing of this library's MoE layers is recorded. "
            f"Received: a {type(model).__name__} without any. `converters.add_experts` "
            "replaces MLPs, `converters.sparsify` keeps the model's own routers."
        )
    return routers


def _by_name(routers):
    """Return a dict from the name of the MoE layer around each router."""
    named = {}
    for router in routers:
        parts = (router.path or router.name).split("/")
        for own in ("router", "moe"):
            # The names of parts in layers of this library.
            if len(parts) > 1 and parts[-1] == own:
                parts.pop()
        name = unique = "/".join(parts)
        for number in itertools.count(2):
            if unique not in named:
                break
            unique = f"{name} ({number})"
        named[unique] = router
    return named


def is_limoe(backbone):
    """Return True if a backbone routes images and text through the same experts."""
    return hasattr(backbone, "sequence_length") and hasattr(backbone, "patch_grid")


def tokens_per_input(backbone):
    """Return the tokens of an input of a ViT or text tower, `None` if unknown."""
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
    """Return True if the tokens choose among the experts of a router."""
    return "num_selected_experts" in router.get_config()


def chooses(router):
    """Return True if a router decides which tokens an expert takes."""
    return not isinstance(router, SoftRouter | IdentityRouter)


def prepared(backbone, images, preprocessor):
    """Return images as a float32 array; raise unless they fit and are finite."""
    if preprocessor is not None:
        images = preprocessor(images)
    elif "int" in keras.backend.standardize_dtype(images.dtype):
        raise ValueError(
            "Integer images need a preprocessor, such as `ViTMoEImageConverter`, or a "
            "task in place of its backbone. Received: images of "
            f"dtype={images.dtype}, preprocessor=None."
        )
    images = ops.convert_to_numpy(images).astype("float32")
    if images.shape[1:] != backbone.image_shape or not len(images):
        raise ValueError(
            f"The model takes batches of {backbone.image_shape} images. Received: "
            f"images of shape={images.shape}."
        )
    check_finite("Images", images, "image")
    return images


def batches_of(model, data, batch_size, preprocessor):
    """Return a generator of preprocessed batches, and their number or `None`."""
    backbone, own = backbone_of(model)
    if isinstance(data, keras.utils.PyDataset):
        count = len(data)
        batches = (data[i] for i in range(count))
    elif isinstance(data, dict) or hasattr(data, "shape"):
        check_whole_numbers(1, batch_size=batch_size)
        starts = range(0, len(keras.tree.flatten(data)[0]), batch_size)
        count = len(starts)
        batches = (
            keras.tree.map_structure(lambda x, i=i: x[i : i + batch_size], data)
            for i in starts
        )
    else:
        count = len(data) if hasattr(data, "__len__") else None
        batches = iter(data)
    return (_inputs(backbone, batch, preprocessor, own) for batch in batches), count


def _inputs(backbone, batch, preprocessor, own):
    if isinstance(batch, tuple | list):
        # Inputs and labels.
        batch = batch[0]
    if hasattr(backbone, "patch_grid") and not isinstance(batch, dict):
        return prepared(backbone, batch, preprocessor or own)
    if preprocessor is not None:
        batch = preprocessor(batch)
    # What is no tensor of this backend may be one of another framework.
    return keras.tree.map_structure(
        lambda x: x if ops.is_tensor(x) else np.asarray(x), batch
    )


PADDING = 0
# The kind of word of padding.
PADDING_TAG = "padding"
# SentencePiece's sign at the beginning of a word.
WORD_BEGINS = "▁"


class Pairs:
    """Images and captions (or one of them alone) and the LIMoE that routes them."""

    def __init__(self, model, images, captions, preprocessor):
        self.backbone, self.preprocessor = backbone_of(model, preprocessor)
        if not is_limoe(self.backbone):
            raise ValueError(
                "Captions need a `LIMoEBackbone`, or a task that has one. Received: "
                f"{type(self.backbone).__name__}."
            )
        self.routers = routers_of(self.backbone)
        given = {"images": images, "captions": captions}
        given = {name: len(x) for name, x in given.items() if x is not None}
        counts = set(given.values())
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                "Images and captions must be equal in number, one or more; `None` "
                f"leaves one of them out. Received: {given or 'neither'}."
            )
        (self.num_pairs,) = counts
        self.images, self.captions = images, captions
        rows, columns = self.backbone.patch_grid
        self.tokens_choose = all(map(tokens_choose, self.routers.values()))
        self.tokenizer = getattr(self.preprocessor, "tokenizer", None)
        # In the order of a pair's tokens.
        self.tokens_of = {}
        if images is not None:
            self.tokens_of["image"] = rows * columns
        if captions is not None:
            self.tokens_of["text"] = self.backbone.sequence_length

    def observe(self, reducers, batch_size, verbose):
        """Route all pairs in one pass and return the results of reducers, a tuple."""
        group = self.backbone.group_images or 1
        batch_size = -(-batch_size // group) * group
        starts = range(0, self.num_pairs, batch_size)
        batches = (self._inputs(slice(start, start + batch_size)) for start in starts)
        model = self.backbone
        if len(self.tokens_of) == 1:
            (modality,) = self.tokens_of
            model = getattr(model, f"{modality}_encoder")
        stream(model, self.routers, batches, reducers, len(starts), verbose)
        return tuple(reducer.result() for reducer in reducers)

    def halves(self, inputs):
        """Return images and token ids of a batch, `None` if missing."""
        if isinstance(inputs, dict):
            return inputs["images"], inputs["token_ids"]
        return (inputs, None) if "image" in self.tokens_of else (None, inputs)

    def modality_masks(self, valid, inputs):
        """Return `(G, S)` masks of valid tokens: a dict by modality, and of padding."""
        # A group is one pair after the other, the image's tokens first.
        modality = np.repeat(list(self.tokens_of), list(self.tokens_of.values()))
        modality = np.tile(modality, valid.shape[1] // len(modality))
        masks = {name: valid & (modality == name) for name in self.tokens_of}
        is_padding = np.zeros_like(valid)
        _, token_ids = self.halves(inputs)
        if token_ids is not None:
            self.by_pair(is_padding, "text", len(token_ids))[:] = token_ids == PADDING
        return masks, is_padding & valid

    def by_pair(self, values, modality, num_pairs):
        """Return the tokens of a modality pair by pair, a view `(B, T, ...)`.

        `values` are `(G, S, ...)`; `num_pairs` leaves out those that fill up groups.
        """
        names, counts = list(self.tokens_of), list(self.tokens_of.values())
        first = sum(counts[: names.index(modality)])
        pairs = values.reshape(-1, sum(counts), *values.shape[2:])
        return pairs[:num_pairs, first : first + self.tokens_of[modality]]

    def _inputs(self, rows):
        # On first use, since `models` imports KerasHub.
        from keras_softmoe.models.arguments import check_pairs

        images = token_ids = None
        if self.images is not None:
            convert = getattr(self.preprocessor, "convert", None)
            images = prepared(self.backbone, self.images[rows], convert)
        if self.captions is not None:
            token_ids = np.asarray(self.captions[rows])
            if token_ids.dtype.kind not in "iu":
                if self.preprocessor is None:
                    raise ValueError(
                        "Captions in words need a preprocessor, or a task. Received: "
                        f"{type(self.captions).__name__}, preprocessor=None."
                    )
                token_ids = self.preprocessor.tokenize(self.captions[rows])
        check_pairs(self.backbone, images, token_ids)
        if len(self.tokens_of) == 2:
            return {"images": images, "token_ids": token_ids}
        return token_ids if images is None else images
