"""Losses of routers (`routers/losses.py`): weights, sets, errors, files."""

import json
import math

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from tests.support.limoe_routers import EVERY_LOSS
from tests.support.references import to_numpy
from tests.support.sparse_routers import losses


def losses_of(router):
    """Losses of a training call on the same tokens and the same noise."""
    router.build((None, 6, 8))
    router.kernel.assign(np.random.default_rng(1).normal(size=router.kernel.shape))
    router.seed_generator.state.assign([0, 0])
    tokens = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    return to_numpy(router(tokens, training=True).summary["auxiliary_loss"])


WEIGHTS = {"importance_loss": 0.3, "load_loss": 0.2, "gshard_loss": 0.1, "z_loss": 0.4}


def test_losses_are_objects_with_weights():
    each = losses(**WEIGHTS)
    router = routers.SoftmaxTokenChoiceRouter(4, losses=each)
    assert router.routing_losses == tuple(each)
    values = [losses_of(routers.SoftmaxTokenChoiceRouter(4, losses=[x])) for x in each]
    np.testing.assert_allclose(losses_of(router), sum(values), rtol=1e-5)
    assert np.abs(values).min() > 0


def test_losses_by_default():
    paper = (
        routers.RoutingLoss(ops.importance_loss, weight=0.005),
        routers.RoutingLoss(ops.load_loss, weight=0.005),
    )
    assert routers.SoftmaxTokenChoiceRouter(4).routing_losses == paper
    # Without noise there is no load loss.
    router = routers.SoftmaxTokenChoiceRouter(4, noise_std=0.0)
    assert router.routing_losses == paper[:1]
    assert routers.SoftmaxTokenChoiceRouter(4, losses=()).routing_losses == ()
    assert routers.SinkhornTokenChoiceRouter(4).routing_losses == ()
    assert routers.SoftmaxExpertChoiceRouter(4).routing_losses == ()


