"""Losses of replicas and of one model on the same batches, on TensorFlow and PyTorch.

Run as a script by `test_data_parallel.py`, because the number of devices and processes
has to be settled before a backend starts. Argument: the file to which it writes, as
JSON, the losses of the steps of one model and of two replicas.
"""

import json
import pathlib
import sys
import tempfile

import keras
import numpy as np

from keras_softmoe import models, routers

NUM_IMAGES, BATCH_SIZE, REPLICAS = 16, 8, 2
rng = np.random.default_rng(0)
IMAGES = rng.uniform(-1, 1, size=(NUM_IMAGES, 8, 8, 3)).astype("float32")
LABELS = (np.arange(NUM_IMAGES) % 3).astype("int32")


def make_model():
    keras.utils.set_random_seed(0)
    backbone = models.ViTMoEBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=12,
        moe_layers=(0,),
        # Not before the devices are settled: a router has variables.
        router=routers.SoftmaxTokenChoiceRouter(4, capacity_factor=0.75, noise_std=0.0),
        # A replica has four images of each batch.
        group_images=8,
        pooling="gap",
    )
    outputs = keras.layers.Dense(3)(backbone.output["pooled_output"])
    return keras.Model(backbone.input, outputs)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Losses(keras.callbacks.Callback):
    """What `fit` reports after each step: the mean since the epoch began."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(float(logs["loss"]))


def on_tensorflow():
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * REPLICAS)
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(BATCH_SIZE)

    def train(strategy):
        with strategy.scope():
            model = make_model()
            # The guide compiles.
            model.compile(keras.optimizers.Adam(0.01), crossentropy(), run_eagerly=True)
        losses = Losses()
        model.fit(dataset, shuffle=False, callbacks=[losses], verbose=0)
        return losses.values

    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return [train(tf.distribute.get_strategy()), train(mirrored)]


def on_torch():
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            replica, args=(folder,), nprocs=REPLICAS, start_method="fork"
        )
        replicas = [np.load(f"{folder}/{i}.npy") for i in range(REPLICAS)]
    assert np.array_equal(*replicas)
    return [train_in_loop(), replicas[0].tolist()]


def replica(index, folder):
    import torch

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=index, world_size=REPLICAS
    )
    np.save(f"{folder}/{index}.npy", train_in_loop(index, REPLICAS))
    torch.distributed.destroy_process_group()


def train_in_loop(index=0, replicas=1):
    import torch

    model = make_model()
    forward = model
    if replicas > 1:
        forward = torch.nn.parallel.DistributedDataParallel(model)
    variables = model.trainable_variables
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(variables)
    share, losses = BATCH_SIZE // replicas, []
    for start in range(index * share, NUM_IMAGES, BATCH_SIZE):
        images = torch.as_tensor(IMAGES[start : start + share])
        labels = torch.as_tensor(LABELS[start : start + share])
        loss = crossentropy()(labels, forward(images, training=True))
        loss = loss + sum(model.losses)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        mean = loss.detach() / replicas
        if replicas > 1:
            torch.distributed.all_reduce(mean)
        losses.append(float(mean))
    return losses


if __name__ == "__main__":
    run = {"tensorflow": on_tensorflow, "torch": on_torch}[keras.backend.backend()]
    pathlib.Path(sys.argv[1]).write_text(json.dumps(run()), encoding="utf-8")
