"""Every recipe trains a small Soft MoE on real digits, and decays what it should."""

import copy
import dataclasses
import functools
import inspect
import pickle
import re

import keras
import numpy as np
import pytest

from keras_softmoe import datasets, training
from tests.models import tiny
from tests.references import to_numpy

NUM_CLASSES = 10
STEPS = 30
# A higher rate than the papers', because there are so few steps; no warmup, so that the
# first step already decays.
SHORT = {
    "num_classes": NUM_CLASSES,
    "steps": STEPS,
    "image_size": 8,
    "batch_size": 32,
    "warmup_steps": 0,
    "steps_per_epoch": 10,
}
# Recipe -> its rate at step 0, and how much of a variable decays, by its path.
RECIPES = {
    "vmoe_pretraining": (
        training.vmoe_pretraining(peak_learning_rate=0.01, **SHORT),
        0.01,
        [("", 0.1)],
    ),
    "soft_moe_pretraining": (
        training.soft_moe_pretraining(
            peak_learning_rate=0.01, cooldown_steps=5, **SHORT
        ),
        0.01,
        [(r"router/scale$", 0.03), (r"kernel$", 0.03)],
    ),
    "vmoe_15b_pretraining": (
        training.vmoe_15b_pretraining(
            peak_learning_rate=0.01, cooldown_steps=5, **SHORT
        ),
        0.01,
        [(r"router/scale$", 0.03), (r"kernel$", 0.03)],
    ),
    "imagenet_from_scratch": (
        training.imagenet_from_scratch(peak_learning_rate=0.01, **SHORT),
        0.01,
        [(r"kernel$", 0.1)],
    ),
    "finetuning": (
        training.finetuning(
            peak_learning_rate=0.1, average_momentum=0.9, clip_norm=10.0, **SHORT
        ),
        0.1,
        [],
    ),
    "vtab": (training.vtab(peak_learning_rate=0.1, **SHORT), 0.1, []),
}


@pytest.fixture(scope="module")
def digits():
    images, labels = datasets.digits(8, split="train")
    return images[:256], labels[:256]


def make_classifier():
    from keras_softmoe import models

    return models.ViTMoEImageClassifier(
        tiny.backbone(), NUM_CLASSES, preprocessor=tiny.preprocessor()
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name, digits):
    recipe, rate, decays = RECIPES[name]
    model = make_classifier()
    recipe.compile(model)
    data = recipe.training_data(digits)
    start = {v.path: to_numpy(v.value) for v in model.backbone.trainable_variables}
    # The head starts from zeros, so that in the first step the backbone has no gradient
    # and only decays.
    model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0)
    for variable in model.backbone.trainable_variables:
        path = variable.path
        decay = next((d for p, d in decays if re.search(p, path)), 0.0)
        expected = start[path] * (1.0 - rate * decay)
        np.testing.assert_allclose(
            to_numpy(variable.value), expected, rtol=1e-6, atol=1e-8, err_msg=path
        )
    # So few steps show progress only on images that stay as they are.
    plain = dataclasses.replace(recipe, augmentation="none").training_data(digits)
    history = model.fit(plain, verbose=0, **recipe.fit_arguments).history
    assert len(history["loss"]) == 3
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert int(to_numpy(model.optimizer.iterations.value)) == 1 + STEPS
    assert model.optimizer is not recipe.optimizer


def test_evaluation_data(digits):
    recipe, *_ = RECIPES["finetuning"]
    model = make_classifier()
    recipe.compile(model)
    images, labels = digits
    data = recipe.evaluation_data((images[:40], labels[:40]))
    loss, accuracy = model.evaluate(data, verbose=0)
    # A head of zeros: every class is as likely.
    np.testing.assert_allclose(loss, np.log(NUM_CLASSES), rtol=1e-5)
    np.testing.assert_allclose(accuracy, np.mean(labels[:40] == 0), rtol=1e-6)


def test_the_papers_numbers():
    recipe = training.vmoe_pretraining(18_291, steps=521_000)
    assert recipe.optimizer.weight_decay == 0.1
    assert recipe.fit_arguments["steps_per_epoch"] == 521_000
    recipe = training.vtab(5)
    assert (recipe.steps, recipe.image_size, recipe.batch_size) == (1250, 384, 512)
    schedule = recipe.optimizer.get_config()["learning_rate"]["config"]
    assert schedule["warmup_steps"] == 250
    assert recipe.augmentation == training.Augmentation(crop=False, flip=False)
    recipe = training.soft_moe_pretraining(29_593)
    assert recipe.optimizer.weight_decay_rules[0] == ("predictions/kernel$", 3.0)
    recipe = training.vmoe_15b_pretraining(30_000, steps=2_900_000)
    assert isinstance(recipe.optimizer, training.Adafactor)
    assert recipe.optimizer.momentum_dtype == "bfloat16"
    assert recipe.optimizer.weight_decay_rules[:2] == (
        ("predictions/kernel$", 3.0),
        ("kernel$", 0.03),
    )
    schedule = recipe.optimizer.get_config()["learning_rate"]["config"]
    assert schedule["peak_learning_rate"] == 8e-4


