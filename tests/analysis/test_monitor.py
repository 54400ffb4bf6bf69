"""Routing in the logs of a training."""

import numpy as np
import pytest

from keras_softmoe import analysis, routers
from tests.models import tiny

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
    found = analysis.soft_statistics(classifier, images, verbose=0)[BLOCK]
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
    load = analysis.expert_load(classifier, images, verbose=0)[BLOCK]
    assert history[f"dropped_{BLOCK}"][-1] == pytest.approx(load.dropped)
    assert history[f"imbalance_{BLOCK}"][-1] == pytest.approx(load.imbalance)
    assert not any("sharpness" in name for name in history)


def test_a_dense_model():
    with pytest.raises(ValueError, match="MoE layers"):
        fit(None)
