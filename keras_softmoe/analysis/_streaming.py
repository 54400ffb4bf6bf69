"""One pass of data through a model, on which reducers see what its routers decide."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.analysis._inputs import backbone_of, batches_of
from keras_softmoe.keras_adapter import flatten_layers
from keras_softmoe.routers import Decision, Router, record


class Reducer(Protocol):
    """Interface of what `observe` shows decisions to: any class with these methods.

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
        """Take in what one router decided for one batch.

        Routers are shown in the order in which the model calls them. Keep sums, not
        decisions, if memory must not grow with the data.

        Args:
            name: int or str, the block, see `observe`.
            decision: `routers.Decision` of NumPy arrays. Its summary is complete:
                `decision.summary["valid"]` `(G, S)` is `False` for padding.
            inputs: the batch as the model took it, preprocessed: an array or a dict of
                arrays.
        """

    def result(self) -> dict:
        """What `observe` returns at the end."""


class LastDecision:
    """Reducer to the last decision of one block, and the inputs of that batch.

    Args:
        name: int or str, the block, see `observe`.
    """

    def __init__(self, name):
        self._name = name

    def update(self, name, decision, inputs):
        if name == self._name:
            self._last = decision, inputs

    def result(self):
        return self._last


def observe(
    model: keras.Model,
    data: ArrayLike,
    reducers: Sequence,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> tuple:
    """Send data through a model once, and show each decision of its routers.

    One batch and the decisions about it are held at a time, so memory does not grow
    with the data.

    Args:
        model: any built `keras.Model` with `layers.MoE` or `layers.SoftMoE`: a backbone
            or task of this library (of a task the backbone is called), or a model of
            one's own, which is called as `model(batch, training=False)`.
        data: an array of inputs, such as `(N, height, width, channels)` images; a dict
            of arrays, for a model that takes it; or an iterable of batches (a
            `tf.data.Dataset`, `keras.utils.PyDataset`, PyTorch `DataLoader`, generator)
            of inputs or of tuples that begin with them.
        reducers: sequence of `Reducer`, which share the pass: `LoadReducer`,
            `RoutingReducer`, `SoftReducer`, or your own.
        batch_size: int, inputs of an array at a time.
        preprocessor: callable applied to each batch. By default a task's own for
            images, none for dicts.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        tuple of what the reducers found, in their order. They name a block by its key
        in `model.routers` where the model has it, such as the index of the block; else
        by the name of its MoE layer.

    Raises:
        ValueError: if the model has no routers or is not built, there are no data, or
            they are not what the model takes.

    Examples:
        >>> load, found = ksm.analysis.observe(
        ...     soft,
        ...     images,
        ...     [ksm.analysis.LoadReducer(), ksm.analysis.SoftReducer(soft)],
        ... )
        >>> load[3].imbalance, found[3].dispatch_peak
    """
    backbone, _ = backbone_of(model)
    routers = routers_of(backbone)
    batches, count = batches_of(model, data, batch_size, preprocessor)
    if not stream(backbone, routers, batches, reducers, count, verbose):
        raise ValueError(
            "There is nothing to route. Pass at least one batch of inputs (an iterator "
            f"that was read before is empty). Received: data={data!r:.200}."
        )
    return tuple(reducer.result() for reducer in reducers)


def stream(model, routers, batches, reducers, count=None, verbose=1):
    """Call a model on batches and update reducers with the decisions about them.

    Args:
        model: keras.Model.
        routers: dict from blocks to the routers that the reducers see.
        batches: iterable of inputs of the model.
        reducers: sequence of `Reducer`.
        count: int, number of batches, or `None` if it is not known.
        verbose: as in `observe`.

    Returns:
        int, the number of batches.
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


def routers_of(model, kind=Router, weight=None):
    """The routers of a model by the names of their blocks.

    Args:
        model: keras.Model with MoE layers, built.
        kind: class of the routers.
        weight: str, name of a weight that they must have, or `None`.

    Returns:
        dict from the block to its router: the keys of `model.routers` where the model
        has it, such as the index of the block; else the name of the MoE layer.

    Raises:
        ValueError: if there is none, or the model is not built.
    """
    if not model.built:
        raise ValueError(
            "A model that is not built has no weights to route with. Call it once on "
            f"data. Received: {type(model).__name__} with built=False."
        )
    routers = all_routers(model)
    found = {
        name: router
        for name, router in routers.items()
        if isinstance(router, kind) and (weight is None or hasattr(router, weight))
    }
    if not found:
        raise ValueError(
            f"The model has to have MoE layers with a `{kind.__name__}`"
            + ("" if weight is None else f" that has the weight `{weight}`")
            + f". Received: {type(model).__name__} with the routers "
            f"{sorted({type(router).__name__ for router in routers.values()})}."
        )
    return found


def all_routers(model):
    """As `routers_of`, but of any model: an empty dict if there are none."""
    routers = getattr(model, "routers", None)
    if isinstance(routers, dict):
        return routers
    return _by_name(x for x in flatten_layers(model) if isinstance(x, Router))


def _by_name(routers):
    """Dict from the name of the MoE layer around each router."""
    named = {}
    for router in routers:
        parts = (router.path or router.name).split("/")
        for own in ("router", "moe"):
            # What the layers of this library call their parts.
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
    """What the routers with these names decide for a batch: pairs, in order of calls.

    A router that is called twice is there twice.
    """
    calls = itertools.count()
    with (
        _without_gradients(),
        record(key=lambda router: (next(calls), names.get(id(router)))) as decisions,
    ):
        model(keras.tree.map_structure(ops.convert_to_tensor, inputs), training=False)
    return [
        (name, decision)
        for (_, name), decision in decisions.items()
        if name is not None
    ]


def _without_gradients():
    """PyTorch would keep all activations of a batch for a backward pass."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
