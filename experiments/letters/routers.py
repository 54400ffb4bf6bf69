"""Routers of the controls: by position alone, and with a changed view of the tokens."""

import math

import keras
import numpy as np
from keras import ops

from keras_softmoe.ops import SlotRouting
from keras_softmoe.routers import Decision, Router, SoftmaxTokenChoiceRouter


@keras.saving.register_keras_serializable(package="letters")
class SquareRouter(Router):
    """Fixed router by position: each expert has the tokens of one square of the image.

    As `ksm.routers.IdentityRouter`, which gives it tokens from all over the image, it
    learns nothing and drops nothing, and the gates are 1.

    Args:
        num_experts: int, number of experts, a square number.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.
    """

    def capacity(self, num_tokens, training=False):
        return num_tokens // self.num_experts

    def call(self, tokens, valid=None, training=False):
        token = square_tokens(tokens.shape[1], self.num_experts)
        token = ops.repeat(ops.convert_to_tensor(token), ops.shape(tokens)[0], axis=0)
        filled = ops.ones_like(token, dtype="bool")
        return Decision(SlotRouting(token, filled, ops.cast(filled, tokens.dtype)), {})


def square_tokens(num_tokens, num_experts):
    """Return the tokens of each square, `(1, num_experts, tokens)` int32."""
    grid, squares = math.isqrt(num_tokens), math.isqrt(num_experts)
    if grid**2 != num_tokens or squares**2 != num_experts or grid % squares:
        raise ValueError(
            "A square grid of patches is cut into as many squares as there are "
            f"experts. Received: num_experts={num_experts} for {num_tokens} tokens."
        )
    side = grid // squares
    token = np.arange(num_tokens, dtype="int32").reshape(squares, side, squares, side)
    return token.transpose(0, 2, 1, 3).reshape(1, num_experts, side**2)


@keras.saving.register_keras_serializable(package="letters")
class ViewRouter(SoftmaxTokenChoiceRouter):
    """V-MoE's router, which may see other tokens than those that it routes.

    Attributes:
        view: callable from the `(G, S, D)` tokens to those that the logits are computed
            of, or `None`. Compiled functions keep the view that they were compiled
            with.
    """

    view = None

    def call(self, tokens, *args, **kwargs):
        if self.view is not None:
            tokens = self.view(tokens)
        return super().call(tokens, *args, **kwargs)


def position_only(tokens, positions):
    """At each position, the mean of the tokens of all images.

    Logits are linear in the tokens, so they too are means.

    Args:
        tokens: `(G, S, D)` tensor, `S` a multiple of `positions`.
        positions: int, tokens of an image.
    """
    return _by_image(tokens, positions, lambda x: x * 0 + ops.mean(x, 0, keepdims=True))


def content_only(tokens, positions):
    """Tokens less the mean of their position, plus the mean of all."""

    def view(x):
        return x - ops.mean(x, 0, keepdims=True) + ops.mean(x, (0, 1), keepdims=True)

    return _by_image(tokens, positions, view)


def other_image(tokens, positions):
    """At each position, the token of another image: content is scrambled."""
    return _by_image(tokens, positions, lambda x: ops.roll(x, 1, axis=0))


VIEWS = {view.__name__: view for view in (position_only, content_only, other_image)}


def _by_image(tokens, positions, view):
    """Apply a view to `(images, positions, D)` tokens."""
    width = tokens.shape[-1]
    images = view(ops.reshape(tokens, (-1, positions, width)))
    return ops.reshape(images, (-1, tokens.shape[1], width))
