"""Fresh weights have the statistics that the released code's have."""

import numpy as np
import pytest

from keras_softmoe import converters, models, routers
from tests.support.references import Reference

HIDDEN_DIM, NUM_EXPERTS = 192, 4
MODELS = {
    "topk": {
        "moe_layers": (1,),
        "num_layers": 2,
        "router": routers.SoftmaxTokenChoiceRouter(NUM_EXPERTS),
        "use_qk_norm": True,
        "representation_dim": HIDDEN_DIM,
    },
    "soft_map": {
        "moe_layers": (0,),
        "num_layers": 1,
        "router": routers.SoftRouter(NUM_EXPERTS, slots_per_expert=8),
        "pooling": "map",
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_statistics(name):
    expected = {
        key.removeprefix(f"{name}:"): value
        for key, value in Reference("m_init_stats").config["stats"].items()
        if key.startswith(f"{name}:")
    }
    backbone = models.ViTMoEBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        num_heads=6,
        hidden_dim=HIDDEN_DIM,
        mlp_dim=2 * HIDDEN_DIM,
        **MODELS[name],
    )
    actual = converters.to_vmoe_params(models.ViTMoEImageClassifier(backbone, 50))
    assert set(actual) == set(expected)
    for key, statistics in expected.items():
        value = actual[key]
        assert list(value.shape) == statistics["shape"], key
        # Two samples of the same size; a deviation is known to 1 / sqrt(2 n) or better.
        std, error = statistics["std"], 5 / np.sqrt(value.size)
        assert abs(value.std() - std) <= error * std, key
        assert abs(value.mean() - statistics["mean"]) <= 1.5 * error * std, key
        # Bounded distributions end where theirs do.
        if value.size > 10000 and std > 0:
            np.testing.assert_allclose(
                value.max(), statistics["max"], rtol=0.02, err_msg=key
            )
