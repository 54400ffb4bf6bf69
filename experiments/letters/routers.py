"""V-MoE's router with a changed view of the tokens."""

import keras
from keras import ops

from keras_softmoe.routers import SoftmaxTokenChoiceRouter


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
