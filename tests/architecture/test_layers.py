"""Layers that records make: their names, settings, and counts.

Of `architecture/counting.py`, `architecture/encoder.py`, `architecture/towers.py` and
`architecture/pairs.py`.
"""

import math
import random

import keras
import pytest

from keras_softmoe import architecture, routers
from keras_softmoe.architecture.counting import count
from keras_softmoe.layers import MLP, MoE
from tests.architecture.test_settings import ROUTER, TEXT, VIT
from tests.models.test_two_towers import text_tower
from tests.support import tiny, tiny_limoe


def test_blocks_and_their_settings():
    found = architecture.ViT.of(
        {
            **VIT,
            "moe_layers": (0, 1),
            "router": [ROUTER, routers.SoftRouter(3)],
            "group_images": 3,
            "dtype": "bfloat16",
            "activation": "gelu",
        }
    )
    encoder = found.layers().encoder
    assert [block.name for block in encoder.blocks] == ["block_0", "block_1"]
    assert [block.moe.router.num_experts for block in encoder.blocks] == [2, 3]
    for block in encoder.blocks:
        assert isinstance(block.moe, MoE) and block.moe.group_images == 3
        assert block.moe.activation == "gelu"
        assert block.compute_dtype == "bfloat16"
        assert not block.built
    dense = found.replace(moe_layers=(), router=None)
    assert all(isinstance(b.mlp, MLP) for b in dense.layers().encoder.blocks)


def test_layers_of_poolings():
    found = architecture.ViT.of({**VIT, "num_registers": 2, "representation_dim": 5})
    layers = found.layers()
    names = [layer.name for layer in layers.embedding]
    expected = ["patch_embedding", "class_token", "position_embedding", "registers"]
    assert names == expected and found.output_dim == layers.pre_logits.units == 5
    layers = found.replace(pooling="map", position_embedding="none").layers()
    assert layers.attention_pooling.name == "attention_pooling"
    assert len(layers.embedding) == 2
    text = architecture.TextTower.of({**TEXT, "mask_padding": True, "pooling": "map"})
    assert text.layers().embedding.mask_padding and text.output_dim == 8
    limoe = architecture.LIMoE.of({**VIT, **TEXT, "text_pooling": "map"})
    assert list(limoe.layers().attention_pooling) == ["text"]


@pytest.mark.parametrize("make", [tiny.backbone, text_tower, tiny_limoe.backbone])
def test_counts_are_those_of_the_model(make):
    model = make()
    found = count(model.architecture).weights
    assert {(w.path, w.numbers, w.dtype) for w in found} == {
        (w.path, math.prod(w.shape), w.dtype) for w in model.weights
    }
    assert len(found) == len(model.weights)
    size = model.count_params()
    assert 0.5 * size < model.architecture.least_weights <= size
    assert architecture.moe_layers_of(model) == [
        block.moe for block in model.blocks if block.moe
    ]


def test_counting_draws_no_random_numbers():
    found = architecture.ViT.of({**VIT, "moe_layers": (1,), "router": ROUTER})
    keras.utils.set_random_seed(0)
    expected = random.random()
    keras.utils.set_random_seed(0)
    count(found)
    assert random.random() == expected


def test_a_batch_of_several_groups():
    found = architecture.ViT.of(
        {**VIT, "moe_layers": (1,), "router": ROUTER, "group_images": 4}
    )
    assert found.group_size == 4
    assert count(found, 8).products == 2 * count(found).products
    assert found.replace(group_images=None).group_size == 1
