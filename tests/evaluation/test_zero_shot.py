"""Zero-shot classification with a model that can be worked out by hand.

Tests `evaluation/embeddings.py` and `models/pair_encoding.py`.
"""

import numpy as np
import pytest

import keras_softmoe.models.pair_encoding as module
from keras_softmoe.evaluation import zero_shot
from keras_softmoe.evaluation.embeddings import ZeroShot
from tests.support.close import assert_near

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """Counts letters; an image holds such counts already."""

    def __init__(self):
        self.texts = []
        self.image_calls = []

    def encode_text(self, texts):
        assert isinstance(texts, list)
        self.texts.append(texts)
        counts = [[text.count(letter) for letter in LETTERS] for text in texts]
        return np.array(counts, "float32")

    def encode_image(self, images, batch_size, verbose):
        self.image_calls.append((batch_size, verbose))
        return np.asarray(images, "float32").reshape(len(images), -1)


def images_of(*texts):
    return Letters().encode_text(list(texts)).reshape(-1, 2, 13, 1)


def class_embeddings(model, class_names, templates):
    return module.class_embeddings(model.encode_text, class_names, templates)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


NAMES = ("aaab", "bbba", "ccc")
TEMPLATES = ["{}", "an {} on {}d"]


def test_class_embeddings():
    model = Letters()
    found = class_embeddings(model, NAMES, TEMPLATES)
    assert model.texts == [
        [*NAMES, "an aaab on aaabd", "an bbba on bbbad", "an ccc on cccd"]
    ]
    texts = unit(model.encode_text(model.texts[0]).astype("float64"))
    assert_near(found, unit(texts[:3] + texts[3:]), atol=1e-7)
    assert found.dtype == "float32"


def test_many_texts_are_encoded_in_parts(monkeypatch):
    whole = class_embeddings(Letters(), NAMES, ["{}", "a {}", "b{}", "{}{}", "c {}"])
    for limit, calls in ((6, [6, 6, 3]), (2, [3] * 5)):
        monkeypatch.setattr(module, "_TEXTS_PER_CALL", limit)
        model = Letters()
        parts = class_embeddings(model, NAMES, ["{}", "a {}", "b{}", "{}{}", "c {}"])
        assert [len(texts) for texts in model.texts] == calls
        assert_near(parts, whole, atol=1e-6)


def test_braces_in_names_and_templates():
    model = Letters()
    class_embeddings(model, ["{a}", "{0}"], ["{} {b} {{"])
    assert model.texts == [["{a} {b} {{", "{0} {b} {{"]]


def test_zero_shot():
    model = Letters()
    images = images_of("aab", "ccb", "bb", "aaa", "c")
    labels = np.array([0, 2, 0, 0, 2], "uint8")
    found = zero_shot(model, images, NAMES, TEMPLATES, labels, batch_size=2, verbose=1)
    assert isinstance(found, ZeroShot)
    assert model.image_calls == [(2, 1)]
    np.testing.assert_array_equal(found.predictions, [0, 2, 1, 0, 2])
    assert found.accuracy == 4 / 5
    np.testing.assert_array_equal(found.class_accuracy, [2 / 3, np.nan, 1.0])
    classes = class_embeddings(model, NAMES, TEMPLATES)
    cosines = unit(images.reshape(5, -1)) @ classes.T
    assert_near(found.scores, cosines, atol=1e-6)
    # Whatever the length of the embeddings
    again = zero_shot(model, 100 * images, NAMES, TEMPLATES, labels)
    assert_near(again.scores, found.scores, atol=1e-6)
    assert again.accuracy == found.accuracy
    # Without labels
    alone = zero_shot(model, images, list(NAMES), tuple(TEMPLATES))
    np.testing.assert_array_equal(alone.predictions, found.predictions)
    assert alone.accuracy is None and alone.class_accuracy is None


def test_equal_scores_go_to_the_first_class():
    names = ("ab", "abab", "aabb", "ba")
    found = zero_shot(Letters(), images_of("ab", "ba"), names, ["{}"], [0, 1])
    np.testing.assert_array_equal(found.predictions, [0, 0])
    np.testing.assert_array_equal(found.class_accuracy, [1.0, 0.0, np.nan, np.nan])
    # Embeddings of length 0 score 0.
    assert not zero_shot(Letters(), images_of("1"), names, ["{}"]).scores.any()


class Untouched:
    """Nothing is encoded before all arguments are checked."""

    def encode_text(self, texts):
        raise AssertionError("texts were encoded")

    def encode_image(self, images, batch_size, verbose):
        raise AssertionError("images were encoded")


GOOD = {"class_names": NAMES, "templates": TEMPLATES, "labels": [0, 1, 2]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_names": []}, "`class_names`.*Received: class_names with none"),
        ({"class_names": "cat"}, "a list of strings.*class_names = 'cat'"),
        ({"class_names": None}, "class_names = None"),
        ({"class_names": ["cat", 3, "dog"]}, "class_names with 3"),
        ({"class_names": ["cat", " "]}, "class_names with ' '"),
        ({"class_names": ["a", "b", "a"]}, "with 'a' more than once"),
        ({"templates": ()}, "templates with none"),
        ({"templates": "a {}"}, r"templates = 'a \{\}'"),
        ({"templates": ["{}", ""]}, "templates with ''"),
        ({"templates": ["{}", "a {name}"]}, r"templates with 'a \{name\}'"),
        ({"labels": [0, 1]}, r"shape=\(2,\), dtype=int64 for 3 images"),
        ({"labels": [0.0, 1.0, 2.0]}, "dtype=float64"),
        ({"labels": ["aaab", "ccc", "ccc"]}, "dtype=<U4"),
        ({"labels": [0, 3, -1]}, r"3 classes, from 0 to 2.*with \[3, -1\]"),
    ],
)
def test_bad_input(arguments, message):
    images = np.zeros((3, 2, 13, 1))
    with pytest.raises(ValueError, match=message):
        zero_shot(Untouched(), images, **{**GOOD, **arguments})


def test_embeddings_that_do_not_match():
    model = Letters()
    with pytest.raises(ValueError, match=r"shape=\(2, 3\).*shape=\(3, 26\)"):
        zero_shot(model, np.ones((2, 3)), NAMES, TEMPLATES)
    with pytest.raises(ValueError, match="image_embeddings.*NaN"):
        zero_shot(model, np.full((2, 26), np.nan), NAMES, TEMPLATES)
    model.encode_text = lambda texts: np.ones((1, 3))
    with pytest.raises(ValueError, match=r"\(1, 3\) for 6 texts"):
        zero_shot(model, np.ones((2, 3)), NAMES, TEMPLATES)
