"""The sigmoid cross-entropy, summed over the classes."""

import keras
import numpy as np

from keras_softmoe import training
from tests.support.references import to_numpy

LOGITS = np.array([[2.0, -1.0, 0.5], [30.0, -40.0, 0.0]], "float32")
LABELS = np.array([[1, 0, 1], [0.25, 0.75, 0]], "float32")
# -log sigmoid(x) is log(1 + exp(-x)); in float64, with exact limits for large x.
ON, OFF = np.logaddexp(0, -LOGITS.astype("float64")), np.logaddexp(0, LOGITS)
EXPECTED = (LABELS * ON + (1 - LABELS) * OFF).sum(-1)


def test_sum_over_classes():
    loss = training.SigmoidCrossentropy()
    np.testing.assert_allclose(to_numpy(loss(LABELS, LOGITS)), EXPECTED.mean(), 1e-5)
    each = training.SigmoidCrossentropy(reduction="none")
    np.testing.assert_allclose(to_numpy(each(LABELS, LOGITS)), EXPECTED, 1e-5)


def test_integer_labels_are_dense_ones():
    loss = training.SigmoidCrossentropy()
    labels = np.array([[1, 0, 1], [0, 1, 0]])
    expected = to_numpy(loss(labels.astype("float32"), LOGITS))
    np.testing.assert_array_equal(to_numpy(loss(labels, LOGITS)), expected)


def test_configuration():
    loss = training.SigmoidCrossentropy(reduction="sum", name="mine")
    copy = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(copy) is training.SigmoidCrossentropy
    assert copy.get_config() == loss.get_config()
    np.testing.assert_allclose(to_numpy(copy(LABELS, LOGITS)), EXPECTED.sum(), 1e-5)
