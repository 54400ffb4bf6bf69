"""Muon for banks of experts: the update of each is that of a matrix of its own."""

import contextlib

import keras
import numpy as np
import pytest

from keras_softmoe import layers, routers, training
from tests.support.close import assert_near
from tests.support.references import assert_all_equal, to_numpy

EXPERTS = 3
RNG = np.random.default_rng(0)


def variable(path, value):
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(value, name=name)


def apply(optimizer, variables, gradients):
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in step], variables)
    return [to_numpy(v) for v in variables]


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize("settings", [{}, {"rms_rate": None, "nesterov": False}])
def test_an_expert_moves_as_a_matrix_of_its_own(shape, settings):
    start = normal(EXPERTS, *shape)
    gradients = [normal(EXPERTS, *shape) * scale for scale in (1.0, 0.1, 3.0)]
    (bank,) = apply(
        training.Muon(0.1, **settings),
        [variable("moe/experts/output_dense/kernel", start)],
        [[g] for g in gradients],
    )
    alone = apply(
        keras.optimizers.Muon(0.1, **settings),
        [variable(f"dense_{e}/kernel", start[e]) for e in range(EXPERTS)],
        gradients,
    )
    assert_near(bank, np.stack(alone), rtol=1e-4, atol=1e-5)
    assert np.abs(bank - start).max() > 1e-2


def test_other_weights_move_as_those_of_keras():
    values = {
        "experts/output_dense/bias": normal(EXPERTS, 1, 6),
        "experts/stacked_bias": normal(EXPERTS, 6),
        "attention/query/kernel": normal(6, 2, 3),
        "predictions/kernel": normal(6, 4),
        "mlp/dense/kernel": normal(6, 4),
        "norm/scale": normal(6),
    }
    gradients = [[normal(*v.shape) for v in values.values()] for _ in range(2)]
    excluded = {"exclude_layers": ["predictions"]}
    ours = apply(
        training.Muon(0.1, **excluded),
        [variable(path, value) for path, value in values.items()],
        gradients,
    )
    # A stacked bias is a matrix for Keras.
    excluded["exclude_layers"].append("stacked_bias")
    expected = apply(
        keras.optimizers.Muon(0.1, **excluded),
        [variable(path, value) for path, value in values.items()],
        gradients,
    )
    assert_all_equal(ours, expected)


@pytest.mark.parametrize("expert", [None, "template"])
def test_banks_are_found_by_their_paths(expert):
    template = keras.Sequential([keras.layers.Dense(8, name="inner")])
    given = {"mlp_dim": 8} if expert is None else {"expert": template}
    layer = layers.MoE(routers.SoftmaxTokenChoiceRouter(EXPERTS), **given)
    layer.build((None, 4, 8))
    optimizer = training.Muon(0.1)
    optimizer.build(layer.trainable_variables)
    by_muon = {
        v.path
        for v, velocity in zip(
            layer.trainable_variables, optimizer.adam_velocities, strict=True
        )
        if velocity is None
    }
    kernels = {v.path for v in layer.trainable_variables if "kernel" in v.name}
    assert by_muon == kernels and len(kernels) == (3 if expert is None else 2)
    again = training.Muon.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
