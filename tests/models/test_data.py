"""Data as users have them: images of all kinds, and all that gives batches.

Tests `models/data.py` and `models/image_preprocessor.py`.
"""

import sys
import types

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_softmoe import evaluation, models
from tests.skips import needs
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights
from tests.support.references import to_numpy

NUM_IMAGES, BATCH = 10, 4
Y = tiny.labels(NUM_IMAGES)
pytestmark = [
    tiny.FITTING,
    # Keras, of what does not tell how many batches it has.
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]


@pytest.fixture(scope="module")
def model():
    """Learns nothing, so that every way to it has the same results."""
    model = tiny.classifier(**tiny.DENSE)
    model.compile(keras.optimizers.SGD(0.0))
    return model


@pytest.fixture(scope="module")
def x():
    return tiny.pixels(NUM_IMAGES)


@pytest.fixture(scope="module")
def expected(model, x):
    return to_numpy(model(x / 127.5 - 1.0))


def assert_close(actual, expected):
    assert_near(actual, expected, rtol=1e-4, atol=1e-5)


def pictures(x):
    from PIL import Image

    return [Image.fromarray(one.astype("uint8")) for one in x]


KINDS = {
    "uint8": lambda x: x.astype("uint8"),
    "int64": lambda x: x.astype("int64"),
    "float16": lambda x: x.astype("float16"),
    "float64": lambda x: x.astype("float64"),
    "backend": keras.ops.convert_to_tensor,
    "list": list,
    "tuple": tuple,
    "nested lists": lambda x: x.tolist(),
    "PIL": pictures,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_images(model, x, expected, kind):
    images = KINDS[kind](x)
    assert_close(tiny.predict(model, images, batch_size=BATCH), expected)
    results = model.evaluate(x, Y, verbose=0)
    assert_close(model.evaluate(images, list(Y), verbose=0), results)
    assert_close(model.predict_on_batch(images), expected)


def test_one_picture(model, x, expected):
    assert_close(tiny.predict(model, pictures(x)[3]), expected[3:4])


@pytest.mark.parametrize("as_pictures", [False, True])
def test_grey_images(model, x, as_pictures):
    grey = x[..., :1]
    expected = to_numpy(model(np.repeat(grey, 3, axis=-1) / 127.5 - 1.0))
    results = model.evaluate(np.repeat(grey, 3, axis=-1), Y, verbose=0)
    images = pictures(grey[..., 0]) if as_pictures else grey
    assert_close(tiny.predict(model, images), expected)
    assert_close(model.predict_on_batch(images), expected)
    assert_close(model.evaluate(images, Y, verbose=0), results)
    # In a pipeline, and without anything that preprocesses
    assert_close(tiny.predict(model, dataset(grey, Y)), expected)
    bare = tiny.classifier({"preprocessor": None}, **tiny.DENSE)
    bare.set_weights(model.get_weights())
    assert_close(tiny.predict(bare, grey / 127.5 - 1.0), expected)


def test_a_model_of_grey_images_keeps_them_grey(x):
    model = tiny.classifier(image_shape=(8, 8, 1), **tiny.DENSE)
    grey = x[..., :1]
    expected = to_numpy(model(grey / 127.5 - 1.0))
    for images in (grey, pictures(grey[..., 0])):
        assert_close(tiny.predict(model, images), expected)
    with pytest.raises(ValueError, match="Make them grey"):
        tiny.predict(model, x)


def test_palettes_and_transparency(model, x, expected):
    # Opaque pixels, and pictures of just two colours
    rgba = [picture.convert("RGBA") for picture in pictures(x)]
    assert_close(tiny.predict(model, rgba), expected)
    few = pictures(np.where(x[:2, ..., :1] > 99, (9, 90, 200), (250, 0, 4)))
    expected = tiny.predict(model, few)
    assert_close(tiny.predict(model, [p.quantize(2) for p in few]), expected)


@pytest.mark.parametrize(
    "images, message",
    [
        (np.zeros((8, 8, 3)), r"\(8, 8, 3\).*`images\[None\]`"),
        (np.zeros((5, 8, 8)), r"\(5, 8, 8\).*`images\[..., None\]`"),
        (np.zeros((5, 3, 8, 8)), r"\(5, 3, 8, 8\).*channels last.*moveaxis"),
        (np.zeros((5, 8, 8, 4)), r"\(5, 8, 8, 4\).*alpha channel"),
        (np.zeros((5, 8, 8, 2)), r"\(5, 8, 8, 2\).*Repeat a grey channel"),
        (np.zeros(5), r"\(5,\).*four axes"),
        ([np.zeros((8, 8, 3)), np.zeros((9, 8, 3))], r"same shape.*\(9, 8.*Resize"),
        (np.full((2, 8, 8, 3), "a"), "arrays of numbers.*Image.open"),
    ],
)
def test_images_that_are_refused(model, images, message):
    y = np.zeros(len(images), "int32")
    for call in (
        lambda: tiny.predict(model, images),
        lambda: model.evaluate(images, y, verbose=0),
        lambda: model.fit(images, y, verbose=0),
        lambda: model.fit(
            tiny.pixels(2), tiny.labels(2), validation_data=(images, y), verbose=0
        ),
        lambda: model.predict_on_batch(images),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}") as caught:
            call()
        assert "in user code" not in str(caught.value)


def test_no_images(model):
    for empty in (tiny.pixels(0), []):
        assert tiny.predict(model, empty).shape == (0, tiny.NUM_CLASSES)
        for method in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match="no images.*0 of them|four axes"):
                method(empty, tiny.labels(0), verbose=0)
    with pytest.raises(ValueError, match="no data.*x=None"):
        model.fit(verbose=0)


