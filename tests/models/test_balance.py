"""The balance of experts in `fit`: their loss, and tokens without one.

Tests `models/fitting.py`.
"""

import functools
import warnings

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, ops, routers
from keras_softmoe.models import fitting
from tests.support import tiny, tiny_limoe
from tests.support.references import assert_all_equal, to_numpy

pytestmark = tiny.FITTING
BATCH, TOKENS, EXPERTS = 4, 4, 4


def classifier(router, **overrides):
    """A model of one block, whose images have `TOKENS` tokens."""
    known = {"num_layers": 1, "moe_layers": (0,), "pooling": "gap", **overrides}
    model = tiny.classifier(router=router, **known)
    # Weights stay as they are: losses of training and validation are of one model.
    model.compile(keras.optimizers.SGD(0.0), metrics=[])
    return model


def fit(model, x=None, epochs=1, **kwargs):
    y = tiny.labels(BATCH) if x is None else None
    x = tiny.pixels(BATCH) if x is None else x
    return model.fit(x, y, epochs=epochs, verbose=0, **kwargs).history


def test_the_metric_is_the_loss_of_the_routers():
    router = routers.SoftmaxTokenChoiceRouter(
        EXPERTS,
        capacity_factor=None,
        noise_std=0.0,
        losses=[routers.RoutingLoss(ops.z_loss, weight=0.5)],
    )
    model = classifier(router)
    images, labels = tiny.pixels(BATCH), tiny.labels(BATCH)
    history = fit(model, epochs=2, validation_data=(images, labels))
    assert set(history) == {"loss", "val_loss", "routing_loss"}
    with routers.record() as decisions:
        model(images / 127.5 - 1.0)
    (decision,) = decisions.values()
    logits = to_numpy(decision.summary["logits"]).astype("float64")
    expected = 0.5 * np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    for epoch in range(2):
        assert history["routing_loss"][epoch] == pytest.approx(expected, rel=1e-4)
        added = history["loss"][epoch] - history["val_loss"][epoch]
        assert added == pytest.approx(expected, rel=1e-3)
    logs = model.evaluate(images, labels, verbose=0, return_dict=True)
    assert set(logs) == {"loss"}


@pytest.mark.parametrize(
    "settings",
    [
        tiny.DENSE,
        {"router": routers.SoftRouter(EXPERTS)},
        {"router": routers.SoftmaxExpertChoiceRouter(EXPERTS)},
    ],
    ids=["dense", "soft", "experts choose"],
)
def test_no_metric_without_such_losses(settings):
    assert set(fit(classifier(**{"num_layers": 1, **settings}))) == {"loss"}


def test_pairs():
    task = tiny_limoe.task()
    task.compile(keras.optimizers.SGD(0.0), metrics=None)
    pairs = tiny.pixels(3), tiny_limoe.captions(3)
    history = task.fit(
        *pairs,
        batch_size=3,
        epochs=2,
        # Other pairs would be routed together.
        shuffle=False,
        verbose=0,
        validation_data=pairs,
    ).history
    assert set(history) == {"loss", "val_loss", "routing_loss"}
    added = np.subtract(history["loss"], history["val_loss"])
    np.testing.assert_allclose(history["routing_loss"], added, rtol=1e-3)
    assert abs(added[0]) > 1e-2


def biased(capacity_factor=1.0, **settings):
    """A router whose tokens all choose the first expert."""
    return routers.SoftmaxTokenChoiceRouter(
        EXPERTS,
        capacity_factor=capacity_factor,
        noise_std=0.0,
        bias_update_rate=0.0,
        losses=[],
        **settings,
    )


def collapsed(capacity_factor=1.0, **overrides):
    model = classifier(biased(capacity_factor), **overrides)
    model.backbone.router.bias.assign([10.0, 0.0, 0.0, 0.0])
    return model


def warnings_of(run):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    messages = [str(w.message) for w in said]
    return [m for m in messages if m.startswith(("Many tokens", "Experts are idle"))]


