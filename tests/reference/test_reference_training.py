"""Schedules, optimizers and training steps against the released code's (h, l)."""

import functools
import re

import keras
import numpy as np
import pytest

from keras_softmoe import training
from tests.reference.test_reference_models import make_router
from tests.support.close import assert_near
from tests.support.references import Reference, finish, to_numpy


def warmup_exponential_decay(
    peak_learning_rate, transition_steps, decay_rate, warmup_steps
):
    """Keras' schedule, which has no warmup, after one. No paper trains with it."""
    decay = keras.optimizers.schedules.ExponentialDecay(
        peak_learning_rate, transition_steps, decay_rate
    )

    def schedule(step):
        if step < warmup_steps:
            return peak_learning_rate * step / warmup_steps
        return decay(step - warmup_steps)

    return schedule


SCHEDULES = {
    "warmup_linear_decay": training.WarmupSchedule,
    "warmup_polynomial_decay": training.WarmupSchedule,
    "warmup_cosine_decay": functools.partial(training.WarmupSchedule, decay="cosine"),
    "warmup_exponential_decay": warmup_exponential_decay,
    "big_vision_rsqrt": functools.partial(training.WarmupSchedule, decay="rsqrt"),
}
LOSSES = {
    "sigmoid_xent": training.SigmoidCrossentropy,
    "softmax_xent": lambda **arguments: keras.losses.CategoricalCrossentropy(
        from_logits=True, **arguments
    ),
}
TRAINED = ["l_train_adam_sigmoid", "l_train_sgd_softmax"]
TOLERANCE = 1e-4


def make_schedule(config, total_steps):
    """Schedule (or float) of a configuration of the released code."""
    if not isinstance(config, dict):
        return config
    kind = config["schedule"]
    if kind == "constant":
        return config["value"]
    arguments = {
        "peak_learning_rate": config["peak_value"],
        "warmup_steps": config.get("warmup_steps", 0),
    }
    if kind != "warmup_exponential_decay":
        arguments["total_steps"] = config.get("decay_steps", total_steps)
    if "end_value" in config:
        arguments["end_learning_rate"] = config["end_value"]
    shared = "power", "transition_steps", "decay_rate", "timescale", "cooldown_steps"
    arguments |= {name: config[name] for name in shared if name in config}
    return SCHEDULES[kind](**arguments)


def make_optimizer(config, total_steps, adam=training.Adam, sgd=training.SGD):
    """Optimizer of a configuration of the released code."""
    clip, decay = config.get("gradient_clip", {}), config.get("weight_decay")
    arguments = {
        "learning_rate": make_schedule(config["learning_rate"], total_steps),
        "global_clipnorm": clip.get("global_norm"),
        "clipvalue": clip.get("absolute_value"),
        "weight_decay_rules" if isinstance(decay, list) else "weight_decay": decay,
    }
    if config["name"] == "big_vision_adafactor":
        momentum = 0.9 if config.get("momentum", True) else 0.0
        names = "min_dim_size_to_factor", "momentum_dtype"
        arguments |= {name: config[name] for name in names if name in config}
        return training.Adafactor(beta_1=momentum, **arguments)
    if config["name"] == "sgd":
        return sgd(momentum=config.get("momentum", 0.0), **arguments)
    assert config["name"] == "adam"
    return adam(
        beta_1=config.get("b1", 0.9), beta_2=config.get("b2", 0.999), **arguments
    )


def test_schedules():
    reference = Reference("h_schedules")
    steps = reference.given("steps")
    for name, config in reference.config["schedules"].items():
        schedule = make_schedule(config, config["total_steps"])
        if name == "constant":
            schedule = training.SGD(schedule)
            actual = np.full(steps.shape, to_numpy(schedule.learning_rate.value))
        else:
            # Those of Keras take one step at a time.
            actual = np.array([to_numpy(schedule(step)) for step in steps])
        expected = reference.given(name)
        # After its cooldown the released code goes below zero; ours stays there.
        ended = expected < 0
        assert ended.any() == bool(config.get("cooldown_steps"))
        assert (steps[ended] > config.get("decay_steps", 100)).all()
        np.testing.assert_array_equal(actual[ended], 0.0)
        actual, expected = actual[~ended], expected[~ended]
        peak = config.get("peak_value", expected.max())
        assert_near(actual / peak, expected / peak, rtol=1e-5, atol=1e-6, err_msg=name)
    finish(reference)


OPTIMIZERS = (
    "adafactor adafactor_nofactor adam adam_clip_scale sgd_momentum_absclip_frozen "
    "sgd_plain_trainable"
).split()
GRADIENTS = [f"grads_{step}" for step in range(4)]


def gradient_scale(config, name):
    """The factor of a gradient before any clipping, by the first pattern that fits."""
    factors = config.get("gradient_scale", ())
    return next((n for pattern, n in factors if re.search(pattern, name)), 1.0)


