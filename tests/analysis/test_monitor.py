"""Routing in the logs of a training."""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, models, routers
from tests.support import tiny, tiny_limoe

BLOCK = 1


def fit(router, monitored=6, epochs=2):
    classifier = tiny.classifier(
        moe_layers=(BLOCK,) if router else (), router=router, pooling="gap"
    )
    images = tiny.pixels(8)
    monitor = analysis.RoutingMonitor(images[:monitored], batch_size=4)
    classifier.compile(loss="sparse_categorical_crossentropy")
    history = classifier.fit(
        images, np.arange(8) % 3, epochs=epochs, verbose=0, callbacks=[monitor]
    )
    return classifier, images[:monitored], history.history


def test_sharpness():
    router = routers.SoftRouter(4, initial_scale="unit_variance")
    classifier, images, history = fit(router)
    names = {f"dispatch_sharpness_{BLOCK}", f"combine_sharpness_{BLOCK}"}
    assert names < set(history) and not any("dropped" in name for name in history)
    found = analysis.analyze(classifier, images, verbose=0).soft[BLOCK]
    for side in ("dispatch", "combine"):
        values = history[f"{side}_sharpness_{BLOCK}"]
        assert len(values) == 2 and values[0] != values[1]
        last = getattr(found, f"{side}_sharpness")
        assert values[-1] == pytest.approx(last, rel=1e-4)
    # Of four tokens, and four slots.
    assert 1 < found.dispatch_sharpness < 4 and 1 < found.combine_sharpness < 4
    assert found.dispatch_sharpness == pytest.approx(4 * found.dispatch_peak)


def test_load():
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=0.75)
    classifier, images, history = fit(router)
    load = analysis.analyze(classifier, images, verbose=0).blocks[BLOCK]
    assert history[f"dropped_{BLOCK}"][-1] == pytest.approx(load.dropped)
    assert history[f"imbalance_{BLOCK}"][-1] == pytest.approx(load.imbalance)
    wanted = history[f"demand_imbalance_{BLOCK}"][-1]
    assert wanted == pytest.approx(load.demand_imbalance)
    assert not any("sharpness" in name for name in history)


def test_a_dense_model():
    with pytest.raises(ValueError, match="MoE layers"):
        fit(None)


def limoe_pairs(count=8):
    return tiny.pixels(count), tiny_limoe.captions(count)


class Statistics(keras.callbacks.Callback):
    """Statistics by modality after each step."""

    def __init__(self, images, captions):
        super().__init__()
        self.pairs = images, captions
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        images, captions = self.pairs
        found = analysis.analyze(self.model, images, captions=captions, verbose=0)
        self.found.append(found.modalities)


def test_usage_is_the_mean_of_the_last_measurements():
    images, captions = limoe_pairs()
    model = tiny_limoe.task()
    model.compile(keras.optimizers.SGD(1.0))
    routed = images[:4], captions[:4]
    monitor = analysis.RoutingMonitor(*routed, every=2, last=2)
    beside = Statistics(*routed)
    # Two epochs of four steps, measured after steps 2, 4, 6 and 8; counted anew in the
    # second training.
    for _ in range(2):
        beside.found.clear()
        model.fit(
            *(images, captions),
            batch_size=2,
            epochs=2,
            verbose=0,
            callbacks=[monitor, beside],
        )
    assert len(beside.found) == 8
    measured = [beside.found[step - 1] for step in (6, 8)]
    for modality in ("image", "text"):
        usage = monitor.usage(modality)
        assert list(usage) == [0, 1]
        for block, share in usage.items():
            expected = np.mean(
                [
                    s[block].assigned[modality] / s[block].num_tokens[modality]
                    for s in measured
                ],
                axis=0,
            )
            np.testing.assert_allclose(share, expected, rtol=1e-12)
    # It tells which experts to keep.
    usage = monitor.usage("text")
    pruned = models.prune_experts(model, usage, 2)
    for block, router in pruned.routers.items():
        best = np.argsort(-usage[block], kind="stable")[:2]
        assert router.kept_experts == tuple(sorted(best))


def test_several_steps_in_an_execution():
    """As `fit` calls it with `steps_per_execution=2`: with the last step of each."""
    _, captions = limoe_pairs()
    model = tiny_limoe.task()
    monitor = analysis.RoutingMonitor(captions=captions, every=3)
    monitor.set_model(model)
    monitor.on_train_begin()
    monitor.on_epoch_begin(0)
    monitor.on_train_batch_end(1)
    with pytest.raises(ValueError, match="Received: modality='text'"):
        monitor.usage("text")
    # The third step is in the second execution.
    monitor.on_train_batch_end(3)
    found = analysis.analyze(model, captions=captions, verbose=0).modalities
    for block, share in monitor.usage("text").items():
        expected = found[block].assigned["text"] / (8 * tiny_limoe.LENGTH)
        np.testing.assert_allclose(share, expected)


def test_usage_that_was_not_measured():
    images, captions = limoe_pairs()
    monitor = analysis.RoutingMonitor(captions=captions)
    with pytest.raises(ValueError, match=r"\[\]. Received: modality='text'"):
        monitor.usage("text")
    model = tiny_limoe.task()
    model.fit(images, captions, batch_size=8, verbose=0, callbacks=[monitor])
    with pytest.raises(ValueError, match=r"\['text'\]. Received: modality='image'"):
        monitor.usage("image")
    for wrong in ({"every": 0}, {"last": 0}):
        with pytest.raises(ValueError, match="Received: (every|last)=0"):
            analysis.RoutingMonitor(captions=captions, **wrong)
    classifier = tiny.classifier()
    with pytest.raises(ValueError, match="LIMoEBackbone"):
        classifier.fit(
            *(tiny.pixels(3), tiny.labels(3)), verbose=0, callbacks=[monitor]
        )
