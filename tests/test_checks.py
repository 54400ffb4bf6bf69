"""Sizes, rates and misspelt names are refused in the library's own words."""

import functools
import re

import numpy as np
import pytest

from benchmarks.torture.arguments import BACKBONE, BACKBONES, NO_SIZES, TEXT, targets
from keras_softmoe import architecture, checks, evaluation, layers, models, ops, routers
from tests.support import tiny, tiny_limoe
from tests.support.layer_checks import from_preset


def assert_refused(make, name, value, error=ValueError):
    with pytest.raises(error) as caught:
        make(**{name: value})
    message = str(caught.value)
    # The rule and the value given.
    assert f"`{name}` must be" in message, message
    assert checks.received(**{name: value}) in message, message
    assert len(message) < 1000


SOFT = routers.SoftRouter(4)


def arguments_of(names, kind):
    """Pairs of a target and an argument of it of some kind."""
    return [
        (name, argument)
        for name in names
        for argument, of_kind in targets()[name].kinds.items()
        if of_kind == kind
    ]


def call(name, **arguments):
    return targets()[name].call(**{**targets()[name].good, **arguments})


LAYERS = [name for name in targets() if hasattr(layers, name)]


@pytest.mark.parametrize("value", NO_SIZES, ids=repr)
@pytest.mark.parametrize("layer, name", arguments_of(LAYERS, "size"))
def test_sizes_of_layers(layer, name, value):
    assert_refused(functools.partial(call, layer), name, value)


@pytest.mark.parametrize("value", [-0.1, 1.0, "0.1", None, float("nan")], ids=repr)
@pytest.mark.parametrize("layer, name", arguments_of(LAYERS, "rate"))
def test_rates_of_layers(layer, name, value):
    assert_refused(functools.partial(call, layer), name, value)


def test_integers_of_numpy_are_sizes():
    layer = layers.SoftMoE(np.int64(4), np.int32(8), slots_per_expert=np.uint8(2))
    assert layer(np.zeros((1, 3, 6), "float32")).shape == (1, 3, 6)


ROUTERS = [name for name in targets() if name.endswith("Router")]


def router(cls, **arguments):
    return getattr(routers, cls)(**{"num_experts": 4, **arguments})


@pytest.mark.parametrize("value", NO_SIZES, ids=repr)
@pytest.mark.parametrize("cls, name", arguments_of(ROUTERS, "size"))
def test_sizes_of_routers(cls, name, value):
    assert_refused(lambda **x: router(cls, **x), name, value)


@pytest.mark.parametrize("value", [0, -1.0, "1.0", None, float("inf")], ids=repr)
@pytest.mark.parametrize("cls, name", arguments_of(ROUTERS, "positive"))
def test_numbers_of_routers(cls, name, value):
    if value is None and name == "capacity_factor" and "ExpertChoice" not in cls:
        return  # It means that there is room for all: `layers/test_dropless.py`.
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}="):
        router(cls, **{name: value})


@pytest.mark.parametrize(
    "cls, wrong",
    [
        ("SoftRouter", {"noise_std": -1.0}),
        ("SoftmaxTokenChoiceRouter", {"noise_std": "1"}),
        ("SoftmaxTokenChoiceRouter", {"keep_fraction": "half"}),
        ("SoftmaxTokenChoiceRouter", {"eval_capacity_factor": 0.0}),
        ("SoftmaxTokenChoiceRouter", {"multiple_of": 2.5}),
        ("LIMoERouter", {"image_experts": 2.0}),
        ("LIMoERouter", {"loss_weight": "0.04"}),
    ],
)
def test_other_numbers_of_routers(cls, wrong):
    ((name, value),) = wrong.items()
    assert_refused(lambda **x: router(cls, **x), name, value)


@pytest.mark.parametrize(
    "cls, name, value",
    [
        ("SoftmaxTokenChoiceRouter", "rounding", "floor"),
        ("SoftmaxExpertChoiceRouter", "rounding", None),
        ("SoftmaxTokenChoiceRouter", "random_logits", "x"),
        ("SoftmaxTokenChoiceRouter", "random_logits", np.zeros(3)),
        ("SoftmaxTokenChoiceRouter", "normalize_gates", "yes"),
        ("SoftRouter", "normalize", None),
        ("LIMoERouter", "per_modality", 2),
        ("LIMoERouter", "priority", ["max"]),
    ],
)
def test_choices_of_routers(cls, name, value):
    with pytest.raises(ValueError, match=f"Unknown `{name}`.*Received: {name}="):
        router(cls, **{name: value})


