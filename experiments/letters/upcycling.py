"""Upcycling by the published protocol, on the letters of the study.

    python -m experiments.letters.upcycling                 # all that is missing
    python -m experiments.letters.upcycling --seeds 50      # one seed
    python -m experiments.letters.upcycling --output experiments/letters/upcycling.json

A dense model is trained with a rate that falls with the square root of the steps. Its
last state, that of the optimizer included, goes on as it is and as mixtures of experts,
at the rate that it had and with the same cooldown. "Upcycling" in `PLAN.md` says what
is asked. Files, priority and `build/pause` are as in `python -m experiments.letters`.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import keras
from keras import ops

import keras_softmoe as ksm
from experiments.letters.__main__ import PAUSE, WORK, lower_priority, wait_while_paused
from experiments.letters.bank import load_bank
from experiments.letters.measures import TEST_SEED, accuracy, counted
from experiments.letters.models import MODELS, SCALES, STUDY, build
from experiments.letters.pictures import Letters
from experiments.letters.trainings import batches_of_epoch, compile_with
from experiments.lib.runs import (
    Run,
    check_before,
    finish,
    processor,
    read_json,
    result_file,
    router_config,
    write_json,
)
from keras_softmoe import routers
from keras_softmoe.files import atomic_file

SEEDS = (50, 51, 52)


@keras.saving.register_keras_serializable(package="letters")
class NormalizedExpertChoiceRouter(routers.SoftmaxExpertChoiceRouter):
    """Expert choice in which the gates of a token sum to one."""

    def call(self, tokens, *args, **kwargs):
        decision = super().call(tokens, *args, **kwargs)
        routing, num_tokens = decision.routing, tokens.shape[1]
        # (G, S)
        total = ops.sum(ksm.ops.to_dense(routing, num_tokens).combine, axis=(2, 3))
        _, num_experts, slots = routing.token.shape
        token = ops.reshape(routing.token, (-1, num_experts * slots))
        of_slot = ops.take_along_axis(total, token, axis=1)
        of_slot = ops.reshape(of_slot, (-1, num_experts, slots))
        gate = routing.gate / ops.where(routing.filled, of_slot, 1.0)
        return decision._replace(routing=routing._replace(gate=gate))


class Variant(NamedTuple):
    """A model that the dense one is continued as.

    Attributes:
        title: str.
        router: router or `None`.
        keeps_moments: bool, whether experts get the dense state of the optimizer.
        length: float, of the continuation, in trainings of the start.
    """

    title: str
    router: routers.Router | None
    keeps_moments: bool = True
    length: float = 0.5


NUM_EXPERTS = STUDY.num_experts
# The dense model trains longer, for as many FLOP.
VARIANTS = {
    "dense": Variant("Dense, as many FLOP", None, length=0.625),
    "expert_choice": Variant(
        "Expert choice, two slots per token (as published)",
        NormalizedExpertChoiceRouter(NUM_EXPERTS, 2.0, name="router"),
    ),
    "no_moments": Variant(
        "The same, the optimizer without a past",
        NormalizedExpertChoiceRouter(NUM_EXPERTS, 2.0, name="router"),
        keeps_moments=False,
    ),
    "token_choice": Variant(
        "Token choice, two experts per token",
        routers.SoftmaxTokenChoiceRouter(
            NUM_EXPERTS,
            num_selected_experts=2,
            capacity_factor=1.0,
            priority="max",
            normalize_gates=True,
            name="router",
        ),
    ),
}


def schedule(scale, steps, cooldown_steps):
    """A rate that falls with the root of the steps, and at last to zero."""
    return ksm.training.WarmupSchedule(
        scale.learning_rate,
        steps,
        scale.warmup_steps,
        decay="rsqrt",
        timescale=2 * scale.warmup_steps,
        cooldown_steps=cooldown_steps,
    )


def adamw(scale, rate):
    """The optimizer of the study with another schedule."""
    return keras.optimizers.AdamW(
        rate, weight_decay=scale.weight_decay, global_clipnorm=scale.clip_norm
    )


def start_file(directory, seed):
    """Path of a dense model with the state of its optimizer."""
    return Path(directory, "starts", f"seed{seed}.keras")


def start_run(scale, letters, seed, file):
    """The training of a dense model without a cooldown, whose state is kept."""

    def build_and_compile():
        classifier = build(scale, MODELS["dense"], letters.bank.num_classes)
        compile_with(classifier, adamw(scale, schedule(scale, scale.steps, 0)))
        return classifier

    def keep_and_measure(classifier):
        with atomic_file(file) as new:
            classifier.save(new)
        return measured(classifier, letters, scale)

    return Run(
        f"upcycling_start_seed{seed}",
        seed,
        build_and_compile,
        lambda epoch: batches_of_epoch(scale, letters, seed, epoch),
        scale.epochs,
        scale.steps_per_epoch,
        keep_and_measure,
        settings=_settings(scale, scale.steps),
    )


def continued_run(scale, letters, seed, name, file):
    """What a dense model becomes in further training."""
    variant = VARIANTS[name]
    before = {}

    def build_and_compile():
        dense = keras.saving.load_model(file)
        classifier = continued(dense, variant, scale)
        before.update(measured(classifier, letters, scale))
        return classifier

    return Run(
        f"upcycling_{name}_seed{seed}",
        seed,
        build_and_compile,
        lambda epoch: batches_of_epoch(scale, letters, seed, scale.epochs + epoch),
        epochs_of(variant, scale),
        scale.steps_per_epoch,
        lambda model: {"before": before, **measured(model, letters, scale)},
        watch=lambda model: {
            "accuracy": accuracy(model, *letters.take(scale.watched_images, TEST_SEED))
        },
        settings={
            **_settings(scale, steps_of(variant, scale)),
            "router": router_config(variant.router),
            "keeps_moments": variant.keeps_moments,
        },
    )


def epochs_of(variant, scale):
    """Epochs of a continuation."""
    return round(scale.epochs * variant.length)


def steps_of(variant, scale):
    """Steps of a continuation."""
    return epochs_of(variant, scale) * scale.steps_per_epoch


def continued(dense, variant, scale):
    """The compiled model that a trained dense one goes on as.

    Args:
        dense: compiled classifier with the state of its optimizer.
        variant: `Variant`.
        scale: `models.Scale`.
    """
    model = upcycled(dense, variant, scale)
    done, steps = int(dense.optimizer.iterations), steps_of(variant, scale)
    # Without a past, bias correction counts from zero, and the rate goes on.
    offset = 0 if variant.keeps_moments else done
    rate = schedule(scale, done + steps, steps // 4)
    compile_with(model, adamw(scale, Shifted(rate, offset) if offset else rate))
    model.optimizer.build(model.trainable_variables)
    if variant.keeps_moments:
        copy_moments(dense, model, lambda twin: upcycled(twin, variant, scale))
        model.optimizer.iterations.assign(done)
    return model


def upcycled(dense, variant, scale):
    """A dense model with experts in the last half of its blocks, or a copy of it."""
    if variant.router is None:
        return _copy(dense)
    layers = range(scale.num_layers // 2, scale.num_layers)
    return ksm.converters.upcycle(
        dense, tuple(layers), variant.router, group_images=scale.group_images
    )


def copy_moments(dense, model, convert):
    """Give an optimizer the moments of the dense one, each expert a copy.

    Moments have the shapes of the weights: they are converted as if they were weights.

    Args:
        dense: compiled classifier with the state of its optimizer.
        model: compiled classifier whose optimizer is built.
        convert: callable from a dense classifier to one like `model`.
    """
    router_weights = {
        variable.path
        for router in getattr(model.backbone, "routers", {}).values()
        for variable in router.trainable_variables
    }
    for kind in ("momentum", "velocity"):
        twin = _copy(dense)
        _assign(twin.trainable_variables, moments_of(dense.optimizer, kind))
        found = convert(twin).trainable_variables
        wanted = zip(model.trainable_variables, found, strict=True)
        values = [0 * f if w.path in router_weights else f for w, f in wanted]
        _assign(moments_of(model.optimizer, kind), values)


def moments_of(optimizer, kind):
    """Moments in the order of the weights; `kind` is `"momentum"` or `"velocity"`."""
    return [v for v in optimizer.variables if v.path.endswith(f"_{kind}")]


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _copy(dense):
    copy = type(dense).from_config({**dense.get_config(), "compile": False})
    copy.set_weights(dense.get_weights())
    return copy


@keras.saving.register_keras_serializable(package="letters")
class Shifted(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule from one of its later steps on."""

    def __init__(self, rate, offset):
        self.rate, self.offset = rate, offset

    def __call__(self, step):
        return self.rate(ops.cast(step, "float32") + self.offset)

    def get_config(self):
        rate = keras.saving.serialize_keras_object(self.rate)
        return {"rate": rate, "offset": self.offset}

    @classmethod
    def from_config(cls, config):
        rate = keras.saving.deserialize_keras_object(config["rate"])
        return cls(rate, config["offset"])


