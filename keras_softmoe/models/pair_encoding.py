"""Embeddings of images alone and of captions alone, and zero-shot classification."""

from collections import Counter

import keras
import numpy as np

from keras_softmoe.checks import check_finite, check_whole_numbers
from keras_softmoe.models import arguments
from keras_softmoe.models.contrastive_preprocessor import checked_captions
from keras_softmoe.models.data import as_arrays, repeat_grey

# Texts that are encoded in one call: a bound on memory, far above a batch.
_TEXTS_PER_CALL = 8192


class PairEncoding:
    """Mixin of contrastive tasks: encode one modality, classify by class names.

    A subclass has a `backbone` and a `preprocessor` or `None`.
    """

    def encode_image(self, images, batch_size=64, verbose=0):
        """Compute embeddings of images alone.

        `images` are `(N, height, width, channels)`, or a list of arrays or PIL images,
        from 0 to 255 (without a preprocessor: in `[-1, 1]`). Returns `(N, width)`
        float32, rows of length one. Source: LIMoE, appendix D.1: experts have a larger
        capacity for one modality (`single_modality_capacity_factor` of the router).
        """
        images = as_arrays(images)
        self.check_input(images)
        check_finite("Images", images, "image")
        return self._encode("image", images, batch_size, verbose)

    def encode_text(self, captions, batch_size=64, verbose=0):
        """Compute embeddings of captions alone.

        `captions` are `N` str, or `(N, sequence_length)` token ids. Returns `(N,
        width)` float32, rows of length one. Source: as `encode_image`.
        """
        return self._encode("text", self._token_ids(captions), batch_size, verbose)

    def _encode(self, modality, inputs, batch_size, verbose):
        """Return the embeddings of images or token ids, batch by batch."""
        check_whole_numbers(1, batch_size=batch_size)
        if not len(inputs):
            raise ValueError(f"There is nothing to encode. Received: {inputs!r}.")
        backbone, embeddings = self.backbone, []
        encoder = getattr(backbone, f"{modality}_encoder")
        bar = keras.utils.Progbar(len(inputs), verbose=verbose, unit_name=modality)
        for start in range(0, len(inputs), batch_size):
            batch = inputs[start : start + batch_size]
            if modality == "text":
                arguments.check_token_ids(batch, backbone.sequence_length)
            else:
                if self.preprocessor is not None:
                    batch = self.preprocessor.convert(batch)
                batch = repeat_grey(batch, backbone.image_shape[-1])
                arguments.check_images(batch, backbone.image_shape)
            embeddings.append(encoder.predict_on_batch(batch)[f"{modality}_embedding"])
            bar.update(min(start + batch_size, len(inputs)))
        return np.concatenate(embeddings)

    def _token_ids(self, captions):
        if "int" in str(getattr(captions, "dtype", "")):
            token_ids = np.asarray(captions)
            arguments.check_vocabulary(token_ids, self.backbone)
            return token_ids.astype("int32")
        if self.preprocessor is None:
            raise ValueError(
                "Captions in words need a task with a `preprocessor`; without one pass "
                f"int token ids, (N, {self.backbone.sequence_length}). Received: "
                f"captions={type(captions).__name__}."
            )
        return self.preprocessor.tokenize(checked_captions(captions))

    def class_embeddings(self, class_names, templates=("{}",)):
        """Compute embeddings of classes from their names, averaged over templates.

        `class_names` are `C` strings, all different, and `templates` have `{}` where
        the name goes. Returns `(C, width)` float32, rows of length one. Source: LIMoE,
        appendix D.2; Radford et al. 2021 (CLIP), section 3.1.4.
        """
        return class_embeddings(self.encode_text, class_names, templates)

    def zero_shot(
        self, images, class_names, templates=("{}",), batch_size=64, verbose=0
    ):
        """Score classes given by their names.

        Arguments are as in `encode_image` and `class_embeddings`. Returns `(N, C)`
        float32, cosines of images and classes. Accuracies: `evaluation.zero_shot`.
        """
        classes = self.class_embeddings(class_names, templates)
        return self.encode_image(images, batch_size, verbose) @ classes.T


def class_embeddings(encode_text, class_names, templates):
    """Compute embeddings of classes with a function of texts, see `PairEncoding`."""
    names, templates = check_names(class_names), _strings("templates", templates)
    without = [text for text in templates if "{}" not in text]
    if without:
        raise ValueError(
            "Each template needs {} where the name of the class goes. Received: "
            f"templates with {without[0]!r}."
        )
    total = 0.0
    step = max(1, _TEXTS_PER_CALL // len(names))
    for start in range(0, len(templates), step):
        part = templates[start : start + step]
        texts = [text.replace("{}", name) for text in part for name in names]
        found = np.asarray(encode_text(texts))
        if found.ndim != 2 or len(found) != len(texts):
            raise ValueError(
                "`encode_text` must return one embedding for each text. "
                f"Received: shape={found.shape} for {len(texts)} texts."
            )
        # (templates, C, D)
        found = keras.utils.normalize(found.astype("float64"))
        found = found.reshape(len(part), len(names), -1)
        total = total + found.sum(axis=0)
    return keras.utils.normalize(total).astype("float32")


def check_names(class_names):
    """Return a list of the names of classes, or raise if they cannot be used."""
    names = _strings("class_names", class_names)
    if len(set(names)) < len(names):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        raise ValueError(
            "The names of classes must all differ. Received: class_names with "
            f"{', '.join(map(repr, repeated[:5]))} more than once. Name them in words, "
            "such as 'crane bird' and 'construction crane'."
        )
    return names


def _strings(name, values):
    """Return a list of strings, or raise unless they are such."""
    is_one = isinstance(values, str) or not np.iterable(values)
    values = [values] if is_one else list(values)
    wrong = [v for v in values if not isinstance(v, str) or not v.strip()]
    if is_one or wrong or not values:
        found = repr(wrong[0] if wrong else values[0]) if values else "none"
        raise ValueError(
            f"`{name}` must be a list of strings, one or more, none of them empty. "
            f"Received: {name} {'=' if is_one else 'with'} {found}."
        )
    return [str(value) for value in values]
