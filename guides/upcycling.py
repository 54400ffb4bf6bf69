"""
Title: Upcycling
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: Turn a trained dense Vision Transformer into a mixture of experts.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

Training a mixture of experts from scratch is expensive. *Sparse upcycling* (Komatsuzaki
et al. 2023) starts from a dense model that exists: in some blocks the MLP is copied
into every expert, a new router is put in front, and training goes on. The copies part
as they see different tokens.

This guide

1. upcycles a dense preset, with a router that leaves its outputs as they were;
2. shows which routers do that, and why others cannot;
3. starts routers and experts from images, which brings a soft router closer;
4. goes on training, beside the dense model;
5. does the same to a checkpoint of an original Vision Transformer.

## Setup
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import keras
import numpy as np

import keras_softmoe as ksm

keras.utils.set_random_seed(0)

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_TRAIN, NUM_TEST, EPOCHS = (32, 32, 1) if SHORT else (1024, 1949, 5)

# Icons are in the order of their sets: take them from all.
x_train, y_train, concepts, _ = ksm.datasets.sample("new_icons")
order = np.random.default_rng(0).permutation(len(x_train))[:NUM_TRAIN]
x_train, y_train = x_train[order], y_train[order]
x_test, y_test, *_ = ksm.datasets.sample("other_new_icons", NUM_TEST)

"""
## A dense model becomes sparse

The dense preset was trained on icons of 1,229 concepts; its head is for those. The
images here are of 129 concepts that it never saw, those of the test in other styles
than those of the training. Two of its six blocks get experts. Everything is copied but
the routers, which are new.

What comes out depends on the router alone, since all experts of a block are equal at
first. Here each token chooses 2 of 8 experts. Two settings see to it that it gets the
output of the one MLP, unchanged:

- `normalize_gates=True`: its two weights sum to one;
- `capacity_factor=8 / 2`: every expert has room for every token, so none is turned
  away.
"""

dense = ksm.models.ViTMoEImageClassifier.from_preset("vit_tiny_patch8_32_icons")
router = ksm.routers.SoftmaxTokenChoiceRouter(
    num_experts=8, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
)
sparse = ksm.converters.upcycle(dense, moe_layers=(3, 5), router=router)
print(f"dense:  {dense.count_params():,} parameters")
print(f"sparse: {sparse.count_params():,} parameters")

before = dense.predict(x_test[:8], verbose=0)
after = sparse.predict(x_test[:8], verbose=0)
print(f"largest difference of a logit: {np.abs(after - before).max():.1e}")

"""
## Which routers keep the outputs

- With the **identity** router every token visits one expert, with weight one: exactly
  the same.
- **Token choice** without normalized gates scales the MLP's output by the sum of a
  token's gates, which is under one unless it chooses all experts.
- With **fewer slots** than choices some tokens get nothing.
- A **soft** router feeds its experts with averages of tokens. The MLP of an average is
  not the average of MLPs (the GELU is not linear), so it is never the same.

Where outputs change, training has to bring the quality back.
"""

routers = {
    "identity": ksm.routers.IdentityRouter(8),
    "token choice, all experts": ksm.routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=8, capacity_factor=1.0
    ),
    "token choice, gates as they are": ksm.routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=2, capacity_factor=4.0
    ),
    "token choice, few slots": ksm.routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=2, capacity_factor=0.5, normalize_gates=True
    ),
    "soft": ksm.routers.SoftRouter(8, slots_per_expert=2),
}
for name, other in routers.items():
    model = ksm.converters.upcycle(dense, moe_layers=(3, 5), router=other)
    logits = model.predict(x_test[:8], verbose=0)
    print(f"{name}: logits change by up to {np.abs(logits - before).max():.1e}")

"""
## Starts that look at images

