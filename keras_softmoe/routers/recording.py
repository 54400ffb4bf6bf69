"""Collecting the decisions of routers while a model runs."""

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
from keras import ops

# The open scopes
_SCOPES = contextvars.ContextVar("scopes_that_record", default=())
# Their ids, in any thread. `torch.compile` cannot trace a context variable: it would
# split each model at the routers and compile again and again.
_OPEN = {}


@contextlib.contextmanager
def record(key: Callable | None = None) -> Iterator[dict]:
    """Collect the decisions of all routers that are called inside a scope.

    It works for any Keras model with MoE layers. In a compiled function (`jax.jit`,
    `tf.function`, `torch.compile`), open the scope inside the function and return the
    collected decisions, or some of their tensors. Scopes may be nested; each collects
    all.

    Args:
        key: optional callable from a `Router` to the key of its decision, by default
            its path, which need not be unique in a user's model.

    Yields:
        dict from the path of a router (`"block_1/moe/router"`) to its complete
        `Decision`, in the order of the calls. Further calls of a router have the number
        of the call in the key: `"block_1/moe/router (2)"`.

    Raises:
        ValueError: at the end of a scope that was opened outside of a compiled function
            (for example around `predict` on JAX and TensorFlow), if the function was
            traced inside. A function that was compiled before calls no router, so
            nothing is collected.

    Examples:
        >>> layer = ksm.layers.MoE(ksm.routers.SoftmaxTokenChoiceRouter(4), mlp_dim=64)
        >>> with ksm.routers.record() as decisions:
        ...     outputs = layer(np.random.normal(size=(2, 16, 32)))
        >>> [decision.summary["load"].shape for decision in decisions.values()]
        [(2, 4)]
    """
    scope = _Scope({}, [], _is_staging(), key or operator.attrgetter("path"))
    token = _SCOPES.set((*_SCOPES.get(), scope))
    _OPEN[id(scope)] = True
    try:
        yield scope.decisions
    finally:
        del _OPEN[id(scope)]
        _SCOPES.reset(token)
    if scope.missed:
        raise ValueError(
            "The decisions of a compiled function do not exist outside of it. "
            "Received: a scope of `routers.record` around a function compiled by "
            f"{keras.backend.backend()}, which called {', '.join(scope.missed)}. Call "
            "the model itself, `model(inputs)`, or open the scope inside the function."
        )


class _Scope(NamedTuple):
    decisions: dict
    # Paths of routers in compiled functions. An error inside a step on JAX would lose
    # the weights that Keras has taken from the model.
    missed: list
    opened_while_staging: bool
    key: Callable


def is_recording():
    """Return whether a scope of `record` is open."""
    return bool(_OPEN) and bool(_SCOPES.get())


def note(router, decision):
    """Add a complete `Decision` of a router to the open scopes."""
    scopes = _SCOPES.get()
    is_staging = bool(scopes) and _is_staging()
    for scope in scopes:
        if is_staging and not scope.opened_while_staging:
            scope.missed.append(router.path)
            continue
        key = name = scope.key(router)
        calls = 1
        while key in scope.decisions:
            calls += 1
            key = f"{name} ({calls})"
        scope.decisions[key] = decision


def _is_staging():
    """Return whether the caller runs in a function that is being compiled."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return isinstance(ops.add(0, 0), jax.core.Tracer)
    if backend == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    # A function compiled by `torch.compile` leaves real tensors, in a dict too.
    return False
