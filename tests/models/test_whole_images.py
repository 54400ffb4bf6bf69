"""Whole images routed to experts in models of somebody else.

Covers `models/with_experts/experts_from_mlps.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, converters, evaluation, routers
from tests.support import close, families
from tests.support.families import FAMILIES, ROUTER, inputs_of
from tests.support.references import to_numpy

# Products of the MLPs of MiT: 64 tokens of width 8 and 16 of width 16, four times as
# many hidden units, 3 x 3 weights for each
_OF_MIT = 64 * 32 * (2 * 8 + 9) + 16 * 64 * (2 * 16 + 9)


def difference(dense, sparse, x):
    """Between the outputs of two models, see `close.difference`."""
    return close.difference(sparse.predict_on_batch(x), dense.predict_on_batch(x))


def refused(message, *arguments, **settings):
    with pytest.raises(ValueError, match=message):
        converters.add_experts(*arguments, **settings)


@pytest.mark.parametrize("family", ["ViT", "MiT"])
def test_whole_images_are_routed(family):
    """On request, or because the MLP computes a token from others."""
    dense = FAMILIES[family]()
    x = inputs_of(dense, 4)
    known = {"by_image": True} if family == "ViT" else {}
    sparse = converters.add_experts(
        dense, (0, 1), ROUTER, group_images=2, verbose=0, **known
    )
    assert difference(dense, sparse, x) < 1e-5
    with routers.record() as decisions:
        sparse(x)
    for decision in decisions.values():
        # Two choices of each image, alone in its group as nothing has a capacity
        assert to_numpy(decision.summary["load"]).sum(axis=1).tolist() == [2] * 4
    assert sparse.get_config()["moe_settings"]["by_image"] == [True, True]
    assert analysis.analyze(sparse, x, verbose=0).blocks[1].dropped == 0
    # One more expert, or a slot for each image in all 4 (a template), and logits
    costs = [evaluation.cost(model).gflop_per_image for model in (dense, sparse)]
    of_mlps = {"ViT": 2 * 5 * 2 * 8 * 12, "MiT": 3 * _OF_MIT}[family]
    logits = 2 * 8 * 4 if family == "ViT" else (8 + 16) * 4
    assert costs[1] - costs[0] == pytest.approx(2e-9 * (of_mlps + logits))
    assert converters.to_dense_model(sparse, x, verbose=0).feature_difference < 1e-5


def test_whole_images_where_they_cannot_be_routed():
    refused(
        "by_image=False for.*mix_ffn", FAMILIES["MiT"](), (0,), ROUTER, by_image=False
    )
    refused("is causal.*by_image=True", families.gpt2(), (0,), ROUTER, by_image=True)
    refused("by_image=2", FAMILIES["ViT"](), (0,), ROUTER, by_image=2)


@pytest.mark.parametrize(
    ("layer", "by_image"),
    [
        (keras.layers.Dense(4, name="mlp"), False),
        (keras.layers.Conv2D(4, 3, padding="same", name="mlp"), True),
        (keras.layers.UnitNormalization(axis=(1, 2), name="mlp"), True),
    ],
    ids=("dense", "convolution", "norm"),
)
def test_layers_of_a_user(layer, by_image):
    dense = keras.Sequential([keras.Input((3, 3, 4)), layer])
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 4)).astype("float32")
    sparse = converters.add_experts(dense, (0,), ROUTER, ["mlp"], verbose=0)
    assert sparse.moe_layers[0].routes_images is by_image
    assert difference(dense, sparse, x) < 1e-5
