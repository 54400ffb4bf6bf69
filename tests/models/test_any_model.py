"""Experts in models of other libraries, and in those of a user.

Covers `models/_copies.py`, `models/shapes.py`, `models/_sites.py`,
`models/_expert_banks.py`, `evaluation/_traced_cost.py`, `keras_adapter/surgery.py`,
`keras_adapter/products.py`.

All families, and the table of them:

    KERAS_BACKEND=torch python -m pytest tests/models/test_any_model.py --all-families
"""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from experiments import family_table
from keras_softmoe import analysis, converters, evaluation, layers, models, routers
from keras_softmoe.keras_adapter.surgery import sublayers
from tests.support import close, families, tiny
from tests.support.close import assert_near
from tests.support.families import FAMILIES, inputs_of
from tests.support.references import to_numpy

BACKEND = keras.backend.backend()
# With room for all choices
ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=2, capacity_factor=None, normalize_gates=True
)
SOFT = routers.SoftRouter(4)


def outputs(model, x):
    """Flat list of the outputs, from a compiled function."""
    return keras.tree.flatten(model.predict_on_batch(x))


def difference(xs, ys):
    return max(close.difference(y, x) for x, y in zip(xs, ys, strict=True))


def state(model):
    return [to_numpy(weight).copy() for weight in model.weights]


def measured(family, folder):
    """Find sites, compare, train, save and load: a row of the table."""
    dense = FAMILIES[family]()
    x = inputs_of(dense)
    before, expected = state(dense), outputs(dense, x)
    sparse = converters.add_experts(dense, (1,), ROUTER, verbose=0)
    # Its MLP is a convolution between dense layers.
    assert sparse.moe_layers[1].by_image == (family == "MiT")
    from_dense = difference(expected, outputs(sparse, x))
    for layer in sparse.layers:
        # KerasHub saves the trained positions of DINOv2 only if their sum is larger.
        layer.trainable = "embeddings" not in layer.name
    experts = sparse.moe_layers[1].experts
    old = state(experts)
    targets = [np.zeros(y.shape, "float32") for y in expected]
    sparse.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    targets = keras.tree.pack_sequence_as(sparse.output, targets)
    sparse.fit(x, targets, verbose=0)
    moved = difference(old, state(experts))
    file = folder / "model.keras"
    sparse.save(file)
    restored = keras.saving.load_model(file, compile=False)
    # The model that was given is as it was.
    assert all(map(np.array_equal, before, state(dense)))
    return {
        "MLPs": sparse.num_blocks,
        "experts": "bank" if hasattr(experts, "intermediate_dense") else "template",
        "from dense": from_dense,
        "a step": moved,
        "from file": difference(outputs(sparse, x), outputs(restored, x)),
    }


@pytest.fixture(scope="module")
def rows(pytestconfig):
    """Rows of the table, which is written at the end."""
    found = {}
    yield found
    if pytestconfig.getoption("--all-families"):
        rounded = {
            family: {
                name: float(f"{value:.1e}") if isinstance(value, float) else value
                for name, value in row.items()
            }
            for family, row in found.items()
        }
        family_table.write(BACKEND, rounded)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, rows, tmp_path):
    row = rows[family] = measured(family, tmp_path)
    # The activation is none of Keras, or the MLP sees the map.
    templates = ("CLIP", "MetaCLIP 2", "MiT")
    assert row["MLPs"] == 2
    assert row["experts"] == ("template" if family in templates else "bank")
    assert row["from dense"] < 1e-5 and row["from file"] < 1e-6
    assert row["a step"] > 1e-4


def test_the_table_is_that_of_the_measurements():
    assert family_table.PAGE.read_text(encoding="utf-8") == family_table.page()


# === The model with experts ===


@pytest.fixture(scope="module")
def vit():
    return FAMILIES["ViT"]()


@pytest.fixture
def sparse(vit):
    return converters.add_experts(vit, (0, 1), ROUTER, verbose=0, group_images=2)


def images(count=4):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, 32, 32, 3)).astype("float32")


