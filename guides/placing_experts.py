"""
Title: Placing experts on many devices
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: Models whose experts outgrow one device: plan, place, audit, train, save.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

A mixture of experts may have fifty times the parameters of the dense model whose time
it takes. Nearly all of them are in the experts, and an expert is needed only by the
tokens that it gets. So the experts are spread over devices, and tokens travel.

The placement of the papers needs just one axis of devices. With `n` devices each has

- `1 / n` of the images of a batch,
- `1 / n` of the experts of every layer, with their optimizer moments,
- and all of the rest.

Where a layer mixes experts, the slots that were filled on one device go to the devices
of their experts, and the results come back: two all-to-alls in the forward pass, two in
the backward pass. Weights of experts never move.

`ksm.distribution` builds this on `keras.distribution`, in four steps: plan, place,
audit, train. All of it runs here on a laptop, whose processor XLA can cut into eight
devices, on the JAX backend. PyTorch has a section of its own at the end.

## Setup
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import tempfile

import keras
import numpy as np

import keras_softmoe as ksm

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_IMAGES, EPOCHS = (64, 1) if SHORT else (896, 3)
BATCH_SIZE = 32

print(keras.distribution.list_devices())

"""
## Plan

Will it fit? `plan` answers for any preset, without building it: from the configuration
follow the bytes that each device holds and sends, on every mesh of so many devices.
Here are the largest models of the papers on 128 devices of 80 GB, trained with Adam on
batches of 1,024 images.
"""

LARGE = {
    "soft_moe_large_patch16_128e_224": "13 B",
    "soft_moe_huge_patch14_128e_224": "27 B",
    "soft_moe_huge_patch14_256e_224": "54 B",
    "vmoe_15b_patch14_every2_32e_224": "15 B",
}

for preset in LARGE:
    print(ksm.distribution.plan(preset, devices=128, memory=80e9, batch_size=1024))
    print()

"""
How to read a table. The first line is data parallel: every device holds all experts,
and 54 billion weights, their gradients and two moments do not fit anywhere. In `4 x 32`
the experts are spread over 32 devices and there are four copies of them, whose
gradients have to be summed: more bytes are kept and more are moved. On one axis each
expert exists once. That is the placement to take unless there are more devices than
experts, as for the V-MoE with its 32, or neighbours are connected much better than
strangers.

Weights, moments and gradients are exact. Activations are an estimate, without
rematerialization: the docstring of `plan` says what is counted and how far it was off.
`optimizer=`, `shard_dense=` and every argument of the model can be changed, for example
`dtype="mixed_bfloat16"`.

And how many devices do these models need?
"""


def smallest_mesh(preset, memory):
    """The plan for the fewest devices (a power of two) on which the preset fits."""
    for devices in (2**power for power in range(12)):
        # Eight images on each device, which is one group of the V-MoE
        plan = ksm.distribution.plan(preset, devices, memory, batch_size=8 * devices)
        if plan.fitting:
            return plan
    raise ValueError(f"{preset} does not fit on {devices} devices of {memory} bytes.")


for preset, size in LARGE.items():
    plan = smallest_mesh(preset, memory=80e9)
    mesh = plan.fitting[-1]
    print(
        f"{size}: {preset} fits on {plan.devices} devices ({mesh.label}), "
        f"{mesh.total / 1e9:.1f} GB on each, {mesh.moved / 1e9:.2f} GB moved in a step"
    )

"""
A mesh whose devices do not divide the experts is not in the tables, and asking for it
is an error.

## Place

One line chooses the placement, for everything that is built after it.
"""

distribution = ksm.distribution.expert_parallel()
keras.distribution.set_distribution(distribution)


def make_classifier():
    keras.utils.set_random_seed(0)
    backbone = ksm.models.ViTMoEBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=48,
        mlp_dim=96,
        moe_layers=(1,),
        router=ksm.routers.SoftRouter(num_experts=16),
        pooling="gap",
    )
    converter = ksm.models.ViTMoEImageConverter(image_size=(32, 32))
    classifier = ksm.models.ViTMoEImageClassifier(
        backbone,
        num_classes=10,
        preprocessor=ksm.models.ViTMoEImageClassifierPreprocessor(converter),
    )
    classifier.compile(optimizer=keras.optimizers.Adam(1e-3))
    return classifier


classifier = make_classifier()

"""
## Audit

Layouts are found by the path of a variable, and a rule that matches nothing replicates
its variable on every device without a word: the model trains, with the memory of all
experts on each device. So everything that is built under this placement is checked. The
same check prints what really lies where.
"""

audit = ksm.distribution.audit(classifier)
print(audit)

"""
What a device holds is what the plan said, and a wrong rule is refused by its name.
"""

(mesh,) = (
    mesh
    for mesh in ksm.distribution.plan(classifier, devices=8, memory=16e9).meshes
    if mesh.shape == (1, 8)
)
on_device = sum(
    weight.value.addressable_shards[0].data.nbytes for weight in classifier.weights
)
print(f"weights on a device: planned {mesh.weights:,} bytes, found {on_device:,} bytes")

with ksm.distribution.expert_parallel(
    layouts={"block_1/moe/expert/output_dense/kernel": ("batch", None, None)}
).scope():
    try:
        make_classifier()
    except ksm.distribution.PlacementError as error:
        print("refused:", str(error).splitlines()[1])

"""
## Train

