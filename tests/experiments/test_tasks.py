"""What models learn first: images by seed and epoch, or a data set of TFDS."""

import dataclasses

import numpy as np
import pytest
import tensorflow_datasets as tfds

from experiments import router_study as study, synthetic
from experiments.lib.runs import finish
from experiments.router_study.cells import cell, digits
from experiments.router_study.models import Stopwatch, build_backbone, build_classifier
from experiments.router_study.tasks import VALIDATION_SEED, upstream_task


def test_glyphs_are_new_in_each_epoch(tmp_path):
    scale, task = study.SMOKE, upstream_task(study.SMOKE, tmp_path)
    seen = [batch for epoch in range(scale.epochs) for batch in task.batches(3, epoch)]
    images, labels = (np.concatenate(part) for part in zip(*seen, strict=True))
    number = scale.steps * scale.batch_size
    expected = synthetic.glyphs(number, scale.image_size, seed=3, verbose=0)
    np.testing.assert_array_equal(images, expected[0])
    np.testing.assert_array_equal(labels, expected[1])
    # Images of validation are those of a seed that no model is trained on.
    assert VALIDATION_SEED not in (*scale.all_seeds, *scale.rate_seeds)


def test_accuracy_and_head(tmp_path):
    scale = study.SMOKE
    task = upstream_task(scale, tmp_path)
    dense = study.configurations(scale, ("routers",))["routers"]["dense"]
    model = build_classifier(build_backbone(scale, dense), task.num_classes, bias=-2.0)
    _, labels = synthetic.glyphs(
        scale.validation_images, scale.image_size, VALIDATION_SEED, verbose=0
    )
    images, same = task.images(2)
    np.testing.assert_array_equal(same, labels[:2])
    logits = model.predict(images, verbose=0)
    np.testing.assert_array_equal(logits, -2.0)
    bias = np.zeros(task.num_classes, "float32")
    bias[labels[0]] = 1.0
    model.output_dense.bias.assign(bias)
    assert task.accuracy(model) == np.mean(labels == labels[0])


def test_less_data_comes_again_in_another_order(tmp_path):
    scale = dataclasses.replace(study.SMOKE, epochs=4)
    task = upstream_task(scale, tmp_path)

    def images(epoch, share):
        return np.concatenate([x for x, _ in task.batches(3, epoch, share)])

    half = [images(epoch, 0.5) for epoch in range(4)]
    for epoch in (0, 1):
        np.testing.assert_array_equal(half[epoch], images(epoch, 1.0))
        again = half[epoch + 2]
        assert not np.array_equal(again, half[epoch])
        np.testing.assert_array_equal(
            *(np.sort(x.reshape(len(x), -1), axis=0) for x in (again, half[epoch]))
        )


def test_glyphs_anywhere(tmp_path):
    scale = dataclasses.replace(study.ANYWHERE, validation_images=8)
    images, _ = upstream_task(scale, tmp_path).images(8)
    expected, _ = synthetic.glyphs(
        8, 24, VALIDATION_SEED, verbose=0, placement="anywhere", distractors=2
    )
    np.testing.assert_array_equal(images, expected)
    # Digits are as large as glyphs, in the middle.
    x, _ = digits(scale, "test")
    assert x.shape[1:] == (24, 24, 3)
    assert not x[:, :4].any() and x[:, 4:20, 4:20].std() > 20


def test_a_data_set_of_tfds(tmp_path):
    scale = dataclasses.replace(
        study.SMOKE, tfds="cifar10", validation_images=6, routed_images=4, batch_size=4
    )
    models = study.configurations(scale, ("routers",))["routers"]
    with tfds.testing.mock_data(num_examples=10):
        task = upstream_task(scale, tmp_path)
        assert task.num_classes == 10 and task.validation == "test"
        # Log of 1 over 10 classes.
        assert task.head_bias == pytest.approx(-2.302585)
        images, labels = task.images(5)
        assert images.shape == (5, 16, 16, 3) and labels.shape == (5,)
        assert Stopwatch(scale, task, models["dense"]).measure(models["soft_4s"])

        def train(directory, stop=100):
            steps = iter(range(stop))

            def step():
                if next(steps, None) is None:
                    raise KeyboardInterrupt

            run = cell(scale, models["softmax_token_choice_k2"], 0, task)
            return finish(run, tmp_path / directory, step)["results"]

        whole = train("whole")
        # In the second of two epochs.
        with pytest.raises(KeyboardInterrupt):
            train("parts", stop=3)
        assert train("parts") == whole
    # Of six images.
    assert 6 * whole["upstream_accuracy"] == pytest.approx(
        round(6 * whole["upstream_accuracy"])
    )
