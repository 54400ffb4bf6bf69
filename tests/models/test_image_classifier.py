"""The classifier: training, prediction, files, errors."""

import keras
import numpy as np
import pytest

from keras_softmoe import models, ops, routers
from tests.skips import only_on
from tests.support import layer_checks, tiny
from tests.support.close import assert_near, difference
from tests.support.references import to_numpy

NUM_IMAGES = 18
pytestmark = [tiny.FITTING, tiny.LOADING]


ONE_IMAGE = pytest.param(1, marks=only_on("torch", because="one backend"))


@pytest.mark.parametrize("group_images", [ONE_IMAGE, 8])
def test_fit_evaluate_predict_in_any_batch_size(group_images):
    router = tiny.SOFT if group_images == 1 else tiny.SPARSE
    model = tiny.classifier(
        num_layers=1, moe_layers=(0,), router=router, group_images=group_images
    )
    x, y = tiny.pixels(NUM_IMAGES), tiny.labels(NUM_IMAGES)
    predictions, losses = [], []
    # 18 is 2 times 7 and 4 more, 16 and 2, and 2 groups of eight and a quarter.
    for batch_size in (1, 7, 16):
        predictions.append(tiny.predict(model, x, batch_size=batch_size))
        assert predictions[-1].shape == (NUM_IMAGES, tiny.NUM_CLASSES)
        loss, _ = model.evaluate(x, y, batch_size=batch_size, verbose=0)
        losses.append(loss)
    if group_images == 1:
        # A soft router looks at one image at a time.
        for one in predictions[1:]:
            assert_near(one, predictions[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    for batch_size in (1, 7, 16):
        before = model.get_weights()
        history = model.fit(x, y, batch_size=batch_size, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
        layer_checks.assert_trained(model, before, least=0)


@pytest.mark.parametrize("group_images", [1, 2])
def test_images_compete_only_inside_their_group(group_images):
    model = tiny.classifier(router=tiny.SPARSE, group_images=group_images)
    x = tiny.pixels(4)
    together = tiny.predict(model, x, batch_size=4)
    alone = tiny.predict(model, x, batch_size=1)
    in_pairs = tiny.predict(model, x, batch_size=2)
    assert_near(in_pairs, together, rtol=1e-5, atol=1e-6)
    same = difference(alone, together) < 1e-5
    assert same == (group_images == 1)


def test_fit_learns():
    model = tiny.classifier(pooling="gap")
    # The class is the colour.
    y = tiny.labels(NUM_IMAGES)
    x = tiny.pixels(NUM_IMAGES)
    x[np.arange(NUM_IMAGES), :, :, y] = 255.0
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(x, y, batch_size=9, epochs=12, verbose=0)
    _, accuracy = model.evaluate(x, y, verbose=0)
    assert accuracy > 0.9


def test_auxiliary_loss_is_trained_but_not_evaluated():
    x, y = tiny.pixels(4), tiny.labels(4)
    fitted, evaluated = [], []
    for weight in (0.0, 1.0):
        router = routers.SoftmaxTokenChoiceRouter(
            4,
            noise_std=0.0,
            losses=[routers.RoutingLoss(ops.importance_loss, weight=weight)],
        )
        model = tiny.classifier(router=router, group_images=1)
        model.compile(keras.optimizers.SGD(0.0))
        fitted.append(model.fit(x, y, verbose=0).history["loss"][0])
        evaluated.append(model.evaluate(x, y, verbose=0)[0])
    np.testing.assert_allclose(*evaluated, rtol=1e-5)
    decision = model.backbone.route(tiny.images(4))[1]
    auxiliary = to_numpy(decision.summary["auxiliary_loss"]).mean()
    assert auxiliary > 0.01
    np.testing.assert_allclose(fitted[1] - fitted[0], auxiliary, rtol=1e-3)


def test_pixels_are_rescaled_and_resized():
    model = tiny.classifier()
    x = tiny.pixels(2)
    expected = to_numpy(model(tiny.images(2)))
    assert_near(tiny.predict(model, x), expected, rtol=1e-4, atol=1e-5)
    # Every pixel four times: resizing gives the same image.
    large = x.repeat(2, axis=1).repeat(2, axis=2)
    assert_near(tiny.predict(model, large), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preprocessor", [None, lambda x: x / 127.5 - 1.0])
def test_without_preprocessor_or_with_any_callable(preprocessor):
    model = tiny.classifier({"preprocessor": preprocessor})
    x = tiny.images(2) if preprocessor is None else tiny.pixels(2)
    expected = to_numpy(model(tiny.images(2)))
    assert_near(tiny.predict(model, x), expected, rtol=1e-4, atol=1e-5)


def test_head():
    model = tiny.classifier()
    pooled = to_numpy(model.backbone(tiny.images(2))["pooled_output"])
    kernel, bias = (to_numpy(w) for w in model.output_dense.weights)
    assert_near(
        to_numpy(model(tiny.images(2))), pooled @ kernel + bias, rtol=1e-4, atol=1e-5
    )
    fresh = models.ViTMoEImageClassifier(tiny.backbone(), 4)
    assert not np.any(to_numpy(fresh(tiny.images(2))))


@pytest.mark.parametrize("activation, from_logits", [(None, True), ("softmax", False)])
def test_default_loss_fits_the_activation(activation, from_logits):
    model = tiny.classifier({"activation": activation})
    assert model.loss.get_config()["from_logits"] == from_logits


def test_mixed_precision():
    model = tiny.classifier(dtype="mixed_bfloat16")
    assert model.output.dtype == "bfloat16"
    model.fit(tiny.pixels(8), tiny.labels(8), batch_size=8, verbose=0)
    assert np.isfinite(tiny.predict(model, tiny.pixels(2)).astype("float32")).all()
    precise = tiny.classifier({"head_dtype": "float32"}, dtype="mixed_bfloat16")
    assert precise.output.dtype == "float32"


@pytest.mark.parametrize("kind", ["soft", "sparse", "dense"])
def test_keras_file(tmp_path, kind):
    overrides = {
        "soft": {"pooling": "map", "use_qk_norm": True},
        "sparse": {"router": tiny.SPARSE, "group_images": 2},
        "dense": {**tiny.DENSE, "position_embedding": "sincos2d"},
    }[kind]
    model = tiny.classifier({"dropout": 0.1, "activation": "softmax"}, **overrides)
    expected = tiny.predict(model, tiny.pixels(3))
    revived = layer_checks.reloaded(model, tmp_path)
    assert type(revived) is models.ViTMoEImageClassifier
    assert type(revived.backbone) is models.ViTMoEBackbone
    assert_near(tiny.predict(revived, tiny.pixels(3)), expected, rtol=1e-6, atol=1e-6)


def test_training_goes_on_from_a_keras_file(tmp_path):
    model = tiny.classifier({"activation": "softmax"})
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "poisson", metrics=None)
    batch = tiny.pixels(4), np.eye(tiny.NUM_CLASSES, dtype="float32")[tiny.labels(4)]
    model.train_on_batch(*batch)
    revived = layer_checks.reloaded(model, tmp_path)
    assert revived.loss == "poisson"
    assert keras.models.clone_model(model).loss == "poisson"
    losses = [m.train_on_batch(*batch) for m in (model, revived)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for one, other in zip(
        revived.optimizer.variables, model.optimizer.variables, strict=True
    ):
        assert_near(to_numpy(one), to_numpy(other), rtol=1e-4, atol=1e-6)


def test_files_of_a_classifier_that_was_never_compiled(tmp_path):
    model = tiny.classifier({"compile": False})
    assert not layer_checks.reloaded(model, tmp_path).compiled
    revived = layer_checks.from_preset(model, tmp_path, compile=False)
    assert not revived.compiled
    layer_checks.assert_same_weights(revived, model)


def test_keras_file_of_a_backbone(tmp_path):
    model = tiny.backbone(dtype="mixed_bfloat16")
    revived = layer_checks.reloaded(model, tmp_path)
    assert revived.get_config() == model.get_config()
    layer_checks.assert_same_weights(revived, model)


def test_configuration_round_trip():
    head = {"activation": "softmax", "dropout": 0.25, "head_dtype": "float32"}
    model = tiny.classifier(head, dtype="mixed_bfloat16")
    revived = models.ViTMoEImageClassifier.from_config(model.get_config())
    assert revived.get_config() == model.get_config()
    assert revived.output_dense.compute_dtype == "float32"
    assert revived.output_dropout.rate == 0.25


@pytest.mark.parametrize("preprocessor", [None, "resizes", "rescales"])
def test_wrong_images(preprocessor):
    head = {"preprocessor": tiny.preprocessor() if preprocessor else None}
    model = tiny.classifier(head)
    if preprocessor == "rescales":
        model.preprocessor.image_converter.image_size = None
    expected = to_numpy(model(tiny.images(2)))
    shapes = [(2, 8, 8, 2), (2, 8, 8, 4), (2, 8, 8), (8, 8, 3), (2, 3, 8, 8)]
    if preprocessor != "resizes":
        shapes.append((2, 12, 8, 3))
    for shape in shapes:
        x, y = np.zeros(shape, "float32"), tiny.labels(shape[0])
        for call in (
            lambda x=x: tiny.predict(model, x),
            lambda x=x, y=y: model.fit(x, y, verbose=0),
            lambda x=x, y=y: model.evaluate(x, y, verbose=0),
        ):
            message = r"(?s)\(None, 8, 8, 3\).*Received: images"
            with pytest.raises(ValueError, match=message) as caught:
                call()
            assert "in user code" not in str(caught.value)
    # The model still works.
    np.testing.assert_allclose(to_numpy(model(tiny.images(2))), expected, rtol=1e-5)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="positive integer.*num_classes=0"):
        models.ViTMoEImageClassifier(tiny.backbone(), 0)
    with pytest.raises(TypeError, match="num_labels"):
        models.ViTMoEImageClassifier(tiny.backbone(), 3, num_labels=3)


@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", "categorical_crossentropy"]
)
def test_a_crossentropy_by_name_is_that_of_the_logits(loss):
    model = tiny.classifier()
    model.compile("adam", loss, metrics=[])
    x, y = tiny.pixels(4), tiny.labels(4)
    logits = tiny.predict(model, x).astype("float64")
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -logits[np.arange(4), y].mean()
    if loss == "categorical_crossentropy":
        y = np.eye(tiny.NUM_CLASSES)[y]
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), expected, rtol=1e-4)
    # Where the model gives probabilities, the name means what it says.
    model = tiny.classifier(head={"activation": "softmax"})
    model.compile("adam", loss, metrics=[])
    assert np.isfinite(model.evaluate(x, y, verbose=0))
    assert model.loss == loss