def test_capacity_is_at_most_the_number_of_tokens():
    """More slots would stay empty, whatever the factor."""
    for cls in ("SoftmaxTokenChoiceRouter", "SoftmaxExpertChoiceRouter", "LIMoERouter"):
        made = router(cls, capacity_factor=1e7, eval_capacity_factor=1e29)
        assert made.capacity(6, training=True) == made.capacity(6) == 6
    with pytest.raises(ValueError, match="`capacity_factor`.*under 1e.30"):
        router("SoftmaxTokenChoiceRouter", capacity_factor=1e308)


def test_weights_of_losses():
    assert_refused(lambda **x: routers.RoutingLoss(ops.z_loss, **x), "weight", "0.1")


MODEL_SIZES = [
    (cls, name)
    for cls, arguments in BACKBONES.items()
    for name in arguments
    if name != "image_shape"
]


@pytest.mark.parametrize("value", [0, -1, 2.5, "4"], ids=repr)
@pytest.mark.parametrize("cls, name", MODEL_SIZES)
def test_sizes_of_backbones(cls, name, value):
    arguments = {**BACKBONES[cls], name: value}
    assert_refused(lambda **x: cls(**{**arguments, **x}), name, value)
    if cls is not models.TextMoEBackbone:
        with pytest.raises(ValueError, match=f"(?s)`{name}`.*Received: {name}="):
            evaluation.cost(arguments)


@pytest.mark.parametrize("value", [8, (8, 8), (8, 8, 0), (8, 8, "3"), "8x8", None])
def test_shapes_of_images(value):
    for make in (lambda x: models.ViTMoEBackbone(**x), evaluation.cost):
        assert_refused(
            lambda make=make, **x: make({**BACKBONE, **x}), "image_shape", value
        )


@pytest.mark.parametrize("value", [1, "1", (1.0,), ("1",), (True,), (-1,), (2,)])
def test_blocks_with_experts(value):
    with pytest.raises(ValueError, match="from 0 to 1.*Received: moe_layers="):
        models.ViTMoEBackbone(**BACKBONE, moe_layers=value, router=SOFT)


@pytest.mark.parametrize("value", [0, 2.5, "10", None], ids=repr)
def test_numbers_of_classes(value):
    def make(**x):
        models.ViTMoEImageClassifier(tiny.backbone(), **x)

    assert_refused(make, "num_classes", value)


def test_tasks_want_a_backbone():
    for make in (
        lambda x: models.ViTMoEImageClassifier(x, 3),
        lambda x: models.LIMoEContrastive(x),
        lambda x: models.TwoTowerContrastive(x),
        lambda x: models.TwoTowerBackbone(x, x),
    ):
        with pytest.raises(ValueError, match="backbone` must be a `.*from_preset`"):
            make("soft_moe_tiny")


def test_projections_of_towers():
    towers = tiny.backbone(), models.TextMoEBackbone(**TEXT)
    for name in ("image_projection_dim", "text_projection_dim"):
        assert_refused(lambda **x: models.TwoTowerBackbone(*towers, **x), name, "8")


def test_a_model_of_numpy_sizes_is_saved(tmp_path):
    sizes = {name: np.array(value)[()] for name, value in BACKBONE.items()}
    sizes |= {"representation_dim": np.int64(8), "group_images": np.int64(2)}
    model = models.ViTMoEBackbone(**sizes, moe_layers=np.array([1]), router=SOFT)
    classifier = models.ViTMoEImageClassifier(model, np.int64(3))
    assert classifier.predict(tiny.images(1), verbose=0).shape == (1, 3)
    revived = from_preset(model, tmp_path)
    x = tiny.images(1)
    np.testing.assert_array_equal(
        revived.predict(x, verbose=0)["pooled_output"],
        model.predict(x, verbose=0)["pooled_output"],
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            {"activation": "relly"},
            "Unknown `activation`. Accepted: 'gelu_tanh', 'gelu'",
        ),
        ({"position_resampling": "nearest"}, "Unknown `position_resampling`"),
        ({"layer_norm_epsilon": 0.0}, "`layer_norm_epsilon` must be"),
        ({"layer_norm_epsilon": "1e-6"}, "`layer_norm_epsilon` must be"),
        ({"layer_scale": 0.0}, "`layer_scale` must be"),
        ({"layer_scale": "small"}, "`layer_scale` must be"),
        ({"num_registers": -1}, "`num_registers` must be"),
        ({"num_registers": 1.5}, "`num_registers` must be"),
    ],
)
def test_what_dense_models_were_trained_with(wrong, message):
    (value,) = wrong.values()
    with pytest.raises(ValueError, match=f"{message}.*Received: .*{value!r}"):
        tiny.backbone(**wrong)
    with pytest.raises(ValueError, match=message):
        evaluation.cost({**BACKBONE, **wrong})


