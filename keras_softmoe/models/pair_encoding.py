"""Embeddings of images alone and of captions alone, and zero-shot classification."""

import keras
import numpy as np

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.models.arguments import (
    check_finite_images,
    check_pairs,
    check_vocabulary,
)
from keras_softmoe.models.class_embeddings import class_embeddings
from keras_softmoe.models.contrastive_preprocessor import checked_captions
from keras_softmoe.models.data import as_arrays, repeat_grey


class PairEncoding:
    """Mixin of contrastive tasks: encode one modality, classify by class names.

    A subclass has a `backbone` with an `image_encoder` and a `text_encoder`, and a
    `preprocessor` or `None`.
    """

    def encode_image(self, images, batch_size=64, verbose=0):
        """Compute embeddings of images alone.

        Args:
            images: `(N, height, width, channels)` array, or list of arrays or PIL
                images, from 0 to 255 (without a preprocessor: in `[-1, 1]`).
            batch_size: int, images per forward pass.
            verbose: 0 or 1, whether to show a progress bar.

        Returns:
            `(N, width)` float32 array, rows of length one.

        Raises:
            ValueError: if images have another shape than the model's, or are not
                finite.

        Source: LIMoE, appendix D.1: experts get a larger capacity, since images alone
        do not use all of them (`single_modality_capacity_factor` of the router).

        Examples:
            >>> similarity = limoe.encode_image(scenes) @ limoe.encode_text(captions).T
            >>> similarity.shape
            (8, 8)
        """
        images, channels = as_arrays(images), self.backbone.image_shape[-1]
        self.check_input(images)
        check_finite_images(images)

        def convert(batch):
            if self.preprocessor is not None:
                batch = self.preprocessor.convert(batch)
            return repeat_grey(batch, channels)

        encoder = self.backbone.image_encoder
        return self._encode(encoder, images, convert, "image", batch_size, verbose)

    def encode_text(self, captions, batch_size=64, verbose=0):
        """Compute embeddings of captions alone.

        Args:
            captions: list or array of `N` str, or `(N, sequence_length)` token ids.
            batch_size: int, captions per forward pass.
            verbose: 0 or 1, whether to show a progress bar.

        Returns:
            `(N, width)` float32 array, rows of length one.

        Raises:
            ValueError: if captions are not valid inputs of the preprocessor.

        Source: as `encode_image`.
        """
        token_ids = self._token_ids(captions)
        encoder = self.backbone.text_encoder
        return self._encode(
            encoder, token_ids, lambda ids: ids, "text", batch_size, verbose
        )

    def _encode(self, encoder, inputs, convert, modality, batch_size, verbose):
        if not len(inputs):
            raise ValueError(f"There is nothing to encode. Received: {inputs!r}.")
        bar = keras.utils.Progbar(len(inputs), verbose=verbose, unit_name=modality)
        embeddings = []
        check_whole_numbers(1, batch_size=batch_size)
        for start in range(0, len(inputs), batch_size):
            batch = convert(inputs[start : start + batch_size])
            halves = {"image": None, "text": None} | {modality: batch}
            check_pairs(self.backbone, halves["image"], halves["text"])
            found = encoder.predict_on_batch(batch)
            embeddings.append(found[f"{modality}_embedding"])
            bar.update(min(start + batch_size, len(inputs)))
        return np.concatenate(embeddings)

    def _token_ids(self, captions):
        if "int" in str(getattr(captions, "dtype", "")):
            token_ids = np.asarray(captions)
            check_vocabulary(token_ids, self.backbone)
            return token_ids.astype("int32")
        if self.preprocessor is None:
            raise ValueError(
                "Without a preprocessor there is no tokenizer: pass token ids, "
                f"(N, {self.backbone.sequence_length}) ints, or give the task a "
                "`preprocessor`. Received: captions of type "
                f"{type(captions).__name__}."
            )
        return self.preprocessor.tokenize(checked_captions(captions))

    def class_embeddings(self, class_names, templates=("{}",)):
        """Compute embeddings of classes from their names, averaged over templates.

        Args:
            class_names: `C` strings, all different.
            templates: strings, each with `{}` where the name goes.

        Returns:
            `(C, width)` float32 array, rows of length one.

        Raises:
            ValueError: if names repeat, or a template has no `{}`.

        Source: LIMoE, appendix D.2, which follows Radford et al. 2021 (CLIP), section
        3.1.4.
        """
        return class_embeddings(self.encode_text, class_names, templates)

    def zero_shot(
        self, images, class_names, templates=("{}",), batch_size=64, verbose=0
    ):
        """Score classes that are given by their names alone.

        Args:
            images: as in `encode_image`.
            class_names: `C` strings, all different.
            templates: strings, each with `{}` where the name goes.
            batch_size: int, images per forward pass.
            verbose: 0 or 1, whether to show a progress bar.

        Returns:
            `(N, C)` float32 array, the cosine of each image and class; `argmax(-1)`
            are the predicted classes. `evaluation.zero_shot` also counts how many are
            right.

        Raises:
            ValueError: as `class_embeddings` and `encode_image`.

        Source: as `class_embeddings`.

        Examples:
            >>> scores = limoe.zero_shot(scenes, ["red circle", "blue star"], ["a {}"])
            >>> scores.argmax(-1).shape
            (8,)
        """
        classes = self.class_embeddings(class_names, templates)
        return self.encode_image(images, batch_size, verbose) @ classes.T
