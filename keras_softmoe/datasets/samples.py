"""Small samples of the synthetic images that the trained presets are about."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_softmoe.checks import check_choice, check_whole_numbers

_DIRECTORY = Path(__file__).with_name("samples")
_NAMES = ("glyphs", "letters", "shapes", "new_shapes")


class Sample(NamedTuple):
    """Images with labels and captions, N of each.

    Attributes:
        images: uint8 array of shape (N, size, size, 3), 0 to 255. `size` is 20 of
            letters, 32 of all others.
        labels: int32 array of shape (N,), indices into `class_names`.
        class_names: list of str.
        captions: array of N str.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: list
    captions: np.ndarray


def sample(name: str, num_images: int | None = None) -> Sample:
    """Return synthetic images that no preset was trained on.

    - `"glyphs"`: 512 letters and signs of 179 classes, white on black, drawn from fonts
      in random weight, sharpness and perspective, some of them coarse or noisy. No
      digits. The caption is the sign itself.
    - `"letters"`: 512 letters and signs of 2,600 classes, anywhere in the image.
    - `"shapes"`: 256 scenes of colored shapes, one to three in a picture, with captions
      that mention all or a part: "two green rings", "the square is over the blue
      heart". Classes are the 64 combinations of color and shape; the label of a pair is
      that of its first thing.
    - `"new_shapes"`: 256 scenes of lone and like things in the 16 combinations that no
      training scene and no training caption had.

    The programs that drew them are in `experiments/synthetic` of the repository.

    Args:
        name: str, see above.
        num_images: int, the first so many. All if `None`.

    Returns:
        `Sample`, a named tuple of `images`, `labels`, `class_names` and `captions`.

    Raises:
        ValueError: if there is no such sample, or it has fewer images.

    Examples:
        >>> images, labels, class_names, captions = ksm.datasets.sample("glyphs")
        >>> scenes = ksm.datasets.sample("shapes", 20)
        >>> scenes.images.shape, scenes.captions[0]
    """
    check_choice("name", name, _NAMES)
    with np.load(_DIRECTORY / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file}
    if num_images is not None:
        check_whole_numbers(1, num_images=num_images)
        found = len(arrays["images"])
        if num_images > found:
            raise ValueError(
                f"The sample {name!r} has {found} images. Received: "
                f"num_images={num_images}."
            )
    images = arrays["images"][:num_images]
    return Sample(
        images=np.repeat(images, 3 // images.shape[-1], axis=-1),
        labels=arrays["labels"][:num_images],
        class_names=arrays["class_names"].tolist(),
        captions=arrays["captions"][:num_images],
    )
