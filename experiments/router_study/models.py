"""The models of a study: built, and timed against each other."""

import statistics
import time

import keras
import numpy as np

import keras_softmoe as ksm


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
        `ksm.models.ViTMoEBackbone`.
    """
    return ksm.models.ViTMoEBackbone(**backbone_arguments(scale, configuration))


def build_classifier(backbone, num_classes, bias=0.0):
    """A backbone with a new head, not compiled.

    Args:
        backbone: `ksm.models.ViTMoEBackbone`.
        num_classes: int.
        bias: float, where the bias of the head begins.

    Returns:
        `ksm.models.ViTMoEImageClassifier`, which takes pixels from 0 to 255.
    """
    classifier = ksm.models.ViTMoEImageClassifier(
        backbone,
        num_classes,
        preprocessor=ksm.models.ViTMoEImageClassifierPreprocessor(
            ksm.models.ViTMoEImageConverter()
        ),
        head_dtype="float32",
        compile=False,
    )
    classifier.output_dense.bias.assign(np.full(num_classes, bias))
    return classifier


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
        self.images = rng.uniform(-1, 1, shape).astype("float32")
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
        # Prepared images: what is timed is the model.
        model.preprocessor = None
        self.task.compile(model, configuration.learning_rate)

        def step():
            model.train_on_batch(self.images, self.labels)
            # What computes asynchronously is waited for.
            keras.ops.convert_to_numpy(model.trainable_variables[-1].value)

        return step


def _seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
