"""Mutual information of experts with positions and classes."""

import numpy as np
import pytest
from sklearn.metrics import mutual_info_score

from keras_softmoe import analysis, ops, routers
from tests.models import tiny
from tests.references import to_numpy

# Of each image
NUM_TOKENS = 4


def information(router, num_images=5, labels=None, group_images=1):
    backbone = tiny.backbone(
        moe_layers=(1,), router=router, pooling="gap", group_images=group_images
    )
    images = tiny.images(num_images)
    found = analysis.expert_information(
        backbone, images, labels, batch_size=4, verbose=0
    )
    assert list(found) == [1]
    return backbone, images, found[1]


def test_position_is_all_that_identity_knows():
    labels = np.array([0, 1, 1, 0, 1])
    _, _, found = information(routers.IdentityRouter(4), labels=labels)
    assert found.entropy == pytest.approx(2.0) == found.position
    assert found.position_share == pytest.approx(1.0)
    assert found.label == pytest.approx(0.0, abs=1e-9)
    assert found.label_share == pytest.approx(0.0, abs=1e-9)


def test_sparse_routers_against_scikit_learn():
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=0.5)
    labels = np.array([0, 2, 2, 0, 2])
    # Five images in groups of two: padding in the last one.
    backbone, images, found = information(router, labels=labels, group_images=2)
    experts = []
    for batch in (images[:4], images[4:]):
        routing, _ = backbone.route(batch)[1]
        dispatch = to_numpy(ops.to_dense(routing, 2 * NUM_TOKENS)[0]).sum(-1)
        experts.append(dispatch.reshape(-1, NUM_TOKENS, 4)[: len(batch)])
    experts = np.concatenate(experts)
    image, place, expert = np.nonzero(experts)
    assert len(expert) < NUM_TOKENS * len(images)

    def bits(other):
        return mutual_info_score(other, expert) / np.log(2)

    assert found.position == pytest.approx(bits(place), abs=1e-6)
    assert found.label == pytest.approx(bits(labels[image]), abs=1e-6)
    assert found.entropy == pytest.approx(bits(expert), abs=1e-6)
    shuffled = np.random.default_rng(0).permutation(labels)
    assert found.label_chance == pytest.approx(bits(shuffled[image]), abs=1e-6)
    share = (found.label - found.label_chance) / found.entropy
    assert found.label_share == pytest.approx(share)


def test_soft_routers_count_combine_weights():
    backbone, images, found = information(routers.SoftRouter(4, slots_per_expert=2))
    combine = [
        to_numpy(backbone.route(x)[1].routing.combine) for x in (images[:4], images[4:])
    ]
    joint = np.concatenate(combine).sum(-1).sum(0)
    joint /= joint.sum()
    expert, place = joint.sum(0), joint.sum(1)
    expected = np.sum(joint * np.log2(joint / np.outer(place, expert)))
    assert found.position == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert found.entropy == pytest.approx(-np.sum(expert * np.log2(expert)), rel=1e-5)
    assert found.label is None and found.label_share is None


def test_one_expert_has_no_entropy():
    _, _, found = information(routers.IdentityRouter(1), labels=np.arange(5))
    assert found.entropy == 0.0
    assert found.position_share == found.label_share == 0.0


def test_labels_of_other_images():
    router = routers.SoftRouter(4)
    backbone, images, _ = information(router)
    with pytest.raises(ValueError, match="5 images, 4 labels"):
        analysis.expert_information(backbone, images, np.arange(4), verbose=0)
    reducer = analysis.InformationReducer(backbone, np.arange(4))
    with pytest.raises(ValueError, match="5 images, 4 labels"):
        analysis.observe(backbone, images, [reducer], verbose=0)
    with pytest.raises(ValueError, match="dense"):
        analysis.InformationReducer(tiny.backbone(**tiny.DENSE))
