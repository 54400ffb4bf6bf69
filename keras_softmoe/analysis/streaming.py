"""What routers decide while data flow through a model, of this library or a user's."""

import contextlib
import functools

import keras
import numpy as np
from keras import ops

from keras_softmoe.evaluation.routing import backbone_of, prepared
from keras_softmoe.routers import Router


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
    return _by_name(x for x in model._flatten_layers() if isinstance(x, Router))


def watch(model, data, see, routers=None, batch_size=64, preprocessor=None, verbose=1):
    """Send data through a model and see what each router decides, one by one.

    Only one decision is held at a time, so memory does not grow with the data or with
    the number of blocks.

    Args:
        model: keras.Model, or a task with a `backbone`, which is then called.
        data: an array of inputs, a dict of such arrays, or an iterable of batches:
            arrays, dicts, or tuples of which the first is one of these.
        see: callable from the block, its `Decision` and the `(G, S)` bool mask of real
            tokens, `None` if all are.
        routers: dict from blocks to routers, as `routers_of` returns it. All if `None`.
        batch_size: int, inputs of an array at a time.
        preprocessor: callable applied to batches. By default a task's own for images,
            none for dicts.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Raises:
        ValueError: if the model has no routers or is not built, there are no data, or
            they are not what the model takes.
    """
    backbone, own = backbone_of(model)
    routers = routers_of(backbone) if routers is None else routers
    batches, count = _batches(data, batch_size)
    bar = keras.utils.Progbar(count, verbose=verbose, unit_name="batch")
    seen = 0
    with _watched(routers, see), _without_gradients():
        for seen, batch in enumerate(batches, start=1):
            backbone(_inputs(backbone, batch, preprocessor, own), training=False)
            bar.update(seen)
    if not seen:
        raise ValueError(
            "There is nothing to route. Pass at least one batch of inputs (an iterator "
            f"that was read before is empty). Received: data={data!r:.200}."
        )


# === Routers ===


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


@contextlib.contextmanager
def _watched(routers, see):
    """Report what these routers decide within the scope."""
    try:
        for name, router in routers.items():
            # Past Keras, which would look for weights in it.
            object.__setattr__(router, "call", _reporting(router.call, name, see))
        yield
    finally:
        for router in routers.values():
            vars(router).pop("call", None)


def _reporting(call, name, see):
    @functools.wraps(call)
    def reporting(tokens, valid=None, **kwargs):
        decision = call(tokens, valid=valid, **kwargs)
        see(name, decision, None if valid is None else ops.convert_to_numpy(valid))
        return decision

    return reporting


def _without_gradients():
    """PyTorch would keep all activations of a batch for a backward pass."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


# === Data ===


def _batches(data, batch_size):
    """Batches of inputs, and how many there are, `None` if that is not known."""
    if isinstance(data, keras.utils.PyDataset):
        count = len(data)
        return (_without_labels(data[i]) for i in range(count)), count
    if isinstance(data, dict) or hasattr(data, "shape"):
        count = len(keras.tree.flatten(data)[0])
        starts = range(0, count, batch_size)
        return (_slice(data, i, i + batch_size) for i in starts), len(starts)
    count = len(data) if hasattr(data, "__len__") else None
    return (_without_labels(batch) for batch in data), count


def _slice(data, start, stop):
    return keras.tree.map_structure(lambda x: x[start:stop], data)


def _without_labels(batch):
    return batch[0] if isinstance(batch, tuple | list) else batch


def _inputs(backbone, batch, preprocessor, own):
    if hasattr(backbone, "patch_grid") and not isinstance(batch, dict):
        return ops.convert_to_tensor(prepared(backbone, batch, preprocessor or own))
    if preprocessor is not None:
        batch = preprocessor(batch)
    return keras.tree.map_structure(_tensor, batch)


def _tensor(x):
    # Not directly: it may be a tensor of another framework.
    return ops.convert_to_tensor(x if ops.is_tensor(x) else np.asarray(x))