@pytest.mark.parametrize(
    "make",
    [
        lambda: training.finetuning(10, steps=0),
        lambda: training.finetuning(0),
        lambda: training.finetuning(10, steps=100, steps_per_epoch=30),
        lambda: training.vmoe_pretraining(10, steps=100),
        lambda: training.imagenet_from_scratch("gentle"),
        lambda: training.vtab(10, augmentation=None),
    ],
)
def test_bad_arguments_are_named(make):
    with pytest.raises(ValueError, match="Received"):
        make()


def test_the_model_must_have_as_many_classes():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    recipe = dataclasses.replace(training.finetuning(4), num_classes=5)
    with pytest.raises(ValueError, match="Received.*num_classes=5"):
        recipe.compile(model)


ALL = {
    "vmoe_pretraining": {"warmup_steps": 5},
    "soft_moe_pretraining": {"warmup_steps": 5, "cooldown_steps": 20},
    "vmoe_15b_pretraining": {"warmup_steps": 5, "cooldown_steps": 20},
    "imagenet_from_scratch": {"warmup_steps": 5},
    # Warms up for a share of the steps.
    "finetuning": {"average_momentum": 0.9},
    "vtab": {},
    "limoe_pretraining": {"warmup_steps": 5},
    "soft_moe_contrastive": {
        "warmup_steps": 5,
        "timescale": 10,
        "cooldown_steps": 20,
    },
}


def rates(recipe):
    """Learning rates at 12 steps, the last of them after the end of a training."""
    config = recipe.optimizer.get_config()["learning_rate"]
    schedule = keras.saving.deserialize_keras_object(config)
    return [float(schedule(step)) for step in range(0, 96, 8)]


def test_all_recipes_are_tested():
    kinds = (training.Recipe, training.ContrastiveRecipe)
    made = {
        name
        for name, member in vars(training).items()
        if inspect.isfunction(member) and member.__annotations__["return"] in kinds
    }
    assert made == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_other_steps(name):
    """A copy for other steps is the recipe that the function makes for them."""
    is_pair = name in ("limoe_pretraining", "soft_moe_contrastive")
    arguments = ALL[name] if is_pair else {"num_classes": 10, **ALL[name]}
    make = functools.partial(getattr(training, name), **arguments)
    recipe, expected = make(steps=40), make(steps=80)
    for start in (recipe, pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        actual = dataclasses.replace(start, steps=80)
        np.testing.assert_array_equal(rates(actual), rates(expected))
        configs = [r.optimizer.get_config() for r in (actual, expected)]
        # Keras counts them.
        names = [config.pop("name") for config in configs]
        assert configs[0] == configs[1], names
        assert actual.fit_arguments == expected.fit_arguments
        # And from there on.
        actual = dataclasses.replace(
            dataclasses.replace(actual, batch_size=4), steps=40
        )
        np.testing.assert_array_equal(rates(actual), rates(recipe))
    assert rates(recipe) != rates(expected)
    np.testing.assert_array_equal(rates(recipe), rates(make(steps=40)))
    # With the steps as they are it is the same optimizer.
    assert dataclasses.replace(recipe, image_size=32).optimizer is recipe.optimizer


def test_an_optimizer_of_the_users_stays():
    recipe = training.finetuning(10, steps=40)
    own = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 7))
    changed = dataclasses.replace(recipe, optimizer=own)
    for copied in (changed, dataclasses.replace(changed, steps=80)):
        assert copied.optimizer is own
    # Or a function of the steps.
    changed = dataclasses.replace(
        recipe, optimizer=lambda steps: keras.optimizers.Adam(1.0 / steps)
    )
    for steps in (40, 80):
        copied = dataclasses.replace(changed, steps=steps)
        np.testing.assert_allclose(float(copied.optimizer.learning_rate), 1 / steps)
    with pytest.raises(ValueError, match="Received: the class Adam. Make one"):
        dataclasses.replace(recipe, optimizer=keras.optimizers.Adam)


def test_steps_per_epoch_stays():
    recipe = training.finetuning(10, steps=40, steps_per_epoch=20)
    recipe = dataclasses.replace(recipe, steps=80)
    assert recipe.fit_arguments["epochs"] == 4
    with pytest.raises(ValueError, match="must divide `steps`.*steps=50"):
        dataclasses.replace(recipe, steps=50)
    with pytest.raises(ValueError, match="warmup"):
        dataclasses.replace(training.vmoe_pretraining(10, 20_000), steps=10_000)