@pytest.mark.parametrize("name", sorted(set(BACKBONE) | {"group_images"}))
def test_sizes_beyond_all_machines(name):
    value = 10**9
    wrong = (value, value, 3) if name == "image_shape" else value
    moe = {"moe_layers": (1,), "router": SOFT}
    for make in (lambda x: models.ViTMoEBackbone(**x), evaluation.cost):
        with pytest.raises(ValueError, match=f"`{name}`.*at most [0-9,]+.*Received"):
            make({**BACKBONE, **moe, name: wrong})


def test_models_that_exceed_the_memory():
    large = {**BACKBONE, "hidden_dim": 2**16, "mlp_dim": 2**20, "num_layers": 200}
    with pytest.raises(ValueError, match=r"weights, which even in half.*Received: a"):
        models.ViTMoEBackbone(**large)
    assert evaluation.cost(large).parameters > 1e13


def test_more_patches_than_attention_compares():
    with pytest.raises(ValueError, match="at most 65,536 patches.*not 1024 x 1024"):
        evaluation.cost({**BACKBONE, "image_shape": (4096, 4096, 3)})


def test_messages_quote_the_beginning_only():
    for wrong in (
        {"moe_layers": tuple(range(10**6))},
        {"moe_layers": [[0] * 10**6]},
        {"image_shape": (8,) * 10**6},
        {"hidden_dim": "8" * 10**6},
        {"pooling": "x" * 10**6},
        {"num_layers": 10**5000},
    ):
        with pytest.raises(ValueError) as caught:
            models.ViTMoEBackbone(**{**BACKBONE, "router": SOFT, **wrong})
        assert len(str(caught.value)) < 1000


def test_received():
    given = checks.received(size=(2, 3), name="x" * 1000, number=10**5000)
    assert given.startswith("Received: size=(2, 3), name='xx") and len(given) < 300
    assert given.endswith("xx', number=a int.")


def test_misspelt_arguments_of_constructors():
    settings = ", ".join(architecture.Mixture.names())
    classifier, limoe = tiny.backbone(), tiny_limoe.backbone()
    for make, wrong, near, accepted in (
        (models.ViTMoEBackbone, "num_layer", "num_layers", settings),
        (models.TextMoEBackbone, "hiden_dim", "hidden_dim", settings),
        (models.LIMoEBackbone, "group_image", "group_images", "embedding_dim"),
        (models.TwoTowerBackbone, "freeze_images", "freeze_image", "logit_scale"),
        (
            functools.partial(models.ViTMoEImageClassifier, classifier, 3),
            *("drop_out", "dropout", "head_dtype"),
        ),
        (
            functools.partial(models.LIMoEContrastive, limoe),
            *("preproccessor", "preprocessor", "compile"),
        ),
    ):
        message = (
            rf"Did you mean `{near}`\? Accepted: .*{accepted}.*Received: {wrong}\."
        )
        with pytest.raises(TypeError, match=message):
            make(**{wrong: 1})


@pytest.mark.parametrize(
    "cls, wrong, near",
    [
        (models.ViTMoEBackbone, "num_selected_expert", "num_selected_experts"),
        (models.ViTMoEBackbone, "hiden_dim", "hidden_dim"),
        (models.ViTMoEImageClassifier, "num_clases", "num_classes"),
        (models.ViTMoEImageClassifier, "image_shpe", "image_shape"),
        (models.ViTMoEImageClassifier, "dropout_rat", "dropout_rate"),
        (models.LIMoEContrastive, "preproccessor", "preprocessor"),
        (models.LIMoEContrastive, "capacity_facter", "capacity_factor"),
        (models.ViTMoEImageClassifierPreprocessor, "image_convertr", "image_converter"),
        (models.ViTMoEImageConverter, "image_sise", "image_size"),
        (models.LIMoETokenizer, "sequence_lenght", "sequence_length"),
    ],
)
def test_misspelt_arguments_of_presets(cls, wrong, near, monkeypatch):
    # Before the preset is looked for, so before any weights are read or fetched.
    with pytest.raises(TypeError) as caught:
        cls.from_preset("no_such_preset", **{wrong: 1})
    message = str(caught.value)
    assert f"`{cls.__name__}.from_preset`" in message
    assert f"Did you mean `{near}`?" in message
    assert re.search(rf"Accepted: .*{near}.* Received: {wrong}\.", message)
    assert len(message) < 1500


def test_names_of_cost():
    with pytest.raises(ValueError, match=r"Did you mean `num_layers`\?"):
        evaluation.cost(BACKBONE, num_layer=3)


def test_a_name_without_a_neighbour():
    with pytest.raises(TypeError, match=r"argument. Accepted: size. Received: xyz."):
        checks.check_names("`f`", {"xyz": 1, "size": 2}, ["size", "size"])
