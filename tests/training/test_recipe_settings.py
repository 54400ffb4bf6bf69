"""The record of a recipe: copies with other values, checks, compiled models."""

import copy
import dataclasses
import pickle

import keras
import numpy as np
import pytest

from keras_softmoe import training
from tests.support.references import to_numpy

CHANGES = {
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
        "decay": "rsqrt",
        "timescale": 10,
        "cooldown_steps": 20,
    },
}


def make(name, **changes):
    return training.recipe(name, **{**CHANGES[name], **changes})


def classifier(num_classes):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(num_classes)])


def rates(schedule):
    """Learning rates at 12 steps, the last of them after the end of a training."""
    return to_numpy(schedule(np.arange(0, 96, 8)))


@pytest.mark.parametrize("name", training.recipes())
def test_other_steps(name):
    """A copy for other steps is the recipe with these steps, its schedule too."""
    recipe, expected = make(name, steps=40), make(name, steps=80)
    for start in (recipe, pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert start == recipe
        actual = dataclasses.replace(start, steps=80)
        assert actual == expected
        schedules = [r.make_optimizer().get_config() for r in (actual, expected)]
        assert schedules[0]["learning_rate"] == schedules[1]["learning_rate"]
        assert actual.fit_arguments == expected.fit_arguments
    assert (rates(recipe.schedule()) != rates(expected.schedule())).any()


def test_the_schedule_of_a_compiled_model():
    recipe = training.recipe("finetuning", num_classes=4, steps=40)
    optimizers = []
    for steps in (40, 80):
        copied = dataclasses.replace(recipe, steps=steps)
        model = classifier(4)
        copied.compile(model)
        optimizers.append(model.optimizer)
        schedule = model.optimizer.get_config()["learning_rate"]
        schedule = keras.optimizers.schedules.deserialize(schedule)
        np.testing.assert_array_equal(rates(schedule), rates(copied.schedule()))
        assert float(to_numpy(schedule(steps))) == pytest.approx(1e-5)
    # Models share nothing.
    assert optimizers[0] is not optimizers[1]


def test_arguments_of_compile_replace_those_of_the_recipe():
    recipe = training.recipe("finetuning", num_classes=4, steps=40)
    model = classifier(4)
    own = keras.optimizers.Adam(recipe.schedule())
    recipe.compile(model, optimizer=own, metrics=None, jit_compile=False)
    assert model.optimizer is own
    assert not model.jit_compile
    assert isinstance(model.loss, keras.losses.CategoricalCrossentropy)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("clip_norm", "global_clipnorm", 3.0),
        ("weight_decay", "weight_decay", 0.3),
        ("weight_decay", "weight_decay_rules", (("bias$", 0.3),)),
        ("average_momentum", "ema_momentum", 0.7),
    ],
)
def test_settings_of_the_optimizer(name, attribute, value):
    recipe = training.recipe("vmoe_pretraining", **{name: value})
    for optimizer in training.Adam, training.Adafactor, training.SGD:
        changed = dataclasses.replace(recipe, optimizer=optimizer.__name__.lower())
        made = changed.make_optimizer()
        assert isinstance(made, optimizer)
        assert getattr(made, attribute) == value
    decoupled = dataclasses.replace(
        recipe, decoupled_weight_decay=True, weight_decay=1e-4
    ).make_optimizer()
    np.testing.assert_allclose(decoupled.weight_decay, 1e-4 / 8e-4)


def test_steps_per_epoch_stays():
    recipe = training.recipe("finetuning", num_classes=10, steps=40, steps_per_epoch=20)
    recipe = dataclasses.replace(recipe, steps=80)
    assert recipe.fit_arguments["epochs"] == 4
    with pytest.raises(ValueError, match="must divide `steps`.*steps=50"):
        dataclasses.replace(recipe, steps=50)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("finetuning", {"steps": 0}),
        ("finetuning", {"num_classes": 0}),
        ("finetuning", {"image_size": 8.5}),
        ("finetuning", {"steps": 100, "steps_per_epoch": 30}),
        ("finetuning", {"steps": 10, "warmup_steps": 10}),
        ("finetuning", {"peak_learning_rate": 0.0}),
        ("finetuning", {"end_learning_rate": -0.1}),
        ("finetuning", {"decay": "exponential"}),
        ("finetuning", {"loss": "hinge"}),
        ("finetuning", {"optimizer": "lion"}),
        ("finetuning", {"optimizer": keras.optimizers.SGD}),
        ("finetuning", {"weight_decay": -0.1}),
        ("finetuning", {"weight_decay": [("kernel", "much")]}),
        ("finetuning", {"central_crop": 0.0}),
        ("vmoe_pretraining", {"steps": 100}),
        ("imagenet_from_scratch", {"augmentation": "gentle"}),
        ("vtab", {"augmentation": None}),
    ],
)
def test_bad_settings_are_named(name, changes):
    with pytest.raises(ValueError, match="Received"):
        training.recipe(name, **changes)


@pytest.mark.parametrize("num_classes", [5, None])
def test_the_model_must_have_as_many_classes(num_classes):
    recipe = training.recipe("finetuning", num_classes=num_classes)
    with pytest.raises(ValueError, match=f"Received.*num_classes={num_classes}"):
        recipe.compile(classifier(4))


def test_labels_need_a_number_of_classes():
    data = np.zeros((4, 8, 8, 3)), np.zeros(4, int)
    with pytest.raises(ValueError, match="num_classes=None"):
        training.recipe("vtab").training_data(data)
