"""Contrastive training: reported losses against plain NumPy, embeddings, zero-shot.

Tests `models/contrastive.py` and `models/pair_encoding.py`.
"""

import itertools

import keras
import numpy as np
import pytest

from keras_softmoe import models, routers
from keras_softmoe.routers import sparse
from tests.support import limoe_router_twin as twin, tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import assert_trained
from tests.support.references import assert_each_near
from tests.support.tiny_limoe import AMPLE, BATCH, as_numpy

NUM_PAIRS = 2 * BATCH
TOLERANCE = 2e-5
ACCURACIES = ("image_to_text_accuracy", "text_to_image_accuracy")


def pixels(num_pairs=NUM_PAIRS):
    return tiny.pixels(num_pairs)


def captions(num_pairs=NUM_PAIRS):
    return tiny_limoe.captions(num_pairs)


def batches(model):
    """What the backbone takes, in batches of three pairs."""
    x = {
        "images": pixels() / np.float32(127.5) - 1.0,
        "token_ids": model.preprocessor.tokenize(captions()),
    }
    return [{k: v[i : i + BATCH] for k, v in x.items()} for i in (0, BATCH)]


def expected_logs(model, auxiliary=True):
    """Mean over two batches of what `fit` and `evaluate` should report."""
    logs = []
    for batch in batches(model):
        outputs = model(batch)
        found = tiny_limoe.logits(outputs)
        loss = tiny_limoe.softmax_loss(outputs)
        added = {}
        if auxiliary:
            added["routing_loss"] = tiny_limoe.auxiliary_loss(model.backbone, batch)
        right = np.arange(BATCH)
        accuracies = [(found.argmax(axis) == right).mean() for axis in (1, 0)]
        logs.append([loss + sum(added.values()), *accuracies, *added.values()])
    names = ("loss", *ACCURACIES, *added)
    return dict(zip(names, np.mean(logs, axis=0), strict=True))


def assert_logs(actual, expected):
    assert sorted(actual) == sorted(expected)
    assert_each_near(actual, expected, TOLERANCE, TOLERANCE)


@pytest.fixture(scope="module")
def limoe():
    """One model for all tests that leave it as it is: compiling takes seconds."""
    keras.utils.set_random_seed(0)
    return tiny_limoe.task()


def test_fit_and_evaluate_report_what_they_should(limoe):
    # Two MoE blocks, whose losses are each counted once, and two batches.
    expected = expected_logs(limoe)
    evaluated = expected_logs(limoe, auxiliary=False)
    assert expected["loss"] > evaluated["loss"] + 0.1
    history = limoe.fit(
        pixels(),
        captions(),
        batch_size=BATCH,
        shuffle=False,
        validation_data=(pixels(), captions()),
        verbose=0,
    ).history
    validation = {f"val_{name}": value for name, value in evaluated.items()}
    assert_logs({name: v[0] for name, v in history.items()}, expected | validation)
    settings = {"batch_size": BATCH, "verbose": 0, "return_dict": True}
    assert_logs(limoe.evaluate(pixels(), captions(), **settings), evaluated)
    # The same pairs as a dict.
    x = {"images": pixels(), "captions": np.array(captions())}
    assert_logs(limoe.evaluate(x, **settings), evaluated)


def test_pipelines_of_strings(limoe):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((pixels(), captions()))
    dataset = dataset.batch(BATCH, drop_remainder=True)
    history = limoe.fit(dataset, verbose=0).history
    assert_logs({name: v[0] for name, v in history.items()}, expected_logs(limoe))
    evaluated = limoe.evaluate(dataset, verbose=0, return_dict=True)
    assert_logs(evaluated, expected_logs(limoe, auxiliary=False))


def test_pairs_that_fill_no_batch_sit_out(limoe):
    settings = {"batch_size": BATCH, "verbose": 0, "return_dict": True}
    more = limoe.evaluate(pixels(8), captions(8), **settings)
    assert_logs(more, expected_logs(limoe, auxiliary=False))
    # No more pairs than there are: one batch of three.
    first = limoe.evaluate(pixels(3), captions(3), verbose=0, return_dict=True)
    logits = tiny_limoe.logits(limoe(batches(limoe)[0]))
    np.testing.assert_allclose(
        first[ACCURACIES[0]], (logits.argmax(1) == np.arange(BATCH)).mean()
    )


