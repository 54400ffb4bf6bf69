"""One training of DINOv2 or of what it becomes, and what is measured of it."""

import dataclasses
import time
from pathlib import Path

import numpy as np

import keras_softmoe as ksm
from experiments.lib.runs import Run, adamw
from experiments.real_weights.plan import DENSE, variants
from experiments.real_weights.textile import CLASSES

# Trainings stop where they are while this file is there.
PAUSE = Path(__file__).resolve().parents[2] / "build" / "pause"
_PREDICTED = 32


class Task:
    """Pictures and the dense start, read once.

    Args:
        plan: `Plan`.
        pictures: see `textile.read`.
        weights: folder of the dense model, see `dinov2.convert`.
    """

    def __init__(self, plan, pictures, weights):
        self.plan, self.pictures, self.weights = plan, pictures, weights
        self.dense = self._read()
        self.preprocessor = ksm.converters.image_preprocessor(
            weights, (plan.image_size, plan.image_size)
        )
        rows, columns = self.dense.patch_grid
        self.variants = variants(plan, rows * columns + 1)

    def backbone(self, name):
        """A new backbone, dense or with experts, before any training."""
        variant, plan = self.variants[name], self.plan
        if variant.router is None:
            return self._read()
        images = None
        if variant.start != "copies":
            images = self.pictures["train"][0]
            chosen = np.random.default_rng(0).permutation(len(images))
            images = self.preprocessor(images[chosen[: plan.start_images]])
        return ksm.converters.upcycle(
            self.dense,
            plan.blocks,
            variant.router,
            start=variant.start,
            images=images,
            energy=1,
            group_images=variant.group_images,
        )

    def classifier(self, name, learning_rate, steps):
        """A compiled classifier. Its head starts from zero."""
        plan, warmup = self.plan, round(self.plan.warmup * steps)
        model = ksm.models.ViTMoEImageClassifier(
            self.backbone(name),
            num_classes=len(CLASSES),
            preprocessor=self.preprocessor,
        )
        model.compile(
            adamw(learning_rate, steps, warmup, plan.weight_decay, plan.clip_norm),
            metrics=["accuracy"],
        )
        return model

    def cost(self, name):
        """Parameters, GFLOP of an image and of the training, and steps: a dict."""
        counted, dense = (
            ksm.evaluation.cost(self.described(n), num_classes=len(CLASSES))
            for n in (name, DENSE)
        )
        steps = self.steps(name)
        images = steps * self.plan.batch_size
        return {
            "parameters": counted.parameters,
            "gflop_per_image": counted.gflop_per_image,
            "ratio": counted.gflop_per_image / dense.gflop_per_image,
            "steps": steps,
            # Forward once, and twice as much backward
            "training_gflop": 3 * counted.gflop_per_image * images,
        }

    def described(self, name):
        """Arguments of the backbone of a variant."""
        variant, arguments = self.variants[name], self.dense.get_config()
        if variant.router is not None:
            arguments |= {
                "moe_layers": self.plan.blocks,
                "router": variant.router,
                "group_images": variant.group_images,
            }
        return arguments

    def steps(self, name):
        """Steps of a training: as many FLOP as those of token choice for the dense."""
        if name != DENSE:
            return self.plan.steps
        costs = [
            ksm.evaluation.cost(self.described(n), num_classes=len(CLASSES))
            for n in ("token_choice", DENSE)
        ]
        ratio = costs[0].gflop_per_image / costs[1].gflop_per_image
        return round(self.plan.steps * ratio)

    def run(self, name, seed, learning_rate, split):
        """One training.

        Args:
            name: str, key of `variants`.
            seed: int.
            learning_rate: float.
            split: `"validation"` or `"test"`, what is predicted in the end.

        Returns:
            `Run`, and the callable for each of its steps.
        """
        plan, steps = self.plan, self.steps(name)
        images, labels = self.pictures["train"]
        before, clock = {}, Clock()

        def build():
            model = self.classifier(name, learning_rate, steps)
            before["feature_difference"] = self._difference(model)
            return model

        def draw(epoch):
            rng = np.random.default_rng(seed)
            each = steps * plan.batch_size // len(images) + 1
            order = np.concatenate([rng.permutation(len(images)) for _ in range(each)])
            for i in range(steps):
                chosen = order[i * plan.batch_size : (i + 1) * plan.batch_size]
                yield images[chosen], labels[chosen]

        def measure(model):
            found = self._measured(model, *self.pictures[split])
            return {"before": before, **found, "processor": clock.median()}

        variant = self.variants[name]
        run = Run(
            name=f"{name}_lr{learning_rate:g}_seed{seed}",
            seed=seed,
            build=build,
            draw=draw,
            # The whole training, in a few minutes: what was interrupted begins anew.
            epochs=1,
            steps_per_epoch=steps,
            measure=measure,
            settings=dataclasses.asdict(plan)
            | {"steps": steps, "start": variant.start},
        )
        return run, clock.step

    def step_times(self, rounds):
        """Processor seconds of a step, of all models in turns: dict of medians."""
        images, labels = (
            part[: self.plan.batch_size] for part in self.pictures["train"]
        )
        models = {n: self.classifier(n, 1e-6, 100) for n in self.variants}
        seconds = {name: [] for name in models}
        for _ in range(rounds + 1):
            for name, model in models.items():
                batch = model.preprocess_samples(images, labels)
                started = time.process_time()
                model.train_on_batch(*batch)
                seconds[name].append(time.process_time() - started)
        # The first step of each compiles, or warms up.
        return {name: float(np.median(s[1:])) for name, s in seconds.items()}

    def _read(self):
        size = self.plan.image_size
        return ksm.converters.dense_model(self.weights, (size, size, 3), head=False)

    def _difference(self, model):
        """Norm of the difference of features over that of the dense ones."""
        images = self.preprocessor(self.pictures["validation"][0][:_PREDICTED])
        ours, theirs = (
            m.predict(images, _PREDICTED, verbose=0)["pooled_output"]
            for m in (model.backbone, self.dense)
        )
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    def _measured(self, model, images, labels):
        logits = model.predict(images, _PREDICTED, verbose=0).astype("float64")
        right = logits.argmax(-1) == labels
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        found = {
            "accuracy": float(right.mean()),
            "loss": float(-logits[np.arange(len(labels)), labels].mean()),
            "by_class": {
                name: float(right[labels == i].mean()) for i, name in enumerate(CLASSES)
            },
        }
        if model.backbone.moe_layers:
            routing = ksm.analysis.analyze(model, images[:_PREDICTED], verbose=0)
            blocks = routing.blocks.values()
            found["dropped"] = [block.dropped for block in blocks]
            found["imbalance"] = [block.imbalance for block in blocks]
        return found


class Clock:
    """Processor time of steps, and pauses between them."""

    def __init__(self):
        self.ticks = []

    def step(self):
        """End a step, and wait as long as others ask for it."""
        self.ticks.append(time.process_time())
        while PAUSE.exists():
            time.sleep(5)

    def median(self):
        """Processor seconds of a step, float."""
        return float(np.median(np.diff(self.ticks)))


def chosen_rate(tried):
    """The learning rate with the highest accuracy, or lowest loss between equals.

    Args:
        tried: dict from rates to results.

    Returns:
        The rate; and the next to try if it is at an edge, otherwise `None`.
    """
    rates = sorted(tried)
    best = max(rates, key=lambda r: (tried[r]["accuracy"], -tried[r]["loss"]))
    if best == rates[0]:
        return best, float(f"{best / 10**0.5:.0e}")
    if best == rates[-1]:
        return best, float(f"{best * 10**0.5:.0e}")
    return best, None
