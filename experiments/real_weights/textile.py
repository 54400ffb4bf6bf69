"""2,000 simulated pictures of textile out of a wheel on PyPI, in three classes.

pip download --no-deps --dest build conformal-clip-data==0.1.4

MIT; from Megahed et al. 2025 (arXiv 2501.12596), made with the R package spc4sts.
"""

import io
import zipfile

import numpy as np

CLASSES = ("nominal", "local", "global")
SHARES = {"train": 0.6, "validation": 0.1, "test": 0.3}
_FOLDER = "conformal_clip_data/data/textile_images/simulated"


def read(wheel, size, limit=None):
    """The pictures, split once and for all.

    Args:
        wheel: path of the wheel.
        size: int, pixels of a side: rows and columns are left out to come to it.
        limit: int or `None`, the first pictures of each class that are taken.

    Returns:
        dict from `"train"`, `"validation"` and `"test"` to `(N, size, size, 3)` uint8
        pictures and `(N,)` int32 classes.
    """
    parts = {name: ([], []) for name in SHARES}
    with zipfile.ZipFile(wheel) as archive:
        for label, folder in enumerate(CLASSES):
            files = sorted(
                name
                for name in archive.namelist()
                if name.startswith(f"{_FOLDER}/{folder}/") and name.endswith(".jpg")
            )[:limit]
            order = np.random.default_rng(label).permutation(len(files))
            bounds = np.cumsum([len(files) * s for s in SHARES.values()])
            cuts = np.split(order, np.round(bounds[:-1]).astype(int))
            for (images, labels), chosen in zip(parts.values(), cuts, strict=True):
                images += [_picture(archive, files[i], size) for i in chosen]
                labels += [label] * len(chosen)
    return {
        name: (np.stack(images), np.array(labels, "int32"))
        for name, (images, labels) in parts.items()
    }


def _picture(archive, name, size):
    from PIL import Image

    with Image.open(io.BytesIO(archive.read(name))) as image:
        nearest = Image.Resampling.NEAREST
        return np.asarray(image.convert("RGB").resize((size, size), nearest))
