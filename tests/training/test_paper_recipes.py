"""Every recipe trains a small Soft MoE on real digits, and decays what it should."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from keras_softmoe import datasets, training
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.references import to_numpy

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


def short(name, **changes):
    return training.recipe(name, **{**SHORT, **changes})


# Recipe -> its rate at step 0, and how much of a variable decays, by its path.
KERNELS = [(r"router/scale$", 0.03), (r"kernel$", 0.03)]
RECIPES = {
    "vmoe_pretraining": (
        short("vmoe_pretraining", peak_learning_rate=0.01),
        0.01,
        [("", 0.1)],
    ),
    "soft_moe_pretraining": (
        short("soft_moe_pretraining", peak_learning_rate=0.01, cooldown_steps=5),
        0.01,
        KERNELS,
    ),
    "vmoe_15b_pretraining": (
        short("vmoe_15b_pretraining", peak_learning_rate=0.01, cooldown_steps=5),
        0.01,
        KERNELS,
    ),
    "imagenet_from_scratch": (
        short("imagenet_from_scratch", peak_learning_rate=0.01),
        0.01,
        [(r"kernel$", 0.1)],
    ),
    "finetuning": (
        short("finetuning", peak_learning_rate=0.1, average_momentum=0.9),
        0.1,
        [],
    ),
    "vtab": (short("vtab", peak_learning_rate=0.1), 0.1, []),
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
        assert_near(
            to_numpy(variable.value), expected, rtol=1e-6, atol=1e-8, err_msg=path
        )
    # So few steps show progress only on images that stay as they are.
    plain = dataclasses.replace(recipe, augmentation="none").training_data(digits)
    history = model.fit(plain, verbose=0, **recipe.fit_arguments).history
    assert len(history["loss"]) == 3
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert int(to_numpy(model.optimizer.iterations.value)) == 1 + STEPS


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


def test_names():
    contrastive = {"limoe_pretraining", "soft_moe_contrastive"}
    assert set(training.recipes()) == {*RECIPES, *contrastive}
    # A list of its own.
    training.recipes().clear()
    assert training.recipes()


@pytest.mark.parametrize("name", ["fine_tuning", "Vtab", "limoe", 3, None])
def test_other_names_are_named(name):
    with pytest.raises(ValueError, match=f"Accepted: .*Received: name={name!r}"):
        training.recipe(name)


def test_the_nearest_names_are_proposed():
    with pytest.raises(ValueError, match="Did you mean `finetuning`?"):
        training.recipe("finetunning")
    with pytest.raises(TypeError, match="Did you mean `warmup_steps`?"):
        training.recipe("vtab", warmup_step=3)


def test_every_recipe_is_described():
    page = pathlib.Path(__file__).parents[2] / "docs" / "concepts" / "recipes.md"
    text = page.read_text(encoding="utf-8")
    for name in training.recipes():
        assert f"\n## {name}\n" in text
