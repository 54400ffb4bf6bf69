"""
Title: Data parallel training on TensorFlow and PyTorch
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/26
Description: Replicas of a mixture of experts, with tf.distribute and PyTorch's DDP.
Accelerator: None
"""

# ruff: noqa: E402

"""
## When to use this

On JAX, and on PyTorch from Keras 3.16 on, `ksm.distribution` spreads the experts of a
model over devices (see `placing_experts.py`). On TensorFlow, and on PyTorch with any
Keras, one can train *replicas*: each device has the whole model and a share of each
batch, and the gradients are averaged. So the model must fit on one device, and larger
batches get faster.

Here two replicas train a small V-MoE, and then one model trains on the same batches:
the losses are the same. The guide runs on both backends; set `KERAS_BACKEND`.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib
import tempfile

import keras
import numpy as np

import keras_softmoe as ksm

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_IMAGES, EPOCHS = (128, 1) if SHORT else (896, 3)
BATCH_SIZE, NUM_REPLICAS = 32, 2

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


crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

"""
## TensorFlow

Only one thing changes: the model is built and compiled in the scope of a strategy.
`fit` gives each replica its share of every batch; the batch size is that of all
replicas together. Here the CPU is cut into two logical devices. On a machine with
several GPUs leave that out: `MirroredStrategy()` then uses all of them.
"""


class Losses(keras.callbacks.Callback):
    """Collects what `fit` reports after each step: the mean loss so far."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(logs["loss"])


def fit(scope):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.batch(BATCH_SIZE, drop_remainder=True)
    with scope:
        model = make_model()
        model.compile(keras.optimizers.Adam(1e-3), crossentropy)
    losses = Losses()
    # Keras says that it does not shuffle a dataset, unless it is told not to.
    model.fit(dataset, epochs=EPOCHS, shuffle=False, callbacks=[losses], verbose=0)
    return np.array(losses.values)


def train_on_tensorflow():
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS,
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return fit(strategy.scope()), fit(contextlib.nullcontext())


"""
## PyTorch

A loop as PyTorch users write it, around a Keras model, loss and optimizer. Two things
are particular:

- the model is called through `DistributedDataParallel`, which averages the gradients of
  all replicas while `backward` computes them;
- `model.losses` holds the balancing losses of the routers. They belong to the loss.
"""


def run_loop(replica=0, num_replicas=1):
    """Losses of all steps, of which this replica computes its share."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = make_model()
    forward = DistributedDataParallel(model) if num_replicas > 1 else model
    variables = model.trainable_variables
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(variables)
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
    import torch

    torch.set_num_threads(1)
    # A file through which the processes find each other. With GPUs: "nccl", and
    # `torch.cuda.set_device(replica)`.
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting_point",
        rank=replica,
        world_size=NUM_REPLICAS,
    )
    losses = run_loop(replica, NUM_REPLICAS)
    if replica == 0:
        np.save(f"{folder}/losses.npy", losses)
    torch.distributed.destroy_process_group()


def train_on_torch():
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            run_replica, args=(folder,), nprocs=NUM_REPLICAS, start_method="fork"
        )
        replicas = np.load(f"{folder}/losses.npy")
    return replicas, run_loop()


"""
## Training
"""

train = {"tensorflow": train_on_tensorflow, "torch": train_on_torch}
replicas, alone = train[keras.config.backend()]()
print(f"{NUM_REPLICAS} replicas on {keras.config.backend()}, losses of first steps:")
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
  replicas would route its 16 images alone: other tokens compete for the slots, and the
  balancing losses, which are means over groups, are those of smaller groups;
- **noise of routers** (`noise_std`, which this guide sets to 0) and dropout. Replicas
  draw the same numbers, each for its own images. On PyTorch, give each its own numbers
  once `DistributedDataParallel` has made all replicas alike:
  `for v in model.non_trainable_variables: v.assign(v + replica)`;
- **the last batch**, if replicas get unequal shares of it: the mean of their means is
  not the mean over all images;
- **contrastive losses** (LIMoE): each replica compares its own images and texts only,
  which is an easier task with fewer wrong answers.

## More devices, more hosts

- TensorFlow: `tf.distribute.MultiWorkerMirroredStrategy()`, started on each machine,
  with the addresses of all in the variable `TF_CONFIG`.
- PyTorch: start the processes with `torchrun --nproc_per_node=8 train.py`, call
  `init_process_group("nccl")` without further arguments, and read the number of the
  replica from the variables `RANK` and `LOCAL_RANK`. For several machines add
  `--nnodes` and `--rdzv_endpoint`.
- A model that does not fit on one device: spread its experts, with Keras 3.16 on
  PyTorch or with KERAS_BACKEND=jax. See `placing_experts.py`; presets are the same on
  all backends.
"""
