"""Routers that do not see what they route, and what is kept of their accuracies."""

import keras
import numpy as np
from keras import ops

from experiments import controls
from experiments.glyph_presets import TWINS, build_backbone
from experiments.lib.cards import read_runs
from experiments.lib.runs import read_json
from keras_softmoe import models
from tests.support.close import assert_near


def tokens(groups, seed=0):
    return np.random.default_rng(seed).normal(size=(groups, 64, 8)).astype("float32")


def test_a_router_of_places_routes_all_images_alike():
    router = controls.BlindRouter(4, priority="max")
    router.build((None, 64, 8))
    images = tokens(3)
    seen = ops.convert_to_numpy(router(images)[0].token)
    assert np.any(seen[0] != seen[1])
    router.swap = controls.same(tokens(1, seed=1)[0])
    placed = ops.convert_to_numpy(router(images)[0].token)
    assert np.all(placed == placed[:1])


def test_scrambled_tokens_are_those_of_the_same_image():
    images = tokens(3)
    swap = controls.scrambled(keras.random.SeedGenerator(0))
    found = ops.convert_to_numpy(swap(images))
    assert np.any(found != images)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(images, axis=1))


def test_a_blind_copy_that_sees_and_its_mean_tokens():
    keras.utils.set_random_seed(0)
    classifier = models.ViTMoEImageClassifier(
        build_backbone(TWINS["token_choice"].router, 1),
        num_classes=179,
        preprocessor=models.ViTMoEImageClassifierPreprocessor(
            models.ViTMoEImageConverter(image_size=(32, 32))
        ),
    )
    shape = (4, 32, 32, 3)
    images = np.random.default_rng(0).integers(0, 256, shape).astype("uint8")
    copy = controls.blind_copy(classifier)
    expected = classifier.predict(images, verbose=0)
    assert_near(copy.predict(images, verbose=0), expected, atol=1e-5)
    all_of_them, *halves = (
        controls.mean_tokens(copy, part) for part in (images, images[:2], images[2:])
    )
    assert list(all_of_them) == [3, 4, 5]
    for block, mean in all_of_them.items():
        assert mean.shape == (64, 96)
        of_halves = np.mean([half[block] for half in halves], axis=0)
        assert_near(mean, of_halves, atol=1e-5)


def test_what_is_kept_is_of_the_presets():
    """Their accuracies, measured again, are those of their first trainings."""
    kept = read_json(controls.RESULTS)
    assert kept["accuracy"].keys() == controls.TITLES.keys()
    for name, twin in (("dense", "dense"), ("trained", "token_choice")):
        first = read_runs(TWINS[twin].name)[0]["upstream_accuracy_by_layout"]
        for layout, accuracy in kept["accuracy"][name].items():
            assert_near(accuracy, first[layout], atol=1e-3)
