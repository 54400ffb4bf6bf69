"""One training: of the dense start, or of what goes on from it."""

import dataclasses
import zipfile
import zlib
from typing import NamedTuple

import keras
import numpy as np

import keras_softmoe as ksm
from experiments.lib.runs import Run
from experiments.router_study.cells import digits, is_finite, sharpness_of
from experiments.router_study.configurations import Configuration
from experiments.router_study.models import build_backbone, build_classifier
from experiments.router_study.tasks import GlyphTask, compile_with_cosine
from experiments.upcycling.plans import DENSE, variants
from keras_softmoe.files import atomic_file

_WATCHED_GROUPS = 32


class Cell(NamedTuple):
    """A continuation.

    Attributes:
        variant: str, one of `VARIANTS`.
        seed: int.
        learning_rate: float, the peak.
    """

    variant: str
    seed: int
    learning_rate: float

    @property
    def name(self):
        """Name of its files."""
        return f"{self.variant}_lr{self.learning_rate:g}_seed{self.seed}"


def task_of(plan, directory):
    """The glyphs of a plan: those of the start, and then those of the continuation."""
    epochs = plan.scale.epochs + plan.epochs
    return GlyphTask(dataclasses.replace(plan.scale, epochs=epochs), directory)


def start_run(plan, seed, task, file):
    """The training of a dense model, whose weights are kept.

    Args:
        plan: `Plan`.
        seed: int.
        task: see `task_of`.
        file: path of the weights, an npz file.

    Returns:
        `Run`.
    """
    scale = plan.scale

    def build():
        model = _dense(plan, task)
        rate = scale.rate("dense")
        compile_with_cosine(model, scale, scale.steps, scale.warmup_steps, rate)
        return model

    def measure(model):
        with atomic_file(file) as new:
            np.savez(new, **ksm.converters.to_vmoe_params(model))
        return _measured(plan, task, model)

    return Run(
        name=start_name(seed),
        seed=seed,
        build=build,
        draw=lambda epoch: task.batches(seed, epoch),
        epochs=scale.epochs,
        steps_per_epoch=scale.steps_per_epoch,
        measure=measure,
        watch=lambda model: _watched(plan, task, model),
    )


def continued_run(plan, cell, task, file):
    """What a dense model becomes in further training.

    Args:
        plan: `Plan`.
        cell: `Cell`.
        task: see `task_of`.
        file: path of the weights of the dense model with this seed.

    Returns:
        `Run`. Its results have `"before"`: what the model achieves before it is
        trained, and the difference of its features from the dense ones.
    """
    scale, seed = plan.scale, cell.seed
    variant = variants(scale)[cell.variant]
    before = {}

    def build():
        dense = _started(plan, task, file)
        model = _upcycled(plan, variant, dense, task, seed)
        before.update(_kept(dense, model, task))
        compile_with_cosine(
            model, scale, plan.steps, plan.warmup_steps, cell.learning_rate
        )
        return model

    return Run(
        name=cell.name,
        seed=seed,
        build=build,
        draw=lambda epoch: task.batches(seed, scale.epochs + epoch),
        epochs=plan.epochs,
        steps_per_epoch=scale.steps_per_epoch,
        measure=lambda model: {"before": before, **_measured(plan, task, model)},
        watch=lambda model: _watched(plan, task, model),
    )


def measured_start(plan, variant, seed, task, file):
    """What a start keeps of the dense model, before any training.

    Args:
        plan: `Plan`.
        variant: `Variant`.
        seed: int.
        task: see `task_of`.
        file: path of the weights of the dense model with this seed.

    Returns:
        dict with `"feature_difference"`, `"upstream_accuracy"` and what becomes of the
        tokens.
    """
    keras.utils.set_random_seed(seed)
    dense = _started(plan, task, file)
    return _kept(dense, _upcycled(plan, variant, dense, task, seed), task)


def start_name(seed):
    """Name of the files of a dense start."""
    return f"start_seed{seed}"


