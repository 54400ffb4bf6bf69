"""
Title: Segmentation with experts
Author: keras_softmoe authors
Date created: 2026/11/27
Last modified: 2026/11/27
Description: A V-MoE that finds digits on photographs, and what its experts take.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

`ViTMoEImageSegmenter` gives each pixel a class: the patches of a `ViTMoEBackbone`, as
maps of several scales, go through a small decoder. This guide

1. lays handwritten digits on photographs, which gives images with true masks;
2. trains a V-MoE on them, and measures the mean IoU beside a classifier of pixels;
3. draws what each expert takes, beside the mask;
4. saves the model, and loads it for larger images;
5. puts the same backbone into a segmenter of KerasHub.

## Setup
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image
from sklearn.linear_model import LogisticRegression

import keras_softmoe as ksm

keras.utils.set_random_seed(0)

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_TRAIN, NUM_TEST, EPOCHS = (64, 80, 1) if SHORT else (1280, 512, 20)
SIZE, NUM_CLASSES = 24, 11

"""
## Images and masks

Digits and two photographs ship with scikit-learn. A digit lies in a random colour on a
random crop; the mask has 0 for the background, and 1 to 10 for the digits 0 to 9. Train
and test have other digits, and other halves of the photographs.
"""

photos = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]


def scenes(split, number, rng):
    digits = [ksm.datasets.digits(image_size=n, split=split) for n in (16, 20)]
    start, end = (0, 400) if split == "train" else (400, 640)

    def crop():
        photo = photos[rng.integers(2)]
        y, x = rng.integers(len(photo) - SIZE), rng.integers(start, end - SIZE)
        return photo[y : y + SIZE, x : x + SIZE]

    images = np.empty((number, SIZE, SIZE, 3), "uint8")
    masks = np.zeros((number, SIZE, SIZE), "int32")
    for image, mask in zip(images, masks, strict=True):
        image[:] = crop()
        pixels, labels = digits[rng.integers(2)]
        digit = rng.integers(len(pixels))
        stroke = pixels[digit, :, :, 0] > 100
        y, x = rng.integers(SIZE - len(stroke) + 1, size=2)
        place = slice(y, y + len(stroke)), slice(x, x + len(stroke))
        ink = 0.25 * crop() + 0.75 * rng.integers(256, size=3)
        image[place][stroke] = ink[place][stroke]
        mask[place][stroke] = 1 + labels[digit]
    return images, masks


rng = np.random.default_rng(0)
x_test, y_test = scenes("test", NUM_TEST, rng)
print("images:", x_test.shape, "masks:", y_test.shape)
print(f"background: {(y_test == 0).mean():.0%} of the pixels")

"""
## A model

The decoder projects each map of the pyramid, resizes it to the largest one, sums them,
and convolves once (`decoder_dim=None` is a linear decoder). The preprocessor resizes
images and masks alike. Groups of a whole batch share the slots of the experts, so that
few patches are dropped.
"""

backbone = ksm.models.ViTMoEBackbone(
    image_shape=(SIZE, SIZE, 3),
    patch_size=4,
    num_layers=4,
    num_heads=4,
    hidden_dim=48,
    mlp_dim=96,
    moe_layers=(1, 3),
    router=ksm.routers.SoftmaxTokenChoiceRouter(8, capacity_factor=2.0),
    group_images=32,
)
print({name: tuple(x.shape[1:3]) for name, x in backbone.pyramid_outputs.items()})
model = ksm.models.ViTMoEImageSegmenter(
    backbone,
    NUM_CLASSES,
    ksm.models.ViTMoEImageSegmenterPreprocessor(ksm.models.ViTMoEImageConverter()),
    decoder_dim=32,
)
model.compile(keras.optimizers.AdamW(2e-3))
cost = ksm.evaluation.cost(model)
print(
    f"{cost.parameters:,} parameters, {1e3 * cost.gflop_per_image:.1f} MFLOP per image"
)

"""
## Training

