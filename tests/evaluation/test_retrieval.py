"""Retrieval: against a twin that sorts everything, fair ties, bounded memory.

With `test_zero_shot.py` it covers `evaluation/embeddings.py`.
"""

import math
import tracemalloc

import numpy as np
import pytest
from keras import ops

from keras_softmoe.evaluation import retrieval
from keras_softmoe.evaluation.embeddings import Retrieval
from tests.support.close import assert_near


def embeddings(num, dim=6, seed=0):
    x = np.random.default_rng(seed).normal(size=(num, dim)).astype("float32")
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def twin(images, texts, owner, ks):
    """Recall of both directions, from the whole matrix and by counting draws."""
    scores = np.round(np.float64(images) @ np.float64(texts).T, 12)
    pairs = owner == np.arange(len(images))[:, None]

    def recall(scores, pairs, k):
        rates = []
        for row, right in zip(scores, pairs, strict=True):
            best = row[right].max()
            seats = max(k - np.sum(row > best), 0)
            tied, wrong = np.sum(row == best), np.sum(row[~right] == best)
            # Seats go to a random choice out of those that are tied.
            draws = math.comb(tied, min(seats, tied))
            rates.append(1 - math.comb(wrong, min(seats, tied)) / draws)
        return np.mean(rates)

    return (
        {k: recall(scores, pairs, k) for k in ks},
        {k: recall(scores.T, pairs.T, k) for k in ks},
    )


def check(found, expected):
    assert isinstance(found, Retrieval)
    for got, want in zip(found, expected, strict=True):
        assert list(got) == list(want)
        assert_near(list(got.values()), list(want.values()), atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 2048])
def test_against_the_twin(chunk_size):
    images = embeddings(11)
    owner = np.random.default_rng(1).permutation([*range(11), 3, 3, 5, 0, 0, 0, 10])
    texts = images[owner] + 0.6 * embeddings(len(owner), seed=2)
    ks = (3, 1, 5, 40)
    found = retrieval(images, texts, owner, ks, chunk_size)
    check(found, twin(images, texts, owner, ks))
    # Neither perfect nor by chance, and not the same in both directions
    assert 0.3 < found.image_to_text[1] < 1.0
    assert found.image_to_text[1] != found.text_to_image[1]
    assert found.image_to_text[40] == found.text_to_image[40] == 1.0


@pytest.mark.parametrize("chunk_size", [3, 100])
def test_ties_against_the_twin(chunk_size):
    # Few directions, so that most embeddings have equals: right ones and wrong ones
    rng = np.random.default_rng(3)
    directions = embeddings(4)
    images = directions[rng.integers(0, 4, size=9)]
    owner = np.concatenate([np.arange(9), rng.integers(0, 9, size=12)])
    texts = directions[rng.integers(0, 4, size=21)]
    ks = (1, 2, 3, 4, 6, 9, 21)
    check(
        retrieval(images, texts, owner, ks, chunk_size), twin(images, texts, owner, ks)
    )


def test_captions_of_an_image_follow_each_other():
    images, texts = embeddings(5), embeddings(15, seed=1)
    owner = np.repeat(np.arange(5), 3)
    assert retrieval(images, texts) == retrieval(images, texts, owner)
    assert retrieval(images, images).text_to_image == {1: 1.0, 5: 1.0, 10: 1.0}
    # Tensors of the backend, and lists
    assert retrieval(
        *map(ops.convert_to_tensor, (images, texts)), ops.array(owner)
    ) == (retrieval(images.tolist(), texts.tolist(), owner.tolist()))


def test_equal_embeddings_score_what_guessing_scores():
    for value in (0.0, 0.3):
        same = np.full((8, 5), value, "float32")
        found = retrieval(same, same, ks=(1, 4, 8))
        check(found, ({1: 1 / 8, 4: 1 / 2, 8: 1.0},) * 2)
    # Two captions for each: at least one of them among the first of 16
    found = retrieval(same, np.repeat(same, 2, axis=0), ks=(1, 2), chunk_size=5)
    one_of_two = 1 - (14 * 13) / (16 * 15)
    check(found, ({1: 2 / 16, 2: one_of_two}, {1: 1 / 8, 2: 1 / 4}))


def test_rounding_makes_no_order():
    # One caption in all places of matrix products, where sums are rounded differently
    images = embeddings(300, dim=97)
    texts = np.repeat(embeddings(1, dim=97, seed=1), 300, axis=0)
    found = retrieval(images, texts, ks=(1, 30), chunk_size=113)
    check(found._replace(text_to_image={}), ({1: 1 / 300, 30: 1 / 10}, {}))


def test_similarity_is_the_dot_product():
    images = np.eye(2, dtype="float32")
    texts = np.array([[1.0, 0.0], [3.0, 1.0]], "float32")
    assert retrieval(images, texts, ks=[1]).image_to_text == {1: 0.5}
    assert retrieval(images, texts, ks=[1]).text_to_image == {1: 0.5}
    # 16-bit numbers
    assert retrieval(ops.cast(images, "bfloat16"), texts, ks=1).text_to_image[1] == 0.5


def test_memory_is_bounded():
    images, texts = embeddings(1500, dim=4), embeddings(3000, dim=4, seed=1)
    tracemalloc.start()
    retrieval(images, texts, chunk_size=100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The matrix would take 36 MB, its blocks take 0.2; the rest is numbers per row.
    assert peak < 1e6


GOOD = {"image_embeddings": embeddings(4), "text_embeddings": embeddings(8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_embeddings": embeddings(1)}, r"two or more.*shape=\(1, 6\)"),
        ({"image_embeddings": embeddings(4, 5)}, r"\(4, 5\), text_.*shape=\(8, 6\)"),
        ({"image_embeddings": np.ones(4)}, r"image_embeddings with shape=\(4,\)"),
        ({"text_embeddings": np.ones((0, 6))}, r"text_embeddings with shape=\(0, 6\)"),
        ({"text_embeddings": np.array([["a"]])}, "dtype=<U1.*encode_text"),
        ({"text_embeddings": np.full((8, 6), np.nan)}, "NaN or infinity.*row 0"),
        ({"text_embeddings": embeddings(7)}, "image_of_caption.*4 images, 7 captions"),
        ({"image_of_caption": [0, 1, 2, 3]}, r"shape=\(4,\).*for 8 captions"),
        ({"image_of_caption": np.arange(8) / 2}, "dtype=float64"),
        ({"image_of_caption": [0, 1, 2, 4] * 2}, r"\[4\] outside, without \[3\]"),
        ({"image_of_caption": [0, 1, 2, -1] * 2}, r"\[-1\] outside"),
        ({"image_of_caption": [0, 1, 2, 2] * 2}, r"without \[3\]"),
        ({"ks": ()}, r"ks=\(\)"),
        ({"ks": (1, 0)}, r"ks=\(1, 0\)"),
        ({"ks": (1, 1)}, r"ks=\(1, 1\)"),
        ({"ks": 2.5}, r"ks=\(2.5,\)"),
        ({"chunk_size": 0}, "chunk_size=0"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        retrieval(**{**GOOD, **arguments})
