"""Errors of contrastive tasks and preprocessors, for arrays and in pipelines.

Tests `models/contrastive_preprocessor.py`.
"""

import re

import keras
import numpy as np
import pytest

from keras_softmoe import evaluation, models
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights
from tests.support.references import to_numpy
from tests.support.tiny_limoe import BATCH, LENGTH, VOCABULARY_SIZE, captions, token_ids

LONG = "a very long caption about one red circle and two blue stars"


@pytest.fixture(scope="module")
def model():
    return tiny_limoe.task(**tiny_limoe.DENSE)


@pytest.fixture(scope="module")
def without_preprocessor():
    return models.LIMoEContrastive(tiny_limoe.backbone(**tiny_limoe.DENSE))


def pixels(num_images=BATCH):
    return tiny.pixels(num_images)


def test_preprocessor():
    preprocessor = tiny_limoe.preprocessor()
    x = preprocessor(pixels(), captions())
    assert_near(to_numpy(x["images"]), tiny.images(BATCH), rtol=1e-5, atol=1e-5)
    ids = x["token_ids"]
    assert ids.shape == (BATCH, LENGTH) and ids.dtype == "int32"
    pieces = [len(np.asarray(row)) for row in preprocessor.tokenizer(captions())]
    # As many tokens as pieces, then padding.
    np.testing.assert_array_equal((ids > 0).sum(-1), pieces)
    for row, length, text in zip(ids, pieces, captions(), strict=True):
        assert not row[length:].any()
        assert str(preprocessor.tokenizer.detokenize(row[:length])) == text
    # Other forms of the same pairs.
    for same in (tuple(captions()), np.array(captions()), ids):
        np.testing.assert_array_equal(preprocessor(pixels(), same)["token_ids"], ids)
    both = {"images": pixels(), "captions": [c.encode() for c in captions()]}
    np.testing.assert_array_equal(preprocessor(both)["token_ids"], ids)
    # Without a converter images are left alone.
    plain = models.LIMoEPreprocessor(preprocessor.tokenizer, sequence_length=LENGTH)
    assert plain.convert(both["images"]) is both["images"]


def test_preprocessor_in_a_pipeline():
    import tensorflow as tf

    preprocessor = tiny_limoe.preprocessor()
    expected = preprocessor(pixels(), captions())
    dataset = tf.data.Dataset.from_tensor_slices((pixels(), captions())).batch(BATCH)
    (x,) = dataset.map(preprocessor)
    np.testing.assert_array_equal(x["token_ids"].numpy(), expected["token_ids"])
    assert x["token_ids"].dtype == "int32"
    assert_near(x["images"].numpy(), to_numpy(expected["images"]), rtol=1e-6, atol=1e-6)


def test_captions_are_cut_on_request():
    import tensorflow as tf

    preprocessor = tiny_limoe.preprocessor(truncate=True)
    pieces = np.asarray(preprocessor.tokenizer([LONG])[0])
    assert len(pieces) > LENGTH
    np.testing.assert_array_equal(preprocessor.tokenize([LONG])[0], pieces[:LENGTH])
    dataset = tf.data.Dataset.from_tensor_slices([LONG, "a heart"]).batch(2)
    (ids,) = dataset.map(preprocessor.tokenize)
    np.testing.assert_array_equal(ids.numpy(), preprocessor.tokenize([LONG, "a heart"]))


def test_preprocessor_configuration():
    for cls in (models.LIMoEPreprocessor, models.TwoTowerPreprocessor):
        preprocessor = tiny_limoe.preprocessor(cls, truncate=True)
        config = preprocessor.get_config()
        revived = keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(preprocessor)
        )
        assert type(revived) is cls
        assert (revived.sequence_length, revived.truncate) == (LENGTH, True)
        assert revived.get_config() == config


BAD_CAPTIONS = [
    (["a ring", 3, "a heart"], r"must be strings.*captions\[1\]=3 of type int"),
    (["a ring", None, "a heart"], r"must be strings.*captions\[1\]=None"),
    (["a ring", "", "a heart"], "must not be empty.*caption=''"),
    (["a ring", "  ", "a heart"], "must not be empty.*caption='  '"),
    (["a ring", LONG, "a heart"], "more tokens.*sequence_length=8.*truncate=True"),
    ("a ring", r"one-dimensional array of str.*shape \(\)"),
    ([["a ring"]] * 3, r"one-dimensional array of str.*shape \(3, 1\)"),
    (np.zeros(3), r"must be strings.*captions\[0\]=0.0 of type float"),
]


