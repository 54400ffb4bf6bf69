"""Dense models of KerasHub, as models of this library: KerasHub is the judge."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_softmoe import converters, evaluation, models, routers
from tests.models import hub, tiny
from tests.references import to_numpy

BACKBONES = [name for name in hub.MODELS if "Classifier" not in name]
CLASSIFIERS = [name for name in hub.MODELS if "Classifier" in name]
LARGER = (20, 20, 3)


def features(model, images):
    """What a backbone computes: tokens, or the vector of SigLIP."""
    inputs = images
    if isinstance(model.input, dict):
        inputs = {"images": images}
    outputs = model(inputs, training=False)
    return to_numpy(outputs)


def assert_same_features(ours, theirs, images):
    expected = features(theirs, images)
    outputs = ours(images, training=False)
    name = "sequence_output" if expected.ndim == 3 else "pooled_output"
    np.testing.assert_allclose(to_numpy(outputs[name]), expected, atol=2e-5)


@pytest.mark.parametrize("name", BACKBONES)
def test_features(name):
    theirs = hub.make(name)
    ours = converters.dense_model(theirs)
    assert type(ours) is models.ViTMoEBackbone
    assert_same_features(ours, theirs, tiny.images(3, ours.image_shape))
    # All of it is counted.
    assert evaluation.cost(ours).parameters == ours.count_params()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits(name):
    theirs = hub.make(name)
    ours = converters.dense_model(theirs)
    assert type(ours) is models.ViTMoEImageClassifier
    images = tiny.images(3, hub.SHAPE)
    expected = to_numpy(theirs(images))
    np.testing.assert_allclose(to_numpy(ours(images)), expected, atol=2e-5)
    if "gap" in name:
        np.testing.assert_allclose(expected.sum(-1), 1.0, rtol=1e-5)
    backbone = converters.dense_model(theirs, head=False)
    assert type(backbone) is models.ViTMoEBackbone