def test_no_batches(model, x):
    import tensorflow as tf

    few = tf.data.Dataset.from_tensor_slices((x, Y)).batch(11, drop_remainder=True)
    for source in (dataset(x[:0], Y[:0]), few, Sequence(x[:0], Y[:0])):
        for method in (model.fit, model.evaluate, model.predict):
            with pytest.raises(ValueError, match="no batches.*of length 0"):
                method(source, verbose=0)


def test_batches_that_do_not_fit_together(model, x):
    for batch, message in (
        ((x, Y[:3]), "equally many.*10, 3"),
        ((x[:0], Y[:0]), "no images.*0 of them"),
    ):
        for method in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match=message):
                method(iter([batch]), verbose=0)
            with pytest.raises(ValueError, match=message):
                method(*batch, verbose=0)


def test_numbers_that_destroy_a_model(model, x):
    """One NaN among the images, and all weights would be NaN."""
    before = [to_numpy(w) for w in model.weights]
    wrong = x.copy()
    wrong[1, 1, 2, 0] = np.nan
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match="finite.*first in image 1 of 10"):
            method(wrong, Y, verbose=0)
        with pytest.raises(ValueError, match="finite.*first in image 1 of 4"):
            method(batches(wrong, Y), verbose=0)
    assert_same_weights(model, before)


def test_numbers_of_half_precision(model, x):
    """bfloat16 is of no kind that NumPy has a letter for."""
    wrong = x.astype(ml_dtypes.bfloat16)
    model.evaluate(wrong, Y, verbose=0)
    wrong[2, 1, 1, 0] = np.inf
    with pytest.raises(ValueError, match="finite.*first in image 2 of 10"):
        model.evaluate(wrong, Y, verbose=0)


def test_weights_that_are_refused(model, x):
    ones = np.ones(NUM_IMAGES)
    for weight, message in (
        (ones[:9], "equally many.*10, 10, 9"),
        (np.ones((NUM_IMAGES, 3)), r"of shape \(N,\).*\(10, 3\)"),
        (["much"] * NUM_IMAGES, "must be numbers.*dtype object"),
        (2.0, r"a row for each image.*\(10, 8, 8, 3\), \(10,\), \(\)"),
    ):
        for method in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match=message):
                method(x, Y, sample_weight=weight, verbose=0)
            with pytest.raises(ValueError, match=message):
                method(iter([(x, Y, weight)]), verbose=0)
    for weight in ([1.0, 2.0], {"0": 1.0}, {3: 1.0}, {-1: 1.0}, {0: None}, 2.0):
        for source in ((x, Y), (dataset(x, Y),), (loader(x, Y),)):
            with pytest.raises(ValueError, match="dict from classes.*from 0 to 2"):
                model.fit(*source, class_weight=weight, verbose=0)


def test_labels_of_other_losses(x):
    model = tiny.classifier(**tiny.DENSE)
    model.compile(keras.optimizers.SGD(0.0), loss="categorical_crossentropy")
    one_hot = np.eye(tiny.NUM_CLASSES)[Y]
    model.fit(x, one_hot, verbose=0)
    one_hot[3, 1] = np.nan
    for source in ((x, one_hot), (batches(x, one_hot),)):
        with pytest.raises(ValueError, match="Labels must be finite.*the label 3 of"):
            model.fit(*source, verbose=0)