def test_it_is_a_backbone_with_routers(vit, sparse, capsys):
    assert isinstance(sparse, keras_hub.models.Backbone)
    assert sparse.moe_blocks == (0, 1) and sparse.group_images == 2
    assert sparse.hidden_dim == vit.hidden_dim
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sparse.nothing
    x = images()
    with routers.record() as decisions:
        sparse(x)
    assert list(decisions) == [router.path for router in sparse.routers.values()]
    before = sparse.predict(x, verbose=0)
    sparse.set_routing(layers=1, capacity_factor=0.25)
    # The compiled function follows.
    assert np.abs(sparse.predict(x, verbose=0) - before).max() > 1e-3
    assert sparse.get_config()["router"][1]["config"]["capacity_factor"] == 0.25
    converters.add_experts(vit, (1,), ROUTER)
    assert "Experts in 1 of 2 MLPs" in capsys.readouterr().out


def test_cost_is_that_of_our_own_model(vit, sparse):
    ours = converters.upcycle(vit, (0, 1), ROUTER, group_images=2)
    # The routers of both drop nothing.
    assert evaluation.cost(sparse) == evaluation.cost(ours)
    assert evaluation.cost(vit) == evaluation.cost(converters.dense_model(vit))
    template = converters.add_experts(FAMILIES["CLIP"](), (0,), ROUTER, verbose=0)
    dense, found = evaluation.cost(FAMILIES["CLIP"]()), evaluation.cost(template)
    # 5 tokens at one more expert each, and the router's logits
    more = 5 * (2 * 8 * 12) + 5 * 8 * 4
    assert found.gflop_per_image - dense.gflop_per_image == pytest.approx(2e-9 * more)
    with pytest.raises(ValueError, match="num_classes=3"):
        evaluation.cost(sparse, num_classes=3)


def test_analysis_and_probe(sparse):
    x, labels = images(8), np.arange(8) % 2
    found = analysis.analyze(sparse, x, verbose=0)
    assert list(found.blocks) == [0, 1] and found.blocks[0].dropped == 0
    features = keras.Model(sparse.input, sparse.output[:, 0])
    result = evaluation.few_shot_probe(
        features, (x, labels), (x, labels), shots=(1,), seeds=1
    )
    assert len(result) == 1
    sparse.compile(loss="mse")
    monitor = analysis.RoutingMonitor(x)
    y = np.zeros(sparse.output_shape[1:])[None].repeat(8, 0)
    history = sparse.fit(x, y, callbacks=[monitor], verbose=0).history
    assert {"dropped_0", "imbalance_1"} <= set(history)


def test_task_of_kerashub(vit, tmp_path):
    """A classifier on such a backbone, and one that gets experts itself."""
    x, y = images(), np.array([0, 1, 2, 0])
    task = keras_hub.models.ViTImageClassifier(backbone=vit, num_classes=3)
    expected = task.predict(x, verbose=0)
    given = converters.add_experts(task, (1,), ROUTER, verbose=0)
    assert type(given) is type(task)
    assert_near(given.predict(x, verbose=0), expected, atol=1e-5)
    backbone = given.backbone
    tuned = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=3)
    old = state(backbone.moe_layers[1].experts)
    tuned.fit(x, y, shuffle=False, verbose=0)
    assert difference(old, state(backbone.moe_layers[1].experts)) > 0
    tuned.save_weights(tmp_path / "task.weights.h5")
    restored = type(tuned).from_config(tuned.get_config())
    restored.optimizer.build(restored.trainable_variables)
    restored.load_weights(tmp_path / "task.weights.h5")
    np.testing.assert_array_equal(
        restored.predict(x, verbose=0), tuned.predict(x, verbose=0)
    )


def is_bank(layer):
    return "/experts/" in str(layer.path) and layer.name.endswith("_dense")


