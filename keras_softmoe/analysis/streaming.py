"""One pass of data through a model, with its routing decisions shown to reducers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_whole_numbers
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
        """Add the decision of one router about one batch.

        Routers come in the order in which the model calls them. Keep sums instead of
        decisions, so that memory does not grow with the data.

        Args:
            name: int or str, the block, see `observe`.
            decision: `routers.Decision` of NumPy arrays. Its summary is complete:
                `decision.summary["valid"]` `(G, S)` is `False` for padding.
            inputs: the batch as the model took it, preprocessed: an array or a dict of
                arrays.
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

    One batch and the decisions about it are held at a time, so memory does not grow
    with the data. `analyze` calls this with the reducers of all its statistics.

    Args:
        model: any built `keras.Model` with `layers.MoE` or `layers.SoftMoE`: a backbone
            or task of this library (the backbone of a task is called), or any other
            model, which is called as `model(batch, training=False)`.
        data: an array of inputs, such as `(N, height, width, channels)` images; a dict
            of arrays, for a model that takes it; or an iterable of batches (a
            `tf.data.Dataset`, `keras.utils.PyDataset`, PyTorch `DataLoader`, generator)
            of inputs or of tuples that begin with them.
        reducers: sequence of `Reducer`, which share the pass.
        batch_size: int, inputs of an array at a time.
        preprocessor: callable applied to each batch. By default a task's own for
            images, none for dicts.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        tuple of the results of the reducers, in their order. A block is named by its
        key in `model.routers` where the model has it, such as the index of the block;
        else by the name of its MoE layer.

    Raises:
        ValueError: if the model has no routers or is not built, there are no data, or
            the model does not take them.

    Examples:
        >>> class Groups:
        ...     def __init__(self):
        ...         self.count = {}
        ...
        ...     def update(self, name, decision, inputs):
        ...         groups = len(decision.summary["valid"])
        ...         self.count[name] = self.count.get(name, 0) + groups
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
            "There is nothing to route. Pass at least one batch of inputs (an iterator "
            f"that was read before is empty). Received: data={data!r:.200}."
        )
    return tuple(reducer.result() for reducer in reducers)


def stream(model, routers, batches, reducers, count=None, verbose=1):
    """Call a model on batches, update reducers, and return the number of batches.

    Args:
        model: keras.Model.
        routers: dict from blocks to the routers whose decisions are shown.
        batches: iterable of inputs of the model.
        reducers: sequence of `Reducer`.
        count: int, number of batches, or `None` if it is not known.
        verbose: as in `observe`.
    """
    # Several routers may have the same path.
    names = {id(router): name for name, router in routers.items()}
    bar = keras.utils.Progbar(count, verbose=verbose, unit_name="batch")
    seen = 0
    for seen, inputs in enumerate(batches, start=1):
        for name, decision in _decisions(model, names, inputs):
            decision = keras.tree.map_structure(ops.convert_to_numpy, decision)
            for reducer in reducers:
                reducer.update(name, decision, inputs)
        bar.update(seen)
    return seen


def routers_of(model):
    """Return the routers of a model by the names of their blocks.

    Raises:
        ValueError: if there are none, or the model is not built.
    """
    if not model.built:
        raise ValueError(
            "A model that is not built has no weights to route with. Call it once on "
            f"data. Received: {type(model).__name__} with built=False."
        )
    routers = getattr(model, "routers", None)
    if not isinstance(routers, dict):
        routers = _by_name(x for x in flatten_layers(model) if isinstance(x, Router))
    if not routers:
        raise ValueError(
            "Only the routing of this library's MoE layers, `MoE` and `SoftMoE`, is "
            f"recorded. Received: {type(model).__name__}, which has none of them: it "
            "is dense, or its experts are of another library. Pass a model of "
            "`ksm.models`, or replace its MLPs by experts with "
            "`ksm.converters.add_experts`."
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
        number = 1
        while unique in named:
            number += 1
            unique = f"{name} ({number})"
        named[unique] = router
    return named


def _decisions(model, names, inputs):
    """Return pairs of a block and a decision about a batch, in the order of calls.

    A router that is called twice is there twice.
    """
    calls = itertools.count()
    with (
        without_gradients(),
        record(key=lambda router: (next(calls), names.get(id(router)))) as decisions,
    ):
        model(keras.tree.map_structure(ops.convert_to_tensor, inputs), training=False)
    return [
        (name, decision)
        for (_, name), decision in decisions.items()
        if name is not None
    ]


# === Inputs ===


def is_limoe(backbone):
    """Whether a backbone routes images and text through the same experts."""
    return hasattr(backbone, "sequence_length") and hasattr(backbone, "patch_grid")


def tokens_per_input(backbone):
    """Return the tokens of an image or text in a `ViTMoEBackbone` or `TextMoEBackbone`.

    `None` for other models, where it is unknown.
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
    from keras_softmoe.models.arguments import check_finite_images

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

    The arguments are those of `observe`.

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
