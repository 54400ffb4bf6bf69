"""Settings of routers that change while a compiled model lives."""

import keras
import numpy as np
import pytest

from keras_softmoe import models, routers
from tests.models import tiny
from tests.references import to_numpy

pytestmark = tiny.FITTING
ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=2, capacity_factor=1.0, noise_std=0.0
)
MOE = {"moe_layers": (0, 1), "router": ROUTER}
CHANGES = [
    {"num_selected_experts": 1},
    {"capacity_factor": 0.25},
    {"priority": "max", "capacity_factor": 0.5},
    {"keep_fraction": 0.5},
    {"eval_capacity_factor": 0.25},
]


def fresh(model, **settings):
    """A newly built model with the weights of another and other settings."""
    router = ROUTER.with_settings(**settings)
    other = tiny.classifier(**{**MOE, "router": router})
    other.set_weights(model.get_weights())
    return other


def test_the_next_prediction_obeys():
    model = tiny.classifier(**MOE)
    x = tiny.pixels(4)
    before = tiny.predict(model, x)
    defaults = {name: ROUTER.get_config()[name] for name in ROUTER.mutable_settings}
    for settings in CHANGES:
        model.set_routing(**settings)
        actual = tiny.predict(model, x)
        expected = tiny.predict(fresh(model, **settings), x)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(actual - before).max() > 1e-4, settings
        model.set_routing(**defaults)
    np.testing.assert_array_equal(tiny.predict(model, x), before)


def test_through_the_backbone_or_a_router():
    # Whichever object is changed, the models that contain it notice.
    model = tiny.classifier(**MOE)
    x = tiny.pixels(4)
    tiny.predict(model, x)
    model.backbone.set_routing(num_selected_experts=1)
    expected = tiny.predict(fresh(model, num_selected_experts=1), x)
    np.testing.assert_allclose(tiny.predict(model, x), expected, rtol=1e-5, atol=1e-6)
    for router in model.routers.values():
        router.num_selected_experts = 2
    expected = tiny.predict(fresh(model), x)
    np.testing.assert_allclose(tiny.predict(model, x), expected, rtol=1e-5, atol=1e-6)

    images = tiny.images(4)
    before = tiny.predict(model.backbone, images)["pooled_output"]
    model.set_routing(capacity_factor=0.25)
    after = tiny.predict(model.backbone, images)["pooled_output"]
    assert np.abs(after - before).max() > 1e-4


def test_training_and_evaluation_obey():
    x, y = tiny.pixels(4), tiny.labels(4)
    model = tiny.classifier(**MOE)
    weights = model.get_weights()

    def one_step(model):
        model.set_weights(weights)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        return model.evaluate(x, y, batch_size=4, verbose=0)

    one_step(model)
    model.set_weights(weights)
    model.set_routing(num_selected_experts=1, capacity_factor=0.5)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    loss = model.evaluate(x, y, batch_size=4, verbose=0)
    expected = one_step(fresh(model, num_selected_experts=1, capacity_factor=0.5))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_chosen_layers_only():
    model = tiny.classifier(**MOE)
    x = tiny.pixels(4)
    model.set_routing(layers=1, num_selected_experts=1, priority="pair")
    assert [r.num_selected_experts for r in model.routers.values()] == [2, 1]
    expected = tiny.predict(model, x)

    # And the configuration remembers, layer by layer.
    config = model.backbone.get_config()
    revived = models.ViTMoEBackbone.from_config(config)
    assert [r.priority for r in revived.routers.values()] == ["position", "pair"]
    assert revived.get_config() == config
    mixed = [ROUTER, ROUTER.with_settings(num_selected_experts=1, priority="pair")]
    other = tiny.classifier(**{**MOE, "router": mixed})
    other.set_weights(model.get_weights())
    np.testing.assert_allclose(tiny.predict(other, x), expected, rtol=1e-5, atol=1e-6)


def test_from_preset(tmp_path):
    model = tiny.classifier(**MOE)
    model.save_to_preset(str(tmp_path / "preset"))
    settings = {"num_selected_experts": 1, "capacity_factor": 0.5, "priority": "max"}
    expected = to_numpy(fresh(model, **settings)(tiny.images(4)))
    for cls in (models.ViTMoEImageClassifier, models.ViTMoEBackbone):
        revived = cls.from_preset(str(tmp_path / "preset"), **settings)
        for router in revived.routers.values():
            assert settings.items() <= router.get_config().items()
        if cls is models.ViTMoEImageClassifier:
            actual = to_numpy(revived(tiny.images(4)))
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    # What a model has been set to is saved with it.
    revived.save_to_preset(str(tmp_path / "changed"))
    changed = models.ViTMoEBackbone.from_preset(str(tmp_path / "changed"))
    assert settings.items() <= changed.router.get_config().items()


def test_expert_dropout_at_load(tmp_path):
    model = tiny.classifier(**MOE)
    model.save_to_preset(str(tmp_path / "preset"))
    revived = models.ViTMoEImageClassifier.from_preset(
        str(tmp_path / "preset"), expert_dropout_rate=0.1
    )
    assert revived.backbone.expert_dropout_rate == 0.1
    for actual, expected in zip(
        revived.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "overrides, arguments, received",
    [
        (MOE, {"layers": [0, 2], "num_selected_experts": 1}, "layers="),
        (MOE, {"num_selected_experts": 5}, "num_selected_experts=5"),
        (MOE, {"slots_per_expert": 2}, "slots_per_expert"),
        ({}, {"capacity_factor": 2.0}, "capacity_factor"),
        (tiny.DENSE, {"capacity_factor": 2.0}, "capacity_factor"),
    ],
)
def test_bad_settings_change_nothing(overrides, arguments, received):
    model = tiny.backbone(**overrides)
    before = model.get_config()
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        model.set_routing(**arguments)
    assert model.get_config() == before


def test_a_list_of_routers_has_one_for_each_block():
    with pytest.raises(ValueError, match="Received: 1 routers"):
        tiny.backbone(moe_layers=(0, 1), router=[ROUTER])
