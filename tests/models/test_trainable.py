"""Frozen parts of models: when they are made, in files, in clones; compilation.

Tests `models/configuration.py`, with `test_image_classifier.py`.
"""

import warnings

import keras
import numpy as np
import pytest

from keras_softmoe import layers, models, ops, routers
from tests.skips import only_on
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import flags, randomize, reloaded
from tests.support.references import assert_all_equal, to_numpy

pytestmark = [tiny.FITTING, tiny.LOADING]
# Quiet, so that two trainings are the same one.
ROUTER = routers.SoftmaxTokenChoiceRouter(
    4,
    capacity_factor=2.0,
    noise_std=0.0,
    losses=(routers.RoutingLoss(ops.z_loss, weight=0.5),),
)
SPARSE = {"router": ROUTER, "pooling": "map"}


def text_tower(**overrides):
    sizes = tiny_limoe.VOCABULARY_SIZE, tiny_limoe.LENGTH
    return models.TextMoEBackbone(*sizes, 1, 2, 8, 12, **overrides)


def towers(**overrides):
    image = tiny.backbone(num_layers=1, **tiny.DENSE)
    return models.TwoTowerBackbone(image, text_tower(), **overrides)


def one_tower(**overrides):
    return tiny_limoe.backbone(router=tiny_limoe.AMPLE, **overrides)


def on(cls, backbone, *arguments):
    """What makes a task on a new backbone."""
    return lambda **overrides: cls(backbone(), *arguments, **overrides)


MODELS = {
    "ViTMoEBackbone": lambda **overrides: tiny.backbone(**SPARSE, **overrides),
    "TextMoEBackbone": text_tower,
    "LIMoEBackbone": one_tower,
    "TwoTowerBackbone": towers,
    "ViTMoEImageClassifier": on(
        models.ViTMoEImageClassifier, lambda: tiny.backbone(**SPARSE), 3
    ),
    "LIMoEContrastive": on(models.LIMoEContrastive, one_tower),
    "TwoTowerContrastive": on(models.TwoTowerContrastive, towers),
}


@pytest.mark.parametrize("name", MODELS)
def test_made_frozen(name):
    model = MODELS[name](trainable=False)
    assert not any(weight.trainable for weight in model.weights)
    revived = type(model).from_config(model.get_config())
    assert not revived.trainable
    assert flags(revived) == flags(model)
    model.trainable = True
    assert len(model.trainable_weights) == len(model.weights)
    with pytest.raises(ValueError, match="Received: trainable='no'"):
        MODELS[name](trainable="no")


@pytest.mark.parametrize("name", MODELS)
def test_frozen_parts_are_those_of_its_configuration(name):
    model = MODELS[name]()
    # Every other layer and weight, at any depth; then also the model itself.
    parts = list(model._flatten_layers())
    for part in [*parts, *model.weights][1::2]:
        part.trainable = False
    # What is frozen stands in the configuration.
    assert flags(type(model).from_config(model.get_config())) == flags(model)
    assert {flag for _, flag in flags(model)} == {True, False}
    # An argument of the constructor has the last word.
    frozen = type(model).from_config({**model.get_config(), "trainable": False})
    assert not any(weight.trainable for weight in frozen.weights)


def freeze_backbone(model):
    model.backbone.trainable = False


def freeze_blocks(model):
    model.backbone.get_layer("patch_embedding").trainable = False
    model.backbone.blocks[0].trainable = False


def freeze_all_but_a_block(model):
    model.backbone.trainable = False
    model.backbone.blocks[1].attention.trainable = True


def freeze_experts(model):
    model.backbone.blocks[1].moe.experts.trainable = False


def freeze_router(model):
    model.backbone.router.trainable = False


def freeze_weights(model):
    model.backbone.blocks[1].moe.experts.output_dense.bias.trainable = False
    model.backbone.router.kernel.trainable = False


def freeze_head(model):
    model.output_dense.trainable = False


FREEZING = [
    freeze_backbone,
    freeze_blocks,
    freeze_all_but_a_block,
    freeze_experts,
    freeze_router,
    freeze_weights,
    freeze_head,
]


def fit(model):
    """The losses of two epochs."""
    x, y = tiny.pixels(4), tiny.labels(4)
    arguments = {"shuffle": False, "batch_size": 4, "epochs": 2, "verbose": 0}
    return model.fit(x, y, **arguments).history["loss"]


@pytest.mark.parametrize("freeze", FREEZING)
def test_files_keep_what_is_frozen(freeze, tmp_path):
    model = tiny.classifier(**SPARSE)
    freeze(model)
    assert not all(weight.trainable for weight in model.weights)
    model.compile(keras.optimizers.Adam(0.01), metrics=[])
    model.optimizer.build(model.trainable_variables)
    for moment in model.optimizer.variables:
        moment.assign(np.random.default_rng(0).integers(1, 9, size=moment.shape))
    model.save(tmp_path / "model.keras")
    model.save_to_preset(str(tmp_path / "preset"))
    with warnings.catch_warnings():
        # Of an optimizer whose state is lost
        warnings.simplefilter("error")
        revived = keras.saving.load_model(tmp_path / "model.keras")
    preset = models.ViTMoEImageClassifier.from_preset(str(tmp_path / "preset"))
    backbone = models.ViTMoEBackbone.from_preset(str(tmp_path / "preset"))
    assert flags(revived) == flags(preset) == flags(model)
    assert flags(backbone) == flags(model.backbone)
    assert_all_equal(revived.optimizer.variables, model.optimizer.variables)