def test_validation_has_batches_of_its_own_size(limoe):
    settings = {"shuffle": False, "verbose": 0, "batch_size": BATCH}
    validation = (pixels(), captions())
    history = limoe.fit(
        pixels(),
        captions(),
        validation_data=validation,
        validation_batch_size=NUM_PAIRS,
        **settings,
    ).history
    expected = limoe.evaluate(
        *validation, batch_size=NUM_PAIRS, verbose=0, return_dict=True
    )
    for name, value in expected.items():
        np.testing.assert_allclose(history[f"val_{name}"][0], value, rtol=1e-5)


def test_noise_and_load_loss(monkeypatch):
    router = routers.LIMoERouter(
        4, noise_std=2.0, losses=routers.classic_losses(), loss_weight=0.5
    )
    # One MoE block, so that the logits before noise are those of `route`.
    model = tiny_limoe.task(moe_layers=(1,), router=router)
    noise = np.random.default_rng(7).normal(size=(2, 24, 4)).astype("float32")

    def normal(x, seed, stddev=1.0):
        # However often a step is traced, it draws the same.
        return keras.ops.convert_to_tensor(stddev * noise.reshape(tuple(x.shape)))

    monkeypatch.setattr(sparse, "normal_like", normal)
    (batch, _) = batches(model)
    history = model.fit(
        pixels(BATCH), captions(BATCH), shuffle=False, verbose=0
    ).history
    expected = tiny_limoe.softmax_loss(model(batch, training=True))
    classic = [(loss, None) for loss in (twin.importance, twin.load, twin.z)]
    expected += tiny_limoe.auxiliary_loss(
        model.backbone, batch, classic, 0.5, noise.astype("float64")
    )
    np.testing.assert_allclose(history["loss"][0], expected, rtol=TOLERANCE)
    # Noise, and the loss about it, made a difference.
    quiet = tiny_limoe.softmax_loss(model(batch)) + tiny_limoe.auxiliary_loss(
        model.backbone, batch, [classic[0], classic[2]], 0.5
    )
    assert abs(expected - quiet) > 1e-3


def test_sigmoid_loss_with_bias():
    # A bias asks for the sigmoid loss.
    model = tiny_limoe.task(**tiny_limoe.DENSE, logit_bias=-3.0)
    assert model.get_compile_config()["loss"] == "sigmoid"
    outputs = [as_numpy(model(batch)) for batch in batches(model)]
    outputs = {k: np.concatenate([x[k] for x in outputs]) for k in outputs[0]}

    def loss(order):
        """Of six pairs in this order, in batches of three."""
        halves = np.array(order).reshape(2, BATCH)
        return np.mean(
            [
                tiny_limoe.sigmoid_loss({k: v[half] for k, v in outputs.items()})
                for half in halves
            ]
        )

    settings = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(pixels(), captions(), shuffle=False, **settings).history
    assert history["loss"][0] == pytest.approx(loss(range(NUM_PAIRS)), rel=TOLERANCE)
    # Shuffled are pairs, before each epoch: the loss is that of one of the ways to
    # divide them, and not always of the same one.
    history = model.fit(pixels(), captions(), epochs=6, **settings).history
    divided = [loss(order) for order in itertools.permutations(range(NUM_PAIRS))]
    for found in history["loss"]:
        assert np.isclose(found, divided, rtol=TOLERANCE, atol=0).any()
    assert np.ptp(history["loss"]) > 1e-3


def test_fit_learns():
    model = tiny_limoe.task()
    model.compile(keras.optimizers.Adam(0.02))
    before = model.get_weights()
    settings = {"batch_size": NUM_PAIRS, "verbose": 0}
    model.fit(pixels(), captions(), epochs=40, **settings)
    logs = model.evaluate(pixels(), captions(), return_dict=True, **settings)
    assert logs[ACCURACIES[0]] == logs[ACCURACIES[1]] == 1.0
    assert_trained(model, before, least=1e-4)