def test_losses_of_files_are_classes():
    serialized = {
        "module": "keras_softmoe.routers._routing_losses",
        "class_name": "ZLoss",
        "config": {"modality": None, "weight": 0.4},
        "registered_name": "keras_softmoe>ZLoss",
    }
    router = routers.SoftmaxExpertChoiceRouter(4, losses=[serialized])
    assert router.routing_losses == tuple(losses(z_loss=0.4))
    (config,) = router.get_config()["losses"]
    assert {**config, "module": serialized["module"]} == serialized
    wrong = {**serialized, "config": {"wieght": 0.4}}
    with pytest.raises(TypeError, match="wieght"):
        routers.SoftmaxExpertChoiceRouter(4, losses=[wrong])


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"losses": [routers.RoutingLoss(ops.load_loss)], "noise_std": 0.0},
            "noise.*load_loss",
        ),
        (
            {
                "losses": [
                    routers.RoutingLoss(ops.z_loss),
                    routers.RoutingLoss(ops.z_loss),
                ]
            },
            "given once",
        ),
        ({"losses": ["z"]}, "must be .*RoutingLoss.*'z'"),
    ],
)
def test_bad_losses(settings, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        routers.SoftmaxTokenChoiceRouter(4, **settings)


@keras.saving.register_keras_serializable(package="tests")
def largest_logit(routed, valid):
    """A loss of a user."""
    return keras.ops.max(routed.logits, axis=(1, 2))


def test_a_loss_of_a_user_is_saved_with_its_router():
    own = routers.RoutingLoss(largest_logit, weight=0.5)
    router = routers.SoftmaxExpertChoiceRouter(4, losses=[own])
    serialized = keras.saving.serialize_keras_object(router)
    revived = keras.saving.deserialize_keras_object(json.loads(json.dumps(serialized)))
    for copy in (revived, router.clone(name="copy")):
        assert copy.routing_losses == (own,)
        loss = losses_of(copy)
        assert loss.shape == (2,) and loss[0] > 0


def test_a_layer_takes_a_loss_that_no_file_could_name():
    def first_logit(routed, valid):
        return routed.logits[:, 0, 0]

    own = routers.RoutingLoss(first_logit)
    router = routers.SoftmaxExpertChoiceRouter(4, losses=[own])
    assert layers.MoE(router, mlp_dim=4).router.routing_losses == (own,)


# === Named sets ===


def test_classic_losses():
    functions = (ops.importance_loss, ops.load_loss, ops.z_loss)
    assert routers.classic_losses() == tuple(map(routers.RoutingLoss, functions))
    assert routers.classic_losses(by_modality=True) == tuple(
        routers.RoutingLoss(f, name) for f in functions for name in ("image", "text")
    )


def test_entropy_losses():
    # The thresholds of the paper's ablations, appendix A.2.
    local, text, image = routers.entropy_losses(32)
    assert local == routers.RoutingLoss(ops.local_entropy_loss, "text")
    assert (text.modality, image.modality) == ("text", "image")
    np.testing.assert_allclose(text.threshold, math.log(9))
    np.testing.assert_allclose(image.threshold, math.log(20))
    # They grow with the number of experts, to no less than one.
    _, text, image = routers.entropy_losses(64)
    np.testing.assert_allclose([text.threshold, image.threshold], np.log([18, 40]))
    _, text, image = routers.entropy_losses(1)
    assert (text.threshold, image.threshold) == (0.0, 0.0)
    # Those of LIMoE-H/14, appendix A.3.
    _, text, image = routers.entropy_losses(32, text_experts=4, image_experts=25)
    np.testing.assert_allclose([text.threshold, image.threshold], np.log([4, 25]))
    # For several choices, appendix E.1.
    assert routers.entropy_losses(32, num_selected_experts=2)[0] == (
        routers.RoutingLoss(ops.merged_entropy_loss, "text")
    )


@pytest.mark.parametrize("num_choices", [1, 2])
def test_default_losses_are_both_sets(num_choices):
    router = routers.LIMoERouter(8, num_choices)
    assert router.routing_losses == (
        *routers.classic_losses(),
        *routers.entropy_losses(8, num_selected_experts=num_choices),
    )
    assert router.loss_weight == 0.04


@pytest.mark.parametrize("num_experts", [4, 8, 16, 32, 64])
def test_thresholds_of_figure_12(num_experts):
    # Table 5: log(2.4) and log(0.8) for 4 experts, ..., log(38.4) and log(12.8) for 64.
    losses = routers.entropy_losses(num_experts, 0.6 * num_experts, 0.2 * num_experts)
    expected = np.log([0.6 * num_experts, 0.2 * num_experts])
    np.testing.assert_allclose([loss.threshold for loss in losses[1:]], expected)
    router = routers.LIMoERouter(num_experts, losses=losses)
    assert router.clone("other").routing_losses == losses


def test_threshold_is_a_soft_minimum():
    one, other = (
        routers.RoutingLoss(ops.global_entropy_loss, "text", soft_minimum=9),
        routers.RoutingLoss(ops.global_entropy_loss, "text", threshold=math.log(9)),
    )
    assert one == other and hash(one) == hash(other)
    assert one != routers.RoutingLoss(ops.global_entropy_loss, "image", soft_minimum=9)
    assert one != routers.RoutingLoss(ops.global_entropy_loss, "text", soft_minimum=8)
    assert routers.RoutingLoss(ops.z_loss) != routers.RoutingLoss(ops.importance_loss)
    # All experts may be asked for.
    for num_experts in (1, 3, 32, 49):
        loss = routers.RoutingLoss(
            ops.global_entropy_loss, "text", soft_minimum=num_experts
        )
        routers.LIMoERouter(num_experts, losses=[loss])
    assert repr(
        routers.RoutingLoss(ops.global_entropy_loss, "text", threshold=0.5)
    ) == ("RoutingLoss(global_entropy_loss, modality='text', threshold=0.5)")


# === A loss by itself ===


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=repr)
def test_a_loss_is_revived(loss):
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(loss)))
    assert keras.saving.deserialize_keras_object(config) == loss


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "either `soft_minimum`.*soft_minimum=None, threshold=None"),
        (
            {"soft_minimum": 2, "threshold": 0.5},
            "either `soft_minimum`.*soft_minimum=2, threshold=0.5",
        ),
        ({"soft_minimum": 0}, "over 0.*soft_minimum=0"),
        ({"soft_minimum": -1.0}, "over 0.*soft_minimum=-1.0"),
        ({"soft_minimum": math.nan}, "over 0.*soft_minimum=nan"),
        ({"soft_minimum": math.inf}, "over 0.*soft_minimum=inf"),
        ({"threshold": -math.inf}, "finite.*threshold=-inf"),
        ({"threshold": math.nan}, "finite.*threshold=nan"),
        ({"modality": "audio", "threshold": 1.0}, "'image', 'text'.*modality='audio'"),
    ],
)
def test_bad_threshold(arguments, message):
    with pytest.raises(ValueError, match=message):
        routers.RoutingLoss(ops.global_entropy_loss, **arguments)


def test_bad_entropy_losses():
    with pytest.raises(ValueError, match="soft_minimum=0.0"):
        routers.entropy_losses(4, text_experts=0.0)
    with pytest.raises(ValueError, match="between 1 and 4.*num_selected_experts=5"):
        routers.entropy_losses(4, num_selected_experts=5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"function": "z_loss"}, "loss of `keras_softmoe.ops`.*function='z_loss'"),
        ({"function": routers.RoutingLoss}, "function=<class"),
        ({"function": ops.z_loss, "weight": "1"}, "`weight`.*weight='1'"),
        (
            {"function": ops.z_loss, "threshold": 1.0},
            "Only `ops.global_entropy_loss`.*threshold=1.0, soft_minimum=None",
        ),
        (
            {"function": ops.z_loss, "soft_minimum": 2.0},
            "soft_minimum=2.0, function='z_loss'",
        ),
        (
            {"function": ops.mutual_information_loss, "modality": "text"},
            "both modalities.*modality='text', function='mutual",
        ),
    ],
)
def test_bad_loss(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        routers.RoutingLoss(**arguments)