def test_training_goes_on_from_a_file(tmp_path):
    model = tiny.classifier(**SPARSE)
    freeze_blocks(model)
    freeze_experts(model)
    frozen = [weight for weight in model.weights if not weight.trainable]
    before = [to_numpy(weight).copy() for weight in frozen]
    model.compile(keras.optimizers.Adam(0.01), metrics=[])
    fit(model)
    np.testing.assert_allclose(fit(reloaded(model, tmp_path)), fit(model), rtol=1e-5)
    assert len(frozen) > 8
    assert_all_equal(frozen, before)


def test_presets_may_be_loaded_frozen(tmp_path):
    model = tiny.classifier(**SPARSE)
    freeze_blocks(model)
    model.save_to_preset(str(tmp_path))
    for cls in (models.ViTMoEImageClassifier, models.ViTMoEBackbone):
        frozen = cls.from_preset(str(tmp_path), trainable=False)
        assert not any(weight.trainable for weight in frozen.weights)
    thawed = models.ViTMoEBackbone.from_preset(str(tmp_path), trainable=True)
    assert all(weight.trainable for weight in thawed.weights)
    # Parts that another architecture does not have.
    smaller = models.ViTMoEBackbone.from_preset(
        str(tmp_path), load_weights=False, moe_layers=(), router=None, num_layers=1
    )
    assert not any(weight.trainable for weight in smaller.blocks[0].weights)
    assert smaller.get_layer("encoder_norm").trainable


def test_a_locked_tower_may_be_unlocked_by_its_argument():
    config = {**towers(freeze_image=True).get_config(), "freeze_image": False}
    revived = models.TwoTowerBackbone.from_config(config)
    assert len(revived.trainable_weights) == len(revived.weights)


def test_a_file_with_lora_is_that_of_an_ordinary_model():
    model = tiny.classifier(**SPARSE)
    model.backbone.enable_lora(2)
    revived = models.ViTMoEImageClassifier.from_config(model.get_config())
    assert len(revived.trainable_weights) == len(revived.weights)


def loss_of_routers(model):
    """What balancing losses add to the loss of a step that changes nothing."""
    model.compile(
        keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics=[]
    )
    x, y = tiny.pixels(4), tiny.labels(4)
    return fit(model)[0] - model.evaluate(x, y, verbose=0)


@only_on("torch", because="one backend")
def test_a_frozen_router_adds_no_loss():
    model = tiny.classifier(moe_layers=(0, 1), **SPARSE)
    first, second = model.backbone.routers.values()
    # Equal logits of four experts
    for router in (first, second):
        router.kernel.assign(np.zeros(router.kernel.shape))
    one = 0.5 * np.log(4.0) ** 2
    np.testing.assert_allclose(loss_of_routers(model), 2 * one, rtol=1e-4)
    first.trainable = False
    np.testing.assert_allclose(loss_of_routers(model), one, rtol=1e-4)
    # That of tokens remains, where a kernel alone is not trained.
    second.kernel.trainable = False
    np.testing.assert_allclose(loss_of_routers(model), one, rtol=1e-4)
    model.backbone.trainable = False
    assert_near(loss_of_routers(model), 0.0, atol=1e-5)
    # What it would be can be seen.
    decision = first(np.ones((1, 5, 8)), training=True)
    np.testing.assert_allclose(
        to_numpy(decision.summary["auxiliary_loss"]), [one], rtol=1e-5
    )
    assert not first.losses


def test_a_frozen_tower_in_a_model_of_ones_own():
    # Keras lets what is around a functional model decide on `training`.
    tower = tiny.backbone(**SPARSE)
    tower.router.kernel.assign(np.zeros(tower.router.kernel.shape))
    inputs = keras.Input(tiny.IMAGE_SHAPE)
    x = tower(inputs, training=False)["pooled_output"]
    model = keras.Model(inputs, keras.layers.Dense(3, kernel_initializer="zeros")(x))
    x, y = tiny.images(4), np.zeros((4, 3))
    losses = []
    for trainable in (True, False):
        tower.trainable = trainable
        model.compile(keras.optimizers.SGD(0.0), "mse")
        losses.append(model.fit(x, y, verbose=0).history["loss"][0])
    assert_near(losses, [0.5 * np.log(4.0) ** 2, 0.0], atol=1e-5)


def outputs_of(model, x):
    return keras.tree.map_structure(to_numpy, model(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_clone_routes_as_its_model_does_now(name):
    model = MODELS[name]()
    randomize(model)
    x = tiny_limoe.pairs()
    if not isinstance(model.input, dict):
        x = x[{3: "images", 1: "token_ids"}[len(model.input.shape) - 1]]
    before = outputs_of(model, x)
    if model.routers:
        model.set_routing(capacity_factor=0.3, group_images=2)
        changed = keras.tree.map_structure(
            lambda a, b: np.abs(a - b).max() > 1e-4, before, outputs_of(model, x)
        )
        assert any(keras.tree.flatten(changed))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    keras.tree.map_structure(
        lambda a, b: assert_near(a, b, rtol=1e-5, atol=1e-6),
        outputs_of(clone, x),
        outputs_of(model, x),
    )
    # A clone is a plain model, and compiled if the other one was.
    assert clone.compiled == model.compiled
    if model.compiled:
        assert type(clone.optimizer) is type(model.optimizer)


def test_a_clone_of_frozen_layers():
    inputs = keras.Input((5, 8))
    layer = layers.MoE(ROUTER, 6, trainable=False)
    clone = keras.models.clone_model(keras.Model(inputs, layer(inputs)))
    assert not clone.trainable_weights