def measured(classifier, letters, scale):
    """Accuracy, and of mixtures what is counted in each block."""
    images, labels = letters.take(scale.test_images, TEST_SEED)
    found = {"accuracy": accuracy(classifier, images, labels)}
    if classifier.backbone.moe_layers:
        found["blocks"] = counted(classifier, images, labels)
    return found


def cost(scale, variant, num_classes):
    """Parameters, and operations of a prediction and of a continuation, a dict."""
    classifier = build(scale, MODELS["dense"], num_classes)
    counted = ksm.evaluation.cost(
        upcycled(classifier, variant, scale).backbone, num_classes=num_classes
    )
    images = steps_of(variant, scale) * scale.batch_size
    return {
        "title": variant.title,
        "parameters": counted.parameters,
        "gflop_per_image": counted.gflop_per_image,
        "training_gflop": 3 * counted.gflop_per_image * images,
    }


def train(scale, letters, seeds, directory):
    """Train and measure what is not finished yet, seed by seed."""
    for seed in seeds:
        file = start_file(directory, seed)
        runs = [start_run(scale, letters, seed, file)]
        runs += [continued_run(scale, letters, seed, n, file) for n in VARIANTS]
        for run in runs:
            if not result_file(directory, run.name).exists():
                print(run.name, flush=True)
            finish(run, directory, on_step=wait_while_paused, verbose=0)


