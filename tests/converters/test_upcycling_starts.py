"""Clusters, decompositions and directions, against plain twins of the papers' text."""

import keras
import numpy as np
import pytest

from keras_softmoe.converters import upcycling_starts as statistics
from tests.support.close import assert_near


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def planted(num_clusters=4, each=30, width=6, noise=0.1, seed=0):
    """Tokens around a few directions, of many lengths, and where each belongs."""
    rng = np.random.default_rng(seed)
    centers = keras.utils.normalize(rng.normal(size=(num_clusters, width)))
    labels = rng.permutation(np.repeat(np.arange(num_clusters), each))
    tokens = centers[labels] + noise * rng.normal(size=(len(labels), width))
    return tokens * rng.uniform(0.1, 10, size=(len(labels), 1)), labels


def plain_kmeans(tokens, centroids):
    """Lloyd's algorithm on the sphere, token by token."""
    points = [token / np.linalg.norm(token) for token in tokens]
    labels = None
    while True:
        found = [int(np.argmax([c @ point for c in centroids])) for point in points]
        if found == labels:
            return np.array(centroids), labels
        labels = found
        centroids = []
        for cluster in range(max(labels) + 1):
            own = [i for i, label in enumerate(labels) if label == cluster]
            total = sum(points[i] for i in own)
            centroids.append(total / np.linalg.norm(total))


def test_kmeans_is_lloyds_algorithm(rng):
    tokens = rng.normal(size=(60, 5))
    first = statistics._first_centroids(
        keras.utils.normalize(tokens), 4, np.random.default_rng(7)
    )
    expected, expected_labels = plain_kmeans(tokens, list(first))
    centroids, labels = statistics.spherical_kmeans(tokens, 4, np.random.default_rng(7))
    assert_near(centroids, expected, atol=1e-12)
    np.testing.assert_array_equal(labels, expected_labels)


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_finds_directions_whatever_the_lengths(seed):
    tokens, expected = planted(seed=seed)
    _, labels = statistics.spherical_kmeans(tokens, 4, np.random.default_rng(seed))
    # The same partition: each cluster is one direction.
    assert len(set(zip(labels, expected, strict=True))) == 4


def test_a_cluster_without_tokens_starts_again(monkeypatch):
    tokens, _ = planted()
    # Of equal centroids all but the first lose their tokens.
    first = np.repeat(keras.utils.normalize(tokens[:1]), 4, axis=0)
    monkeypatch.setattr(statistics, "_first_centroids", lambda *_: first)
    centroids, labels = statistics.spherical_kmeans(tokens, 4, None)
    assert sorted(set(labels)) == [0, 1, 2, 3]
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=-1), 1)


def test_kmeans_with_fewer_different_tokens_than_clusters():
    tokens = np.ones((6, 3), "float32")
    centroids, labels = statistics.spherical_kmeans(tokens, 3, np.random.default_rng(0))
    assert np.isfinite(centroids).all() and labels.max() < 3


def test_kmeans_in_chunks(rng, monkeypatch):
    tokens = rng.normal(size=(50, 4)).astype("float32")
    whole = statistics.spherical_kmeans(tokens, 3, np.random.default_rng(1))
    monkeypatch.setattr(statistics, "_CHUNK", 7)
    in_chunks = statistics.spherical_kmeans(tokens, 3, np.random.default_rng(1))
    np.testing.assert_array_equal(in_chunks[1], whole[1])
    assert in_chunks[0].dtype == "float32"


def whitened_truncation(kernel, inputs, rank):
    """The data-aware truncated SVD of the paper: whiten, truncate, and back."""
    whitening = np.linalg.cholesky(inputs.T @ inputs)
    u, values, v = np.linalg.svd(whitening.T @ kernel, full_matrices=False)
    truncated = (u[:, :rank] * values[:rank]) @ v[:rank]
    return np.linalg.solve(whitening.T, truncated)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5)])
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.999])
def test_truncation_is_that_with_whitened_tokens(rng, shape, energy):
    kernel = rng.normal(size=shape)
    inputs = rng.normal(size=(40, shape[0])) * np.geomspace(1, 0.05, shape[0])
    truncated = statistics.truncated_kernel(kernel, inputs, energy)
    rank = np.linalg.matrix_rank(truncated)
    expected = whitened_truncation(kernel, inputs, rank)
    assert_near(truncated, expected, atol=1e-10)

    def lost(kernel_of_rank):
        change = inputs @ (kernel - kernel_of_rank)
        return np.sum(change**2) / np.sum((inputs @ kernel) ** 2)

    # The lowest rank at which so much is left.
    assert lost(truncated) <= 1 - energy
    if rank > 1:
        assert lost(whitened_truncation(kernel, inputs, rank - 1)) > 1 - energy


def test_truncation_where_whitening_is_impossible(rng):
    # Fewer tokens than they are wide: no Cholesky factor.
    kernel, inputs = rng.normal(size=(8, 6)), rng.normal(size=(3, 8))
    truncated = statistics.truncated_kernel(kernel, inputs, 1 - 1e-12)
    assert np.linalg.matrix_rank(truncated) == 3
    assert_near(inputs @ truncated, inputs @ kernel, atol=1e-10)


def test_truncation_keeps_what_nothing_is_known_of(rng):
    kernel = rng.normal(size=(4, 3))
    assert statistics.truncated_kernel(kernel, kernel.T, 1) is kernel
    assert statistics.truncated_kernel(kernel, np.zeros((0, 4)), 0.5) is kernel


def test_positions_are_told_apart(rng):
    places = 3 * rng.normal(size=(6, 16))
    tokens = (places + rng.normal(size=(50, 6, 16))).astype("float32")
    for num_groups, groups in ((6, [0, 1, 2, 3, 4, 5]), (3, [0, 0, 1, 1, 2, 2])):
        directions = statistics.position_directions(tokens, num_groups)
        assert directions.dtype == "float32"
        np.testing.assert_allclose(np.linalg.norm(directions, axis=-1), 1, rtol=1e-6)
        nearest = (tokens @ directions.T).argmax(axis=-1)
        assert (nearest == groups).mean() > 0.95


@pytest.mark.parametrize("confidence", [0.3, 0.9, 0.999])
def test_the_scale_gives_the_confidence(rng, confidence):
    logits = rng.normal(size=(200, 5))
    logits -= logits.max(axis=-1, keepdims=True)
    scaled = np.exp(statistics.scale_for(logits, confidence) * logits)
    found = (scaled / scaled.sum(axis=-1, keepdims=True)).max(axis=-1).mean()
    assert found == pytest.approx(confidence, abs=1e-6)


def test_the_scale_of_logits_that_are_all_equal_is_a_number():
    assert np.isfinite(statistics.scale_for(np.ones((3, 4)), 0.9))
