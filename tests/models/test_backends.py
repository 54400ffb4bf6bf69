"""A preset gives the same outputs on every backend, whichever one saved it."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from keras_softmoe import catalogue, models, routers
from tests.skips import only_on
from tests.support import tiny, tiny_limoe
from tests.support.references import assert_each_near

ROOT = pathlib.Path(__file__).parents[2]
# Another backend loads what JAX saves, and trained presets have the outputs recorded on
# PyTorch (`guards/golden.py`): each within half of what any two backends may differ by.
OTHER = "torch"
RECORDED = ROOT / "tests" / "guards" / "golden" / "predictions.npz"
TOLERANCE = 5e-5
TRAINED = catalogue.names_of_kind("trained")
ONE_OF_EACH = (
    "expert_choice_micro_patch4_25e_20_letters",
    "limoe_tiny_patch8_8e_32_icons",
    "soft_moe_micro_patch4_25e_20_letters",
    "vmoe_micro_patch4_25e_20_letters",
)
# Names of the presets of classifiers that the test saves, and of contrastive models.
SAVED = {
    "soft": {"pooling": "map", "use_qk_norm": True},
    "token_choice": {"router": tiny.SPARSE, "group_images": 2},
    "expert_choice": {
        "router": routers.SinkhornExpertChoiceRouter(4),
        "pooling": "gap",
        "position_embedding": "sincos2d",
    },
    "dense": {**tiny.DENSE, "representation_dim": 6},
    "limoe": {"image_pooling": "map", "text_pooling": "last"},
}

SCRIPT = """
import sys, numpy as np
from tests.models.test_backends import outputs
output, *names = sys.argv[1:]
np.savez(output, **{name: outputs(name) for name in names})
"""


def outputs(preset):
    """Logits of five images of the preset's own size, or embeddings of five pairs."""
    if is_contrastive(preset):
        return embeddings(models.LIMoEContrastive.from_preset(preset))
    model = models.ViTMoEImageClassifier.from_preset(preset)
    x = tiny.pixels(5, model.backbone.image_shape)
    return np.asarray(model.predict(x, batch_size=5, verbose=0), "float32")


def embeddings(model):
    """Those of pairs that are routed together, and those of each half alone."""
    x = tiny.pixels(5, model.backbone.image_shape)
    captions = tiny_limoe.captions(5)
    pairs = model.predict(
        {"images": x, "captions": np.array(captions)}, batch_size=5, verbose=0
    )
    together = [pairs["image_embedding"], pairs["text_embedding"]]
    return np.concatenate(
        [*together, model.encode_image(x), model.encode_text(captions)]
    )


def is_contrastive(preset):
    return pathlib.Path(preset).name.startswith("limoe")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Path of each saved preset -> the outputs that it has on this backend."""
    directory = tmp_path_factory.mktemp("presets")
    expected = {}
    for name, overrides in SAVED.items():
        path = str(directory / name)
        if is_contrastive(path):
            model = tiny_limoe.task(**overrides)
            expected[path] = embeddings(model)
        else:
            model = tiny.classifier(**overrides)
            expected[path] = tiny.predict(model, tiny.pixels(5))
        model.save_to_preset(path)
    return expected


def assert_same_outputs(actual, expected):
    assert min(value.std() for value in expected.values()) > 0.01
    assert_each_near(actual, expected, TOLERANCE, TOLERANCE)


@only_on("torch", because="one backend")
def test_same_outputs_when_loaded(expected):
    assert_same_outputs({path: outputs(path) for path in expected}, expected)


# On PyTorch itself: `guards/test_golden.py`, which is stricter
@only_on("jax", "tensorflow", because="one backend")
def test_trained_presets_have_the_recorded_outputs():
    with np.load(RECORDED) as recorded:
        assert set(recorded) == set(TRAINED)
        expected = {name: recorded[name] for name in ONE_OF_EACH}
    assert_same_outputs({name: outputs(name) for name in expected}, expected)


@only_on("jax", because="one backend")
def test_same_outputs_on_another_backend(expected, tmp_path):
    output = tmp_path / "outputs.npz"
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(output), *expected],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": OTHER, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert_same_outputs(np.load(output), expected)
