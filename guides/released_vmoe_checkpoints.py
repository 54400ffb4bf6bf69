"""
Title: Released V-MoE checkpoints
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: Load the released V-MoE weights in one line, or read and convert your own.
Accelerator: None
"""

# ruff: noqa: E402

"""
## In one line

The authors of V-MoE released five checkpoints. Each has a preset here, and loads like
any other:

```python
name = "vmoe_base_patch16_every2_8e_384_imagenet"
classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
classifier.predict(photos)
```

The first time, the checkpoint is downloaded, converted, and kept in the directory of
Keras; after that it loads from there. Fine-tuning is `from_preset(name,
num_classes=10)` and `fit`.

This guide needs no network. It lists the presets, then writes a small checkpoint in the
same format, and does by hand what `from_preset` does by itself.

## Setup

The library reads the format and never writes it. The writer belongs to the tests, so
this guide needs a checkout of the repository that is installed: `pip install -e .`.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import numpy as np

import keras_softmoe as ksm
from tests.support.checkpoint_writer import write_checkpoint

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_TRAIN, EPOCHS = (32, 1) if SHORT else (901, 4)

folder = Path(tempfile.mkdtemp())

"""
## What was released

`describe` says where a checkpoint is kept, and the accuracy that its authors published.
The card of a preset has more: which runs the figure is the mean of, and how images are
to be cropped. It is the `README.md` in the directory that `ksm.presets.write` creates.
"""

for name in ksm.presets.names():
    preset = ksm.presets.describe(name)
    if preset.kind == "convertible":
        print(f"{name}: {preset.parameters / 1e6:.0f} M parameters")
        print(f"    {preset.checkpoint}")
        for images, accuracy in preset.accuracy.items():
            print(f"    {accuracy:.1%} on {images}")

"""
Where the bucket is out of reach, `from_preset` fails with a message that names the
files to fetch elsewhere, and the call that converts the copies once:

```python
ksm.presets.convert(name, prefix="downloads/vmoe_b16_imagenet21k_randaug_strong")
```

## A checkpoint

For a checkpoint to play with, take a small V-MoE that was trained on icons. Its
parameters under the names of the released code are one call away. They go into one
index and two data files; the banks of experts are cut by expert, as they are when every
expert was trained on a device of its own.
"""

original = ksm.models.ViTMoEImageClassifier.from_preset("vmoe_tiny_patch8_8e_32_icons")
params = ksm.converters.to_vmoe_params(original)
cuts = {
    name: (range(1, len(array)),) + ((),) * (array.ndim - 1)
    for name, array in params.items()
    if "/Moe/Mlp/" in name
}
prefix = folder / "vmoe_tiny"
write_checkpoint(prefix, params, num_shards=2, cuts=cuts)
for path in sorted(folder.iterdir()):
    print(f"{path.name}: {path.stat().st_size:,} bytes")

"""
## Read it

`read_checkpoint` opens the files and checks all of them: that every array is there,
whole and once, and of the dtype that the index claims. It reads no array yet. The
result is a mapping from name to array; each is read when it is asked for, so memory
holds one array at a time, however large the checkpoint is.
"""

checkpoint = ksm.converters.read_checkpoint(prefix)
print(checkpoint)
name = "Encoder/encoderblock_3/Moe/Mlp/Dense_0/kernel"
print(name, checkpoint.shapes[name])
kernel = checkpoint[name]
print(f"read: {kernel.dtype}, mean {kernel.mean():.4f}")

"""
Checkpoints come from anywhere, so nothing in them is trusted or unpickled. A file that
is cut short, for example by a download that broke off, is refused:
"""

data = folder / "vmoe_tiny.data-00000-of-00002"
content = data.read_bytes()
data.write_bytes(content[:-100])
try:
    ksm.converters.read_checkpoint(prefix)
except ksm.converters.CheckpointError as error:
    print(f"refused: {error}")
data.write_bytes(content)

"""
## Convert it

The names and shapes of the parameters tell most of the model: widths, heads, which
blocks have experts, and so on. What they do not tell are arguments. Their defaults are
the settings of the released models:

- the **router**: token choice with K = 2 and a capacity factor of 1.05, and slots
  rounded up to a multiple of four (`rounding="ceil", multiple_of=4`; a router made by
  hand has the nearest whole number, as in the paper);
- **groups** of 8 images that share the experts' slots;
- **bfloat16**: the released code rounds tokens on their way to the experts and back,
  and a model that was trained so computes a little differently without it.

Our small model is another one in all of this: each token chooses one expert, in groups
of 32 images, and in predictions without a limit. It has no class token. Its learned
positions are those of 4 x 4 patches, which tells the size of the images.
"""

preset_dir = folder / "my_vmoe"
ksm.converters.convert_vmoe_checkpoint(
    prefix,
    preset_dir,
    pooling="gap",
    # Or one made by hand: `ksm.routers.SoftmaxTokenChoiceRouter(num_experts=8, ...)`
    router=original.backbone.router,
    group_images=32,
    dispatch_dtype=None,
)
print(sorted(path.name for path in preset_dir.iterdir()))

"""
The result is a preset like any other, on every backend:
"""

images, labels, concepts, _ = ksm.datasets.sample("new_icons")
order = np.random.default_rng(0).permutation(len(images))[:NUM_TRAIN]
images, labels = images[order], labels[order]
converted = ksm.models.ViTMoEImageClassifier.from_preset(str(preset_dir))
expected = original.predict(images[:8], verbose=0)
logits = converted.predict(images[:8], verbose=0)
print(f"largest difference of a logit: {np.abs(logits - expected).max():.1e}")

"""
## Change it

What a checkpoint was trained with need not be what it is used with. Fewer slots save
time (V-MoE, section 4), more choices of experts may be more accurate (appendix E.4).
Settings of the routers can change while the model lives, and the rounding to bfloat16
when it is loaded.
"""

converted.set_routing(capacity_factor=0.5)
halved = converted.predict(images[:8], verbose=0)
converted.set_routing(capacity_factor=1.05, num_selected_experts=2)
doubled = converted.predict(images[:8], verbose=0)
rounded = ksm.models.ViTMoEImageClassifier.from_preset(
    str(preset_dir), dispatch_dtype="bfloat16"
).predict(images[:8], verbose=0)
for change, outputs in (
    ("slots for half of the tokens", halved),
    ("two experts per token", doubled),
    ("bfloat16 on the way", rounded),
):
    print(f"{change}: logits change by up to {np.abs(outputs - logits).max():.3f}")

"""
## Fine-tune it

On another task, with a new head, at another resolution if you like: positions that
were learned are resampled. The released checkpoints were themselves fine-tuned at
384 x 384 from 224 x 224 in this way. The recipe `"finetuning"` is that of the paper:
SGD with momentum, a warmup and a cosine. Its crops and flips are not for icons: an
arrow to the left is another concept than one to the right.
"""

classifier = ksm.models.ViTMoEImageClassifier.from_preset(
    str(preset_dir), num_classes=len(concepts), image_shape=(40, 40, 3)
)
recipe = ksm.training.recipe(
    "finetuning",
    num_classes=len(concepts),
    steps=EPOCHS * (NUM_TRAIN // 32),
    peak_learning_rate=0.01,
    image_size=40,
    batch_size=32,
    augmentation="none",
    steps_per_epoch=NUM_TRAIN // 32,
)
recipe.compile(classifier)
batches = recipe.training_data((images, labels))
history = classifier.fit(batches, verbose=2, **recipe.fit_arguments)
print(f"fine-tuned: loss {history.history['loss'][-1]:.3f}")