def test_labels_that_are_no_classes(model, x):
    for wrong in (0.5, tiny.NUM_CLASSES, -1, np.nan):
        y = Y.astype("float32")
        y[4] = wrong
        for method in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match=rf"from 0 to 2.*with \[{wrong}"):
                method(x, y, verbose=0)
    with pytest.raises(ValueError, match="labels of dtype object"):
        model.fit(x, ["cat"] * NUM_IMAGES, verbose=0)
    one_hot = np.eye(tiny.NUM_CLASSES)[Y]
    with pytest.raises(ValueError, match=r"labels of shape \(.*, 3\).*One-hot"):
        model.fit(x, one_hot, verbose=0)
    columns = Y[:, None]
    for source in ((x, columns), (dataset(x, columns),), (batches(x, columns),)):
        model.evaluate(*source, verbose=0)
    # Whole numbers are, whatever their dtype.
    model.evaluate(x, Y.astype("float64"), verbose=0)


def test_sizes_of_batches(model, pair_model, x):
    for size in (0, -1, 2.5, "8"):
        for run in (
            lambda size=size: model.fit(x, tiny.labels(10), size, verbose=0),
            lambda size=size: model.predict(x, size),
            lambda size=size: pair_model.zero_shot(x, ["a", "b"], batch_size=size),
            lambda size=size: pair_model.encode_text(["a"], batch_size=size),
            lambda size=size: evaluation.zero_shot(
                pair_model, x, ["a", "b"], ["{}"], batch_size=size
            ),
        ):
            with pytest.raises(ValueError, match="`batch_size` must be a positive"):
                run()


def test_converter(x):
    converter = models.ViTMoEImageConverter(image_size=(4, 4))
    # Of integers Keras resizes to integers.
    expected = to_numpy(converter(x.astype("uint8")))
    images = pictures(x)
    assert_close(to_numpy(converter(images)), expected)
    assert_close(to_numpy(converter(images[0])), expected[0])
    assert to_numpy(converter(images[0].convert("L"))).shape == (4, 4, 1)


def batches(x, y):
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def dataset(x, y):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


class Sequence(keras.utils.PyDataset):
    """Batches by their index, which counts epochs."""

    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.batches, self.num_epochs = list(batches(x, y)), 0

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def on_epoch_end(self):
        self.num_epochs += 1


def loader(x, y, **kwargs):
    import torch

    rows = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, **kwargs)


def stream(x, y):
    """A loader that does not tell its length."""
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(x, y, strict=True)

    return torch.utils.data.DataLoader(Stream(), batch_size=BATCH)


def grain_dataset(x, y):
    return needs("grain").MapDataset.source(list(zip(x, y, strict=True))).batch(BATCH)