@pytest.mark.parametrize("bad, message", BAD_CAPTIONS)
def test_bad_captions(model, bad, message):
    weights = model.get_weights()
    for call in (
        lambda: model.fit(pixels(), bad, verbose=0),
        lambda: model.evaluate(pixels(), bad, verbose=0),
        lambda: model.encode_text(bad),
        lambda: model.preprocessor(pixels(), bad),
        lambda: model.fit(
            pixels(), captions(), validation_data=(pixels(), bad), verbose=0
        ),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call()
    assert_same_weights(model, weights)


def test_no_captions(model):
    with pytest.raises(ValueError, match=r"at least one.*shape \(0,\)"):
        model.encode_text([])
    with pytest.raises(ValueError, match="nothing to encode"):
        model.encode_image(pixels()[:0])
    with pytest.raises(ValueError, match="array of str.*None"):
        model.fit({"images": pixels()}, verbose=0)


@pytest.mark.parametrize(
    "num_images, num_captions, arguments, message",
    [
        (3, 2, {}, "3 images, 2 captions"),
        (2, 3, {}, "2 images, 3 captions"),
        (1, 1, {}, "two or more.*1 images, 1 captions"),
        (3, 3, {"batch_size": 1}, "at least 2.*batch_size=1"),
    ],
)
def test_bad_pairs(model, num_images, num_captions, arguments, message):
    x, y = pixels(num_images), captions(num_captions)
    for method in ("fit", "evaluate"):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            getattr(model, method)(x, y, verbose=0, **arguments)
        with pytest.raises(ValueError, match=f"(?s){message}"):
            pair = {"images": x, "captions": y}
            getattr(model, method)(pair, verbose=0, **arguments)
    if not arguments:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            model.fit(pixels(), captions(), validation_data=(x, y), verbose=0)


def test_pairs_have_no_weights(model, without_preprocessor):
    ones = np.ones(BATCH)
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match="no weights.*Received: sample_weight="):
            method(pixels(), captions(), sample_weight=ones, verbose=0)
    with pytest.raises(ValueError, match="no weights.*Received: class_weight="):
        model.fit(pixels(), captions(), class_weight={0: 1.0}, verbose=0)
    batch = (tiny.images(BATCH), token_ids(), ones)
    for method in (without_preprocessor.fit, without_preprocessor.evaluate):
        with pytest.raises(ValueError, match="no weights.*Received: sample_weight="):
            method(iter([batch]), verbose=0)
    with pytest.raises(ValueError, match="no weights.*Received: sample_weight="):
        validation = (pixels(), captions(), ones)
        model.fit(pixels(), captions(), validation_data=validation, verbose=0)
    with pytest.raises(ValueError, match="(?s)no weights.*sample_weight="):
        model.preprocessor(pixels(), captions(), sample_weight=ones)


def test_images_must_be_finite(model, without_preprocessor):
    wrong = pixels()
    wrong[1, 2, 3, 0] = np.nan
    names = ["a circle", "a star"]
    for run in (
        lambda: model.fit(wrong, captions(), verbose=0),
        lambda: model.evaluate(wrong, captions(), verbose=0),
        lambda: model.predict({"images": wrong, "captions": captions()}),
        lambda: model.fit(iter([(wrong, captions())]), verbose=0),
        lambda: model.encode_image(wrong),
        lambda: without_preprocessor.encode_image(wrong / 255),
        lambda: model.zero_shot(wrong, names),
        lambda: evaluation.zero_shot(model, wrong, names, ["{}"]),
    ):
        with pytest.raises(ValueError, match="Images must be finite.*image 1 of 3"):
            run()


@pytest.mark.parametrize("wrong", [-1, VOCABULARY_SIZE])
def test_token_ids_that_the_model_does_not_know(model, without_preprocessor, wrong):
    ids = token_ids()
    ids[1, 2] = wrong
    for run in (
        lambda: model.fit(pixels(), ids, verbose=0),
        lambda: model.evaluate(pixels(), ids, verbose=0),
        lambda: model.encode_text(ids),
        lambda: without_preprocessor.fit(iter([(tiny.images(3), ids)]), verbose=0),
        lambda: without_preprocessor.predict(
            {"images": tiny.images(3), "token_ids": ids}
        ),
        lambda: without_preprocessor.predict(
            iter([{"images": tiny.images(3), "token_ids": ids}])
        ),
    ):
        with pytest.raises(ValueError, match=f"from 0 to 109.*Received.* {wrong}"):
            run()


