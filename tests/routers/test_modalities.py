"""LIMoE's settings (`Modalities`): configuration, changes, errors."""

import json
import re

import keras
import numpy as np
import pytest

from keras_softmoe import ops, routers
from tests.support.limoe_routers import (
    EVERY_LOSS,
    MODALITIES,
    NUM_EXPERTS,
    Pruned,
    build,
    call,
    tokens,
)

PRUNED = {"kept_experts": (1, 2), "num_predicted_experts": 4}

# === Configuration ===


@pytest.mark.parametrize("cls", [routers.LIMoERouter, Pruned])
def test_router_is_revived(cls):
    settings = {
        "num_selected_experts": 2,
        "capacity_factor": 1.5,
        "priority": "text_first",
        "losses": EVERY_LOSS,
        "loss_weight": 0.1,
        "per_modality": True,
        "image_experts": 3,
        "text_experts": 2,
        "single_modality_capacity_factor": 3.0,
        "rounding": "ceil",
        "multiple_of": 2,
        "noise_std": 0.5,
        "eval_capacity_factor": 2.5,
        "random_logits": True,
        "name": "mine",
        "trainable": False,
    }
    if cls is Pruned:
        router = cls(2, **PRUNED, **settings)
    else:
        router = cls(4, **settings)
    config = router.get_config()
    for name in settings.keys() - {"losses"}:
        assert config[name] == settings[name], name
    serialized = json.loads(json.dumps(keras.saving.serialize_keras_object(router)))
    revived = keras.saving.deserialize_keras_object(serialized)
    assert type(revived) is type(router) is routers.LIMoERouter
    assert revived.routing_losses == EVERY_LOSS
    for other in (revived, type(router).from_config(config), router.clone(name="mine")):
        assert other.get_config() == config
        assert not other.built
    assert cls is routers.LIMoERouter or revived.kept_experts == (1, 2)


@pytest.mark.parametrize(
    "form, shapes",
    [
        ({}, {"kernel": (4, 4)}),
        ({"per_modality": True}, {"image_kernel": (4, 4), "text_kernel": (4, 4)}),
        ({"image_experts": 2, "text_experts": 2}, {"kernel": (4, 4)}),
    ],
)
def test_weights(form, shapes):
    router = build(**form)
    found = {w.path.rpartition("/")[2]: tuple(w.shape) for w in router.weights}
    assert found == shapes
    router = build(2, Pruned, **PRUNED, **form)
    found = {w.path.rpartition("/")[2]: tuple(w.shape) for w in router.weights}
    assert found == shapes


# === Settings that may change ===


def test_mutable_settings_change_the_next_call():
    settings = {
        "num_selected_experts": 2,
        "priority": "image_first",
        "capacity_factor": 0.5,
        "single_modality_capacity_factor": 1.0,
    }
    losses = routers.entropy_losses(NUM_EXPERTS)
    router, fresh = build(losses=losses), build(losses=losses, **settings)
    router.update(**settings)
    assert {**router.get_config(), "name": ""} == {**fresh.get_config(), "name": ""}
    for modalities in (MODALITIES, (("text", 6),)):
        for actual, expected in zip(
            call(router, tokens(), modalities=modalities)[0],
            call(fresh, tokens(), modalities=modalities)[0],
            strict=True,
        ):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "wrong, received",
    [
        ({"num_selected_experts": 3}, "image_experts=2"),
        ({"num_selected_experts": 5}, "num_selected_experts=5"),
        ({"priority": "best"}, "priority='best'"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        (
            {"single_modality_capacity_factor": -1.0},
            "single_modality_capacity_factor=-1.0",
        ),
        ({"losses": ()}, "losses"),
        ({"keep_fraction": 0.5}, "keep_fraction"),
    ],
)
def test_a_refused_setting_changes_nothing(wrong, received):
    router = build(image_experts=2, text_experts=3)
    before = router.get_config()
    with pytest.raises(ValueError, match=f"(?s)Received: .*{received}"):
        router.update(**wrong)
    assert router.get_config() == before


# === Bad input ===