def grain_loader(x, y):
    grain = needs("grain")
    return grain.DataLoader(
        data_source=list(zip(x, y, strict=True)),
        sampler=grain.samplers.IndexSampler(len(x), num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
    )


class Iterable:
    """As little as can give batches."""

    def __init__(self, x, y):
        self.data = x, y

    def __iter__(self):
        return ([x.tolist(), list(y)] for x, y in batches(*self.data))


SOURCES = {
    "tf.data": dataset,
    "PyDataset": Sequence,
    "PyDataset with workers": lambda x, y: Sequence(x, y, workers=2),
    "DataLoader": loader,
    "DataLoader without length": stream,
    "grain": grain_dataset,
    "grain loader": grain_loader,
    "generator": batches,
    "iterable": Iterable,
}
# How many batches they tell to have; `None` of those that do not.
TOLD = {"tf.data": 3, "PyDataset": 3, "PyDataset with workers": 3, "DataLoader": 3}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources_of_batches(model, x, expected, kind):
    make = SOURCES[kind]
    assert_close(tiny.predict(model, make(x, Y)), expected)
    results = model.evaluate(x, Y, batch_size=BATCH, verbose=0)
    assert_close(model.evaluate(make(x, Y), verbose=0), results)
    steps = Steps()
    history = model.fit(
        make(x, Y), validation_data=make(x, Y), callbacks=[steps], verbose=0
    ).history
    assert_close([history["loss"][0], history["val_loss"][0]], [results[0]] * 2)
    assert steps.told == TOLD.get(kind, steps.told)
    assert steps.num_batches == 3


class Steps(keras.callbacks.Callback):
    """Counts batches, and keeps how many a progress bar was told."""

    num_batches = told = 0

    def on_train_begin(self, logs=None):
        self.told = self.params["steps"]

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1


@pytest.mark.parametrize("kind", ["PyDataset", "PyDataset with workers", "DataLoader"])
def test_epochs_of_batches(model, x, kind):
    steps = Steps()
    source = SOURCES[kind](x, Y)
    model.fit(source, validation_data=(x, Y), epochs=3, callbacks=[steps], verbose=0)
    assert steps.num_batches == 3 * 3
    if isinstance(source, Sequence):
        assert source.num_epochs >= 3


def test_a_generator_is_used_up(model, x):
    with pytest.raises(Exception, match="gives its batches once.*steps_per_epoch"):
        model.fit(batches(x, Y), epochs=2, verbose=0)

    def forever():
        while True:
            yield from batches(x, Y)

    steps = Steps()
    model.fit(forever(), steps_per_epoch=4, epochs=2, callbacks=[steps], verbose=0)
    assert steps.num_batches == 8
    # The model still works.
    assert tiny.predict(model, x[:1]).shape == (1, tiny.NUM_CLASSES)


def test_batches_of_pictures_and_of_images_alone(model, x, expected):
    images = pictures(x)
    source = ((images[i : i + 5],) for i in (0, 5))
    assert_close(tiny.predict(model, source), expected)
    assert_close(tiny.predict(model, iter([x[:5], x[5:]])), expected)


def test_class_weight(model, x):
    weight = {0: 2.0, 1: 0.5, 2: 1.0}
    losses = [
        model.fit(source, class_weight=weight, verbose=0).history["loss"][0]
        for source in (dataset(x, Y), loader(x, Y), batches(x, Y))
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    weighted = ((*batch, np.ones(len(batch[1]))) for batch in batches(x, Y))
    with pytest.raises(Exception, match="weights of their own.*Leave"):
        model.fit(weighted, class_weight=weight, verbose=0)


def test_batches_are_given_whole(model, x):
    for source in (dataset(x, Y), loader(x, Y)):
        for extra in ({"y": Y}, {"batch_size": 4}, {"sample_weight": Y}):
            message = f"together with {next(iter(extra))}"
            for method in (model.fit, model.evaluate):
                with pytest.raises(ValueError, match=message):
                    method(source, verbose=0, **extra)
        with pytest.raises(ValueError, match="cuts arrays in two.*_split=0.5"):
            model.fit(source, validation_split=0.5, verbose=0)


def test_wrong_batches(model, x):
    with pytest.raises(ValueError, match=r"\(8, 8, 3\).*dataset.batch"):
        model.fit(dataset(x, Y).unbatch(), verbose=0)
    weights = model.get_weights()
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match="channels last"):
            method(loader(np.moveaxis(x, -1, 1), Y), verbose=0)
    assert_same_weights(model, weights)


def test_validation_split(model, x):
    history = model.fit(x, Y, validation_split=0.4, verbose=0).history
    assert_close(history["val_loss"][0], model.evaluate(x[6:], Y[6:], verbose=0)[0])


@pytest.fixture(scope="module")
def pair_model():
    return tiny_limoe.task(**tiny_limoe.DENSE)


def pair_loader(images, captions):
    import torch

    rows = list(zip(images, captions, strict=True))
    return torch.utils.data.DataLoader(rows, batch_size=len(rows))


PAIRS = {
    "tf.data": dataset,
    "PyDataset": Sequence,
    "DataLoader": pair_loader,
    "generator": batches,
    "dicts": lambda x, y: iter([{"images": x, "captions": y}]),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_sources_of_pairs(pair_model, kind):
    model, x, y = pair_model, tiny.pixels(3), tiny_limoe.captions(3)
    results = model.evaluate(x, y, verbose=0)
    make = PAIRS[kind]
    assert_close(model.evaluate(make(x, y), verbose=0), results)
    found = model.predict(make(x, y), verbose=0)["text_embedding"]
    assert_close(found, model.encode_text(y))
    history = model.fit(make(x, y), validation_data=make(x, y), verbose=0).history
    assert_close([history["loss"][0], history["val_loss"][0]], [results[0]] * 2)


def test_pictures_with_captions(pair_model):
    model, x, y = pair_model, tiny.pixels(3), tiny_limoe.captions(3)
    grey = np.repeat(x[..., :1], 3, axis=-1)
    for images, same in ((pictures(x), x), (x[..., :1], grey)):
        assert_close(model.encode_image(images), model.encode_image(same))
        results = model.evaluate(same, y, verbose=0)
        assert_close(model.evaluate(images, y, verbose=0), results)
        assert_close(model.zero_shot(images, ["ring"]), model.zero_shot(same, ["ring"]))


def test_pil_need_not_be_there(model, x, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert_close(tiny.predict(model, list(x)), expected)
    # An object that is no array gives batches, or is refused.
    with pytest.raises(ValueError, match="four axes"):
        tiny.predict(model, types.SimpleNamespace())
