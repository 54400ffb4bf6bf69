"""One cell of a study: a configuration and a seed, trained and measured."""

import keras
import numpy as np

import keras_softmoe as ksm
from experiments.lib.runs import EpochData, Run, batches_of, fit
from experiments.router_study.models import (
    backbone_arguments,
    build_backbone,
    build_classifier,
)
from experiments.router_study.tasks import accuracy, compile_with_cosine

_FINE_TUNING_BATCH = 32


def cell_name(name, seed):
    """Name of the files of a configuration and a seed."""
    return f"{name}_seed{seed}"


def cell(scale, configuration, seed, task):
    """The training of a model with a seed, and all that a study tells about it.

    Args:
        scale: `Scale`.
        configuration: `Configuration`.
        seed: int.
        task: the scale's task, see `upstream_task`.

    Returns:
        `Run`. Its results are those of `run_study`; if the loss became infinite or NaN
        they are `{"diverged": True}`.
    """

    def build():
        model = build_classifier(
            build_backbone(scale, configuration), task.num_classes, task.head_bias
        )
        task.compile(model, configuration.learning_rate)
        return model

    def measure(model):
        if not is_finite(model):
            return {"diverged": True}
        return {
            "diverged": False,
            "upstream_accuracy": task.accuracy(model),
            **_routing(scale, model, task),
            **_transfer(scale, model, seed),
        }

    def watch(model):
        sharpness = None
        if model.backbone.moe_layers:
            images, _ = task.images(scale.watched_images // 8)
            sharpness = sharpness_of(ksm.analysis.analyze(model, images, verbose=0))
        return {
            "accuracy": task.accuracy(model, scale.watched_images),
            "sharpness": sharpness,
        }

    return Run(
        name=cell_name(configuration.name, seed),
        seed=seed,
        build=build,
        draw=lambda epoch: task.batches(seed, epoch, configuration.data_share),
        epochs=scale.epochs,
        steps_per_epoch=scale.steps_per_epoch,
        measure=measure,
        watch=watch,
    )


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
        "learning_rate": configuration.learning_rate,
        "data_share": configuration.data_share,
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
    counted = ksm.evaluation.cost(
        backbone_arguments(scale, configuration), num_classes=num_classes
    )
    images = scale.steps * scale.batch_size
    return {
        "parameters": counted.parameters,
        "gflop_per_image": counted.gflop_per_image,
        # Forward once, and twice as much backward.
        "training_gflop": 3 * counted.gflop_per_image * images,
    }


def _routing(scale, model, task):
    """Dropped tokens, the balance of experts and what explains them, per block."""
    names = ("dropped", "imbalance", "position_share", "label_share", "sharpness")
    if not model.backbone.moe_layers:
        return dict.fromkeys(names)
    images, labels = task.images(scale.routed_images)
    routing = ksm.analysis.analyze(model, images, labels, verbose=0)
    blocks = routing.blocks.values()
    return {
        "dropped": [x.dropped for x in blocks],
        "imbalance": [x.imbalance for x in blocks],
        "position_share": [x.information.position_share for x in blocks],
        "label_share": [x.information.label_share for x in blocks],
        "sharpness": sharpness_of(routing),
    }


def sharpness_of(routing):
    """The largest dispatch and combine weights in even shares, per soft block."""
    if not routing.soft:
        return None
    soft = routing.soft.values()
    return [[x.dispatch_sharpness, x.combine_sharpness] for x in soft]


def _transfer(scale, model, seed):
    """Few-shot and fine-tuned accuracy on the handwritten digits."""
    train, test = (digits(scale, split) for split in ("train", "test"))
    probe = ksm.evaluation.few_shot_probe(
        model, train, test, shots=scale.shots, seeds=scale.draws, verbose=0
    )
    # After the probe: it changes the weights.
    return {
        "few_shot": {str(shots): result.mean for shots, result in probe.items()},
        "fine_tuned_accuracy": _fine_tuned(scale, model.backbone, train, test, seed),
    }


def digits(scale, split):
    """Handwritten digits as large as the glyphs, in the middle of the image."""
    images, labels = ksm.datasets.digits(scale.glyph_size, split)
    before = (scale.image_size - scale.glyph_size) // 2
    after = scale.image_size - scale.glyph_size - before
    images = np.pad(images, ((0, 0), (before, after), (before, after), (0, 0)))
    return images[: scale.transfer_images], labels[: scale.transfer_images]


def _fine_tuned(scale, backbone, train, test, seed):
    keras.utils.set_random_seed(seed)
    images, labels = train

    def shuffled(epoch):
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))
        return batches_of(images[order], labels[order], _FINE_TUNING_BATCH)

    steps_per_epoch = len(labels) // _FINE_TUNING_BATCH
    steps = scale.fine_tuning_epochs * steps_per_epoch
    model = build_classifier(backbone, int(labels.max()) + 1)
    compile_with_cosine(model, scale, steps, steps // 8, scale.fine_tuning_rate)
    data = EpochData(shuffled, steps_per_epoch, model.preprocess_samples)
    fit(model, data, scale.fine_tuning_epochs)
    return accuracy(model, *test)


def is_finite(model):
    """Whether no weight that is trained has become infinite or NaN."""
    return all(
        bool(np.all(np.isfinite(keras.ops.convert_to_numpy(weight.value))))
        for weight in model.trainable_variables
    )