def gather(scale, num_classes, directory):
    """All that is finished, a dict that JSON can hold."""

    def found(name):
        files = {s: result_file(directory, f"upcycling_{name}_seed{s}") for s in SEEDS}
        return {
            str(seed): read_json(file, ())["results"]
            for seed, file in files.items()
            if file.exists()
        }

    return {
        "scale": scale.name,
        "models": {n: cost(scale, v, num_classes) for n, v in VARIANTS.items()},
        "starts": found("start"),
        "runs": {name: found(name) for name in VARIANTS},
        "processor": f"{processor()}, {keras.config.backend()}",
    }


def _settings(scale, steps):
    return {
        "learning_rate": scale.learning_rate,
        "warmup_steps": scale.warmup_steps,
        "batch_size": scale.batch_size,
        "steps": steps,
    }


def main(arguments=None):
    """Train what is missing, and write what all has brought."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.letters.upcycling",
        description="Continue dense models of letters, as they are and with experts. "
        f"Waits while there is a file {PAUSE}.",
    )
    parser.add_argument("--scale", choices=SCALES, default="study")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--work", type=Path, default=WORK, help=f"[{WORK}]")
    parser.add_argument("--output", type=Path, help="file of the results")
    arguments = parser.parse_args(arguments)
    lower_priority()
    scale, work = SCALES[arguments.scale], arguments.work
    check_before([work], arguments.seeds, SEEDS)
    letters = Letters(load_bank(work, scale.candidates), "anywhere")
    train(scale, letters, arguments.seeds, work)
    results = gather(scale, letters.bank.num_classes, work)
    write_json(arguments.output or work / "upcycling.json", results)


if __name__ == "__main__":
    main()