def test_compilation():
    model = models.LIMoEContrastive(tiny_limoe.backbone())
    names = ["loss", *ACCURACIES, "routing_loss"]
    # Compiled when made, and as often as one likes.
    assert [m.name for m in model.metrics] == names
    assert isinstance(model.optimizer, keras.optimizers.AdamW)
    model.compile("sgd", loss="sigmoid")
    assert [m.name for m in model.metrics] == names
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    config = model.get_compile_config()
    assert config["loss"] == "sigmoid"
    assert config["optimizer"]["own"] == {"metrics": "auto"}
    model.compile(metrics=None)
    assert [m.name for m in model.metrics] == ["loss", "routing_loss"]
    config = model.get_compile_config()
    assert config["loss"] == "softmax"
    assert config["optimizer"]["own"] == {"metrics": None}
    for wrong, accepted in (
        ({"loss": "hinge"}, "'softmax', 'sigmoid'.*loss='hinge'"),
        ({"metrics": ["accuracy"]}, r"'auto', None.*metrics=\['accuracy'\]"),
    ):
        with pytest.raises(ValueError, match=accepted):
            model.compile(**wrong)
    model = models.LIMoEContrastive(tiny_limoe.backbone(), compile=False)
    assert not model.compiled and model.get_compile_config() == {}
    batch = tiny_limoe.pairs()
    for call in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=r"call `compile\(\)`"):
            call(batch, verbose=0)


@pytest.fixture(scope="module")
def ample():
    """A LIMoE with room for all, in which nobody feels the rest of the batch."""
    keras.utils.set_random_seed(0)
    return tiny_limoe.task(router=AMPLE)


def encoded(model):
    """Embeddings of both halves, three at a time."""
    return {
        "image_embedding": model.encode_image(pixels(), batch_size=BATCH),
        "text_embedding": model.encode_text(captions(), batch_size=BATCH),
    }


def test_encode(ample):
    expected = [as_numpy(ample(batch)) for batch in batches(ample)]
    for name, found in encoded(ample).items():
        assert found.shape == (NUM_PAIRS, 6) and found.dtype == "float32"
        np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1.0, rtol=1e-5)
        value = np.concatenate([outputs[name] for outputs in expected])
        assert_near(found, value, rtol=1e-5, atol=1e-5)


def test_encode_any_number(ample, capsys):
    # The last batch is not full; images of other sizes are resized; ids are captions.
    expected = encoded(ample)
    large = pixels().repeat(2, axis=1).repeat(2, axis=2).astype("uint8")
    found = ample.encode_image(large, batch_size=4)
    assert_near(found, expected["image_embedding"], rtol=1e-4, atol=1e-4)
    ids = ample.preprocessor.tokenize(captions()).astype("int64")
    assert capsys.readouterr().out == ""
    found = ample.encode_text(ids, batch_size=BATCH, verbose=1)
    assert_near(found, expected["text_embedding"], atol=1e-6)
    assert "6/6" in capsys.readouterr().out


def test_zero_shot(ample):
    names, templates = ["ring", "heart", "star"], ["a {}", "a red {}"]
    embeddings = [
        ample.encode_text([t.replace("{}", name) for name in names], batch_size=BATCH)
        for t in templates
    ]
    classes = np.mean(embeddings, axis=0)
    classes /= np.linalg.norm(classes, axis=-1, keepdims=True)
    found = ample.class_embeddings(names, templates)
    assert_near(found, classes, rtol=1e-4, atol=1e-5)
    scores = ample.zero_shot(pixels(), names, templates, batch_size=BATCH)
    images = ample.encode_image(pixels(), batch_size=BATCH)
    assert_near(scores, images @ classes.T, rtol=1e-4, atol=1e-5)
    assert scores.shape == (NUM_PAIRS, 3)


def test_encoders_follow_the_routers(ample):
    before = ample.encode_text(captions(), batch_size=BATCH)
    settings = {"single_modality_capacity_factor": 0.25}
    fresh = tiny_limoe.task(router=AMPLE.with_settings(**settings))
    fresh.set_weights(ample.get_weights())
    ample.set_routing(**settings)
    after = ample.encode_text(captions(), batch_size=BATCH)
    ample.set_routing(single_modality_capacity_factor=16.0)
    assert np.abs(after - before).max() > 1e-3
    expected = fresh.encode_text(captions(), batch_size=BATCH)
    assert_near(after, expected, rtol=1e-5, atol=1e-6)
    again = ample.encode_text(captions(), batch_size=BATCH)
    np.testing.assert_array_equal(again, before)


def test_encoders_follow_quantization():
    model = tiny_limoe.task(**tiny_limoe.DENSE, num_layers=1)
    before = model.encode_text(captions(), batch_size=BATCH)
    model.backbone.quantize("int8")
    after = model.encode_text(captions(), batch_size=BATCH)
    assert 1e-5 < np.abs(after - before).max() < 0.3
