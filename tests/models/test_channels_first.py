"""Models take channels last, whatever format of images is set for all of Keras."""

import json

import keras
import keras_hub
import numpy as np
import pytest

from keras_softmoe import analysis, converters, evaluation, models, training
from keras_softmoe.exporting.write import FromPixels
from tests.support import hub, tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import randomize
from tests.support.references import to_numpy

pytestmark = [tiny.FITTING, tiny.LOADING]

# No square, and another size than the model's, so that axes that are mixed up show.
PIXELS = tiny.pixels(6, (10, 14, 3))
LABELS = tiny.labels(6)


@pytest.fixture
def channels_first():
    keras.config.set_image_data_format("channels_first")
    yield
    keras.config.set_image_data_format("channels_last")


def predict():
    return tiny.predict(tiny.classifier(), PIXELS)


def fit():
    model = tiny.classifier()
    model.compile(keras.optimizers.SGD(0.1))
    model.fit(PIXELS, LABELS, shuffle=False, verbose=0)
    return np.concatenate([to_numpy(w).ravel() for w in model.trainable_weights])


def batches():
    """Of the path that is not `tf.data`'s."""
    return tiny.predict(tiny.classifier(), Batches())


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return PIXELS[3 * index : 3 * index + 3]


def probe():
    found = evaluation.few_shot_probe(
        tiny.classifier(),
        (PIXELS, LABELS),
        (PIXELS, LABELS),
        shots=(1,),
        seeds=2,
        verbose=0,
    )
    return found[1].accuracies


def route():
    routing = analysis.analyze(tiny.classifier(router=tiny.SPARSE), tiny.pixels(4))
    return [x.load for x in routing.blocks.values()]


def encode_image():
    return tiny_limoe.task().encode_image(PIXELS)


def fit_pairs():
    model = tiny_limoe.task()
    model.compile(keras.optimizers.SGD(0.1))
    model.fit(PIXELS[:3], tiny_limoe.captions(), shuffle=False, verbose=0)
    return np.concatenate([to_numpy(w).ravel() for w in model.trainable_weights])


def two_towers():
    text = models.TextMoEBackbone(
        tiny_limoe.VOCABULARY_SIZE, tiny_limoe.LENGTH, 1, 2, 8, 12
    )
    model = models.TwoTowerContrastive(
        models.TwoTowerBackbone(tiny.backbone(), text),
        tiny_limoe.preprocessor(models.TwoTowerPreprocessor),
    )
    randomize(model)
    return model.encode_image(PIXELS)


def upcycle():
    dense = tiny.classifier(**tiny.DENSE)
    model = converters.upcycle(
        dense, (1,), tiny.SOFT, "clusters", images=tiny.pixels(32)
    )
    return tiny.predict(model, PIXELS)


def another_resolution():
    model = tiny.classifier()
    return tiny.predict(converters.dense_model(model, image_shape=(12, 12, 3)), PIXELS)


def recipe():
    """Batches with each layer of Keras in them; they draw their numbers anew."""
    recipe = training.recipe(
        "finetuning",
        num_classes=3,
        steps=2,
        image_size=8,
        batch_size=4,
        augmentation=training.Augmentation(num_operations=1, mixup_alpha=0.5),
    )
    images, labels = next(iter(recipe.training_data((PIXELS, LABELS))))
    images, labels = next(iter(recipe.evaluation_data((PIXELS, LABELS))))
    return np.array(images)


def from_pixels():
    """What an exported file computes."""
    return to_numpy(FromPixels(tiny.classifier(), (None, *PIXELS.shape[1:]))(PIXELS))


CASES = [
    predict,
    fit,
    batches,
    probe,
    route,
    encode_image,
    fit_pairs,
    two_towers,
    upcycle,
    another_resolution,
    recipe,
    from_pixels,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_numbers_are_those_of_channels_last(case, request):
    keras.utils.set_random_seed(0)
    expected = case()
    request.getfixturevalue("channels_first")
    keras.utils.set_random_seed(0)
    keras.tree.map_structure(
        lambda a, b: assert_near(a, b, rtol=1e-6, atol=1e-7), case(), expected
    )


@pytest.mark.parametrize("cls", [models.ViTMoEImageClassifier, models.LIMoEContrastive])
def test_presets_that_were_saved_before(cls, tmp_path, request):
    """Their files say nothing of a format."""
    is_pair = cls is models.LIMoEContrastive
    model = tiny_limoe.task() if is_pair else tiny.classifier()
    images = (lambda m: m.encode_image(PIXELS)) if is_pair else predict_with
    model.save_to_preset(str(tmp_path / "preset"))
    saved = json.loads((tmp_path / "preset" / "image_converter.json").read_text())
    assert "data_format" not in saved["config"]
    expected = images(model)
    request.getfixturevalue("channels_first")
    loaded = cls.from_preset(str(tmp_path / "preset"))
    assert_near(images(loaded), expected, rtol=1e-6, atol=1e-7)
    converter = models.ViTMoEImageConverter.from_preset(str(tmp_path / "preset"))
    assert converter(PIXELS).shape == (6, 8, 8, 3)


def predict_with(model):
    return tiny.predict(model, PIXELS)


def test_sources_of_keras_hub(request):
    """Its models follow the format; what is made of them does not."""

    def make():
        backbone = hub.make(
            "ViTBackbone", image_shape=hub.SHAPE if last else (3, 12, 12)
        )
        preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(
            keras_hub.layers.ViTImageConverter(
                image_size=hub.SHAPE[:2], scale=[0.01, 0.02, 0.03], offset=-0.5
            )
        )
        model = keras_hub.models.ViTImageClassifier(
            backbone, 3, preprocessor=preprocessor
        )
        model.output_dense.kernel.assign(np.linspace(-1, 1, 24).reshape(8, 3))
        return converters.dense_model(model)

    last = True
    expected = predict_with(make())
    request.getfixturevalue("channels_first")
    last = False
    assert_near(predict_with(make()), expected, rtol=1e-5, atol=1e-6)


def test_converters_of_channels_first_are_refused(channels_first):
    with pytest.raises(ValueError, match="data_format='channels_first'"):
        models.ViTMoEImageConverter((8, 8), data_format="channels_first")
    # Of KerasHub, which follows the format.
    converter = keras_hub.layers.ImageConverter(image_size=(8, 8))
    preprocessor = models.ViTMoEImageClassifierPreprocessor(converter)
    with pytest.raises(ValueError, match="(?s)channels last.*ImageConverter"):
        tiny.classifier({"preprocessor": preprocessor})
    converter = keras_hub.layers.ImageConverter(
        image_size=(8, 8), data_format="channels_last"
    )
    preprocessor = models.ViTMoEImageClassifierPreprocessor(converter)
    model = tiny.classifier({"preprocessor": preprocessor})
    assert tiny.predict(model, PIXELS).shape == (6, 3)
