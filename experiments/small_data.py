"""What sparse routers drop on small data: V-MoE from scratch on a few thousand images.

    python -m experiments.small_data              # all that is missing, 85 trainings
    python -m experiments.small_data --seeds 0    # one seed of five
    python -m experiments.small_data --data icons # one of the three tasks

Each setting of the router is trained with each seed, for eight epochs: on the 1,437
digits of scikit-learn, on 2,048 letters of 64 classes, and on icons of 24 concepts
(`experiments.icons` makes their bank first). Measured are the accuracy on other images,
as trained and with predictions without a capacity, and the share of tokens that the
blocks drop: in training, in predictions of a batch, and in those of one image. The
results are in `small_data.json`; the last lines are the table of `docs/small_data.md`.
"""

import argparse
import functools
from pathlib import Path

import keras
import numpy as np

import keras_softmoe as ksm
from experiments.lib.runs import (
    Run,
    adamw,
    batches_of,
    check_before,
    finish,
    processor,
    router_config,
    write_json,
)
from keras_softmoe import models
from keras_softmoe.routers import SoftmaxTokenChoiceRouter

WORK = Path("build/small_data")
OUTPUT = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2, 3, 4)
EPOCHS, BATCH_SIZE = 8, 32
SIZES = {
    "image_shape": (32, 32, 3),
    "patch_size": 4,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 64,
    "mlp_dim": 128,
    "pooling": "gap",
}
MOE_LAYERS = (1, 3)
# The settings of `ViTMoEBackbone` and of its router that differ
OF_BATCH = {"group_images": None, "eval_capacity_factor": "dropless"}
SETTINGS = {
    "dense": None,
    "groups of one image": {},
    "groups of the batch": OF_BATCH,
    "without capacity": {"capacity_factor": None},
}
NUM_EXPERTS = (8, 25)


def classifier(settings, num_experts, steps):
    """A compiled classifier of digits; a dense one if the settings are `None`."""
    experts = {}
    if settings is not None:
        routing = dict(settings)
        group_images = routing.pop("group_images", 1)
        router = SoftmaxTokenChoiceRouter(num_experts, **routing)
        experts = {"moe_layers": MOE_LAYERS, "router": router}
        experts["group_images"] = group_images
    converter = models.ViTMoEImageConverter(image_size=SIZES["image_shape"][:2])
    model = models.ViTMoEImageClassifier(
        models.ViTMoEBackbone(**SIZES, **experts),
        num_classes=10,
        preprocessor=models.ViTMoEImageClassifierPreprocessor(converter),
    )
    optimizer = adamw(2e-3, steps, steps // 10, weight_decay=0.05)
    model.compile(optimizer, metrics=["accuracy"])
    return model


def dropped(model, images, batch_size, training=False):
    """The share of tokens that each block with experts drops, a list."""
    blocks = {id(router): block for block, router in model.routers.items()}
    found = {block: [] for block in blocks.values()}
    for start in range(0, len(images), batch_size):
        batch = model.preprocessor(images[start : start + batch_size])
        with ksm.routers.record(lambda router: blocks.get(id(router))) as decisions:
            model(keras.ops.convert_to_tensor(batch), training=training)
        for block, decision in decisions.items():
            lost = keras.ops.convert_to_numpy(decision.summary["dropped"])
            found[block].append(lost.mean())
    return [float(np.mean(shares)) for shares in found.values()]


def measure(model, train, test):
    """Accuracy, and the shares of dropped tokens."""

    def accuracy():
        return model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]

    found = {"accuracy": accuracy()}
    if model.routers:
        found["training"] = dropped(model, train[0][:256], BATCH_SIZE, training=True)
        found["batch"] = dropped(model, test[0][:256], BATCH_SIZE)
        found["alone"] = dropped(model, test[0][:32], 1)
        model.set_routing(eval_capacity_factor="dropless")
        found["dropless"] = accuracy()
    return found


def runs(seeds):
    """The `Run`s of all settings, those of a seed one after the other."""
    train, test = (ksm.datasets.digits(split=split) for split in ("train", "test"))
    steps_per_epoch = len(train[0]) // BATCH_SIZE

    def draw(epoch, seed):
        order = np.random.default_rng((seed, epoch)).permutation(len(train[0]))
        return batches_of(*(part[order] for part in train), BATCH_SIZE)

    for seed in seeds:
        for name, settings in SETTINGS.items():
            for num_experts in NUM_EXPERTS if settings is not None else (0,):
                make = functools.partial(
                    classifier, settings, num_experts, EPOCHS * steps_per_epoch
                )
                yield Run(
                    f"{name.replace(' ', '_')}_{num_experts}_{seed}",
                    seed,
                    make,
                    functools.partial(draw, seed=seed),
                    EPOCHS,
                    steps_per_epoch,
                    functools.partial(measure, train=train, test=test),
                    settings={
                        "sizes": SIZES,
                        "router": settings
                        and router_config(make().backbone.routers[MOE_LAYERS[0]]),
                    },
                )


def table(results):
    """The rows of the page, in Markdown, from the results of runs by name."""
    lines = [
        "| experts | router | accuracy | without a capacity in predictions "
        "| dropped in training | predicting 32 | one |",
        "|---|---|---|---|---|---|---|",
    ]
    for num_experts in (0, *NUM_EXPERTS):
        for name in SETTINGS:
            stem = f"{name.replace(' ', '_')}_{num_experts}_"
            found = [r for key, r in results.items() if key.startswith(stem)]
            if found:
                cells = []
                for kind in ("accuracy", "dropless"):
                    values = [100 * r[kind] for r in found if kind in r]
                    if values:
                        spread = np.std(values, ddof=int(len(values) > 1))
                        cells.append(f"{np.mean(values):.1f} ± {spread:.1f}")
                    else:
                        cells.append("")
                for kind in ("training", "batch", "alone"):
                    shares = [np.mean(r[kind]) for r in found if kind in r]
                    cells.append(f"{100 * np.mean(shares):.0f} %" if shares else "")
                label = [str(num_experts or ""), name, *cells]
                lines.append(f"| {' | '.join(label)} |")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args(arguments)
    check_before([WORK, chosen.output.parent], chosen.seeds, SEEDS)
    results = {}
    for run in runs(chosen.seeds):
        results[run.name] = finish(run, WORK)["results"]
        print(run.name, results[run.name], flush=True)
    known = {"backend": keras.config.backend(), "machine": processor()}
    write_json(chosen.output, {**known, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
