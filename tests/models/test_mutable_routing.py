"""Settings of routers that change while a compiled model lives."""

import keras
import numpy as np
import pytest

from keras_softmoe import models, routers
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights, from_preset
from tests.support.references import to_numpy

pytestmark = tiny.FITTING
ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=2, capacity_factor=1.0, noise_std=0.0
)
ROUNDING = routers.SoftmaxTokenChoiceRouter(4, multiple_of=None, rounding="round")
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
    other = tiny.classifier(**{**MOE, "router": ROUTER.with_settings(**settings)})
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
        assert_near(actual, expected, rtol=1e-5, atol=1e-6)
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
    assert_near(tiny.predict(model, x), expected, rtol=1e-5, atol=1e-6)
    for router in model.routers.values():
        router.num_selected_experts = 2
    expected = tiny.predict(fresh(model), x)
    assert_near(tiny.predict(model, x), expected, rtol=1e-5, atol=1e-6)

    images = tiny.images(4)
    before = tiny.predict(model.backbone, images)["pooled_output"]
    model.set_routing(capacity_factor=0.25)
    after = tiny.predict(model.backbone, images)["pooled_output"]
    assert np.abs(after - before).max() > 1e-4


def test_compiled_functions_obey():
    x, y = tiny.pixels(4), tiny.labels(4)
    one = {"num_layers": 1, "moe_layers": (0,)}
    model = tiny.classifier(**one, router=ROUTER)
    weights = model.get_weights()

    def one_step(model):
        model.set_weights(weights)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    one_step(model)
    model.set_weights(weights)
    model.set_routing(num_selected_experts=1, capacity_factor=0.5)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    router = ROUTER.with_settings(num_selected_experts=1, capacity_factor=0.5)
    expected = one_step(tiny.classifier(**one, router=router))
    for weight, value in zip(model.get_weights(), expected, strict=True):
        assert_near(weight, value, rtol=1e-4, atol=1e-5)


def test_groups_of_images():
    # Predictions, an evaluation and a step of training are those of a model built so.
    x, y = tiny.pixels(6), tiny.labels(6)
    model = tiny.classifier(**MOE)
    weights = model.get_weights()

    def measure(model):
        model.set_weights(weights)
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
        return [
            model.evaluate(x, y, batch_size=6, verbose=0, return_dict=True)["loss"],
            *tiny.predict(model, x, batch_size=6).ravel(),
        ]

    def compiled(model):
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    compiled(model)
    seen = [measure(model)]
    for group_images in (4, 1):
        model.set_routing(group_images=group_images)
        new = tiny.classifier(**MOE, group_images=group_images)
        actual, expected = measure(model), measure(compiled(new))
        assert_near(actual, expected, rtol=1e-4, atol=1e-6)
        # Capacity and competition are others in each.
        differences = [np.abs(np.subtract(actual, other)).max() for other in seen]
        assert min(differences) > 1e-4 if group_images != 1 else differences[0] < 1e-6
        seen.append(actual)
        assert model.backbone.group_images == group_images
        assert model.backbone.get_config() == {
            **new.backbone.get_config(),
            "name": model.backbone.name,
        }


def test_groups_with_other_settings_and_files(tmp_path):
    model = tiny.classifier(**MOE)
    x = tiny.pixels(4)
    tiny.predict(model, x)
    model.backbone.set_routing(group_images=2, capacity_factor=0.5)
    expected = tiny.predict(model, x)
    other = fresh(model, capacity_factor=0.5)
    assert np.abs(tiny.predict(other, x) - expected).max() > 1e-4
    other.set_routing(group_images=2)
    assert_near(tiny.predict(other, x), expected, rtol=1e-5, atol=1e-6)

    model.save(tmp_path / "model.keras")
    model.save_to_preset(str(tmp_path / "preset"))
    for revived in (
        keras.saving.load_model(tmp_path / "model.keras"),
        models.ViTMoEImageClassifier.from_preset(str(tmp_path / "preset")),
    ):
        assert revived.backbone.group_images == 2
        actual = tiny.predict(revived, x)
        assert_near(actual, expected, rtol=1e-5, atol=1e-6)


