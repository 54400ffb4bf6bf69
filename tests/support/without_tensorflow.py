"""Program: what works where TensorFlow is not installed; prints `done`."""

import sys
from importlib.machinery import PathFinder

HIDDEN = ("tensorflow", "tensorflow_text")


class Finder(PathFinder):
    """Finds all packages but those."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(name, path, target)


sys.meta_path[:] = [Finder if one is PathFinder else one for one in sys.meta_path]

import keras  # noqa: E402
import numpy as np  # noqa: E402

import keras_softmoe as ksm  # noqa: E402
from tests.support import tiny, tiny_limoe  # noqa: E402
from tests.support.close import assert_near  # noqa: E402
from tests.support.references import to_numpy  # noqa: E402

X, Y = tiny.pixels(10), tiny.labels(10)


class Batches(keras.utils.PyDataset):
    """The same rows in three batches."""

    def __len__(self):
        return 3

    def __getitem__(self, number):
        rows = slice(4 * number, 4 * number + 4)
        return X[rows], Y[rows]


def classifier():
    """Arrays, tensors and batches; class weights, a split, images of another size."""
    model = tiny.classifier()
    expected = to_numpy(model(X / 127.5 - 1.0))
    sources = [(X, Y), map(keras.ops.convert_to_tensor, (X, Y))]
    sources = [*map(tuple, sources), (Batches(),)]
    if keras.backend.backend() == "torch":
        import torch

        rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        sources.append((torch.utils.data.DataLoader(rows, batch_size=4),))
    for source in sources:
        assert_near(model.predict(source[0], verbose=0), expected, atol=1e-4)
    larger = np.repeat(np.repeat(X, 2, axis=1), 2, axis=2)
    assert model.predict(larger, verbose=0).shape == expected.shape
    model.compile(keras.optimizers.SGD(0.0))
    of_all = model.evaluate(X, Y, batch_size=4, verbose=0)[0]
    for source in sources:
        history = model.fit(*source, validation_data=source, verbose=0).history
        np.testing.assert_allclose(history["val_loss"], of_all, rtol=1e-4)
    weights = {"class_weight": {0: 2.0}, "validation_split": 0.2}
    history = model.fit(X, Y, 4, epochs=2, verbose=0, **weights).history
    assert np.isfinite(history["loss"]).all() and len(history["val_loss"]) == 2


def pairs():
    """A tokenizer, the last incomplete batch left out, and every row once."""
    model = tiny_limoe.task()
    images, captions = tiny.pixels(6), tiny_limoe.CAPTIONS
    found = model.predict({"images": images, "captions": captions}, verbose=0)
    assert all(np.isfinite(x).all() for x in found.values())
    history = model.fit(images, captions, batch_size=4, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def files():
    name = "soft_moe_tiny_patch8_16e_32_icons"
    model = ksm.models.ViTMoEImageClassifier.from_preset(name)
    assert model.predict(np.zeros((1, 32, 32, 3), "uint8"), verbose=0).shape[0] == 1


def the_rest():
    recipe = ksm.training.recipe(
        "finetuning", num_classes=3, steps=2, image_size=32, batch_size=4
    )
    try:
        recipe.training_data((X, Y))
    except ImportError as error:
        assert "pip install tensorflow" in str(error), error
    else:
        raise AssertionError("a pipeline of TensorFlow without TensorFlow")


if __name__ == "__main__":
    for part in (classifier, pairs, files, the_rest):
        part()
    assert not any(name in sys.modules for name in HIDDEN)
    print("done")
