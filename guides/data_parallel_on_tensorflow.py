"""
Title: Data parallel training on TensorFlow
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Replicas of a mixture of experts on several devices, with tf.distribute.
Accelerator: None
"""

# ruff: noqa: E402

"""
## When to use this

On JAX `ksm.distribution` spreads the experts of a model over devices. Keras cannot do
that on TensorFlow. What it can do there is train *replicas*: each device has the whole
model and a share of each batch, and the gradients are averaged. So the model must fit
on one device, and larger batches get faster.

Here two replicas train a small V-MoE, and then one model trains on the same batches:
the losses are the same. The same guide for PyTorch is `data_parallel_on_torch.py`.

## Two devices on a laptop

TensorFlow can cut the processor into logical devices. On a machine with several GPUs
leave these lines out: `MirroredStrategy()` then takes all GPUs.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib

import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)

import keras
import numpy as np

import keras_softmoe as ksm

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_IMAGES, EPOCHS = (128, 1) if SHORT else (896, 3)
BATCH_SIZE = 32

"""
## A model

A V-MoE, whose tokens choose experts together with those of three other images:
`group_images=4`. The batch of each replica should be a whole number of such groups.
"""


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
        router=ksm.routers.SoftmaxTokenChoiceRouter(
            num_experts=8, priority="max", noise_std=0.0
        ),
        group_images=4,
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


"""
## Training

Only one thing changes: the model is built and compiled in the scope of the strategy.
`fit` gives each replica its share of every batch; the batch size is that of all
replicas together.
"""

x, y = ksm.datasets.digits(image_size=32, split="train")
dataset = tf.data.Dataset.from_tensor_slices((x[:NUM_IMAGES], y[:NUM_IMAGES]))
dataset = dataset.batch(BATCH_SIZE, drop_remainder=True)


class Losses(keras.callbacks.Callback):
    """Collects what `fit` reports after each step: the mean loss so far."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(logs["loss"])


def train(strategy=None):
    with strategy.scope() if strategy else contextlib.nullcontext():
        classifier = make_classifier()
    losses = Losses()
    # Keras says that it does not shuffle a dataset, unless it is told not to.
    classifier.fit(dataset, epochs=EPOCHS, shuffle=False, callbacks=[losses], verbose=0)
    return np.array(losses.values)


strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
replicas = train(strategy)
alone = train()
print(f"{strategy.num_replicas_in_sync} replicas, losses of the first steps:")
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
- **noise of routers** (`noise_std`, which this guide sets to 0) and dropout: all
  replicas draw the same numbers, each for its own images. With two of them the first
  and the 17th image of a batch are disturbed alike;
- **the last batch**, if it is smaller. Each replica takes the mean over its images, and
  the mean of those means is not that over all images if one replica has fewer. Use
  `drop_remainder=True` to train on full batches only;
- **contrastive losses** (LIMoE): each replica compares its own images and texts only,
  which is an easier task with fewer wrong answers.

## More devices, more hosts

- Several GPUs in one machine: `tf.distribute.MirroredStrategy()`.
- Several machines: `tf.distribute.MultiWorkerMirroredStrategy()`, started on each of
  them, with the addresses of all in the variable `TF_CONFIG`.
- A model that does not fit on one device: spread its experts, with KERAS_BACKEND=jax.
  See `placing_experts.py`; presets are the same on all backends.
"""
