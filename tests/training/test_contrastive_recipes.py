"""Recipes for pairs: they train small models, decay what they should, name mistakes."""

import keras
import numpy as np
import pytest

from keras_softmoe import datasets, models, routers, training
from tests.support import tiny
from tests.support.layer_checks import reloaded
from tests.support.references import to_numpy

STEPS = 40
SHORT = {
    "steps": STEPS,
    "image_size": 8,
    "batch_size": 16,
    "warmup_steps": 0,
    "steps_per_epoch": 10,
}
TOWERS = training.recipe("soft_moe_contrastive", peak_learning_rate=0.005, **SHORT)
RECIPES = {
    "limoe": training.recipe("limoe_pretraining", peak_learning_rate=0.02, **SHORT),
    "towers": TOWERS,
    "towers frozen": TOWERS,
}
# Decoupled from the rate: what a kernel loses in a step at the peak.
DECAY = 1e-5


@pytest.fixture(scope="module")
def pairs():
    images, labels = datasets.digits(8, split="train")
    return images[:64], np.array([f"the digit {label}" for label in labels[:64]])


@pytest.fixture(scope="module")
def vocabulary(pairs):
    return datasets.train_vocabulary(pairs[1], 90)


def make_preprocessor(cls, vocabulary):
    return cls(
        models.LIMoETokenizer(vocabulary),
        models.ViTMoEImageConverter(tiny.IMAGE_SHAPE[:2]),
        sequence_length=16,
        truncate=True,
    )


TRANSFORMER = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 32}


def make_limoe(vocabulary):
    backbone = models.LIMoEBackbone(
        image_shape=tiny.IMAGE_SHAPE,
        patch_size=4,
        vocabulary_size=90,
        sequence_length=16,
        moe_layers=(1,),
        router=routers.LIMoERouter(4),
        embedding_dim=8,
        group_images=16,
        **TRANSFORMER,
    )
    preprocessor = make_preprocessor(models.LIMoEPreprocessor, vocabulary)
    return models.LIMoEContrastive(backbone, preprocessor)


def make_towers(vocabulary, **arguments):
    towers = models.TwoTowerBackbone(
        models.ViTMoEBackbone(
            tiny.IMAGE_SHAPE,
            4,
            moe_layers=(1,),
            router=routers.SoftRouter(4),
            pooling="gap",
            **TRANSFORMER,
        ),
        models.TextMoEBackbone(90, 16, pooling="gap", **TRANSFORMER),
        **arguments,
    )
    preprocessor = make_preprocessor(models.TwoTowerPreprocessor, vocabulary)
    return models.TwoTowerContrastive(towers, preprocessor)


def values(model):
    return {v.path: to_numpy(v.value) for v in model.trainable_variables}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name, pairs, vocabulary):
    recipe = RECIPES[name]
    if name.startswith("limoe"):
        model = make_limoe(vocabulary)
    else:
        model = make_towers(vocabulary, freeze_image="frozen" in name)
        trained = {path.partition("/")[0] for path in values(model)}
        assert ("patch_embedding" in trained) == ("frozen" not in name)
    recipe.compile(model)
    history = model.fit(
        recipe.training_data(pairs),
        validation_data=recipe.evaluation_data(pairs),
        verbose=0,
        **recipe.fit_arguments,
    ).history
    assert len(history["loss"]) == 4
    assert history["val_loss"][-1] < 0.9 * history["val_loss"][0]
    assert int(to_numpy(model.optimizer.iterations.value)) == STEPS
    assert isinstance(model.optimizer, training.Adafactor)


@pytest.mark.parametrize("peak", [0.02, 0.001])
def test_decay_is_decoupled_from_the_rate(peak, vocabulary):
    recipe = training.recipe("limoe_pretraining", peak_learning_rate=peak, **SHORT)
    model = make_limoe(vocabulary)
    recipe.compile(model)
    variables = model.trainable_variables
    start = values(model)
    # Large enough to be seen in float32.
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    model.optimizer.apply([keras.ops.zeros(v.shape) for v in variables], variables)
    for variable in variables:
        lost = DECAY if variable.path.endswith("kernel") else 0.0
        np.testing.assert_allclose(
            to_numpy(variable.value), 1.0 - lost, rtol=2e-7, err_msg=variable.path
        )
    assert any(path.endswith("kernel") for path in start)


def test_the_loss_of_two_towers_goes_with_their_bias(vocabulary, pairs):
    recipe = training.recipe("soft_moe_contrastive", augmentation="light0", **SHORT)
    for bias, loss in ((None, "softmax"), (-10.0, "sigmoid")):
        model = make_towers(vocabulary, logit_bias=bias)
        recipe.compile(model, metrics=None)
        config = model.get_compile_config()
        assert (config["loss"], config["metrics"]) == (loss, None)
    data = recipe.training_data(pairs)
    history = model.fit(data, steps_per_epoch=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_a_cooldown_goes_on_from_a_saved_model(vocabulary, tmp_path, pairs):
    recipe = training.recipe(
        "limoe_pretraining",
        peak_learning_rate=0.02,
        decay="rsqrt",
        timescale=10,
        **SHORT,
    )
    model = make_limoe(vocabulary)
    recipe.compile(model)
    settings = {"steps_per_epoch": 5, "shuffle": False, "verbose": 0}
    model.fit(recipe.training_data(pairs), **settings)
    model = reloaded(model, tmp_path)
    model.optimizer.learning_rate = training.WarmupSchedule(
        0.02, 10, decay="rsqrt", timescale=10, cooldown_steps=5
    )
    model.fit(recipe.training_data(pairs), **settings)
    assert int(to_numpy(model.optimizer.iterations.value)) == 10
    assert float(to_numpy(model.optimizer.learning_rate)) == 0.0
    # At a rate of zero nothing changes any more.
    before = values(model)
    model.fit(recipe.training_data(pairs), **settings)
    np.testing.assert_equal(values(model), before)


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"steps": 100}, "total_steps=100, warmup_steps=40000"),
        ({"cooldown_steps": 10}, "decay='cosine', cooldown_steps=10"),
        ({"augmentation": "light1"}, "augmentation='light1'.*mixup_alpha=0.2"),
        ({"batch_size": 1}, "batch_size=1"),
        ({"timescale": 0.0}, "timescale=0.0"),
    ],
)
def test_bad_arguments_are_named(arguments, received):
    with pytest.raises(ValueError, match=f"(?s)Received: .*{received}"):
        training.recipe("limoe_pretraining", **arguments)


def test_another_model_is_named():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    with pytest.raises(ValueError, match="Received: Sequential"):
        RECIPES["limoe"].compile(model)
