"""Digits on photographs, segmented by dense, V-MoE and Soft MoE models.

    python -m experiments.segmentation              # all that is missing, 9 trainings
    python -m experiments.segmentation --seeds 0    # one seed of three

Scikit-learn's handwritten digits lie in random colours on crops of its two photographs;
the masks have a class for each digit, and the background. Training draws new scenes in
each epoch. Measured is the mean IoU on scenes of other digits and other parts of the
photographs, beside a linear classifier of single pixels by their colour and place. The
results are in `segmentation.json`; the last lines are the table of `docs/cookbook.md`.
"""

import argparse
import functools
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_sample_image
from sklearn.linear_model import LogisticRegression

import keras_softmoe as ksm
from experiments.lib.runs import (
    Run,
    adamw,
    batches_of,
    check_before,
    finish,
    processor,
    router_config,
    write_json,
)
from keras_softmoe import models, routers

WORK = Path("build/segmentation")
OUTPUT = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)
EPOCHS, SCENES, BATCH_SIZE = 20, 2048, 32
NUM_CLASSES = 11
SIZES = {
    "image_shape": (24, 24, 3),
    "patch_size": 4,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 48,
    "mlp_dim": 96,
}
MOE_LAYERS = (1, 3)
# As many slots as patches and class token
MODELS = {
    "dense": {},
    "V-MoE": {
        "moe_layers": MOE_LAYERS,
        "router": routers.SoftmaxTokenChoiceRouter(8, num_selected_experts=1),
        "group_images": BATCH_SIZE,
    },
    "Soft MoE": {"moe_layers": MOE_LAYERS, "router": routers.SoftRouter(12, 3)},
}


def scenes(split, number, seed):
    """Images `(N, 24, 24, 3)` uint8 and masks `(N, 24, 24)` int32."""
    rng = np.random.default_rng(seed)
    photos = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    left, right = (0, 400) if split == "train" else (400, 640)
    digits = [ksm.datasets.digits(image_size=n, split=split) for n in (16, 20)]
    size = SIZES["image_shape"][0]

    def crop():
        photo = photos[rng.integers(2)]
        row, column = rng.integers(len(photo) - size), rng.integers(left, right - size)
        return photo[row : row + size, column : column + size]

    images = np.empty((number, size, size, 3), "uint8")
    masks = np.zeros((number, size, size), "int32")
    for image, mask in zip(images, masks, strict=True):
        image[:] = crop()
        pixels, labels = digits[rng.integers(len(digits))]
        digit = rng.integers(len(pixels))
        stroke = pixels[digit, :, :, 0] > 100
        row, column = rng.integers(size - len(stroke) + 1, size=2)
        place = slice(row, row + len(stroke)), slice(column, column + len(stroke))
        ink = 0.25 * crop() + 0.75 * rng.integers(256, size=3)
        image[place][stroke] = ink[place][stroke]
        mask[place][stroke] = 1 + labels[digit]
    return images, masks


def segmenter(settings, steps):
    """A compiled segmenter."""
    converter = models.ViTMoEImageConverter(image_size=SIZES["image_shape"][:2])
    model = models.ViTMoEImageSegmenter(
        models.ViTMoEBackbone(**SIZES, **settings),
        NUM_CLASSES,
        models.ViTMoEImageSegmenterPreprocessor(converter),
        decoder_dim=32,
    )
    model.compile(adamw(2e-3, steps, steps // 10, weight_decay=0.05))
    return model


def figures(masks, predicted):
    """Mean IoU over all classes, and the IoU of digits against the background."""
    metric = keras.metrics.MeanIoU(NUM_CLASSES)
    metric.update_state(masks, predicted)
    both, either = (masks > 0) & (predicted > 0), (masks > 0) | (predicted > 0)
    found = {"mean_iou": metric.result(), "digit_iou": both.sum() / either.sum()}
    return {name: float(value) for name, value in found.items()}


def measure(model, test):
    """The `figures` of a segmenter on scenes."""
    images, masks = test
    return figures(masks, model.predict(images, verbose=0).argmax(-1))


def per_pixel(train, test):
    """The `figures` of a linear classifier of the colour and place of a pixel."""

    def rows(images):
        grid = np.moveaxis(np.indices(images.shape[1:3]) / images.shape[1], 0, -1)
        places = np.broadcast_to(grid, (*images.shape[:3], 2))
        values = np.concatenate([images / 255, places], -1).reshape(-1, 5)
        return np.concatenate([values, values**2], -1)

    linear = LogisticRegression(max_iter=200).fit(rows(train[0]), train[1].ravel())
    return figures(test[1], linear.predict(rows(test[0])).reshape(test[1].shape))


def runs(seeds, test):
    """The `Run`s of all models, those of a seed one after the other."""
    steps = SCENES // BATCH_SIZE

    def draw(epoch, seed):
        return batches_of(*scenes("train", SCENES, (seed, epoch)), BATCH_SIZE)

    for seed in seeds:
        for name, settings in MODELS.items():
            yield Run(
                f"{name.replace(' ', '_')}_{seed}",
                seed,
                functools.partial(segmenter, settings, EPOCHS * steps),
                functools.partial(draw, seed=seed),
                EPOCHS,
                steps,
                functools.partial(measure, test=test),
                settings={
                    "sizes": SIZES,
                    "epochs": EPOCHS,
                    "router": router_config(settings.get("router")),
                },
            )


def table(results):
    """The rows of the table, in Markdown, from the results of runs by name."""
    lines = ["| model | mean IoU | digits against background |", "|---|---|---|"]
    for name in ("per pixel", *MODELS):
        found = [
            r for key, r in results.items() if key.startswith(name.replace(" ", "_"))
        ]
        cells = [name]
        for kind in ("mean_iou", "digit_iou") if found else ():
            values = [100 * result[kind] for result in found]
            spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.1f}{spread}")
        if found:
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args(arguments)
    check_before([WORK, chosen.output.parent], chosen.seeds, SEEDS)
    test = scenes("test", SCENES // 2, 0)
    results = {"per_pixel": per_pixel(scenes("train", SCENES // 8, 0), test)}
    for run in runs(chosen.seeds, test):
        results[run.name] = finish(run, WORK)["results"]
        print(run.name, results[run.name], flush=True)
    known = {"backend": keras.config.backend(), "machine": processor()}
    write_json(chosen.output, {**known, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