def is_trained(config, name):
    patterns = config.get("trainable_pattern")
    if patterns:
        return any(re.search(pattern, name) for pattern in patterns)
    frozen = config.get("frozen_pattern")
    return not (frozen and re.search(frozen, name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    reference = Reference("l_optimizers")
    config = reference.config["optimizers"][name]
    variables = {}
    for path, value in reference.given_under("params/").items():
        scope, leaf = path.split("/")
        with keras.name_scope(scope):
            variables[path] = keras.Variable(
                value, name=leaf, trainable=is_trained(config, path)
            )
    optimizer = make_optimizer(config, reference.config["total_steps"])
    trained = {path: v for path, v in variables.items() if v.trainable}
    assert len(GRADIENTS) == reference.config["nsteps"]
    for step in GRADIENTS:
        gradients = reference.given_under(f"{step}/")
        optimizer.apply(
            [
                keras.ops.convert_to_tensor(gradients[p] * gradient_scale(config, p))
                for p in trained
            ],
            list(trained.values()),
        )
    for path, variable in variables.items():
        reference.check(f"{name}/final/{path}", variable.value, TOLERANCE)
    finish(reference, f"{name}/")


def make_classifier(reference, params):
    """Classifier of a training configuration, with `params`."""
    from keras_softmoe import converters, models

    model, encoder = reference.config["model"], reference.config["model"]["encoder"]
    height, width, _ = image_shape = reference.given("images").shape[1:]
    patch_size = tuple(model["patch_size"])
    num_tokens = height // patch_size[0] * (width // patch_size[1])
    moe = encoder["moe"]
    group_images, remainder = divmod(
        moe["group_size"], num_tokens + (model["classifier"] == "token")
    )
    assert not remainder
    backbone = models.ViTMoEBackbone(
        image_shape=image_shape,
        patch_size=patch_size,
        num_layers=encoder["num_layers"],
        num_heads=encoder["num_heads"],
        hidden_dim=model["hidden_size"],
        mlp_dim=encoder["mlp_dim"],
        moe_layers=tuple(moe["layers"]),
        router=make_router(moe, noisy=not reference.config["deterministic"]),
        group_images=group_images,
        pooling=model["classifier"],
        position_embedding=encoder.get("position_emb", {}).get("name", "learned"),
        representation_dim=model["representation_size"],
    )
    classifier = models.ViTMoEImageClassifier(backbone, model["num_classes"])
    converters.load_vmoe_params(classifier, params)
    return classifier


def recording(cls):
    """The optimizer, which also keeps the norm of the gradient that it is given."""

    class Recording(cls):
        def build(self, variables):
            super().build(variables)
            self.norm = self.add_variable((), name="norm")

        def apply(self, grads, trainable_variables=None):
            if not self.built:
                self.build(trainable_variables)
            squares = [keras.ops.sum(keras.ops.square(g)) for g in grads]
            self.norm.assign(keras.ops.sqrt(sum(squares)))
            return super().apply(grads, trainable_variables)

    return Recording


class Norms(keras.callbacks.Callback):
    """Norms of gradient, update and parameters after each epoch of one step."""

    def on_train_begin(self, logs=None):
        self.before, self.norms = self.values(), []

    def on_epoch_end(self, epoch, logs=None):
        now = self.values()
        gradient = to_numpy(self.model.optimizer.norm.value)
        norm = np.linalg.norm
        self.norms.append((gradient, norm(now - self.before), norm(now)))
        self.before = now

    def values(self):
        variables = self.model.trainable_variables
        return np.concatenate([to_numpy(v.value).ravel() for v in variables])


@pytest.mark.parametrize("name", TRAINED)
def test_training_steps(name):
    from keras_softmoe import converters

    reference = Reference(name)
    config = reference.config
    start = reference.given_under("params/")
    model = make_classifier(reference, start)
    make_loss = LOSSES[config["loss"]]
    main_loss = make_loss(reduction="none")
    model.compile(
        optimizer=make_optimizer(
            {**config["optimizer"], "weight_decay": our_rules(config["optimizer"])},
            config["total_steps"],
            recording(training.Adam),
            recording(training.SGD),
        ),
        loss=make_loss(),
        metrics=[keras.metrics.MeanMetricWrapper(main_loss, name="main_loss")],
    )
    schedule = make_schedule(
        config["optimizer"]["learning_rate"], config["total_steps"]
    )
    rates = np.array([to_numpy(schedule(step)) for step in range(config["nsteps"])])
    norms = Norms()
    history = model.fit(
        reference.given("images"),
        reference.given("labels_onehot"),
        epochs=config["nsteps"],
        callbacks=[norms],
        verbose=0,
    ).history
    total, main = np.array(history["loss"]), np.array(history["main_loss"])
    reference.check("steps/main_loss", main, TOLERANCE)
    reference.check("steps/total_loss", total, TOLERANCE)
    reference.check("steps/auxiliary_loss", total - main, TOLERANCE)
    for kind, values in zip(
        ("grads", "updates", "params"), zip(*norms.norms, strict=True), strict=True
    ):
        reference.check(f"steps/global_norm/{kind}", np.array(values), TOLERANCE)
    final = converters.to_vmoe_params(model)
    for path in [key for key in reference.keys if key.startswith("final/")]:
        name = path.removeprefix("final/")
        if config["optimizer"]["name"] == "adam" and name.endswith("key/bias"):
            # Attention does not depend on it. Its gradient is rounding noise, of which
            # Adam makes steps: only their length can be compared.
            moved = np.abs(
                [final[name] - start[name], reference.given(path) - start[name]]
            )
            assert moved.max() <= 1.001 * rates.sum()
        else:
            reference.check(path, final[name], TOLERANCE)
    finish(reference)


def our_rules(optimizer):
    """The weight decay of a configuration, with our names of the variables."""
    rules = optimizer.get("weight_decay")
    return rules and [
        [pattern.replace("head/", "predictions/"), rate] for pattern, rate in rules
    ]