LOAD = [routers.RoutingLoss(ops.load_loss, "text")]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_experts": 0}, "positive integer.*num_experts=0"),
        ({"num_selected_experts": 5}, "between 1 and 4.*num_selected_experts=5"),
        ({"priority": "best"}, "'sum'.*'image_first', 'text_first'.*priority='best'"),
        ({"noise_std": 0.0}, r"needs noise.*load_loss.*noise_std=0.0"),
        ({"noise_std": 0.0, "losses": LOAD}, "load_loss.*'text'.*noise_std=0.0"),
        ({"losses": ["entropy"]}, "(?s)RoutingLoss.*losses with .'entropy'"),
        ({"losses": [ops.z_loss] * 2}, "(?s)RoutingLoss.*losses with .*z_loss"),
        (
            {"losses": [routers.RoutingLoss(ops.z_loss, "text")] * 2},
            r"given once.*z_loss, modality='text'\)",
        ),
        (
            {
                "losses": [
                    routers.RoutingLoss(
                        ops.global_entropy_loss, "text", soft_minimum=4.1
                    )
                ]
            },
            r"at most log\(4\) = 1.3863.*num_experts=4 .*threshold of 1.4110 for text "
            "tokens, a soft minimum of 4.1 experts",
        ),
        (
            {"losses": [routers.RoutingLoss(ops.global_entropy_loss, threshold=1.4)]},
            "at most.*threshold of 1.4000 for all tokens",
        ),
        (
            {"losses": routers.entropy_losses(8, image_experts=8)},
            "num_experts=4 .*threshold of 2.0794 for image",
        ),
        ({"image_experts": 1, "text_experts": 2}, "image_experts=1, text_experts=2"),
        ({"image_experts": 0}, "positive integer.*image_experts=0"),
        ({"text_experts": 5}, "to 4, the number of experts.*text_experts=5"),
        (
            {"num_selected_experts": 2, "image_experts": 3, "text_experts": 1},
            "from 2, the number of choices.*text_experts=1",
        ),
        (
            {"single_modality_capacity_factor": 0},
            "number over 0.*single_modality_capacity_factor=0",
        ),
        ({"capacity_factor": -1.0}, "number over 0.*capacity_factor=-1.0"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        routers.LIMoERouter(**{"num_experts": 4, **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_experts": 0, "kept_experts": ()}, "positive integer.*num_experts=0"),
        ({"kept_experts": (2, 1)}, r"ascending.*kept_experts=\(2, 1\)"),
        ({"kept_experts": (1, 1)}, r"ascending.*kept_experts=\(1, 1\)"),
        ({"kept_experts": (1, 4)}, r"to 3.*kept_experts=\(1, 4\)"),
        ({"kept_experts": (-1, 1)}, r"from 0.*kept_experts=\(-1, 1\)"),
        (
            {"kept_experts": (0, 1, 2)},
            r"kept experts.*kept_experts=\(0, 1, 2\), num_experts=2",
        ),
        ({"num_selected_experts": 3}, "between 1 and 2.*num_selected_experts=3"),
    ],
)
def test_bad_pruning(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Pruned(**{"num_experts": 2, **PRUNED, **arguments})


def test_a_pruned_router_is_asked_for_experts_that_there_were():
    # Its probabilities are about all of them, and so are losses on them.
    four = routers.RoutingLoss(ops.global_entropy_loss, "text", soft_minimum=4)
    router = Pruned(2, **PRUNED, losses=[four])
    assert router.routing_losses == (four,)
    router = Pruned(2, **PRUNED, losses=None)
    assert router.routing_losses[3:] == routers.entropy_losses(4)
    assert Pruned(2, **PRUNED).routing_losses == ()


@pytest.mark.parametrize(
    "modalities",
    [
        (),
        (("image", 0),),
        (("image", 4), ("words", 2)),
        (("image", 5), ("text", 2)),
        (("image", 24),),
    ],
)
def test_tokens_of_unknown_modality(modalities):
    received = re.escape(f"modalities={modalities} for 12 tokens")
    with pytest.raises(ValueError, match=f"(?s)needs the modality.*{received}"):
        build()(tokens(), modalities=modalities)
