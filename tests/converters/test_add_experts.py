"""Experts in models of other libraries, and in those of a user.

Covers `models/with_experts/copies.py`, `models/with_experts/token_shapes.py`,
`models/with_experts/mlp_sites.py`, `models/with_experts/experts_from_mlps.py`,
`architecture/counting.py`, `keras_adapter/surgery.py`, `keras_adapter/surgery.py`.

All families, and the table of them, run with `--all-families`.
"""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from experiments import measured as kept
from keras_softmoe import analysis, converters, evaluation, layers, routers
from keras_softmoe.keras_adapter.surgery import sublayers
from tests.support import close, families, tiny
from tests.support.close import assert_near
from tests.support.families import FAMILIES, ROUTER, inputs_of
from tests.support.layer_checks import from_preset, reloaded
from tests.support.references import to_numpy

BACKEND = keras.backend.backend()
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
    assert sparse.moe_layers[1].routes_images == (family == "MiT")
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
        kept.write_families(BACKEND, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, rows, tmp_path):
    row = rows[family] = measured(family, tmp_path)
    # The activation is none of Keras, or the MLP sees the map.
    templates = ("CLIP", "MetaCLIP 2", "MiT")
    assert row["MLPs"] == 2
    assert row["experts"] == ("template" if family in templates else "bank")
    assert row["from dense"] < 1e-5 and row["from file"] < 1e-6
    assert row["a step"] > 1e-4


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
    assert "experts in 1 of 2 MLPs (block 1)." in capsys.readouterr().out


def test_cost_is_that_of_our_own_model(vit, sparse):
    ours = converters.upcycle(vit, (0, 1), ROUTER, group_images=2)
    # The routers of both drop nothing.
    assert evaluation.cost(sparse) == evaluation.cost(ours)
    assert evaluation.cost(vit) == evaluation.cost(converters.dense_model(vit))
    template = converters.add_experts(FAMILIES["CLIP"](), (0,), ROUTER, verbose=0)
    dense, found = evaluation.cost(FAMILIES["CLIP"]()), evaluation.cost(template)
    # A template has a slot for each of 5 tokens in all 4 experts; logits of the router
    more = 3 * 5 * (2 * 8 * 12) + 5 * 8 * 4
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
    restored = from_preset(sparse, tmp_path / "preset", keras_hub.models.Backbone)
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
    again = reloaded(sparse, tmp_path)
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
                [keras.layers.Dense(6, activation="gelu"), keras.layers.Dense(4)],
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
    restored = reloaded(sparse, tmp_path)
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
    refused("replace MLPs.*transformer_block_2", sparse, (1,), ROUTER)
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
    refused("must be a `keras.Model`", layers.MLP(3), (0,), ROUTER)
    refused("`ksm.converters.upcycle`", tiny.backbone(**tiny.DENSE), (0,), ROUTER)
    refused("`ksm.converters.upcycle`", tiny.backbone(), (0,), ROUTER)
    refused("call it once on data", Subclassed(), (0,), ROUTER, lambda layer: True)


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


# === What can be a site ===


DECODER = {"num_query_heads": 2, "num_key_value_heads": 1, "intermediate_dim": 12}
DECODER |= {"vocabulary_size": 20, "num_layers": 1, "hidden_dim": 8}
FEEDFORWARD = tuple(
    f"feedforward_{x}_dense" for x in ("intermediate", "gate", "output")
)


# Keras' own code, in the quantization of embeddings
@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors")
@pytest.mark.parametrize("family", ["Llama", "Gemma", "Qwen", "Qwen3", "Mistral"])
def test_gated_mlps_of_decoders(family, tmp_path):
    heads = {"head_dim": 8} if family in ("Gemma", "Qwen3") else {}
    dense = getattr(keras_hub.models, f"{family}Backbone")(**DECODER, **heads)
    task = getattr(keras_hub.models, f"{family}CausalLM")(dense, preprocessor=None)
    sparse = converters.add_experts(task, (0,), ROUTER, verbose=0)
    x = {"token_ids": np.arange(10).reshape(2, 5), "padding_mask": np.ones((2, 5))}
    expected = task.predict_on_batch(x)
    assert_near(sparse.predict_on_batch(x), expected, rtol=1e-5, atol=1e-6)
    back = converters.to_dense_model(sparse.backbone, x, verbose=0)
    hidden = dense.predict_on_batch(x)
    assert_near(back.predict_on_batch(x), hidden, rtol=1e-5, atol=1e-5)
    experts = sparse.backbone.moe_layers[0].experts
    assert [len(bank.trainable_variables) for bank in experts.banks] == [1, 1, 1]
    before = state(experts)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sparse.compile(keras.optimizers.SGD(1.0), loss)
    sparse.train_on_batch(x, x["token_ids"])
    assert difference(before, state(experts)) > 0
    restored = reloaded(sparse, tmp_path, compile=False)
    found, expected = (model.predict_on_batch(x) for model in (restored, sparse))
    np.testing.assert_array_equal(found, expected)
    # LoRA begins with the same outputs and trains factors; int8 stays near.
    adapted, quantized = restored, reloaded(sparse, tmp_path, compile=False)
    adapted.backbone.enable_lora(2)
    banks = adapted.backbone.moe_layers[0].experts.banks
    assert all(bank.lora_enabled for bank in banks)
    np.testing.assert_array_equal(adapted.predict_on_batch(x), expected)
    adapted.compile(keras.optimizers.SGD(1.0), loss)
    adapted.train_on_batch(x, x["token_ids"])
    quantized.quantize("int8")
    error = np.abs(quantized.predict_on_batch(x) - expected).max()
    assert 0 < error < 0.05 * np.abs(expected).max()
    for changed in (adapted, quantized):
        again = reloaded(changed, tmp_path, compile=False)
        found, expected = (m.predict_on_batch(x) for m in (again, changed))
        np.testing.assert_array_equal(found, expected)
    dense.enable_lora(2)
    refused("merge LoRA factors first", dense, (0,), ROUTER)


