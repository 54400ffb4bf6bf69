"""What all experiments share: data by epoch, results in files, commands."""

import dataclasses
import json

import keras
import numpy as np
import pytest

from experiments.lib import runs
from keras_softmoe import models
from tests.support import tiny
from tests.support.close import assert_near


def test_each_epoch_has_its_own_batches():
    def draw(epoch):
        return runs.batches_of(np.full(6, epoch), np.arange(6), 2)

    data = runs.EpochData(draw, 3, lambda x, y: (x, -y))
    assert len(data) == 3
    # Keras looks at a batch before the first epoch; the epoch begins with the first.
    assert data[0][0].tolist() == [0, 0]
    for epoch in (0, 5):
        data.callback().on_epoch_begin(epoch, {})
        seen = [data[index] for index in range(len(data))]
        assert [x.tolist() for x, _ in seen] == [[epoch] * 2] * 3
        assert [y.tolist() for _, y in seen] == [[0, -1], [-2, -3], [-4, -5]]


def test_a_damaged_file_is_named(tmp_path):
    runs.write_json(tmp_path / "new" / "file.json", {"a": 1})
    assert runs.read_json(tmp_path / "new" / "file.json") == {"a": 1}
    with pytest.raises(ValueError, match="JSON compliant"):
        runs.write_json(tmp_path / "new" / "file.json", {"a": float("nan")})
    assert json.loads((tmp_path / "new" / "file.json").read_text()) == {"a": 1}
    (tmp_path / "file.json").write_text("{")
    with pytest.raises(ValueError, match="file.json' is damaged.*Delete it"):
        runs.read_json(tmp_path / "file.json")


def test_the_rate_rises_and_falls():
    rate = keras.optimizers.schedules.deserialize(
        runs.adamw(0.1, 30, 10, 0.01).get_config()["learning_rate"]
    )
    found = [float(keras.ops.convert_to_numpy(rate(s))) for s in (0, 5, 10, 20, 30)]
    assert_near(found, [0, 0.05, 0.1, 0.05, 0], atol=1e-8)


def make_run(interrupt_at=None):
    def build():
        model = models.ViTMoEImageClassifier(
            tiny.backbone(), 3, tiny.preprocessor(), compile=False
        )
        model.compile(
            runs.adamw(1e-2, 9, 1, 0.01), "sparse_categorical_crossentropy", metrics=[]
        )
        return model

    def draw(epoch):
        if epoch == interrupt_at:
            raise KeyboardInterrupt
        rng = np.random.default_rng(epoch)
        images = rng.integers(0, 256, (6, 8, 8, 3), "uint8")
        return runs.batches_of(images, rng.integers(3, size=6), 2)

    def measure(model):
        return {"weights": [float(w.sum()) for w in model.get_weights()]}

    return runs.Run("tiny", 1, build, draw, 3, 3, measure)


def test_an_interrupted_run_ends_with_the_same_results(tmp_path):
    whole = runs.finish(make_run(), tmp_path / "whole")
    for epoch in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            runs.finish(make_run(epoch), tmp_path / "parts")
    drawn, run = [], make_run()
    draw = run.draw
    run = dataclasses.replace(
        run, draw=lambda epoch: drawn.append(epoch) or draw(epoch)
    )
    parts = runs.finish(run, tmp_path / "parts")
    assert drawn[-1] == 2 and 1 not in drawn
    assert parts["results"] == whole["results"]
    assert 0 < whole["times"]["training_seconds"] < whole["times"]["seconds"]
    # What is finished is read, and its backup is gone.
    assert runs.finish(run, tmp_path / "parts") == parts
    assert drawn[-1] == 2 and not runs.backup_directory(tmp_path, "tiny").exists()


def test_a_training_with_other_settings_is_refused(tmp_path):
    settings = {"learning_rate": 1e-2, "sizes": (1, 2)}
    run = dataclasses.replace(make_run(1), settings=settings)
    # It is interrupted, goes on with the same settings, and with no others.
    with pytest.raises(KeyboardInterrupt):
        runs.finish(run, tmp_path)
    for changed in ({"learning_rate": 1e-3, "sizes": (1, 2)}, {"sizes": (1, 2)}):
        other = dataclasses.replace(make_run(), settings=changed)
        with pytest.raises(ValueError, match=r"differs in \['learning_rate'\]"):
            runs.finish(other, tmp_path)
    same = dataclasses.replace(make_run(), settings=settings)
    done = runs.finish(same, tmp_path)
    with pytest.raises(ValueError, match="Received: 'tiny'"):
        runs.finish(other, tmp_path)
    assert runs.finish(same, tmp_path) == done
