"""Collecting what routers decide while a model runs."""

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
from keras import ops

# The scopes that are open.
_SCOPES = contextvars.ContextVar("scopes_that_record", default=())
# Their ids, in any thread. `torch.compile` cannot look into the other one: it would cut
# each model into pieces, and compile them again and again.
_OPEN = {}


@contextlib.contextmanager
def record(key: Callable | None = None) -> Iterator[dict]:
    """Scope in which the decisions of all routers that are called are collected.

    It works for any Keras model that contains MoE layers: call the model on data inside
    the scope. Where a function is compiled (`jax.jit`, `tf.function`, `torch.compile`),
    open the scope inside the function and return what it collected, or the parts of it
    that are wanted. Scopes may be nested; each collects everything.

    Args:
        key: optional callable from a `Router` to the key of its decision. The path by
            default, which a user's model may give to several routers.

    Yields:
        dict from the path of a router (`"block_1/moe/router"`) to its `Decision`, in
        the order of the calls. A router that is called again in the same scope adds an
        entry, whose key is its path and the number of the call:
        `"block_1/moe/router (2)"`. The summaries are complete, see `Decision`.

    Raises:
        ValueError: at the end of the scope, if a router was called in a function that
            was being compiled and the scope was opened outside of it (around `predict`
            on JAX and TensorFlow, for example): its tensors do not outlive the
            function. A function that was compiled before calls no router at all, so
            nothing is collected.

    Examples:
        >>> layer = ksm.layers.MoE(ksm.routers.SoftmaxTokenChoiceRouter(4), mlp_dim=64)
        >>> tokens = np.random.normal(size=(2, 16, 32))
        >>> with ksm.routers.record() as decisions:
        ...     outputs = layer(tokens)
        >>> [decision.summary["load"].shape for decision in decisions.values()]
        [(2, 4)]

        Inside a function that is compiled, here by JAX, the scope is opened there, too:

        >>> def route(tokens):
        ...     with ksm.routers.record() as decisions:
        ...         layer(tokens)
        ...     return decisions
        >>> if keras.backend.backend() == "jax":
        ...     import jax
        ...
        ...     route = jax.jit(route)
        >>> decisions = route(tokens)
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
            "Decisions made in a function that is compiled are not there outside of "
            "it. Received: a scope of `routers.record` around a function compiled by "
            f"{keras.backend.backend()}, which called {', '.join(scope.missed)}. Call "
            "the model itself, `model(inputs)`, or open the scope inside the compiled "
            "function and return what it collected."
        )


class _Scope(NamedTuple):
    decisions: dict
    # Paths of routers whose decisions are out of reach. Raising at once, in the middle
    # of a step on JAX, would cost Keras the weights that it has taken from the model.
    missed: list
    opened_while_staging: bool
    key: Callable


def is_recording():
    """Whether a scope of `record` is open."""
    return bool(_OPEN) and bool(_SCOPES.get())


def note(router, decision):
    """Add a decision to the scopes that are open.

    Args:
        router: `Router`.
        decision: `Decision` with a complete summary.
    """
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
    """Whether what is computed now becomes part of a compiled function."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return isinstance(ops.add(0, 0), jax.core.Tracer)
    if backend == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    # What `torch.compile` compiles leaves real tensors behind, in a dict too.
    return False