@pytest.mark.parametrize("sites", [None, [FEEDFORWARD], [tuple(reversed(FEEDFORWARD))]])
def test_gated_mlps_are_named_in_any_order(sites):
    dense = keras_hub.models.LlamaBackbone(**DECODER, dtype="mixed_bfloat16")
    sparse = converters.add_experts(dense, (0,), ROUTER, sites, verbose=0)
    x = {"token_ids": np.ones((2, 5)), "padding_mask": np.ones((2, 5))}
    one, two = (to_numpy(ops.cast(m(x), "float32")) for m in (dense, sparse))
    assert_near(two, one, rtol=0.02, atol=0.02)
    phi3 = keras_hub.models.Phi3Backbone(**DECODER)
    with pytest.raises(ValueError, match="Gated MLPs .* not supported yet in others"):
        converters.add_experts(phi3, (0,), ROUTER, sites)
    with pytest.raises(ValueError, match="must not depend on later ones"):
        converters.add_experts(dense, (0,), SOFT, sites)


@keras.saving.register_keras_serializable(package="tests")
class OddBlock(keras.layers.Layer):
    """An activation in the code between the parts, and a layer that is not called."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.up = keras.layers.Dense(8, name="up")
        self.down = keras.layers.Dense(4, name="down")
        self.whole = keras.layers.Dense(4, name="whole")
        self.unused = keras.layers.Dense(4, name="unused")
        self.attention = keras.layers.MultiHeadAttention(2, 2, name="attention")

    def build(self, shape):
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 8))
        self.whole.build(shape)
        self.unused.build(shape)
        self.attention.build(shape, shape)

    def call(self, x):
        x = x + self.attention(x, x)
        x = self.down(ops.silu(self.up(self.norm(x))))
        return self.whole(x)


WRONG_SITES = {
    "not the outputs": ([("up", "down")], "does not get the outputs"),
    "order": ([("down", "up")], "does not get the outputs"),
    "one part of two": (["up"], r"\(1, 5, 4\) to \(1, 5, 8\)"),
    "projection": (["attention/query"], r"to \(1, 5, 2, 2\)"),
    "attention": (["attention"], "more than one tensor"),
    "not called": (["unused"], "is not called"),
    "no weights": (["softmax*", "dropout*"], "No MLP was found"),
    "missing part": ([("up", "dawn")], "No MLP was found"),
    "a string": ("mlp", "in a tuple are one MLP"),
    "nothing": ([()], "in a tuple are one MLP"),
    "numbers": ([1], "in a tuple are one MLP"),
}


@pytest.mark.parametrize("case", WRONG_SITES)
def test_what_is_no_mlp_is_refused(case):
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, OddBlock(name="block")(inputs))
    sites, message = WRONG_SITES[case]
    with pytest.raises(ValueError, match=message):
        converters.add_experts(model, (0,), ROUTER, sites, verbose=0)


def test_an_activation_between_the_parts_is_not_lost():
    """Bloom's is in the code of its blocks: outputs were off by 0.7."""
    model = keras_hub.models.BloomBackbone(20, 1, 2, 8, 12)
    sites = [("mlp_intermediate_dense", "mlp_output_dense")]
    with pytest.raises(ValueError, match="part before it: name the layers between"):
        converters.add_experts(model, (0,), ROUTER, sites, verbose=0)


def test_a_layer_that_depends_on_places_gets_whole_images():
    inputs = keras.Input((5, 4))
    positions = keras_hub.layers.PositionEmbedding(5, name="positions")
    model = keras.Model(inputs, positions(inputs))
    sparse = converters.add_experts(model, (0,), ROUTER, ["positions"], verbose=0)
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    assert sparse.moe_layers[0].routes_images
    np.testing.assert_allclose(*(outputs(m, x)[0] for m in (model, sparse)), rtol=1e-5)


# === Equal outputs ===