Nothing changes. Each device gets its share of every batch; if the devices do not divide
the last one, all of them compute all of it. Moments lie where their variables lie.
"""

x, y = ksm.datasets.digits(image_size=32, split="train")
x, y = x[:NUM_IMAGES], y[:NUM_IMAGES]
history = classifier.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
print("loss:", ", ".join(f"{loss:.3f}" for loss in history.history["loss"]))

kernel = classifier.backbone.get_layer("block_1").moe.experts.output_dense.kernel
moments = [v for v in classifier.optimizer.variables if v.shape == kernel.shape]
for variable in (kernel, *moments):
    shards = variable.value.addressable_shards
    print(f"{variable.path}: {len(shards)} pieces of {shards[0].data.shape}")

"""
With routers that route several images together (`group_images`), let the batch be a
multiple of that number times the number of devices: each device then routes whole
groups of its own images. Otherwise all tokens are gathered, and a warning says so.

## Another mesh

`mesh_shape=(2, 4)` spreads the experts over four devices and repeats them twice. With
64 devices and 32 experts it has to be at least `(2, 32)`. A model that was saved on one
mesh loads on any other, or on one device.
"""

with tempfile.TemporaryDirectory() as folder:
    keras.distribution.set_distribution(distribution)
    expected = classifier.predict(x[:16], verbose=0)
    classifier.save_to_preset(f"{folder}/digits")
    for placement in (ksm.distribution.expert_parallel(mesh_shape=(2, 4)), None):
        keras.distribution.set_distribution(placement)
        loaded = ksm.models.ViTMoEImageClassifier.from_preset(f"{folder}/digits")
        found = loaded.predict(x[:16], verbose=0)
        where = "one device" if placement is None else "a mesh of 2 x 4"
        print(f"on {where}: largest difference of a logit", end=" ")
        print(f"{np.abs(found - expected).max():.1e}")

"""
## On your devices

**One machine with GPUs or TPUs.** Leave out the flag
`--xla_force_host_platform_device_count`: `expert_parallel()` takes all devices that
`keras.distribution.list_devices()` lists. Choose some with `devices=["gpu:0", ...]`.

**Several hosts.** Each host runs the same program. The first thing that it does, before
it touches a device, is to find the others; then `list_devices()` lists the devices of
all hosts, and nothing else changes:

```python
keras.distribution.initialize(
    job_addresses="10.0.0.1:1234",  # of the first process
    num_processes=4,
    process_id=0,  # 1, 2, 3 on the others
)
keras.distribution.set_distribution(ksm.distribution.expert_parallel())
```

On TPU pods `keras.distribution.initialize()` needs no arguments. For processes on
processors alone, add `jax.config.update("jax_cpu_collectives_implementation", "gloo")`
in front. Feed `fit` the same `tf.data.Dataset` of whole batches on every host: each
takes its rows of every batch. If your hosts read different data already, pass
`expert_parallel(auto_shard_dataset=False)`.

**A large dense part.** `expert_parallel(shard_dense=True)` also cuts the kernels of
attention and dense MLPs. They are gathered where they are needed, which costs time;
`plan(..., shard_dense=True)` says how much memory it saves.

## On PyTorch

It needs Keras 3.16 or its nightly release. Each device has a process of its own, and
`torchrun` starts them and tells them where the others are:

```python
# experts.py, run by: torchrun --nproc-per-node=2 experts.py
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import keras_softmoe as ksm

keras.distribution.initialize()
keras.utils.set_random_seed(0)
keras.distribution.set_distribution(ksm.distribution.expert_parallel())

classifier = ksm.models.ViTMoEImageClassifier.from_preset(
    "soft_moe_tiny_patch8_16e_32_icons", num_classes=129
)
classifier.compile(optimizer=keras.optimizers.Adam(1e-3))
x, y, *_ = ksm.datasets.sample("new_icons")
classifier.fit(x, y, batch_size=32)
classifier.save_to_preset("new_icons")
```

Without `torchrun` pass the address of the first process, how many there are and which
one this is, as above. Then everything is as on JAX: plan, audit, errors, presets and
`Backup`. Two processes train with the losses of one, and each holds half of the
experts.
Four things to know:

- **Seeds.** Each process draws the weights that all of them hold, so all need the same
  seed. Different weights are an error before the first step.
- **Data.** Each process is given the whole data and takes its rows of every batch:
  arrays for the models of this library, and `tf.data` datasets for any. If your
  processes read different data, pass `expert_parallel(auto_shard_dataset=False)`; then
  data may have any form, and each process feeds equally many rows.
- **Dropout** without a seed is drawn by PyTorch. On processors, where it warns of that,
  all processes draw the same mask for different images.
- **One axis.** `mesh_shape` is for JAX, and so is `data_parallel`: for replicas see
  `data_parallel.py`.

With an older Keras `expert_parallel` raises instead of running on one device. So it
does on TensorFlow, where replicas of the whole model work: see
`data_parallel.py`.
"""
