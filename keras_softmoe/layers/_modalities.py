"""Tokens of several modalities: a dict from a modality's name to its tokens.

Where there is just one, a plain tensor does. What these functions take and return is
either.
"""

import keras
from keras import ops


def each(function, tokens):
    """Apply a function to the tokens of each modality."""
    if isinstance(tokens, dict):
        return {name: function(x) for name, x in tokens.items()}
    return function(tokens)


def add(x, y):
    """Sum, modality by modality."""
    return keras.tree.map_structure(ops.add, x, y)


def layout(tokens):
    """Pairs of modality and number of tokens, in the order in which `join` puts them.

    Args:
        tokens: dict of `(B, S, D)` tensors or shapes, or one of them.

    Returns:
        tuple of `(name, S)`, empty if there is just one modality without a name.
    """
    if not isinstance(tokens, dict):
        return ()
    return tuple((name, _shape(tokens[name])[1]) for name in sorted(tokens))


def join(tokens):
    """`(B, S, D)` of all modalities, one after the other in alphabetical order."""
    if not isinstance(tokens, dict):
        return tokens
    return ops.concatenate([tokens[name] for name, _ in layout(tokens)], axis=1)


def split(joined, tokens):
    """The inverse of `join`, for tokens like those that were joined."""
    if not isinstance(tokens, dict):
        return joined
    parts, start = {}, 0
    for name, count in layout(tokens):
        parts[name] = joined[:, start : start + count]
        start += count
    return parts


def joined_shape(shapes):
    """The shape of what `join` returns for tokens of some shapes."""
    if not isinstance(shapes, dict):
        return shapes
    batch, _, width = next(iter(shapes.values()))
    return (batch, sum(count for _, count in layout(shapes)), width)


def check_tokens_shape(shapes):
    """Raise unless shapes are `(batch, tokens, width)` with known tokens and width."""
    parts = shapes.values() if isinstance(shapes, dict) else [shapes]
    for shape in parts:
        if len(shape) != 3 or shape[1] is None or shape[2] is None:
            raise ValueError(
                "Routing needs tokens of shape (batch, tokens, width), the last two "
                f"known beforehand. Received: shape={tuple(shape)}. Reshape images or "
                "feature maps to a sequence first."
            )
    if not parts or len({shape[2] for shape in parts}) > 1:
        raise ValueError(
            "The modalities that are routed together must have one width. Received: "
            f"shapes={shapes}."
        )


def sum_costs(cost_of_shape, shapes):
    """What a layer costs that is applied to each modality: its weights count once.

    Args:
        cost_of_shape: callable from a shape to a `costs.LayerCost`.
        shapes: dict of shapes, or one of them.
    """
    parts = shapes.values() if isinstance(shapes, dict) else [shapes]
    first, *others = map(cost_of_shape, parts)
    return sum((cost.without_weights() for cost in others), start=first)


def _shape(tokens):
    return getattr(tokens, "shape", tokens)
