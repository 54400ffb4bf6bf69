"""Token choice without capacity: what it costs, and who refuses it."""

import numpy as np
import pytest

import keras_softmoe as ksm
from keras_softmoe import layers, routers
from keras_softmoe.ops.grouped import grouped_affine
from tests.layers.test_dropless import NUM_EXPERTS, SHAPE, build
from tests.support.close import assert_near
from tests.support.gradients import recorded
from tests.support.layer_checks import normal
from tests.support.references import to_numpy


def test_skipped_tokens():
    router = routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, capacity_factor=None, keep_fraction=0.5, priority="max"
    )
    layer = build(router=router, group_images=1)
    outputs, decision = recorded(layer, normal(SHAPE))
    dropped = to_numpy(decision.summary["dropped"])
    np.testing.assert_array_equal(dropped.sum(-1), 3)
    assert not to_numpy(outputs)[dropped].any()
    sure = to_numpy(decision.summary["probabilities"]).max(-1)
    assert (
        np.where(dropped, sure, 1).min(-1) <= np.where(dropped, 1, sure).min(-1)
    ).all()


def test_routers_that_choose_tokens_refuse_it():
    for kind in (
        routers.SoftmaxExpertChoiceRouter,
        routers.SinkhornExpertChoiceRouter,
        routers.SparseTransportExpertChoiceRouter,
    ):
        with pytest.raises(ValueError, match="experts choose.*capacity_factor=None"):
            kind(NUM_EXPERTS, capacity_factor=None)


def test_cost():
    layer = layers.MoE(
        routers.SoftmaxTokenChoiceRouter(8, 2, capacity_factor=None), mlp_dim=32
    )
    # Without slots to spare: what two dense layers cost for each choice
    found = layer.cost((3, 50, 16))
    assert found.products == 3 * 50 * (2 * 2 * 16 * 32 + 16 * 8)
    assert found.weights == 8 * (2 * 16 * 32 + 32 + 16)
    assert found.mixtures[0].slots == 3 * 50 * 2


def test_a_distribution_refuses_it(monkeypatch):
    layer = build(2)
    monkeypatch.setattr("keras_softmoe.layers.moe.is_distributed", lambda: True)
    with pytest.raises(ValueError, match="`capacity_factor=2` keeps every token too"):
        layer(normal(SHAPE))


def test_a_file_refuses_it(tmp_path):
    backbone = ksm.models.ViTMoEBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=1,
        num_heads=1,
        hidden_dim=8,
        mlp_dim=12,
        moe_layers=(0,),
        router=routers.SoftmaxTokenChoiceRouter(NUM_EXPERTS),
    )
    backbone.set_routing(capacity_factor=None)
    assert backbone(np.zeros((2, 8, 8, 3), "float32"))["pooled_output"].shape == (2, 8)
    with pytest.raises(ValueError, match=r"set_routing\(capacity_factor=4\)"):
        backbone.export(str(tmp_path / "file"))


# Of what PyTorch does where its graph breaks
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_torch_compile():
    import torch

    shapes = (6, 8), (3, 8, 4), (3, 1, 4)
    arrays = [torch.tensor(normal(shape)).requires_grad_() for shape in shapes]
    count = torch.tensor([2, 0, 4], dtype=torch.int32)
    # The part of it that reads the program; what follows does not depend on this one.
    compiled = torch.compile(grouped_affine, backend="eager")
    results = []
    for fn in (grouped_affine, compiled):
        found = fn(*arrays, count)
        results.append([found, *torch.autograd.grad(found.square().sum(), arrays)])
    for one, two in zip(*results, strict=True):
        assert_near(to_numpy(one), to_numpy(two), atol=1e-6)
