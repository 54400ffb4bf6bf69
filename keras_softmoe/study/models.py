"""The models of a study: built, and timed against each other."""

import statistics
import time

import keras
import numpy as np

from keras_softmoe.models.vit_moe_backbone import ViTMoEBackbone


def backbone_arguments(scale, configuration):
    """Arguments of the backbone of a configuration.

    Args:
        scale: `Scale`.
        configuration: `Configuration`.

    Returns:
        dict.
    """
    return {
        "image_shape": (scale.image_size, scale.image_size, 3),
        "patch_size": scale.patch_size,
        "num_layers": scale.num_layers,
        "num_heads": scale.num_heads,
        "hidden_dim": scale.hidden_dim,
        "mlp_dim": scale.mlp_dim,
        "moe_layers": configuration.moe_layers,
        "router": configuration.router,
        "group_images": configuration.group_images,
        "pooling": scale.pooling,
        "position_embedding": "sincos2d",
    }


def build_backbone(scale, configuration):
    """The backbone of a configuration, with new weights.

    Args:
        scale: `Scale`.
        configuration: `Configuration`.

    Returns:
        `models.ViTMoEBackbone`.
    """
    return ViTMoEBackbone(**backbone_arguments(scale, configuration))


def build_classifier(backbone, num_classes, bias=0.0):
    """A backbone with a new head, from images to logits.

    KerasHub's tasks train on arrays and `tf.data` pipelines; this takes any data.

    Args:
        backbone: `models.ViTMoEBackbone`.
        num_classes: int.
        bias: float, where the bias of the head begins.

    Returns:
        `keras.Model` from `(B, height, width, 3)` images, 0 to 255, to
        `(B, num_classes)` logits.
    """
    images = keras.Input(backbone.image_shape)
    features = backbone(keras.layers.Rescaling(1 / 127.5, -1.0)(images))
    head = keras.layers.Dense(
        num_classes,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(bias),
        dtype="float32",
        name="logits",
    )
    return keras.Model(images, head(features["pooled_output"]))


class Stopwatch:
    """Times steps of training against those of the dense model.

    Args:
        scale: `Scale`.
        task: the scale's task, see `upstream_task`.
        dense: `Configuration` of the dense model.
    """

    def __init__(self, scale, task, dense):
        self.scale, self.task = scale, task
        rng = np.random.default_rng(0)
        shape = (scale.batch_size, scale.image_size, scale.image_size, 3)
        self.images = rng.uniform(0, 255, shape).astype("float32")
        self.labels = rng.integers(task.num_classes, size=scale.batch_size)
        if scale.tfds:
            self.labels = np.eye(task.num_classes, dtype="float32")[self.labels]
        self.dense = self._step(dense)

    def measure(self, configuration):
        """Time a model and the dense one in turn, so that both meet the same load.

        Args:
            configuration: `Configuration`.

        Returns:
            dict with `ms` and `dense_ms`, medians in milliseconds, and `ratio`, the
            median of the ratios within a round; 1 for a dense model.
        """
        steps = (self._step(configuration), self.dense)
        for step in steps:
            # The first call compiles, in the second caches settle.
            step(), step()
        seconds = [
            [_seconds(step) for step in steps] for _ in range(self.scale.timed_rounds)
        ]
        ratio = statistics.median(own / dense for own, dense in seconds)
        return {
            "ms": 1e3 * statistics.median(own for own, _ in seconds),
            "dense_ms": 1e3 * statistics.median(dense for _, dense in seconds),
            # Two of them differ by what the machine does besides.
            "ratio": ratio if configuration.router else 1.0,
        }

    def _step(self, configuration):
        backbone = build_backbone(self.scale, configuration)
        model = build_classifier(backbone, self.task.num_classes)
        self.task.compile(model, self.scale.learning_rate)

        def step():
            model.train_on_batch(self.images, self.labels)
            # What computes asynchronously is waited for.
            keras.ops.convert_to_numpy(model.trainable_variables[-1].value)

        return step


def _seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