_ALL = {"capacity_factor": None, "normalize_gates": True}
_TOKEN, _SINKHORN = routers.SoftmaxTokenChoiceRouter, routers.SinkhornTokenChoiceRouter
_EXPERT = routers.SinkhornExpertChoiceRouter
_SPARSE_PLAN = routers.SparseTransportExpertChoiceRouter
# Whether equal experts compute what one MLP does, by hand: gates that sum to one.
KEEPS = [
    (routers.IdentityRouter(5), True),
    (routers.SoftRouter(4, slots_per_expert=2), False),
    (routers.SoftRouter(4, dispatch="uniform"), False),
    (_TOKEN(4, num_selected_experts=2), False),
    (_TOKEN(4, num_selected_experts=2, **_ALL), True),
    (_TOKEN(4, 2, 2.0, normalize_gates=True), True),
    (_TOKEN(4, 2, 1.5, normalize_gates=True), False),
    (_TOKEN(4, 2, None), False),
    (_TOKEN(4, 4, None), True),
    (_TOKEN(4, 4, None, score="sigmoid"), False),
    (_TOKEN(4, 2, score="sigmoid", **_ALL), True),
    (_TOKEN(4, noise_std=1.0, **_ALL), True),
    (_TOKEN(4, keep_fraction=0.5, **_ALL), False),
    (_TOKEN(4, random_logits=True, **_ALL), True),
    (_TOKEN(4, 2, bias_update_rate=0.1, **_ALL), True),
    (_SINKHORN(4), False),
    (_SINKHORN(4, combine="plan", **_ALL), True),
    (routers.SoftmaxExpertChoiceRouter(4), False),
    (routers.SoftmaxExpertChoiceRouter(4, capacity_factor=4.0), True),
    (_EXPERT(4, capacity_factor=4.0, combine="plan"), True),
    (_SPARSE_PLAN(4), False),
    (_SPARSE_PLAN(4, capacity_factor=4.0), True),
    (_SPARSE_PLAN(4, capacity_factor=4.0, combine="plan"), False),
    (routers.ExpertRaceRouter(4), False),
    (routers.ExpertRaceRouter(4, 4, None), False),
]


@pytest.mark.parametrize("case", range(len(KEEPS)))
def test_it_is_said_where_outputs_change(case, capsys):
    router, is_equal = KEEPS[case]
    dense = graph()
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")
    # Equal tokens choose equal experts, as many as there are.
    x[1] = x[1, :1]
    sites = ["mlp_1"]
    sparse = converters.add_experts(dense, (0,), router, sites)
    assert ("outputs differ from those" in capsys.readouterr().out) is not is_equal
    expected, found = (outputs(model, x)[0] for model in (dense, sparse))
    off = np.abs(found - expected).max() / np.abs(expected).max()
    assert off < 1e-5 if is_equal else off > 1e-3
    if not is_equal:
        sparse = converters.add_experts(dense, (0,), router, sites, start="shared")
        assert "outputs differ" not in capsys.readouterr().out
        np.testing.assert_allclose(outputs(sparse, x)[0], expected, rtol=1e-4)


# === LoRA ===


def test_experts_of_any_layer_without_factors_are_said():
    sparse = converters.add_experts(FAMILIES["CLIP"](), (1,), ROUTER, verbose=0)
    experts = sparse.moe_layers[1].experts
    with pytest.warns(UserWarning, match="have no factors of LoRA.*moe/experts"):
        sparse.enable_lora(2)
    assert not any(weight.trainable for weight in experts.weights)
    with pytest.raises(ValueError, match="a second time"):
        sparse.enable_lora(2)


def test_names_without_a_layer_freeze_nothing():
    sparse = converters.add_experts(FAMILIES["ViT"](), (1,), ROUTER, verbose=0)
    flags = [weight.trainable for weight in sparse.weights]
    for names in (["quer"], [], ["layer_norm"], ["query", "valu"]):
        with pytest.raises(ValueError, match="that have factors"):
            sparse.enable_lora(2, names)
    assert [weight.trainable for weight in sparse.weights] == flags


# === Quantized models in files ===


@pytest.mark.filterwarnings("ignore:Layer .* does not have a .quantize:UserWarning")
@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_a_quantized_model_comes_back(mode, tmp_path):
    if mode == "int8":
        dense, sites = FAMILIES["ViT"](), None
    else:
        # Its layers have dtypes of their own in the configuration.
        dense, sites = graph(), [("up", "act", "down")]
    sparse = converters.add_experts(dense, (0,), ROUTER, sites, verbose=0)
    x = inputs_of(sparse)
    before = outputs(sparse, x)
    sparse.quantize(mode)
    expected = outputs(sparse, x)
    assert difference(before, expected) > 1e-4
    config = sparse.get_config()
    for _ in range(2):
        sparse.save_to_preset(str(tmp_path / "preset"))
    assert sparse.get_config() == config
    sparse.save(tmp_path / "model.keras")
    for loaded in (
        keras_hub.models.Backbone.from_preset(str(tmp_path / "preset")),
        type(sparse).from_preset(str(tmp_path / "preset")),
        keras.saving.load_model(tmp_path / "model.keras"),
    ):
        assert difference(outputs(loaded, x), expected) < 1e-6
        assert loaded.moe_layers[0].experts.output_dense.quantization_mode == mode