@pytest.mark.parametrize(
    "loss",
    ["auto", "sparse_categorical_crossentropy", "categorical_crossentropy", "mse"],
)
def test_default_metric_is_for_the_labels_of_the_loss(loss):
    model = tiny.classifier()
    model.compile("adam", loss)
    x, y = tiny.pixels(4), tiny.labels(4)
    expected = np.mean(tiny.predict(model, x).argmax(-1) == y)
    if loss in ("categorical_crossentropy", "mse"):
        y = np.eye(tiny.NUM_CLASSES, dtype="float32")[y]
    results = model.evaluate(x, y, verbose=0, return_dict=True)
    del results["loss"]
    assert list(results.values()) == [pytest.approx(expected)]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_weights_of_samples_must_be_finite(number):
    """One that is not, and all weights of the model would be NaN."""
    model = tiny.classifier(**tiny.DENSE)
    before = [to_numpy(w) for w in model.weights]
    x, y, weight = tiny.pixels(6), tiny.labels(6), np.ones(6, "float32")
    weight[4] = number
    data = (x, y, weight)
    for run in (
        lambda: model.fit(x, y, sample_weight=weight, verbose=0),
        lambda: model.fit(x, y, sample_weight=list(weight), verbose=0),
        lambda: model.fit(x, y, sample_weight=weight[:, None], verbose=0),
        lambda: model.fit(x, y, sample_weight=weight, validation_split=0.1, verbose=0),
        lambda: model.fit(x, y, validation_data=data, verbose=0),
        lambda: model.fit(iter([data]), verbose=0),
        lambda: model.evaluate(x, y, sample_weight=weight, verbose=0),
        lambda: model.evaluate(iter([data]), verbose=0),
    ):
        with pytest.raises(ValueError, match="weights must be finite.*weight 4 of"):
            run()
    with pytest.raises(ValueError, match=r"`class_weight` must be.*Received.*\{1: "):
        model.fit(x, y, class_weight={1: number}, verbose=0)
    layer_checks.assert_same_weights(model, before)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_weights_of_samples():
    """Also 0 and less, which Keras allows, and as a column."""
    model = tiny.classifier(**tiny.DENSE)
    x, y = tiny.pixels(6), tiny.labels(6)
    weight = np.array([0, 2, -1, 1, 0.5, 3], "float32")
    loss = keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
    losses = to_numpy(loss(y, tiny.predict(model, x)))
    # One after the other: TensorFlow keeps what it has compiled.
    for form in (weight, weight[:, None]):
        for labels in (y, y[:, None]):
            for found in (
                model.evaluate(x, labels, sample_weight=form, verbose=0)[0],
                model.evaluate(iter([(x, labels, form)]), verbose=0)[0],
            ):
                np.testing.assert_allclose(found, (losses * weight).mean(), rtol=1e-4)
    # Classes that are not mentioned have the weight 1.
    model.compile(keras.optimizers.SGD(0.0))
    found = model.fit(x, y, class_weight={1: 3}, verbose=0).history["loss"][0]
    expected = (losses * np.where(y == 1, 3.0, 1.0)).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-4)
