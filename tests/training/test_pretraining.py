"""The loss and the metric of images with several labels (`training/objectives.py`)."""

import keras
import numpy as np
import pytest

from keras_softmoe import training
from keras_softmoe.training import PrecisionAt1
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


def test_configuration_of_the_loss():
    loss = training.SigmoidCrossentropy(reduction="sum", name="mine")
    copy = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(copy) is training.SigmoidCrossentropy
    assert copy.get_config() == loss.get_config()
    np.testing.assert_allclose(to_numpy(copy(LABELS, LOGITS)), EXPECTED.sum(), 1e-5)


def twin(labels, predictions, weights):
    """By the letter of V-MoE, appendix B.6, image by image."""
    hits = total = 0.0
    for image, scores, weight in zip(labels, predictions, weights, strict=True):
        if not any(image):
            continue
        # The first of equal ones
        best = max(range(len(scores)), key=lambda c: (scores[c], -c))
        hits += weight * (image[best] > 0)
        total += weight
    return hits / total if total else 0.0


def data(num_images=12, num_classes=5, seed=0):
    """Labels of 0 to 5 classes, logits with many ties."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((num_images, num_classes)) < 0.3).astype("float32")
    labels[3], labels[7] = 0.0, 1.0
    logits = rng.integers(-2, 3, size=labels.shape).astype("float32")
    return labels, logits, rng.random(num_images).astype("float32")


def test_twin():
    labels, logits, weights = data()
    metric = PrecisionAt1()
    assert float(metric.result()) == 0.0
    value = metric(labels, logits)
    expected = twin(labels, logits, np.ones(12))
    assert 0.0 < expected < 1.0
    np.testing.assert_allclose(to_numpy(value), expected, rtol=1e-6)

    # A second batch adds to the first, with weights in either shape.
    expected = twin(
        np.tile(labels, (2, 1)),
        np.tile(logits, (2, 1)),
        np.concatenate([np.ones(12), weights]),
    )
    for shape in ((12,), (12, 1)):
        metric.reset_state()
        metric.update_state(labels, logits)
        metric.update_state(labels, logits, sample_weight=weights.reshape(shape))
        np.testing.assert_allclose(to_numpy(metric.result()), expected, rtol=1e-6)


def test_kinds_of_labels_and_predictions():
    labels, logits, _ = data()
    expected = twin(labels, logits, np.ones(12))
    for labels_dtype, logits_dtype in (("bool", "bfloat16"), ("int32", "float16")):
        value = PrecisionAt1()(
            keras.ops.convert_to_tensor(labels.astype(labels_dtype)),
            keras.ops.cast(logits, logits_dtype),
        )
        np.testing.assert_allclose(to_numpy(value), expected, rtol=1e-6)


def test_images_without_labels_are_left_out():
    metric = PrecisionAt1()
    empty, logits = np.zeros((3, 4), "float32"), np.ones((3, 4), "float32")
    assert float(metric(empty, logits)) == 0.0
    labels = np.eye(4, dtype="float32")[:3]
    assert float(metric(labels, labels)) == 1.0


@pytest.mark.filterwarnings("ignore:.compile.*was not called:UserWarning")
def test_in_a_compiled_model(tmp_path):
    labels, logits, weights = data()
    model = keras.Sequential([keras.Input((5,)), keras.layers.Identity()])
    metrics = {"metrics": [PrecisionAt1()], "weighted_metrics": [PrecisionAt1("w")]}
    model.compile(loss="mse", **metrics)
    # Batches of 5, 5 and 2
    found = model.evaluate(
        logits, labels, batch_size=5, sample_weight=weights, return_dict=True, verbose=0
    )
    expected = twin(labels, logits, np.ones(12))
    np.testing.assert_allclose(found["precision_at_1"], expected, rtol=1e-5)
    expected = twin(labels, logits, weights)
    np.testing.assert_allclose(found["w"], expected, rtol=1e-5)


def test_serialization():
    metric = PrecisionAt1(name="p1", dtype="float32")
    revived = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert type(revived) is PrecisionAt1
    assert revived.get_config() == {"name": "p1", "dtype": "float32"}


@pytest.mark.parametrize(
    ("labels", "logits", "weights", "message"),
    [
        ((4,), (4, 3), None, r"one_hot"),
        ((4, 2), (4, 3), None, r"y_true with shape=\(4, 2\), y_pred with.*\(4, 3\)"),
        ((4, 3, 1), (4, 3, 1), None, r"same shape \(B, num_classes\)"),
        ((4, 3), (4, 3), (4, 3), r"sample_weight with shape=\(4, 3\)"),
    ],
)
def test_wrong_shapes(labels, logits, weights, message):
    arrays = [np.ones(shape, "float32") for shape in (labels, logits)]
    sample_weight = None if weights is None else np.ones(weights, "float32")
    with pytest.raises(ValueError, match=message):
        PrecisionAt1().update_state(*arrays, sample_weight=sample_weight)