@pytest.mark.parametrize("shape", [(3, 8, 8, 2), (3, 8, 8, 4), (3, 8, 8)])
def test_images_of_wrong_shape(model, shape):
    x = np.zeros(shape, "float32")
    message = r"(?s)\(None, 8, 8, 3\).*Received: images"
    for call in (
        lambda: model.fit(x, captions(), verbose=0),
        lambda: model.evaluate(x, captions(), verbose=0),
        lambda: model.encode_image(x),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_one_image_is_no_batch(model):
    with pytest.raises(ValueError, match=r"batch of one"):
        model.encode_image(pixels()[0])


@pytest.mark.parametrize(
    "names, templates, message",
    [
        (["ring", "star", "ring"], ["a {}"], "must all differ.*'ring' more than once"),
        (["ring", "star"], ["a thing"], "needs {}.*'a thing'"),
        (["ring", ""], ["a {}"], "none of them empty.*class_names"),
        (["ring", 3], ["a {}"], "list of strings.*class_names with 3"),
        ([], ["a {}"], "one or more.*class_names.*none"),
        ("ring", ["a {}"], "list of strings.*class_names = 'ring'"),
        (["ring"], "a {}", "list of strings.*templates = 'a {}'"),
        (["ring"], [], "one or more.*templates.*none"),
    ],
)
def test_bad_classes(model, names, templates, message):
    for call in (
        lambda: model.class_embeddings(names, templates),
        lambda: model.zero_shot(pixels(), names, templates),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call()


def test_without_preprocessor(without_preprocessor, model):
    bare, ids = without_preprocessor, model.preprocessor.tokenize(captions())
    for call in (
        lambda: bare.encode_text(captions()),
        lambda: bare.fit(tiny.images(BATCH), captions(), verbose=0),
    ):
        with pytest.raises(ValueError, match="`preprocessor`.*int token ids"):
            call()
    with pytest.raises(ValueError, match=r"\(None, 8\).*\(3, 7\)"):
        bare.encode_text(ids[:, :7])
    with pytest.raises(ValueError, match=r"(?s)\(None, 8, 8, 3\).*\(3, 16, 8, 3\)"):
        bare.encode_image(np.zeros((3, 16, 8, 3), "float32"))
    import tensorflow as tf

    images = tf.data.Dataset.from_tensor_slices(tiny.images(BATCH)).batch(BATCH)
    with pytest.raises(ValueError, match="pairs of images and token ids"):
        bare.fit(images, verbose=0)


def pipeline(images, texts):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((images, texts)).batch(BATCH)


@pytest.mark.parametrize(
    "bad, message",
    [
        (["a ring", "a heart", ""], "A caption is empty"),
        (["a ring", LONG, "a heart"], "more than sequence_length=8"),
    ],
)
def test_bad_captions_in_a_pipeline(model, bad, message):
    import tensorflow as tf

    # In the first batch or a later one, of a model that has or has not worked before.
    good = pipeline(pixels(), captions())
    weights = model.get_weights()
    for dataset in (pipeline(pixels(), bad), pipeline(pixels(6), captions() + bad)):
        for call in (model.fit, model.evaluate):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                call(dataset, verbose=0)
        assert np.isfinite(model.fit(good, verbose=0).history["loss"]).all()
        # (The rate is zero.)
        assert_same_weights(model, weights)


@pytest.mark.parametrize(
    "images, texts, message",
    [
        (pixels(), np.zeros(3), r"captions str.*dtype float64"),
        (pixels(), np.zeros(3, "int32"), r"\(None, 8\).*token ids of shape \(None,\)"),
        (pixels(), [["a ring"]] * 3, r"captions of shape \(None, 1\), dtype string"),
        (pixels()[..., :2], captions(), r"\(None, 8, 8, 3\).*\(None, 8, 8, 2\)"),
    ],
)
def test_bad_pipelines(model, images, texts, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        model.fit(pipeline(images, texts), verbose=0)


def test_a_pipeline_gives_batches(model):
    unbatched = pipeline(pixels(), captions()).unbatch()
    with pytest.raises(ValueError, match=r"Received.*\(8, 8, 3\).*dataset.batch\(32\)"):
        model.fit(unbatched, verbose=0)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"sequence_length": LENGTH + 1}, "sequence_length=8 and 9"),
        ({"vocabulary_size": 50}, "110 pieces for vocabulary_size=50"),
    ],
)
def test_preprocessor_and_backbone_must_fit(overrides, message):
    backbone = tiny_limoe.backbone(**tiny_limoe.DENSE, **overrides)
    with pytest.raises(ValueError, match=re.escape(message)):
        models.LIMoEContrastive(backbone, tiny_limoe.preprocessor())


def test_bad_preprocessors():
    tokenizer = models.LIMoETokenizer(tiny_limoe.vocabulary(), sequence_length=4)
    with pytest.raises(ValueError, match="without a length.*sequence_length=4"):
        models.LIMoEPreprocessor(tokenizer)
    with pytest.raises(ValueError, match="positive integer.*sequence_length=0"):
        tiny_limoe.preprocessor(sequence_length=0)


def test_images_become_what_the_backbone_takes():
    preprocessor = tiny_limoe.preprocessor()
    preprocessor.image_converter.image_size = (4, 4)
    models.LIMoEContrastive(tiny_limoe.backbone(**tiny_limoe.DENSE), preprocessor)
    assert tuple(preprocessor.image_converter.image_size) == tiny.IMAGE_SHAPE[:2]
