"""The encoder block of LIMoE: images and text, each with its own attention."""

import keras
from keras import ops

from keras_softmoe.layers.encoder_block import EncoderBlock
from keras_softmoe.layers.groups import check_tokens_shape
from keras_softmoe.ops.kernels import as_mask


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoEBlock(EncoderBlock):
    """Encoder block for tokens of several modalities.

    Attention and an MLP are applied to each modality. A `MoE` routes all together.
    Arguments are those of `EncoderBlock`. Inputs and outputs are dicts from modalities
    (`"image"`, `"text"`) to `(B, S, D)` tensors of equal batch sizes and widths; an
    optional mask is a dict from some of them to `(B, S)` bool tensors.

    Source: LIMoE, section 2.
    """

    def build(self, inputs_shape):
        shapes = inputs_shape
        if not isinstance(shapes, dict) or not shapes or None in shapes.values():
            raise ValueError(
                f"Tokens: a dict of one or more names to tensors. Received: {shapes=}."
            )
        for shape in shapes.values():
            check_tokens_shape(shape)
        if len({shape[-1] for shape in shapes.values()}) > 1:
            raise ValueError(
                f"Modalities routed together must have one width. Received: {shapes=}."
            )
        batch, _, width = next(iter(shapes.values()))
        num_tokens = sum(shape[1] for shape in shapes.values())
        # Attention differs in the number of tokens, which it is not built for.
        super().build((batch, num_tokens, width))

    def call(self, inputs, mask=None, training=None):
        masks = {} if mask is None else mask
        if not isinstance(masks, dict) or set(masks) - set(inputs):
            raise ValueError(
                "`mask` is a dict with names among those of the tokens. Received: a "
                f"mask of {list(masks) if isinstance(masks, dict) else masks.shape} "
                f"for tokens of {sorted(inputs)}."
            )
        # 1. Attention within each modality
        sums, tokens = {}, {}
        for name, x in inputs.items():
            sums[name], tokens[name] = self.before_mlp(x, masks.get(name), training)
        # 2. An MLP for each modality, or experts for all tokens
        if self.moe is None:
            outputs = {}
            for name, x in tokens.items():
                known = {"mask": masks.get(name)} if self._masks_mlp else {}
                outputs[name] = self.mlp(x, **known)
        else:
            names = sorted(tokens)
            layout = tuple((name, tokens[name].shape[1]) for name in names)
            joined = self.moe(
                join([tokens[name] for name in names]),
                mask=join_masks(masks, tokens),
                training=training,
                modalities=layout,
            )
            outputs = split(joined, layout)
        # 3. The residual sum
        return {name: self._sum(x, outputs[name], training) for name, x in sums.items()}

    def compute_mask(self, inputs, previous_mask=None):
        # An entry for each modality: Keras would use a single one for the first.
        if previous_mask is None:
            return None
        return {name: previous_mask.get(name) for name in inputs}


# Keras names the parts of files by classes: those of LIMoE have `encoder_block`.
LIMoEBlock.__name__ = "EncoderBlock"


def join(parts):
    """Concatenate the `(B, S, D)` tokens of modalities, or raise if batches differ."""
    sizes = {x.shape[0] for x in parts if isinstance(x.shape[0], int)}
    if len(sizes) > 1:
        shapes = [tuple(x.shape) for x in parts]
        raise ValueError(
            "The modalities that are routed together belong to the same examples: "
            f"pass batches of one size. Received: shapes={shapes}."
        )
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=1)


def join_masks(masks, tokens):
    """Return the `(B, S)` mask of joined tokens, `None` if no modality has one."""
    if all(mask is None for mask in masks.values()):
        return None
    parts = []
    for name in sorted(tokens):
        mask = masks.get(name)
        if mask is None:
            mask = ops.ones_like(tokens[name][..., 0])
        parts.append(as_mask(mask))
    return ops.concatenate(parts, axis=1)


def split(joined, layout):
    """Split joined tokens to a dict, by pairs of modality and number of tokens."""
    parts, start = {}, 0
    for name, count in layout:
        parts[name] = joined[:, start : start + count]
        start += count
    return parts
