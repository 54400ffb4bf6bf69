"""The page `docs/concepts/soft_moe_in_60_lines.py` computes what the layer computes."""

import pathlib
import runpy

import keras
import numpy as np

import keras_softmoe as ksm
from tests.support.close import assert_near

FILE = pathlib.Path(__file__).parents[2] / "docs/concepts/soft_moe_in_60_lines.py"


def test_it_is_the_layer():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 60
    soft_moe = runpy.run_path(FILE)["soft_moe"]
    random = np.random.default_rng(0)
    tokens = random.normal(size=(3, 9, 8)).astype("float32")
    layer = ksm.layers.SoftMoE(4, mlp_dim=16, slots_per_expert=2)
    layer.build(tokens.shape)
    weights = [random.normal(size=w.shape).astype("float32") for w in layer.weights]
    layer.set_weights(weights)
    names = [weight.path.split("/", 2)[-1] for weight in layer.weights]
    by_name = dict(zip(names, weights, strict=True))
    mlps = [
        by_name[f"experts/{name}"]
        for name in (
            "intermediate_dense/kernel",
            "intermediate_dense/bias",
            "output_dense/kernel",
            "output_dense/bias",
        )
    ]
    # The layer keeps biases as (E, 1, H).
    mlps[1], mlps[3] = mlps[1][:, 0], mlps[3][:, 0]
    expected = soft_moe(tokens, by_name["router/mu"], by_name["router/scale"], *mlps)
    assert expected.shape == tokens.shape
    assert_near(
        keras.ops.convert_to_numpy(layer(tokens)), expected, rtol=1e-5, atol=1e-5
    )
