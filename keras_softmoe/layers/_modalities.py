"""Tokens of several modalities: a dict from a modality's name to its tokens.

Where there is just one, a plain tensor does. What these functions take and return is
either.
"""

import math

import keras
from keras import ops


def each(function, tokens, *others):
    """Apply a function to the tokens of each modality, and what else there is of it.

    Args:
        function: callable.
        tokens: dict from modalities to tokens, or tokens.
        *others: of the same structure, for further arguments. `None` and what a dict
            lacks is `None` for each.
    """
    if isinstance(tokens, dict):
        others = [other or {} for other in others]
        return {
            name: function(x, *(other.get(name) for other in others))
            for name, x in tokens.items()
        }
    return function(tokens, *others)


def masks_like(tokens, masks):
    """Masks with an entry for each modality, as Keras hands them on; `None` for none.

    It would take the only entry of a shorter dict for the mask of the first modality.
    """
    return None if masks is None else each(lambda _, mask: mask, tokens, masks)


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


def join_masks(masks, tokens):
    """`(B, S)` mask of what `join` returns, `None` if no modality has one.

    Args:
        masks: dict of `(B, S)` bool tensors or `None`, or one of them.
        tokens: the tokens that they are of.
    """
    if not isinstance(tokens, dict):
        return masks
    if masks is None or all(mask is None for mask in masks.values()):
        return None
    parts = []
    for name, _ in layout(tokens):
        mask = masks.get(name)
        if mask is None:
            mask = ops.ones_like(tokens[name][..., 0], dtype="bool")
        parts.append(mask)
    return ops.concatenate(parts, axis=1)


def as_sequence(tokens):
    """`(B, ..., D)` tokens as `(B, S, D)`: the axes between are one."""
    return each(lambda x: ops.reshape(x, _sequence_shape(x.shape)), tokens)


def sequence_shapes(shapes):
    """The shapes of what `as_sequence` returns, `B` as it is."""
    return each(lambda shape: (shape[0], *_sequence_shape(shape)[1:]), shapes)


def _sequence_shape(shape):
    return (-1, math.prod(shape[1:-1]), shape[-1])


def check_tokens_shape(shapes, any_rank=False):
    """Raise unless shapes are `(batch, tokens, width)` with known tokens and width.

    With `any_rank` there may be several axes of tokens, which must all be known.
    """
    parts = shapes.values() if isinstance(shapes, dict) else [shapes]
    for shape in parts:
        has_rank = len(shape) >= 3 if any_rank else len(shape) == 3
        if not has_rank or None in tuple(shape[1:]):
            axes = "(batch, ..., width)" if any_rank else "(batch, tokens, width)"
            raise ValueError(
                f"Tokens have a shape {axes}, of which all but the first are known "
                f"beforehand. Received: shape={tuple(shape)}. Give `keras.Input` all "
                "sizes but the batch's, or reshape what comes before the layer."
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
