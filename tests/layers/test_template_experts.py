"""Experts of any layer: outputs, initial weights, files and refusals.

Also for `layers/template.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, routers
from keras_softmoe.keras_adapter.layers import is_initialized
from keras_softmoe.layers.template_experts import TemplateExperts
from tests.support import layer_checks
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients
from tests.support.products import counted
from tests.support.references import to_numpy

NUM_EXPERTS, WIDTH = 3, 8
SLOTS = (2, NUM_EXPERTS, 4, WIDTH)
ROUTER = routers.SoftmaxTokenChoiceRouter(
    NUM_EXPERTS, num_selected_experts=2, capacity_factor=1.5, noise_std=0.0
)


def sequential(*between):
    parts = [keras.layers.Dense(5, activation="silu"), *between]
    return keras.Sequential([*parts, keras.layers.Dense(WIDTH)], name="ffn")


TEMPLATES = {
    "mlp": lambda: layers.MLP(5),
    "sequential": lambda: sequential(keras.layers.LayerNormalization()),
    # They take no rows, but sequences of one slot each.
    "einsum": lambda: keras.layers.EinsumDense("abc,cd->abd", (None, WIDTH)),
    "convolution": lambda: keras.layers.Conv1D(WIDTH, 3, padding="same"),
}


def build(template, **kwargs):
    layer = TemplateExperts(NUM_EXPERTS, template, **kwargs)
    layer.build((None, NUM_EXPERTS, None, WIDTH))
    return layer


class Wrapped(keras.layers.Layer):
    """A layer without a configuration, around layers that are built."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts
        self.built = True

    def call(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_expert_is_the_template_with_its_own_weights(name):
    template = TEMPLATES[name]()
    layer = build(template)
    assert not template.built
    # No weights are in memory beside the stacked ones.
    used = layer._templates.used
    assert not any(is_initialized(w) for w in used.weights)
    if keras.backend.backend() == "torch":
        assert not list(used.parameters())
    layer_checks.randomize(layer)
    slots, upstream = layer_checks.normal(SLOTS), layer_checks.normal(SLOTS, 1)
    outputs = to_numpy(layer(slots))
    _, of_slots, of_weights = layer_gradients(
        layer, slots, lambda y, _: keras.ops.sum(keras.ops.multiply(y, upstream))
    )
    stacked = layer.get_weights()
    for e in range(NUM_EXPERTS):
        # The same rows, by a layer of Keras alone
        one = type(template).from_config(template.get_config())
        rows = slots[:, e].reshape(-1, *layer._slot_shape)
        one(rows)
        one.set_weights([values[e] for values in stacked])
        of_expert = upstream[:, e].reshape(rows.shape)
        _, of_rows, of_own = layer_gradients(
            one,
            rows,
            lambda y, _, given=of_expert: keras.ops.sum(keras.ops.multiply(y, given)),
        )
        pairs = [(outputs[:, e], to_numpy(one(rows))), (of_slots[:, e], of_rows)]
        pairs += [
            (found[e], own)
            for found, own in zip(of_weights.values(), of_own.values(), strict=True)
        ]
        for found, expected in pairs:
            assert_near(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_layer():
    def make(**kwargs):
        template = layers.MLP(5, dtype=kwargs.get("dtype"))
        return layers.MoE(routers.SoftRouter(2), expert=template, **kwargs)

    layer_checks.check_layer(make, (6, WIDTH), (6, WIDTH), num_weights=2 + 4)


@pytest.mark.parametrize("equal_experts", [False, True])
def test_initial_weights(equal_experts):
    kernel, _, output_kernel, _ = build(
        layers.MLP(5), equal_experts=equal_experts
    ).get_weights()
    for stacked in (kernel, output_kernel):
        assert np.array_equal(stacked[0], stacked[1]) == equal_experts
        # Glorot, with the fans of one expert
        assert 0.7 * (6 / 13) ** 0.5 < abs(stacked).max() <= (6 / 13) ** 0.5


def test_a_built_layer_is_copied_and_left_alone():
    parts = keras.layers.Dense(5), keras.layers.Dropout(0.5), keras.layers.Dense(WIDTH)
    for part, width in zip(parts, (WIDTH, 5, 5), strict=True):
        part.build((None, width))
    template = Wrapped(*parts)
    before = template.get_weights()
    # Room for every choice, and gates that add up to one
    router = routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, 2, capacity_factor=1.5, normalize_gates=True
    )
    layer = layers.MoE(router, expert=template)
    model = keras.Sequential([keras.Input((6, WIDTH)), layer])
    inputs = layer_checks.normal((2, 6, WIDTH))
    assert_near(
        to_numpy(model(inputs)), to_numpy(template(inputs)), rtol=1e-5, atol=1e-6
    )
    names = [weight.name for weight in layer.experts.weights]
    # Without the counter of the process in the names of `parts`
    assert names == [
        f"stacked_{p}_{w}" for p in ("dense", "dense_1") for w in ("kernel", "bias")
    ]
    assert len(model.weights) == 5
    model.compile("sgd", "mse")
    model.fit(inputs, inputs, verbose=0)
    layer_checks.assert_same_weights(template, before)
    kernels = layer.experts.get_weights()[0]
    assert not np.array_equal(kernels[0], kernels[1])


def test_dropout_differs_by_expert_and_by_step():
    layer = build(sequential(keras.layers.Dropout(0.5)))
    for weight in layer.weights:
        weight.assign(np.broadcast_to(to_numpy(weight)[:1], weight.shape))
    slots = np.broadcast_to(layer_checks.normal((WIDTH,)), SLOTS)
    first, second, quiet = (
        to_numpy(layer(slots, training=training)) for training in (True, True, False)
    )
    assert not np.allclose(first[:, 0], first[:, 1])
    assert not np.allclose(first, second)
    np.testing.assert_allclose(quiet, np.broadcast_to(quiet[0, 0, 0], SLOTS), rtol=1e-5)


def test_frozen_parts_and_penalties():
    template = keras.Sequential(
        [
            keras.layers.Dense(
                5, kernel_regularizer="l2", kernel_constraint="unit_norm"
            ),
            keras.layers.Dense(WIDTH, trainable=False),
        ]
    )
    layer = build(template)
    assert [w.trainable for w in layer.weights] == [True, True, False, False]
    kernel = layer.get_weights()[0]
    np.testing.assert_allclose(
        to_numpy(layer.losses[0]), 0.01 * (kernel**2).sum(), rtol=1e-5
    )
    norms = np.linalg.norm(to_numpy(layer.weights[0].constraint(kernel)), axis=1)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


def test_configuration():
    layer = layers.MoE(ROUTER, expert=layers.MLP(5), equal_experts=True)
    layer.build((None, 6, WIDTH))
    revived = layer_checks.revive(layer)
    assert type(revived.expert) is layers.MLP and not revived.expert.built
    assert revived.experts.equal_experts and revived.mlp_dim is None


def test_cost():
    def numbers(expert):
        return counted(layers.MoE(ROUTER, expert=expert), (4, 6, WIDTH))

    expected = counted(layers.MoE(ROUTER, 5), (4, 6, WIDTH))
    assert numbers(layers.MLP(5)) == numbers(sequential()) == expected
    parts = keras.layers.Dense(5), keras.layers.Dense(WIDTH)
    parts[0].build((None, WIDTH))
    parts[1].build((None, 5))
    assert numbers(Wrapped(*parts)) == expected
    one, other = keras.layers.Conv1D(WIDTH, 1), keras.layers.Dense(WIDTH)
    assert numbers(one) == numbers(other)


# === Bad input ===


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        (3, "must be a layer.*expert=3"),
        (keras.layers.Dense(9), r"shape of its input.*\(None, 8\) to \(None, 9\)"),
        (keras.layers.BatchNormalization(), "changes .*moving_mean.*LayerNorm"),
        (keras.layers.ActivityRegularization(0.1), "adds one"),
        (keras.layers.MultiHeadAttention(2, 4), "one input.*takes 2"),
        (keras.layers.Add(), "must map slots of shape.*`Add`"),
    ],
)
def test_refused_before_anything_is_built(expert, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        layer = layers.MoE(ROUTER, expert=expert)
        layer.build((None, 6, WIDTH))
    if isinstance(expert, keras.layers.Layer) and "takes 2" not in message:
        assert not layer.weights


def test_refused_adaptations():
    layer = layers.MoE(ROUTER, expert=layers.MLP(5))
    layer.build((None, 6, WIDTH))
    with pytest.raises(ValueError, match="factors of LoRA.*`MLP`.*mlp_dim"):
        layer.experts.enable_lora(2)
    with pytest.raises(ValueError, match="`filters=lambda .*mode='int8'"):
        layer.experts.quantize("int8")
    model = keras.Sequential(
        [keras.Input((6, WIDTH)), keras.layers.Dense(WIDTH), layer]
    )
    with pytest.warns(UserWarning, match="not (quantized|support quantization)"):
        model.quantize("int8")
    assert model.layers[0].quantization_mode == "int8"
    dense = keras.layers.Dense(WIDTH)
    dense.build((None, WIDTH))
    dense.enable_lora(2)
    with pytest.raises(ValueError, match="factors of LoRA.*`Dense`.*Fold the"):
        layers.MoE(ROUTER, expert=dense)
    with pytest.raises(ValueError, match="not quantized.*'int8'.*from before"):
        layers.MoE(ROUTER, expert=keras.layers.Dense(WIDTH, dtype="int8_from_float32"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Received: mlp_dim=None"),
        ({"mlp_dim": 5, "expert": layers.MLP(5)}, "mlp_dim=5, expert=<MLP"),
        ({"expert": layers.MLP(5), "remat_experts": True}, "remat_experts=True"),
        ({"expert": layers.MLP(5), "activation": "silu"}, "activation='silu'"),
        (
            {"expert": layers.MLP(5), "expert_dropout_rate": 0.1},
            "expert_dropout_rate=0.1",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        layers.MoE(ROUTER, **arguments)


def test_wrong_slots():
    layer = TemplateExperts(NUM_EXPERTS, layers.MLP(5))
    with pytest.raises(ValueError, match=r"with 3 experts.*\(2, 4, 3, 8\)"):
        layer.build((2, 4, 3, 8))