def test_preset_lora_and_int8(vit, tmp_path):
    x = images()
    sparse = converters.add_experts(vit, (1,), [SOFT], verbose=0)
    sparse.moe_layers[1].trainable = False
    sparse.save_to_preset(str(tmp_path / "preset"))
    restored = keras_hub.models.Backbone.from_preset(str(tmp_path / "preset"))
    assert type(restored) is type(sparse) and not restored.moe_layers[1].trainable
    np.testing.assert_array_equal(outputs(restored, x)[0], outputs(sparse, x)[0])
    restored.load_weights(tmp_path / "preset" / "model.weights.h5")
    half = keras_hub.models.Backbone.from_preset(
        str(tmp_path / "preset"), dtype="bfloat16"
    )
    bank = half.moe_layers[1].experts.intermediate_dense
    assert bank.compute_dtype == "bfloat16"
    assert "gate_dense" in restored.default_lora_layer_names()
    restored.enable_lora(2)
    assert restored.moe_layers[1].experts.output_dense.lora_enabled
    # LoRA has frozen the router, and a file has no factors.
    assert restored.get_config()["router"]["config"]["trainable"] is True
    before = outputs(sparse, x)[0]
    sparse.quantize("int8", filters=is_bank)
    found = outputs(sparse, x)[0]
    assert 0 < np.abs(found - before).max() < 0.05 * np.abs(before).max()
    sparse.save(tmp_path / "int8.keras")
    again = keras.saving.load_model(tmp_path / "int8.keras")
    np.testing.assert_array_equal(outputs(again, x)[0], found)


def test_the_given_model_stays_as_it_is():
    dense = FAMILIES["CLIP"]()
    dense.layers[1].trainable = False
    x = inputs_of(dense)
    dense.compile(optimizer="sgd", loss="mse")
    config, weights, y = dense.get_config(), state(dense), outputs(dense, x)
    flags = [layer.trainable for layer in dense.layers]
    sparse = converters.add_experts(dense, (0, 1), SOFT, verbose=0)
    assert dense.get_config() == config and dense.compiled
    assert [layer.trainable for layer in dense.layers] == flags
    assert [layer.trainable for layer in sparse.layers] == flags
    with pytest.raises(ValueError, match="of any layer are not quantized"):
        sparse.quantize("int8")
    modes = [getattr(x, "quantization_mode", None) for _, x, _ in sublayers(sparse)]
    assert not any(modes)
    assert all(map(np.array_equal, weights, state(dense)))
    assert all(map(np.array_equal, y, outputs(dense, x)))
    dense.train_on_batch(x, keras.tree.map_structure(np.zeros_like, y[0]))
    assert difference(weights, state(dense)) > 0


# === Models of no family ===


