"""A preset gives the same logits on every backend, whichever one saved it."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_softmoe import models, presets, routers
from tests.models import tiny

ROOT = pathlib.Path(__file__).parents[2]
OWN = keras.backend.backend()
# Each suite compares with one other; together they close the circle.
OTHER = {"jax": "tensorflow", "tensorflow": "torch", "torch": "jax"}[OWN]
TRAINED = [n for n in presets.names() if presets.describe(n).kind == "trained"]
# Names of the presets that the test saves.
SAVED = {
    "soft": {"pooling": "map", "use_qk_norm": True},
    "token_choice": {"router": tiny.SPARSE, "group_images": 2},
    "expert_choice": {
        "router": routers.SinkhornExpertChoiceRouter(4, multiple_of=None),
        "pooling": "gap",
        "position_embedding": "sincos2d",
    },
    "dense": {**tiny.DENSE, "representation_dim": 6},
}

SCRIPT = """
import sys, numpy as np
from tests.models.test_backends import logits
output, *names = sys.argv[1:]
np.savez(output, **{name: logits(name) for name in names})
"""


def logits(preset):
    """Logits of five images of the preset's own size."""
    model = models.ViTMoEImageClassifier.from_preset(preset)
    x = tiny.pixels(5, model.backbone.image_shape)
    return np.asarray(model.predict(x, batch_size=5, verbose=0), "float32")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Path or name of each preset -> the logits that it has on this backend."""
    directory = tmp_path_factory.mktemp("presets")
    expected = {name: logits(name) for name in TRAINED}
    for name, overrides in SAVED.items():
        model = tiny.classifier(**overrides)
        model.save_to_preset(str(directory / name))
        expected[str(directory / name)] = tiny.predict(model, tiny.pixels(5))
    return expected


def assert_same_logits(actual, expected):
    for preset, value in expected.items():
        assert value.std() > 0.01, preset
        np.testing.assert_allclose(
            actual[preset], value, rtol=1e-4, atol=1e-4, err_msg=preset
        )


def test_same_logits_when_loaded(expected):
    saved = {path: value for path, value in expected.items() if path not in TRAINED}
    assert_same_logits({path: logits(path) for path in saved}, saved)


def test_same_logits_on_another_backend(expected, tmp_path):
    output = tmp_path / "logits.npz"
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(output), *expected],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": OTHER, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert_same_logits(np.load(output), expected)
