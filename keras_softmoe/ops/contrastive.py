"""Contrastive losses of image and text embeddings, with one value per pair."""

import keras
from keras import ops


def softmax_contrastive_loss(logits):
    """Return the cross-entropy of matching images to captions and captions to images.

    Logits are `(B, B)` scaled similarities of images (rows) and captions (columns);
    pairs, two or more, lie on the diagonal. The loss is `(B,)`: for pair `i` the mean
    of the cross-entropies of row `i` and of column `i`. The training loss is its mean.

    Source: LIMoE, section 2.1; Radford et al. 2021 (CLIP), section 2.3.
    """
    logits = _checked(logits)
    pairs = ops.diagonal(logits)
    rows = ops.logsumexp(logits, axis=1) - pairs
    columns = ops.logsumexp(logits, axis=0) - pairs
    return 0.5 * (rows + columns)


def sigmoid_contrastive_loss(logits):
    """Return the binary cross-entropy of "image and caption belong together".

    Logits are as in `softmax_contrastive_loss`, and may be shifted. The loss is `(B,)`:
    for image `i` the sum over all captions. The training loss is its mean.

    Source: Zhai et al. 2023 (SigLIP), section 3.2.
    """
    logits = _checked(logits)
    rows = ops.arange(ops.shape(logits)[0], dtype="int32")
    belongs = ops.cast(ops.equal(ops.expand_dims(rows, -1), rows), logits.dtype)
    return -ops.sum(ops.log_sigmoid((2.0 * belongs - 1.0) * logits), axis=1)


def _checked(logits):
    logits = ops.convert_to_tensor(logits)
    if "float" not in keras.backend.standardize_dtype(logits.dtype):
        logits = ops.cast(logits, "float32")
    shape = tuple(logits.shape)
    # TensorFlow may know the number of pairs only when the graph runs.
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 1:
        raise ValueError(
            "A contrastive loss requires logits of shape (B, B) for at least two "
            f"pairs. Received: logits of shape {shape}."
        )
    return logits
