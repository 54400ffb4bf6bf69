"""Greedy soups, on models whose best weights are known."""

import itertools
import tracemalloc

import keras
import numpy as np
import pytest

from keras_softmoe.training import greedy_soup
from keras_softmoe.training.soups import Soup
from tests.support.close import assert_near
from tests.support.references import assert_all_equal


def linear(*sizes):
    layers = [keras.layers.Dense(size, use_bias=False) for size in sizes[1:]]
    return keras.Sequential([keras.Input((sizes[0],)), *layers])


def nearness(target):
    """A score that is highest at `target`: minus the squared distance to it."""

    def score(model):
        weights = np.concatenate([w.ravel() for w in model.get_weights()])
        return -np.sum((weights - target) ** 2)

    return score


def test_a_checkpoint_is_used_again_where_that_helps():
    # 2/3 is nearest to 0.7 that few parts of 0 and 1 can come.
    model = linear(1, 1)
    checkpoints = [[np.array([[value]])] for value in (0.0, 1.0, -3.0)]
    soup = greedy_soup(model, checkpoints, nearness(0.7))
    assert isinstance(soup, Soup)
    assert soup.chosen == (1, 0, 1)
    squares = -np.square([0.3, 0.2, 1 / 30])
    np.testing.assert_allclose(soup.scores, squares, rtol=1e-5)
    np.testing.assert_allclose(soup.alone, -np.square([0.7, 0.3, 3.7]))
    np.testing.assert_allclose(model.get_weights()[0], [[2 / 3]], rtol=1e-6)
    # No more parts than asked for
    for size in (1, 2):
        part = greedy_soup(model, checkpoints, nearness(0.7), size)
        assert part == Soup(soup.chosen[:size], soup.scores[:size], soup.alone)
    np.testing.assert_allclose(model.get_weights()[0], [[0.5]])


def test_against_a_search_step_by_step():
    rng = np.random.default_rng(17)
    target = rng.normal(size=8)
    found = target + rng.normal(size=(5, 8))
    model = linear(2, 2, 2)
    checkpoints = [[row[:4].reshape(2, 2), row[4:].reshape(2, 2)] for row in found]
    soup = greedy_soup(model, checkpoints, nearness(target), max_size=6)

    chosen, best = [], -np.inf
    for _ in range(6):
        means = [found[[*chosen, i]].mean(axis=0) for i in range(5)]
        scores = -np.sum((means - target) ** 2, axis=1)
        if scores.max() <= best:
            break
        best = scores.max()
        chosen.append(int(scores.argmax()))
    assert soup.chosen == tuple(chosen)
    assert len(chosen) > len(set(chosen)) > 1
    # Half the squared distance, or less
    assert soup.scores[-1] > max(soup.alone) / 2
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    np.testing.assert_allclose(weights, found[chosen].mean(axis=0), rtol=1e-6)


def test_equal_scores_end_it_with_the_first():
    model = linear(1, 1)
    checkpoints = [[np.array([[0.1]], "float32")]] * 3
    soup = greedy_soup(model, checkpoints, lambda model: 5)
    assert soup == Soup((0,), (5.0,), (5.0,) * 3)
    # As it was, to the last bit
    assert model.get_weights()[0] == checkpoints[0][0]


@pytest.fixture
def trained(tmp_path):
    """A model in the middle of its training, and files of it."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=1)])
    model.add(keras.layers.Dense(2))
    model.add(keras.layers.BatchNormalization())
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(8, 3))
    files = []
    for step in range(3):
        model.fit(x, x[:, :2], verbose=0)
        files.append(tmp_path / f"{step}.weights.h5")
        model.save_weights(files[-1])
    model.fit(x, x[:, :2], verbose=0)
    return model, files, (x, x[:, :2])


def state(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def test_files_and_what_is_left_alone(trained):
    model, files, (x, y) = trained
    others = [v for v in model.variables if not any(v is w for w in model.weights)]
    others += model.optimizer.variables
    before = [v.numpy() for v in others]

    def score(model):
        return -model.evaluate(x, y, verbose=0)

    soup = greedy_soup(model, [str(files[0]), *files[1:]], score)
    assert_all_equal(others, before)
    parts = []
    for index in soup.chosen:
        model.load_weights(files[index])
        parts.append(model.get_weights())
    mean = [np.mean(weight, axis=0) for weight in zip(*parts, strict=True)]
    greedy_soup(model, files, score)
    for weight, expected in zip(model.get_weights(), mean, strict=True):
        assert_near(weight, expected, rtol=1e-5, atol=1e-6)
    assert score(model) == pytest.approx(soup.scores[-1], rel=1e-5)
    # It trains on.
    model.fit(x, y, verbose=0)


@pytest.mark.parametrize("call", [1, 3, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_model_stays_as_it_was_after_a_failure(trained, call, error):
    model, files, _ = trained
    before = state(model)
    calls = itertools.count(1)

    def score(model):
        if next(calls) == call:
            raise error
        return 1.0

    with pytest.raises(error):
        greedy_soup(model, files, score)
    assert_all_equal(state(model), before)


def test_a_damaged_file(trained):
    model, files, _ = trained
    before = state(model)
    linear(3, 5).save_weights(files[1])
    with pytest.raises(ValueError, match="could not be loaded"):
        greedy_soup(model, files, lambda model: 1.0)
    assert_all_equal(state(model), before)


def test_memory_does_not_grow_with_the_files(tmp_path):
    model = linear(*[120] * 9)
    files = [tmp_path / f"{index}.weights.h5" for index in range(6)]
    for file in files:
        model.set_weights([w + 1 for w in model.get_weights()])
        model.save_weights(file)
    scores = iter(range(100))
    tracemalloc.start()
    soup = greedy_soup(model, files, lambda _: next(scores), max_size=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(soup.chosen) == 2
    # One copy, one in float64, what the backend may take over: not one for each file
    assert peak < 6 * (8 * 120 * 120 * 4)


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ([], r"checkpoints=\[\]"),
        ("a.weights.h5", "checkpoints='a.weights.h5'"),
        (3, "checkpoints=3"),
        (["no.weights.h5"], "existing file.*'no.weights.h5'"),
        ([[np.ones((2, 2))]], r"\(2, 2\), \(2, 2\)\]. Received: \[\(2, 2\)\]"),
        ([[np.ones((2, 2)), np.ones((2, 3))]], r"Received: \[\(2, 2\), \(2, 3\)\]"),
    ],
)
def test_checkpoints_that_do_not_fit(checkpoints, message):
    with pytest.raises(ValueError, match=message):
        greedy_soup(linear(2, 2, 2), checkpoints, nearness(0.0))


@pytest.mark.parametrize("value", [None, [0.1, 0.2], "good", np.nan])
def test_score_that_is_no_number(value):
    model = linear(1, 1)
    before = model.get_weights()
    with pytest.raises(ValueError, match="one number.*with checkpoint 0"):
        greedy_soup(model, [[np.ones((1, 1))]], lambda model: value)
    assert_all_equal(model.get_weights(), before)


def test_other_arguments():
    with pytest.raises(ValueError, match="max_size=0"):
        greedy_soup(linear(1, 1), [[np.ones((1, 1))]], nearness(0.0), 0)
    with pytest.raises(ValueError, match="must be built.*0 weights"):
        greedy_soup(keras.Sequential(), [[]], nearness(0.0))
    model = linear(4, 4)
    model.layers[0].quantize("int8")
    with pytest.raises(ValueError, match="not floats.*kernel"):
        greedy_soup(model, [model.get_weights()], nearness(0.0))