def batches():
    while True:
        yield tiny.pixels(BATCH), tiny.labels(BATCH)


@pytest.mark.parametrize("data", ["arrays", "generator"])
def test_fit_warns_once(data):
    model = collapsed()
    rest = {} if data == "arrays" else {"x": batches(), "steps_per_epoch": 1}
    (message,) = warnings_of(lambda: fit(model, epochs=3, **rest))
    # One slot of the first expert for the four tokens of an image.
    assert "75% at block 0" in message and "after epoch 1" in message
    assert "group_images" in message and "bias_update_rate" in message


def test_fit_warns_of_what_begins_after_the_first_epoch():
    model = classifier(routers.SoftmaxTokenChoiceRouter(EXPERTS, capacity_factor=None))

    class Limit(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.set_routing(capacity_factor=1.0, random_logits=False)
                self.model.backbone.router.kernel.assign(
                    np.zeros(self.model.backbone.router.kernel.shape)
                )

    (message,) = warnings_of(lambda: fit(model, epochs=3, callbacks=[Limit()]))
    assert "after epoch 3" in message


@pytest.mark.parametrize(
    "make",
    [
        lambda: collapsed(capacity_factor=4.0),
        lambda: classifier(routers.SoftRouter(EXPERTS)),
        lambda: classifier(**tiny.DENSE),
    ],
    ids=["all kept", "soft", "dense"],
)
def test_fit_does_not_warn(make):
    assert warnings_of(lambda: fit(make(), epochs=2)) == []


def test_share_of_dropped_tokens():
    model = collapsed(capacity_factor=0.5, group_images=2)
    # Of 8 tokens in a group one is taken; for 4 of them there are no slots.
    for factor in ("dropless", 4.0, None):
        model.set_routing(eval_capacity_factor=factor)
        (found,) = fitting.balance(model, tiny.images(BATCH)).values()
        assert found.dropped == pytest.approx((8 - 1 - 4) / 8)
        assert model.backbone.router.eval_capacity_factor == factor
    (block,) = analysis.analyze(model, tiny.pixels(BATCH), verbose=0).blocks.values()
    assert block.dropped == pytest.approx(7 / 8)


@pytest.mark.parametrize("capacity_factor", [None, 4.0], ids=["dropless", "slots"])
def test_fit_warns_of_idle_experts(monkeypatch, capacity_factor):
    monkeypatch.setattr(fitting, "_ENOUGH", 1)
    model = collapsed(capacity_factor=capacity_factor)
    (message,) = warnings_of(lambda: fit(model, epochs=3))
    assert f"{EXPERTS - 1} of them at block 0" in message and "idle" in message
    assert "after epoch 1" in message and "bias_update_rate" in message


def test_the_look_at_a_batch_changes_nothing(monkeypatch):
    after = []
    for limit in (-1.0, 1.0):
        monkeypatch.setattr(fitting, "_MANY", limit)
        if limit == 1.0:
            monkeypatch.setattr(fitting, "_with_drop_warning", lambda *a: a[-1])
        keras.utils.set_random_seed(1)
        router = routers.SoftmaxTokenChoiceRouter(
            EXPERTS, capacity_factor=1.0, noise_std=1.0, random_logits=True
        )
        model = classifier(router, dropout_rate=0.2)
        model.compile(keras.optimizers.SGD(0.1), metrics=[])
        said = warnings_of(functools.partial(fit, model, epochs=2))
        assert len(said) == (limit < 0)
        after.append([to_numpy(v) for v in model.variables])
    assert_all_equal(*after)


def test_pairs_are_looked_at(monkeypatch):
    monkeypatch.setattr(fitting, "_MANY", -1.0)
    task = tiny_limoe.task()
    task.compile(keras.optimizers.SGD(0.0), metrics=None)
    x = {"images": tiny.pixels(3), "captions": tiny_limoe.captions(3)}
    (message,) = warnings_of(lambda: task.fit(x, batch_size=3, verbose=0))
    assert all(f"at block {block}" in message for block in task.routers)
