"""Text towers and two towers: outputs, freezing, losses of both, files, errors.

Tests `models/two_towers.py` and `models/text.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import models, ops, routers
from keras_softmoe.layers.pooling import TEXT_POOLINGS
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights, from_preset, randomize
from tests.support.references import to_numpy
from tests.support.tiny_limoe import BATCH, LENGTH, VOCABULARY_SIZE, as_numpy, pairs

WIDTH = 8
# Noise that would show, and a loss.
IMPORTANCE = (routers.RoutingLoss(ops.importance_loss),)
NOISY = routers.SoftmaxTokenChoiceRouter(4, noise_std=8.0, losses=IMPORTANCE)
QUIET = routers.SoftmaxTokenChoiceRouter(4, noise_std=0.0, losses=IMPORTANCE)


def text_tower(**overrides):
    arguments = {**tiny.SIZES_OF_BLOCKS, "num_layers": 1, **overrides}
    sizes = {"vocabulary_size": VOCABULARY_SIZE, "sequence_length": LENGTH}
    model = models.TextMoEBackbone(**{**sizes, **arguments})
    randomize(model)
    return model


def image_tower(**overrides):
    arguments = {"num_layers": 1, "pooling": "gap", **tiny.DENSE, **overrides}
    return tiny.backbone(**arguments)


def towers(image=None, text=None, **overrides):
    model = models.TwoTowerBackbone(
        image_tower(**image or {}), text_tower(**text or {}), **overrides
    )
    randomize(model)
    return model


def moe(router):
    return {"moe_layers": (0,), "router": router}


@pytest.mark.parametrize("pooling", TEXT_POOLINGS)
def test_text_tower(pooling):
    model = text_tower(pooling=pooling)
    ids = pairs()["token_ids"]
    outputs = as_numpy(model(ids))
    tokens = outputs["sequence_output"]
    assert tokens.shape == (BATCH, LENGTH, WIDTH)
    expected = {
        "last": lambda: tokens[:, -1],
        "first": lambda: tokens[:, 0],
        "gap": lambda: tokens.mean(1),
        "gmp": lambda: tokens.max(1),
        "map": lambda: to_numpy(model.get_layer("attention_pooling")(tokens)),
    }[pooling]()
    assert_near(outputs["pooled_output"], expected, rtol=1e-5, atol=1e-5)
    # Where a token stands matters.
    backwards = as_numpy(model(ids[:, ::-1].copy()))["pooled_output"]
    assert np.abs(backwards - outputs["pooled_output"]).max() > 1e-3


def test_text_tower_configuration(tmp_path):
    arguments = {"num_layers": 2, "router": NOISY, "pooling": "map", "name": "text"}
    model = text_tower(**tiny.UNUSUAL, **arguments)
    revived = models.TextMoEBackbone.from_config(model.get_config())
    assert revived.get_config() == model.get_config()
    revived = from_preset(model, tmp_path, priority="max")
    assert revived.router.priority == "max"
    assert_same_weights(revived, model)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_heads": 3}, "must divide.*num_heads=3, width=8"),
        ({"moe_layers": (0,)}, r"go together.*moe_layers=\(0,\)"),
        ({"pooling": "token"}, "'last', 'first', 'gap', 'gmp', 'map'.*'token'"),
        ({"vocabulary_size": 0}, "vocabulary_size=0"),
    ],
)
def test_bad_text_tower(wrong, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        text_tower(**wrong)


def test_texts_of_wrong_length():
    model = text_tower()
    for shape in ((3, 9), (8,)):
        with pytest.raises(ValueError, match=r"\(None, 8\).*Received: token ids"):
            tiny.predict(model, np.zeros(shape, "int32"))


@pytest.mark.parametrize("dims", [(None, None), (6, 6), (None, 8)])
def test_outputs(dims):
    model = towers(
        image_projection_dim=dims[0], text_projection_dim=dims[1], logit_bias=-10.0
    )
    outputs = as_numpy(model(pairs()))
    for modality, key, dim in zip(
        ("image", "text"), ("images", "token_ids"), dims, strict=True
    ):
        tower = getattr(model, f"{modality}_backbone")
        x = to_numpy(tower(pairs()[key])["pooled_output"])
        if dim is not None:
            kernel, bias = model.get_layer(f"{modality}_projection").weights
            x = x @ to_numpy(kernel) + to_numpy(bias)
        expected = x / np.linalg.norm(x, axis=-1, keepdims=True)
        assert_near(outputs[f"{modality}_embedding"], expected, rtol=1e-4, atol=1e-5)
        (alone,) = getattr(model, f"{modality}_encoder")(pairs()[key]).values()
        assert_near(to_numpy(alone), expected, rtol=1e-4, atol=1e-5)
    scale = to_numpy(model.get_layer("contrastive_scale").log_scale)
    np.testing.assert_allclose(outputs["logit_scale"], np.exp([scale] * BATCH), 1e-5)
    assert outputs["logit_bias"].shape == (BATCH,)
    with pytest.raises(ValueError, match="equally many.*3 images, 2 texts"):
        x = pairs()
        tiny.predict(model, {**x, "token_ids": x["token_ids"][:2]})


def test_losses_of_both_towers_are_trained():
    # Where a router's logits are all zero, its z-loss is log(E) squared.
    image, text = (
        routers.SoftmaxTokenChoiceRouter(
            4, noise_std=0.0, losses=[routers.RoutingLoss(ops.z_loss, weight=weight)]
        )
        for weight in (1.0, 0.5)
    )
    backbone = towers(moe(image), moe(text))
    for router in backbone.routers.values():
        router.kernel.assign(np.zeros(router.kernel.shape))
    model = models.TwoTowerContrastive(backbone)
    model.compile(keras.optimizers.SGD(0.0))
    x = pairs()
    loss = model.evaluate(x, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, tiny_limoe.softmax_loss(model(x)), rtol=2e-5)
    history = model.fit(x["images"], x["token_ids"], shuffle=False, verbose=0).history
    expected = loss + 1.5 * np.log(4.0) ** 2
    np.testing.assert_allclose(history["loss"][0], expected, rtol=2e-5)


def test_frozen_image_tower():
    # Locked: no noise, no dropout, no loss, no change, while the text tower learns.
    backbone = towers(
        {**moe(NOISY), "dropout_rate": 0.5},
        {"dropout_rate": 0.0},
        text_projection_dim=WIDTH,
        freeze_image=True,
    )
    image = backbone.image_backbone
    model = models.TwoTowerContrastive(backbone)
    model.compile(keras.optimizers.SGD(0.1))
    x = pairs()
    expected = tiny_limoe.softmax_loss(model(x))
    frozen = [to_numpy(w) for w in image.weights]
    learned = [to_numpy(w) for w in backbone.text_backbone.trainable_weights]
    assert not image.trainable_weights
    history = model.fit(x["images"], x["token_ids"], shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"][0], expected, rtol=2e-5)
    assert_same_weights(image, frozen)
    text = backbone.text_backbone.trainable_weights
    for weight, old in zip(text, learned, strict=True):
        if not weight.path.endswith("key/bias"):
            assert np.abs(to_numpy(weight) - old).max() > 0, weight.path


@pytest.mark.parametrize("freeze_image", [False, True])
def test_preset(tmp_path, freeze_image):
    backbone = towers(
        moe(NOISY),
        moe(QUIET),
        image_projection_dim=5,
        text_projection_dim=5,
        logit_bias=-1.0,
        freeze_image=freeze_image,
    )
    model = models.TwoTowerContrastive(
        backbone, tiny_limoe.preprocessor(models.TwoTowerPreprocessor)
    )
    path = str(tmp_path / "preset")
    revived = from_preset(model, path)
    assert type(revived.preprocessor) is models.TwoTowerPreprocessor
    assert revived.backbone.get_config() == backbone.get_config()
    expected, actual = as_numpy(model(pairs())), as_numpy(revived(pairs()))
    for name in expected:
        assert_near(actual[name], expected[name], rtol=1e-5, atol=1e-6)
    texts = tiny_limoe.captions()
    np.testing.assert_array_equal(
        revived.preprocessor.tokenize(texts), model.preprocessor.tokenize(texts)
    )
    trainable = len(backbone.image_backbone.trainable_weights)
    assert len(revived.backbone.image_backbone.trainable_weights) == trainable
    assert bool(trainable) != freeze_image
    # Frozen or not, the weights have one place in the file.
    other = models.TwoTowerBackbone.from_preset(path, freeze_image=not freeze_image)
    assert_same_weights(other, backbone)


def test_routers_of_both_towers():
    model = models.TwoTowerContrastive(towers(moe(NOISY), moe(QUIET)))
    assert list(model.routers) == ["image/0", "text/0"]
    model.set_routing(layers="text/0", num_selected_experts=1, priority="max")
    priorities = {name: r.priority for name, r in model.routers.items()}
    assert priorities == {"image/0": "position", "text/0": "max"}
    model.backbone.set_routing(capacity_factor=0.5)
    assert {r.capacity_factor for r in model.routers.values()} == {0.5}
    with pytest.raises(ValueError, match="'image/0', 'text/0'.*layers="):
        model.set_routing(layers="text/1", num_selected_experts=1)
    assert towers().routers == {} and towers().router is None


def test_widths_must_agree():
    message = "one width.*8 for images, 6 for text.*`text_projection_dim=8`"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        towers(text_projection_dim=6)
    with pytest.raises(ValueError, match="5 for images, 8 for text"):
        towers(image_projection_dim=5)
    with pytest.raises(ValueError, match="number over 0.*scale=-1.0"):
        towers(logit_scale=-1.0)
