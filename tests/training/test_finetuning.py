"""Fine-tuning with another K, capacity, priority and group than in the pretraining."""

import keras
import numpy as np
import pytest

from keras_softmoe import datasets, models, routers, training
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.layer_checks import from_preset
from tests.support.references import to_numpy

pytestmark = tiny.LOADING
NUM_CLASSES = 10
STEPS = 3
# Groups of two images drop tokens under any of these settings.
PRETRAINED = routers.SoftmaxTokenChoiceRouter(
    4,
    num_selected_experts=2,
    capacity_factor=0.8,
    priority="position",
    multiple_of=None,
    noise_std=0.0,
)
SETTINGS = {"num_selected_experts": 1, "priority": "max", "capacity_factor": 0.5}
RECIPE = training.recipe(
    "finetuning",
    num_classes=NUM_CLASSES,
    steps=STEPS,
    peak_learning_rate=0.1,
    warmup_steps=0,
    image_size=8,
    batch_size=8,
    augmentation="none",
)


@pytest.fixture(scope="module")
def digits():
    images, labels = datasets.digits(8, split="train")
    return images[:32], labels[:32]


@pytest.fixture
def preset(tmp_path):
    """Directory of a backbone that routes as in its pretraining."""
    model = tiny.backbone(router=PRETRAINED, group_images=2)
    model.save_to_preset(str(tmp_path / "preset"))
    return str(tmp_path / "preset")


def load(preset, **changes):
    """A classifier with a head that does not start from zeros, so that all moves."""
    model = models.ViTMoEImageClassifier.from_preset(
        preset, num_classes=NUM_CLASSES, preprocessor=tiny.preprocessor(), **changes
    )
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(0).normal(size=kernel.shape))
    return model


def tune(model, digits):
    """Losses of three steps, and all weights."""
    # To make the metrics, the first `fit` of a model would pass over a batch.
    model.evaluate(RECIPE.evaluation_data(digits), verbose=0)
    data = RECIPE.training_data(digits)
    history = model.fit(data, verbose=0, **RECIPE.fit_arguments).history
    return [*history["loss"], *(to_numpy(w.value) for w in model.weights)]


def compiled(model):
    RECIPE.compile(model)
    return model


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b, rtol=2e-4, atol=2e-5)


def differ(one, other):
    return any(np.abs(a - b).max() > 1e-3 for a, b in zip(one, other, strict=True))


def test_from_a_preset(preset, digits, tmp_path):
    model = compiled(load(preset, **SETTINGS))
    actual = tune(model, digits)
    # As if the model had been built so.
    router = PRETRAINED.with_settings(**SETTINGS)
    assert_same(actual, tune(compiled(load(preset, router=router)), digits))
    assert differ(actual, tune(compiled(load(preset)), digits))
    # What it was fine-tuned with it keeps.
    tuned = from_preset(model, tmp_path / "tuned")
    assert SETTINGS.items() <= tuned.backbone.router.get_config().items()
    x = digits[0][:6]
    assert_near(tiny.predict(tuned, x), tiny.predict(model, x), rtol=1e-4, atol=1e-5)


def test_between_two_trainings(preset, digits):
    model = compiled(load(preset))
    tune(model, digits)
    model.set_routing(group_images=4, **SETTINGS)
    router = PRETRAINED.with_settings(**SETTINGS)
    other = compiled(load(preset, router=router, group_images=4))
    same = compiled(load(preset))
    for copy in (other, same):
        copy.optimizer.build(copy.trainable_variables)
        copy.set_weights(model.get_weights())
        pairs = zip(copy.optimizer.variables, model.optimizer.variables, strict=True)
        for mine, theirs in pairs:
            mine.assign(to_numpy(theirs.value))
    for each in (model, other, same):
        # Theirs has come to its end.
        each.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    actual = tune(model, digits)
    assert_same(actual, tune(other, digits))
    assert differ(actual, tune(same, digits))