@keras.saving.register_keras_serializable(package="tests")
class Block(keras.layers.Layer):
    """A block with parts in attributes and in a list."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.mlps = [
            keras.Sequential(
                [
                    keras.layers.Dense(6, activation="gelu"),
                    keras.layers.Dense(4),
                ],
                name=f"mlp_{index}",
            )
            for index in range(2)
        ]

    def build(self, shape):
        self.norm.build(shape)
        for mlp in self.mlps:
            mlp.build(shape)

    def call(self, x):
        for mlp in self.mlps:
            x = x + mlp(self.norm(x))
        return x


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block(name="block")

    def build(self, shape):
        self.block.build(shape)

    def call(self, x):
        return self.block(x)


def graph():
    x = inputs = keras.Input((5, 4))
    x = Block(name="block")(x)
    x = keras.layers.Dense(6, name="up")(x)
    x = keras.layers.Activation("gelu", name="act")(x)
    x = keras.layers.Dense(4, name="down")(x)
    return keras.Model(inputs, keras.layers.Add()([inputs, x]))


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 5, 4)))
    return model


RULES = {
    "name": (graph, ["mlp_1"], 1),
    "path": (graph, ["block/mlp_*"], 0),
    "chain in a graph": (graph, [("up", "act", "down")], 1),
    "predicate": (graph, lambda layer: layer.name.startswith("mlp"), 2),
    "subclassed": (subclassed, ["mlp_0", "mlp_1"], 2),
    "sequential": (
        lambda: keras.Sequential([keras.Input((5, 4)), *graph().layers[1:2]]),
        lambda layer: "mlp" in layer.name,
        2,
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_rule(case, tmp_path):
    make, rule, count = RULES[case]
    dense = make()
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    if case == "path":
        # A name is compared with that of a single layer: patterns are for folders.
        with pytest.raises(ValueError, match=r"No MLP.*block/mlp_\*.*block/mlp_0"):
            converters.add_experts(dense, (0,), ROUTER, rule)
        return
    blocks = range(count)
    sparse = converters.add_experts(dense, blocks, ROUTER, rule, verbose=0)
    assert sparse.num_blocks == count
    assert difference(outputs(dense, x), outputs(sparse, x)) < 1e-5
    for moe in sparse.moe_layers.values():
        moe.experts.weights[0].assign(2 * moe.experts.weights[0])
    assert difference(outputs(dense, x), outputs(sparse, x)) > 1e-3
    sparse.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert difference(outputs(restored, x), outputs(sparse, x)) == 0


# === What is refused ===


def refused(message, *arguments, **settings):
    with pytest.raises(ValueError, match=message):
        converters.add_experts(*arguments, **settings)


def test_bad_arguments(vit):
    before = state(vit)
    refused(r"from 0 to 1.*blocks=\(2,\).*transformer_block_1/mlp", vit, (2,), ROUTER)
    refused("at most once", vit, (1, 1), ROUTER)
    refused("`router` must be a router.*router=3", vit, (1,), 3)
    refused("2 routers for blocks", vit, (1,), [ROUTER, ROUTER])
    limoe = routers.LIMoERouter(4)
    refused("two modalities", vit, (1,), limoe)
    with pytest.raises(TypeError, match="group_images.*Received: group"):
        converters.add_experts(vit, (1,), ROUTER, group=2)
    sparse = converters.add_experts(vit, (1,), ROUTER, verbose=0)
    refused("in the place of an MLP.*transformer_block_2", sparse, (1,), ROUTER)
    twice = converters.add_experts(sparse, (0,), SOFT, verbose=0)
    assert twice.moe_blocks == (0,) and len(analysis_routers(twice)) == 2
    assert all(map(np.array_equal, before, state(vit)))


def analysis_routers(model):
    with routers.record() as decisions:
        model(images(1))
    return decisions


def test_models_without_sites(vit):
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="only")])
    refused("No MLP.*`Sequential`.*the model.*with only", dense, (0,), ROUTER)
    refused("causal decoders.*CachedGemmaAttention", families.gemma(), (0,), SOFT)
    refused("must be a `keras.Model`", layers.MLP(3), (0,), ROUTER)
    refused("`ksm.converters.upcycle`", tiny.backbone(**tiny.DENSE), (0,), ROUTER)
    refused("`ksm.converters.upcycle`", tiny.backbone(), (0,), ROUTER)
    refused("not built", Subclassed(), (0,), ROUTER, lambda layer: True)


def test_what_a_copy_needs():
    class Unknown(Subclassed):
        pass

    model = Unknown()
    model(np.zeros((1, 5, 4)))
    refused("register_keras_serializable", model, (0,), ROUTER, ["mlp_0"])


@pytest.mark.parametrize(
    ("router", "looks_ahead"),
    [
        (SOFT, True),
        (routers.SoftmaxExpertChoiceRouter(4), True),
        (routers.SinkhornTokenChoiceRouter(4, capacity_factor=4.0), True),
        (routers.SoftmaxTokenChoiceRouter(4, priority="max"), True),
        # A second choice waits for the first ones of later tokens.
        (routers.SoftmaxTokenChoiceRouter(4, 2), True),
        (routers.SoftmaxTokenChoiceRouter(4), False),
        (routers.SoftmaxTokenChoiceRouter(4, 2, capacity_factor=2.0), False),
        (ROUTER, False),
        (routers.IdentityRouter(4), False),
    ],
)
def test_causal_decoder(router, looks_ahead):
    """A router is refused if, and only if, a later token changes an earlier output."""
    tokens = np.random.default_rng(0).normal(size=(40, 8, 6))
    other = tokens.copy()
    other[:, 4:] = np.random.default_rng(1).normal(size=(40, 4, 6))
    layer = layers.MoE(router, mlp_dim=8)
    first, second = (to_numpy(layer(ops.convert_to_tensor(x))) for x in (tokens, other))
    assert (np.abs(first - second)[:, :4].max() > 1e-4) == looks_ahead
    gpt2 = families.gpt2()
    if looks_ahead:
        refused("is causal.*later ones", gpt2, (1,), router)
    else:
        sparse = converters.add_experts(gpt2, (1,), router, verbose=0)
        assert sparse.moe_blocks == (1,)


def test_the_docstring_names_models():
    assert models.ViTMoEBackbone.__name__ in converters.add_experts.__doc__