def test_defaults_where_tokens_choose():
    """Groups in training, no capacity in predictions, until one is given."""
    router = routers.SoftmaxTokenChoiceRouter(4)
    model = tiny.backbone(router=router)
    assert (model.group_images, model.router.eval_capacity_factor) == (32, "dropless")
    x = tiny.images(3)
    (decision,) = model.route(x).values()
    assert not keras.ops.convert_to_numpy(decision.summary["dropped"]).any()
    alone = keras.ops.convert_to_numpy(model(x[:1])["pooled_output"])
    together = keras.ops.convert_to_numpy(model(x)["pooled_output"])
    assert_near(together[:1], alone, atol=1e-6)
    model.set_routing(capacity_factor=0.5, group_images=1)
    assert model.router.eval_capacity_factor is None
    (decision,) = model.route(x).values()
    assert keras.ops.convert_to_numpy(decision.summary["dropped"]).any()
    # What is given stays.
    for settings in ({"router": tiny.SPARSE}, {"router": router, "group_images": 1}):
        given = tiny.backbone(**settings)
        assert (given.group_images, given.router.eval_capacity_factor) == (1, None)


def test_a_configuration_forgets_groups_that_were():
    # Two slots for 40 tokens; none for the 5 that the model was built with.
    model = tiny.backbone(router=ROUNDING)
    model.set_routing(group_images=8, capacity_factor=0.2)
    revived = models.ViTMoEBackbone.from_config(model.get_config())
    assert revived.get_config() == model.get_config()
    layer = model.blocks[1].moe
    assert type(layer).from_config(layer.get_config()).group_images == 8


def test_groups_of_pairs():
    model = tiny_limoe.task()
    images, captions = tiny.pixels(4), tiny_limoe.captions(4)

    def encode(model):
        both = tiny.predict(model.backbone, tiny_limoe.pairs(4))
        return [
            both["image_embedding"],
            both["text_embedding"],
            model.encode_image(images),
            model.encode_text(captions),
        ]

    before = encode(model)
    model.set_routing(group_images=4)
    after = encode(model)
    new = tiny_limoe.task(group_images=4)
    new.set_weights(model.get_weights())
    for actual, expected in zip(after, encode(new), strict=True):
        assert_near(actual, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(after[0] - before[0]).max() > 1e-4


def test_groups_of_both_towers():
    text = models.TextMoEBackbone(50, 8, 1, 2, 8, 12, moe_layers=(0,), router=ROUTER)
    towers = models.TwoTowerBackbone(tiny.backbone(**MOE), text)
    towers.set_routing(group_images=3)
    towers.text_backbone.set_routing(group_images=2)
    revived = models.TwoTowerBackbone.from_config(towers.get_config())
    for model in (towers, revived):
        assert model.image_backbone.group_images == 3
        assert model.text_backbone.group_images == 2
    # The whole batch
    towers.set_routing(group_images=None)
    assert towers.image_backbone.group_images is None


def test_a_dense_model_keeps_its_argument():
    model = tiny.backbone(**tiny.DENSE, group_images=3)
    assert model.group_images == model.get_config()["group_images"] == 3


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
    assert_near(tiny.predict(other, x), expected, rtol=1e-5, atol=1e-6)


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
            assert_near(actual, expected, rtol=1e-5, atol=1e-6)
    # What a model has been set to is saved with it.
    changed = from_preset(revived, tmp_path / "changed")
    assert settings.items() <= changed.router.get_config().items()


def test_expert_dropout_at_load(tmp_path):
    model = tiny.classifier(**MOE)
    revived = from_preset(model, tmp_path, expert_dropout_rate=0.1)
    assert revived.backbone.expert_dropout_rate == 0.1
    assert_same_weights(revived, model)


@pytest.mark.parametrize(
    "overrides, arguments, received",
    [
        (MOE, {"layers": [0, 2], "num_selected_experts": 1}, "layers="),
        (MOE, {"num_selected_experts": 5}, "num_selected_experts=5"),
        (MOE, {"slots_per_expert": 2}, "slots_per_expert"),
        ({}, {"capacity_factor": 2.0}, "capacity_factor"),
        (tiny.DENSE, {"capacity_factor": 2.0}, "capacity_factor"),
        (tiny.DENSE, {"group_images": 2}, "group_images"),
        (MOE, {"group_images": 0, "num_selected_experts": 1}, "group_images=0"),
        (MOE, {"group_images": 2.5}, "group_images=2.5"),
        (MOE, {"group_images": 2, "num_selected_experts": 5}, "num_selected_experts=5"),
        (MOE, {"group_images": 2, "layers": [1]}, r"layers=\[1\], group_images=2"),
        # 5 tokens of an image, of which 4 experts would take none.
        (
            {"router": ROUNDING, "group_images": 8},
            {"group_images": 1, "capacity_factor": 0.05},
            "capacity_factor=0.05",
        ),
        (
            {"router": routers.IdentityRouter(4), "group_images": 4},
            {"group_images": 1},
            "num_experts=4",
        ),
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
