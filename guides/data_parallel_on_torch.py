"""
Title: Data parallel training on PyTorch
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Replicas of a mixture of experts in several processes, with PyTorch's DDP.
Accelerator: None
"""

# ruff: noqa: E402

"""
## When to use this

On JAX `ksm.distribution` spreads the experts of a model over devices, and on PyTorch
from Keras 3.16 on (see `placing_experts.py`). Any Keras can train *replicas* with
`DistributedDataParallel`: each process has the whole model and a share of each batch,
and the gradients are averaged. So the model must fit on one device, and larger batches
get faster.

Here two replicas train a small V-MoE, and then one model trains on the same batches:
the losses are the same. The same guide for TensorFlow is
`data_parallel_on_tensorflow.py`.

## Setup
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import tempfile

import keras
import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import keras_softmoe as ksm

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_IMAGES, EPOCHS = (128, 1) if SHORT else (896, 3)
BATCH_SIZE = 32
NUM_REPLICAS = 2

x, y = ksm.datasets.digits(image_size=32, split="train")
x, y = x[:NUM_IMAGES] / 127.5 - 1.0, y[:NUM_IMAGES]

"""
## A model

A V-MoE, whose tokens choose experts together with those of three other images:
`group_images=4`. The batch of each replica should be a whole number of such groups.

The last line makes a plain Keras model of the classifier, with the same layers and
weights. PyTorch looks for parameters in `model.parameters()`, and the classes of
KerasHub, of which the classifier is one, leave that empty.
"""


def make_model():
    keras.utils.set_random_seed(0)
    backbone = ksm.models.ViTMoEBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=48,
        mlp_dim=96,
        moe_layers=(1,),
        router=ksm.routers.SoftmaxTokenChoiceRouter(
            num_experts=8, priority="max", noise_std=0.0
        ),
        group_images=4,
        pooling="gap",
    )
    classifier = ksm.models.ViTMoEImageClassifier(backbone, num_classes=10)
    return keras.Model(classifier.input, classifier.output)


"""
## Training

A loop as PyTorch users write it, around a Keras model, loss and optimizer. Two things
are particular:

- the model is called through `DistributedDataParallel`, which averages the gradients of
  all replicas while `backward` computes them;
- `model.losses` holds the balancing losses of the routers. They belong to the loss.
"""


def train(replica=0, num_replicas=1):
    """Losses of all steps, of which this replica computes its share."""
    model = make_model()
    forward = DistributedDataParallel(model) if num_replicas > 1 else model
    variables = model.trainable_variables
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(variables)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    share = BATCH_SIZE // num_replicas
    losses = []
    for _ in range(EPOCHS):
        for start in range(replica * share, NUM_IMAGES, BATCH_SIZE):
            images = torch.as_tensor(x[start : start + share], dtype=torch.float32)
            labels = torch.as_tensor(y[start : start + share])
            logits = forward(images, training=True)
            loss = crossentropy(labels, logits) + sum(model.losses)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)
            mean = loss.detach()
            if num_replicas > 1:
                torch.distributed.all_reduce(mean)
            losses.append(float(mean) / num_replicas)
    return np.array(losses)


def run_replica(replica, folder):
    torch.set_num_threads(1)
    # A file through which the processes find each other. With GPUs: "nccl", and
    # `torch.cuda.set_device(replica)`.
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting_point",
        rank=replica,
        world_size=NUM_REPLICAS,
    )
    losses = train(replica, NUM_REPLICAS)
    if replica == 0:
        np.save(f"{folder}/losses.npy", losses)
    torch.distributed.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    torch.multiprocessing.start_processes(
        run_replica, args=(folder,), nprocs=NUM_REPLICAS, start_method="fork"
    )
    replicas = np.load(f"{folder}/losses.npy")
alone = train()
print(f"{NUM_REPLICAS} replicas, losses of the first steps:")
print(np.round(replicas[:4], 5))
print("one model:")
print(np.round(alone[:4], 5))
print(f"largest difference of {len(alone)} losses: {abs(replicas - alone).max():.1e}")

"""
## What stays the same, and what does not

The losses agree to rounding if nothing in the model looks across the border between
replicas. That holds for soft routers, which look at one image at a time, and for all
others as long as each replica gets whole groups of images: `BATCH_SIZE` should be a
multiple of the number of replicas times `group_images`.

Not the same are:

- **groups that a replica cannot fill.** With `group_images=32` here, each of two
  replicas would route its 16 images by themselves: other tokens compete for the slots,
  and the balancing losses, which are means over groups, are those of smaller groups;
- **noise of routers** (`noise_std`, which this guide sets to 0) and dropout. Replicas
  start from the same seed and draw the same numbers, each for its own images. To give
  each numbers of its own, add something to the seeds once `DistributedDataParallel` has
  made all replicas alike: `for v in model.non_trainable_variables: v.assign(v +
  replica)`;
- **the last batch**, if replicas get unequal shares of it: the mean of their means is
  not the mean over all images;
- **contrastive losses** (LIMoE): each replica compares its own images and texts only,
  which is an easier task with fewer wrong answers.

## More devices, more hosts

- Start the processes with `torchrun --nproc_per_node=8 train.py` instead of
  `start_processes`, call `init_process_group("nccl")` without further arguments, and
  read the number of the replica from the variables `RANK` and `LOCAL_RANK`. For several
  machines add `--nnodes` and `--rdzv_endpoint`.
- A model that does not fit on one device: spread its experts, with Keras 3.16 or with
  KERAS_BACKEND=jax. See `placing_experts.py`; presets are the same on all backends.
"""
