"""One cell of a study: a configuration and a seed, trained and measured."""

import time

import keras
import numpy as np

from keras_softmoe.analysis.load import expert_load
from keras_softmoe.datasets.digits import digits
from keras_softmoe.distribution.backup import Backup
from keras_softmoe.evaluation.cost import cost
from keras_softmoe.evaluation.few_shot import few_shot_probe
from keras_softmoe.study.models import (
    backbone_arguments,
    build_backbone,
    build_classifier,
)
from keras_softmoe.study.tasks import Batches, accuracy, compile_with_cosine

_FINE_TUNING_BATCH = 32


def train_cell(scale, configuration, seed, task, directory, on_step=None):
    """Train a model and measure all that a study tells about it.

    All that is random follows from the seed, so a cell is the same whatever ran before
    it, and if it was interrupted: training goes on after the last finished epoch.

    Args:
        scale: `Scale`.
        configuration: `Configuration`.
        seed: int.
        task: the scale's task, see `upstream_task`.
        directory: path of a backup while the cell is trained.
        on_step: optional callable without arguments, called after each step.

    Returns:
        dict of results and dict of seconds. The results are those of
        `study.run_study`; if the loss became infinite or NaN they are
        `{"diverged": True}`.
    """
    started = time.perf_counter()
    keras.utils.set_random_seed(seed)
    backbone = build_backbone(scale, configuration)
    model = build_classifier(backbone, task.num_classes, task.head_bias)
    task.compile(model, configuration.learning_rate or scale.learning_rate)
    callbacks = [
        keras.callbacks.TerminateOnNaN(),
        Backup(directory, delete=False),
    ]
    if on_step:
        callbacks.append(
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: on_step()
            )
        )
    task.fit(model, seed, callbacks)
    trained = time.perf_counter()
    if not _is_finite(model):
        return {"diverged": True}, _times(started, trained)
    results = {
        "diverged": False,
        "upstream_accuracy": task.accuracy(model),
        **_routing(scale, backbone, task),
        **_transfer(scale, backbone, seed),
    }
    return results, _times(started, trained)


def describe(scale, configuration):
    """What a configuration is.

    Args:
        scale: `Scale`.
        configuration: `Configuration`.

    Returns:
        dict that can be written as JSON.
    """
    return {
        "title": configuration.title,
        "family": configuration.family,
        "num_experts": configuration.num_experts,
        "slots_per_token": configuration.capacity,
        "moe_layers": list(configuration.moe_layers),
        "group_images": configuration.group_images,
        "learning_rate": configuration.learning_rate or scale.learning_rate,
        "router": configuration.router and configuration.router.get_config(),
    }


def count(scale, configuration, num_classes):
    """What a configuration costs.

    Args:
        scale: `Scale`.
        configuration: `Configuration`.
        num_classes: int, classes of the upstream task.

    Returns:
        dict that can be written as JSON.
    """
    counted = cost(backbone_arguments(scale, configuration), num_classes=num_classes)
    images = scale.steps * scale.batch_size
    return {
        "parameters": counted.parameters,
        "gflop_per_image": counted.gflop_per_image,
        # Forward once, and twice as much backward.
        "training_gflop": 3 * counted.gflop_per_image * images,
    }


def _routing(scale, backbone, task):
    """Dropped tokens and the balance of experts, per block."""
    if not backbone.moe_layers:
        return {"dropped": None, "imbalance": None}
    found = expert_load(
        backbone,
        task.images(scale.routed_images),
        preprocessor=_to_unit_range,
        verbose=0,
    )
    return {
        "dropped": [load.dropped for load in found.values()],
        "imbalance": [load.imbalance for load in found.values()],
    }


def _transfer(scale, backbone, seed):
    """Few-shot and fine-tuned accuracy on the handwritten digits."""
    train, test = (
        [array[: scale.transfer_images] for array in digits(scale.image_size, split)]
        for split in ("train", "test")
    )
    probe = few_shot_probe(
        backbone,
        train,
        test,
        shots=scale.shots,
        seeds=scale.draws,
        preprocessor=_to_unit_range,
        verbose=0,
    )
    # After the probe: it changes the weights.
    return {
        "few_shot": {str(shots): result.mean for shots, result in probe.items()},
        "fine_tuned_accuracy": _fine_tuned(scale, backbone, train, test, seed),
    }


def _fine_tuned(scale, backbone, train, test, seed):
    keras.utils.set_random_seed(seed)
    images, labels = train

    def shuffled(epoch):
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))
        return images[order], labels[order]

    batches = Batches(shuffled, _FINE_TUNING_BATCH)
    steps = scale.fine_tuning_epochs * len(batches)
    model = build_classifier(backbone, int(labels.max()) + 1)
    compile_with_cosine(model, scale, steps, steps // 8, scale.fine_tuning_rate)
    model.fit(
        batches,
        epochs=scale.fine_tuning_epochs,
        shuffle=False,
        verbose=0,
        callbacks=[batches.callback()],
    )
    return accuracy(model, *test)


def _to_unit_range(images):
    return np.asarray(images, "float32") / 127.5 - 1.0


def _is_finite(model):
    return all(
        bool(np.all(np.isfinite(keras.ops.convert_to_numpy(weight.value))))
        for weight in model.trainable_variables
    )


def _times(started, trained):
    return {
        "training_seconds": trained - started,
        "seconds": time.perf_counter() - started,
    }