def cost_of(plan, variant, num_classes):
    """Parameters, GFLOP of an image, and those of the continuation: a dict."""
    arguments = _dense_backbone(plan).get_config()
    if variant.router is not None:
        arguments |= {
            "moe_layers": plan.scale.moe_layers,
            "router": variant.router,
            "group_images": variant.group_images,
        }
    counted = ksm.evaluation.cost(arguments, num_classes=num_classes)
    images = plan.steps * plan.scale.batch_size
    return {
        "parameters": counted.parameters,
        "gflop_per_image": counted.gflop_per_image,
        # Forward once, and twice as much backward.
        "training_gflop": 3 * counted.gflop_per_image * images,
    }


# === Models ===


def _dense_backbone(plan):
    return build_backbone(plan.scale, Configuration(DENSE, DENSE, DENSE))


def _dense(plan, task):
    return build_classifier(_dense_backbone(plan), task.num_classes)


def _started(plan, task, file):
    dense = _dense(plan, task)
    try:
        with np.load(file) as opened:
            params = dict(opened)
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"'{file}' holds no weights of a dense start ({error}). Delete it and the "
            "file of that start in 'cells': it is trained again."
        ) from error
    ksm.converters.load_vmoe_params(dense, params)
    return dense


def _upcycled(plan, variant, dense, task, seed):
    if variant.router is None:
        return dense
    start = dict(variant.start)
    if "start" in start:
        batches = task.batches(seed, plan.scale.epochs)
        images, count = [], 0
        while count < plan.num_images:
            images.append(next(batches)[0])
            count += len(images[-1])
        start["images"] = np.concatenate(images)[: plan.num_images]
    return ksm.converters.upcycle(
        dense,
        plan.scale.moe_layers,
        variant.router,
        group_images=variant.group_images,
        **{"seed": seed, **start},
    )


# === Measures ===


def _measured(plan, task, model):
    """Accuracies, and what becomes of the tokens; `{"diverged": True}` if NaN."""
    if not is_finite(model):
        return {"diverged": True}
    scale = plan.scale
    train, test = (digits(scale, split) for split in ("train", "test"))
    probe = ksm.evaluation.few_shot_probe(
        model, train, test, shots=scale.shots, seeds=scale.draws, verbose=0
    )
    return {
        "diverged": False,
        "upstream_accuracy": task.accuracy(model),
        "accuracy_with_room": _accuracy_with_room(scale, model, task),
        "few_shot": {str(shots): result.mean for shots, result in probe.items()},
        **_routing(model, task.images(scale.routed_images)[0]),
    }


def _kept(dense, model, task):
    """What a model that is not trained further has of the dense one."""
    return {
        "diverged": False,
        "feature_difference": _feature_difference(dense, model, task),
        "upstream_accuracy": task.accuracy(model),
        **_routing(model, task.images(task.scale.routed_images)[0]),
    }


def _watched(plan, task, model):
    images, _ = task.images(_WATCHED_GROUPS * plan.scale.group_images)
    return {
        "accuracy": task.accuracy(model, plan.scale.watched_images),
        **_routing(model, images),
    }


def _routing(model, images):
    """Of each block the tokens that no expert takes, and the fullest expert over the
    mean; of a soft router the largest dispatch and combine weight in even shares.
    """
    if not model.backbone.moe_layers:
        return dict.fromkeys(("dropped", "imbalance", "sharpness"))
    routing = ksm.analysis.analyze(model, images, verbose=0)
    return {
        "dropped": [x.dropped for x in routing.blocks.values()],
        "imbalance": [x.imbalance for x in routing.blocks.values()],
        "sharpness": sharpness_of(routing),
    }


def _accuracy_with_room(scale, model, task):
    """Accuracy where no expert turns a token away, `None` where none ever does."""
    choosing = [
        router
        for router in model.backbone.routers.values()
        if "eval_capacity_factor" in router.mutable_settings
    ]
    if not choosing:
        return None
    model.set_routing(eval_capacity_factor=float(scale.num_experts))
    found = task.accuracy(model)
    model.set_routing(eval_capacity_factor=None)
    return found


def _feature_difference(dense, model, task):
    """Norm of the difference of pooled features over that of the dense ones."""
    images = dense.preprocessor(task.images(task.scale.watched_images)[0])
    ours, theirs = (
        keras.ops.convert_to_numpy(
            m.backbone.predict(images, batch_size=64, verbose=0)["pooled_output"]
        )
        for m in (model, dense)
    )
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