Equal experts behind a random router have to find out by themselves what to be good at.
With `start="clusters"` some images are sent through the dense model, and the tokens
that its MLP is given are put into clusters: their centroids become the router, and each
expert keeps of the MLP what its own cluster needs, `energy` says how much of it. With
`energy=1` the experts stay copies: behind a soft router each slot is then the mean of
tokens that are alike. `start="positions"` makes each of its slots the token of one
place: 16 slots for 4 x 4 patches. Both start closer to the dense model than a new soft
router does.
"""

for name, settings in {
    "new": {},
    "clusters": {"start": "clusters", "images": x_train, "energy": 1},
    "positions": {"start": "positions", "images": x_train},
}.items():
    soft = ksm.routers.SoftRouter(16)
    model = ksm.converters.upcycle(dense, (3, 5), soft, **settings)
    change = model.predict(x_test[:8], verbose=0) - before
    print(f"soft, {name}: logits change by {np.linalg.norm(change):.2f} in all")

"""
## Go on training

Both models learn the new concepts, for as many steps and at the same rate, from the
same weights and with heads that start from zero. A preset directory carries the
upcycled model over to a new head, like any other model.

Room for every choice costs four times the MLP's work. With the experts trained, most of
it can go: `set_routing` lowers the capacity of the live model.
"""

folder = Path(tempfile.mkdtemp())
sparse.save_to_preset(str(folder / "upcycled"))
results = {}
for name, preset in (
    ("dense", "vit_tiny_patch8_32_icons"),
    ("upcycled", str(folder / "upcycled")),
):
    keras.utils.set_random_seed(0)
    model = ksm.models.ViTMoEImageClassifier.from_preset(
        preset, num_classes=len(concepts)
    )
    model.compile(optimizer=keras.optimizers.AdamW(5e-4, weight_decay=0.01))
    model.fit(x_train, y_train, batch_size=32, epochs=EPOCHS, verbose=2)
    results[name] = model.evaluate(x_test, y_test, verbose=0)[1]
model.set_routing(capacity_factor=1.05)
results["upcycled, capacity factor 1.05"] = model.evaluate(x_test, y_test, verbose=0)[1]
for name, accuracy in results.items():
    print(f"{name}: accuracy {accuracy:.3f}")

"""
A thousand icons are few and this is one seed, so do not expect one to beat the other
here.
Komatsuzaki et al. report gains for Vision Transformers on ImageNet after some more
epochs of pretraining. They go on with the state of the optimizer and at the rate that
the dense training had reached. A new optimizer that begins at a high rate, as in this
repository's own comparison, loses most of the start in its first epoch, and says
nothing about their way.

## From an original Vision Transformer

The checkpoints of the original Vision Transformers are `.npz` files
(`gs://vit_models/imagenet21k/ViT-B_16.npz`, for example). `convert_vmoe_checkpoint`
takes their path, or URL, in place of a sharded checkpoint's prefix. The result is a
dense preset, to be upcycled like any other.

Without a network, we write such a file ourselves: the dense model under the names that
the ViT repository gives to its parameters, in the older of its two numberings.
"""

OLDER_NAMES = {
    "Encoder/": "Transformer/",
    "/SelfAttention/": "/MultiHeadDotProductAttention_1/",
    "/LayerNorm_1/": "/LayerNorm_2/",
    "/Mlp/": "/MlpBlock_3/",
}
arrays = {}
for name, array in ksm.converters.to_vmoe_params(dense).items():
    for ours, theirs in OLDER_NAMES.items():
        name = name.replace(ours, theirs)
    arrays[name] = array
np.savez(folder / "vit.npz", **arrays)

checkpoint = ksm.converters.read_checkpoint(folder / "vit.npz")
print(checkpoint)

ksm.converters.convert_vmoe_checkpoint(
    folder / "vit.npz",
    folder / "vit",
    # An original ViT has a class token, and does not need this.
    pooling="gap",
    verbose=0,
)
converted = ksm.models.ViTMoEImageClassifier.from_preset(str(folder / "vit"))
vmoe = ksm.converters.upcycle(converted, moe_layers=(3, 5), router=router)
logits = vmoe.predict(x_test[:8], verbose=0)
print(f"from ViT to V-MoE: logits change by up to {np.abs(logits - before).max():.1e}")