Each epoch has new scenes. `mean_iou`, the mean over the classes of intersection over
union, is reported by `fit`.
"""

for epoch in range(EPOCHS):
    x_train, y_train = scenes("train", NUM_TRAIN, rng)
    history = model.fit(x_train, y_train, batch_size=32, verbose=0).history
    if epoch % 5 == 4 or SHORT:
        print(f"epoch {epoch + 1}: mean IoU {history['mean_iou'][0]:.3f} in training")

"""
Beside it, a linear classifier of single pixels by their colour:
"""


def digit_iou(masks, predicted):
    """IoU of all digits together against the background."""
    both, either = (masks > 0) & (predicted > 0), (masks > 0) | (predicted > 0)
    return both.sum() / either.sum()


def mean_iou(masks, predicted):
    classes = range(NUM_CLASSES)
    pairs = [(masks == c, predicted == c) for c in classes]
    return np.mean([(a & b).sum() / max((a | b).sum(), 1) for a, b in pairs])


linear = LogisticRegression(max_iter=1000)
linear.fit(x_train[:16].reshape(-1, 3) / 255, y_train[:16].ravel())
by_pixel = linear.predict(x_test.reshape(-1, 3) / 255).reshape(y_test.shape)
predicted = model.predict(x_test, verbose=0).argmax(-1)
for name, found in (("V-MoE", predicted), ("single pixels", by_pixel)):
    figures = mean_iou(y_test, found), digit_iou(y_test, found)
    print(
        "{}: mean IoU {:.3f}, digits against background {:.3f}".format(name, *figures)
    )

"""
Three seeds of a dense model, of V-MoE and of Soft MoE, trained longer on such scenes,
are in the [cookbook](../cookbook.md#segment).

## What the experts take

`analyze` records the decisions of the routers. In each image, the expert that a patch
goes to, beside the mask; white patches are dropped.
"""

os.makedirs("build", exist_ok=True)
routing = ksm.analysis.analyze(model, x_test[:6], num_pictures=6, verbose=0)
names = ("image", "mask", "predicted", *(f"experts of block {b}" for b in (1, 3)))
figure, axes = plt.subplots(5, 6, figsize=(8, 7))
for column in range(6):
    rows = [x_test[column], y_test[column], predicted[column]]
    for block in (1, 3):
        experts = routing.maps[block].main_experts[column]
        rows.append(np.ma.masked_less(experts, 0))
    for row, (ax, picture) in enumerate(zip(axes[:, column], rows, strict=True)):
        limit = NUM_CLASSES - 1 if row < 3 else 7
        ax.imshow(picture, cmap="tab20" if row < 3 else "Set2", vmin=0, vmax=limit)
        ax.set(xticks=[], yticks=[])
        if column == 0:
            ax.set_ylabel(names[row], fontsize=8)
figure.tight_layout()
figure.savefig("build/experts_beside_masks.png", dpi=120)

"""
Whether an expert is one for strokes can be counted: of its patches, how many have more
than a quarter of a digit in them?
"""

maps = ksm.analysis.analyze(model, x_test[:64], num_pictures=64, verbose=0).maps
patches = (y_test[:64] > 0).reshape(-1, SIZE // 4, 4, SIZE // 4, 4).mean((2, 4))
is_stroke = patches > 0.25
print(f"all patches: {is_stroke.mean():.0%} strokes")
for block, found in maps.items():
    shares = [
        f"{is_stroke[found.main_experts == expert].mean():.0%}"
        for expert in range(8)
        if (found.main_experts == expert).any()
    ]
    print(f"block {block}: {', '.join(shares)}")

"""
## A few labelled patches

How much of the classes the patches know without a decoder: a linear probe of a few
labelled patches, of digits and of the background, by their middle pixel.
"""


def patches(images, masks):
    scaled = model.preprocessor(images)
    tokens = model.backbone.predict(scaled, verbose=0)["sequence_output"]
    # Without the class token
    tokens = tokens[:, -np.prod(model.backbone.patch_grid) :]
    is_digit = (masks[:, 2::4, 2::4] > 0).astype("int32")
    return tokens.reshape(-1, tokens.shape[-1]), is_digit.ravel()


probe = ksm.evaluation.few_shot_probe(
    None,
    patches(x_train[:64], y_train[:64]),
    patches(x_test, y_test),
    shots=(5, 50),
    verbose=0,
)
print(probe)

"""
## Save, load, other sizes

A preset holds the decoder and the preprocessor. With another `image_shape` the position
embeddings are resampled; images of any size are resized to it.
"""

with tempfile.TemporaryDirectory() as folder:
    model.save_to_preset(str(Path(folder, "segmenter")))
    loaded = keras_hub.models.ImageSegmenter.from_preset(str(Path(folder, "segmenter")))
    same = loaded.predict(x_test, verbose=0).argmax(-1)
    print(type(loaded).__name__, f"same class of {(same == predicted).mean():.1%}")
    larger = ksm.models.ViTMoEImageSegmenter.from_preset(
        str(Path(folder, "segmenter")), image_shape=(32, 48, 3)
    )
    print("masks:", larger.predict(x_test[:4], verbose=0).shape)

"""
## In a segmenter of KerasHub

The backbone is a `FeaturePyramidBackbone`: DeepLabV3, RetinaNet and others take it.
(Models of KerasHub with a Transformer inside, such as SegFormer, DepthAnything or SAM,
get experts from `ksm.converters.add_experts(task, ...)`.)
"""

deeplab = keras_hub.models.DeepLabV3ImageSegmenter(
    keras_hub.models.DeepLabV3Backbone(
        backbone,
        spatial_pyramid_pooling_key="P3",
        upsampling_size=2,
        dilation_rates=[2],
        low_level_feature_key="P2",
        projection_filters=16,
        image_shape=(SIZE, SIZE, 3),
    ),
    num_classes=NUM_CLASSES,
)
print("DeepLabV3:", deeplab.output.shape)
