"""Graphs over models with experts, and what such models keep of their dense classes.

Covers `models/with_experts/model.py`.
"""

import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_softmoe import converters, layers, models, routers
from tests.support import close, families, tiny
from tests.support.close import assert_near
from tests.support.families import FAMILIES, ROUTER, inputs_of
from tests.support.layer_checks import from_preset, reloaded
from tests.support.references import to_numpy

hub = keras_hub.models


def outputs(model, x):
    return [to_numpy(y) for y in keras.tree.flatten(model(x))]


def differences(model, other, x):
    pairs = zip(outputs(model, x), outputs(other, x), strict=True)
    return max(close.difference(b, a) for a, b in pairs)


def scrambled(model):
    """Give a model other weights, so that a copy with initial ones is seen."""
    rng = np.random.default_rng(0)
    for weight in model.weights:
        # KerasHub saves the positions of DINOv2 only if their sum has become larger.
        if "float" in str(weight.dtype) and "embeddings" not in weight.path:
            noise = 0.1 * rng.normal(size=weight.shape)
            weight.assign(to_numpy(weight) + noise.astype("float32"))
    return model


def sparse(family, blocks=(1,)):
    dense = FAMILIES[family]()
    return scrambled(converters.add_experts(dense, blocks, ROUTER, verbose=0))


def first(outputs):
    return keras.tree.flatten(outputs)[0]


def nested(model):
    def like(x):
        return keras.Input(x.shape[1:], dtype=x.dtype, name=x.name)

    inputs = keras.tree.map_structure(like, model.input)
    return keras.Model(inputs, first(model(inputs)))


def with_head(model):
    head = keras.layers.Dense(3, name="head")
    return keras.Model(model.input, head(first(model.output)))


def of_layer(model):
    name = [x.name for x in model.layers if x.weights][-1]
    return keras.Model(model.input, first(model.get_layer(name).output))


def twice(model):
    """A functional model over a graph that was taken from a model."""
    return with_head(keras.Model(model.input, {"a": first(model.output)}))


def clone(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def of_dense(model):
    return with_head(converters.to_dense_model(model, verbose=0))


WAYS = (nested, with_head, of_layer, twice, clone, of_dense)


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_is_loaded_equal(family, tmp_path, pytestconfig):
    """In every way for one family; a file differs by the layers that it is of."""
    is_whole = family == "ViT" or pytestconfig.getoption("--all-cases")
    model = sparse(family)
    x = inputs_of(model)
    for way in WAYS if is_whole else (with_head,):
        graph = way(model)
        assert differences(graph, reloaded(graph, tmp_path), x) == 0, way.__name__


@pytest.mark.parametrize("family", ["ViT", "GPT-2"])
def test_graph_with_factors_of_lora(family, tmp_path):
    model = sparse(family)
    model.enable_lora(2)
    graph = with_head(scrambled(model))
    assert differences(graph, reloaded(graph, tmp_path), inputs_of(model)) < 1e-5


def test_layers_are_of_one_model(tmp_path):
    """The file of a graph makes the model once, not for each layer."""
    graph = reloaded(with_head(sparse("DINOv2")), tmp_path)
    owners = {
        id(layer.described_by.model)
        for layer in graph.layers
        if hasattr(layer, "described_by")
    }
    assert len(owners) == 1
    # It can be saved again, and a block is still one of its class.
    again = reloaded(graph, tmp_path)
    assert differences(graph, again, inputs_of(graph)) == 0
    assert "DINOV2Encoder" in {type(layer).__name__ for layer in again.layers}


def test_quantized_graph(tmp_path):
    model = sparse("ViT")
    model.quantize("int8")
    graph = with_head(model)
    assert differences(graph, reloaded(graph, tmp_path), inputs_of(graph)) == 0


def test_sequential_of_a_model_and_a_head(tmp_path):
    model = sparse("ViT")
    graph = keras.Sequential([model, keras.layers.Dense(3)])
    x = inputs_of(model)
    graph(x)
    assert differences(graph, reloaded(graph, tmp_path), x) == 0


def test_graphs_over_our_own_models(tmp_path):
    vit = FAMILIES["ViT"]()
    for model in (
        tiny.backbone(),
        tiny.backbone(router=tiny.SPARSE),
        converters.upcycle(vit, (1,), ROUTER),
        converters.to_dense_model(tiny.backbone(), verbose=0),
    ):
        x = inputs_of(model)
        for way in (with_head, of_layer):
            graph = way(model)
            assert differences(graph, reloaded(graph, tmp_path), x) == 0, way.__name__


class Scaled(keras.layers.Layer):
    """A block of a user, without a method for the shape of its outputs."""

    def __init__(self, router, **kwargs):
        super().__init__(**kwargs)
        self.moe = layers.MoE(router, mlp_dim=4)

    def build(self, shape):
        self.moe.build(shape)

    def call(self, x):
        return x + self.moe(x)


PUBLIC = ("BERT", "GPT-2", "ViT", "DINOv2", "DeiT", "Swin", "MiT", "CLIP", "SigLIP")
TEXT = {
    "RoBERTa": hub.RobertaBackbone,
    "DistilBERT": hub.DistilBertBackbone,
    "OPT": hub.OPTBackbone,
}


def public(model):
    """Public attributes and properties of a model, without methods."""
    found = {}
    for name in dir(type(model)) + list(vars(model)):
        if name.startswith("_") or name in ("metrics_names", "presets"):
            continue
        try:
            value = getattr(model, name)
        except (AttributeError, ValueError, RuntimeError):
            continue
        if not callable(value) or isinstance(value, keras.layers.Layer):
            found[name] = value
    return found


def described(value):
    """What two attributes have in common if one is the copy of the other."""
    if isinstance(value, keras.Variable | keras.KerasTensor):
        return type(value).__name__, tuple(value.shape)
    return type(value).__name__


@pytest.mark.parametrize("family", [*PUBLIC, *TEXT])
def test_public_attributes_are_kept(family):
    if family in TEXT:
        dense = TEXT[family](**families.TEXT)
    else:
        dense = FAMILIES[family]()
    model = converters.add_experts(dense, (1,), ROUTER, verbose=0)
    assert isinstance(model, type(dense))
    # Those that change with the experts
    changed = {"weights", "variables", "name", "operations"}
    changed |= {"trainable_weights", "trainable_variables"}
    changed |= {"non_trainable_weights", "non_trainable_variables"}
    before, after = public(dense), public(model)
    assert set(before) <= set(after)
    for name in set(before) - changed:
        old, new = before[name], after[name]
        flat = [keras.tree.flatten(value) for value in (old, new)]
        kinds = [[described(x) for x in values] for values in flat]
        assert kinds[0] == kinds[1], name
        for x in flat[1]:
            # Tensors of its own graph, layers of its own
            if isinstance(x, keras.KerasTensor):
                keras.Model(model.input, x)
            elif isinstance(x, keras.layers.Layer):
                assert not any(x is layer for layer in dense.layers), name


def test_tied_head_of_a_language_model():
    settings = {**families.TEXT, "max_sequence_length": 12}
    dense = hub.GPT2Backbone(**settings)
    model = converters.add_experts(dense, (1,), ROUTER, verbose=0)
    lms = [hub.GPT2CausalLM(x, preprocessor=None) for x in (dense, model)]
    lms.append(converters.add_experts(lms[0], (1,), ROUTER, verbose=0))
    prompt = {
        "token_ids": np.array([[3, 4, 5] + 9 * [0], [7, 6, 5] + 9 * [0]], "int32"),
        "padding_mask": np.array(2 * [3 * [1] + 9 * [0]], "int32"),
    }
    texts = []
    for lm in lms:
        lm.compile(sampler="greedy")
        copy = {name: x.copy() for name, x in prompt.items()}
        found = lm.generate(copy, stop_token_ids=None)
        texts.append(to_numpy(found["token_ids"]))
    assert (texts[0] == texts[1]).all() and (texts[0] == texts[2]).all()
    bert = hub.BertMaskedLM(FAMILIES["BERT"](), preprocessor=None)
    given = converters.add_experts(bert, (1,), ROUTER, verbose=0)
    table = given.backbone.token_embedding.embeddings
    assert sum(weight is table for weight in given.weights) == 1
    # A router and three more experts
    moe = given.backbone.moe_layers[1]
    assert given.count_params() == (
        bert.count_params()
        + moe.router.count_params()
        + moe.experts.count_params() * 3 // 4
    )


def test_segmenter_with_experts(tmp_path):
    encoder = FAMILIES["MiT"]()
    maps = hub.SegFormerBackbone(image_encoder=encoder, projection_filters=8)
    task = hub.SegFormerImageSegmenter(maps, num_classes=2, preprocessor=None)
    router = routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
    )
    given = converters.add_experts(task, (0, 1), router, group_images=2, verbose=0)
    x = inputs_of(encoder)
    assert_near(outputs(given, x)[0], outputs(task, x)[0], atol=1e-5)
    inner = given.backbone.image_encoder
    assert isinstance(inner, hub.MiTBackbone) and inner.moe_blocks == (0, 1)
    assert inner.moe_layers[0] is given.backbone.moe_layers[0]
    assert list(inner.pyramid_outputs) == list(encoder.pyramid_outputs)
    alone = keras.Model(inner.input, inner.pyramid_outputs)
    assert differences(alone, reloaded(alone, tmp_path), x) == 0
    loaded = from_preset(inner, tmp_path / "encoder", hub.Backbone)
    assert differences(inner, loaded, x) == 0
    # Another segmenter over the encoder that was taken out
    other = hub.SegFormerBackbone(image_encoder=inner, projection_filters=8)
    assert differences(other, reloaded(other, tmp_path), x) == 0
    again = from_preset(given, tmp_path / "task", hub.ImageSegmenter)
    assert differences(given, again, x) == 0


@keras.saving.register_keras_serializable(package="tests")
class OwnBackbone(hub.Backbone):
    """A user's backbone, whose MLP consists of two layers in the graph."""

    def __init__(self, width=4, dtype=None, **kwargs):
        up = keras.layers.Dense(6, activation="gelu", name="up")
        down = keras.layers.Dense(width, name="down")
        inputs = keras.Input((5, width))
        outputs = keras.layers.Add(name="sum")([inputs, down(up(inputs))])
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        self.width, self.up, self.maps = width, up, {"sum": outputs}

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def test_backbone_of_a_user(tmp_path):
    dense = OwnBackbone()
    x = inputs_of(dense)
    model = converters.add_experts(
        dense, (0,), ROUTER, sites=[("up", "down")], verbose=0
    )
    assert isinstance(model, OwnBackbone) and model.width == 4
    assert model.up is model.moe_layers[0]
    maps = keras.Model(model.input, model.maps["sum"])
    assert_near(outputs(maps, x)[0], outputs(dense, x)[0], atol=1e-6)
    for graph in (model, maps, with_head(model)):
        assert differences(graph, reloaded(graph, tmp_path), x) == 0
    loaded = from_preset(model, tmp_path / "preset", hub.Backbone)
    assert isinstance(loaded, OwnBackbone) and differences(model, loaded, x) == 0


def test_preset_of_a_task(tmp_path):
    """The task, its head and its preprocessor come back by the names of KerasHub."""
    converter = keras_hub.layers.ViTImageConverter(image_size=(32, 32))
    preprocessor = hub.ViTImageClassifierPreprocessor(converter)
    vit = FAMILIES["ViT"]()
    task = hub.ViTImageClassifier(vit, num_classes=3, preprocessor=preprocessor)
    given = scrambled(converters.add_experts(task, (1,), ROUTER, verbose=0))
    folder, x = str(tmp_path / "preset"), inputs_of(vit)
    given.save_to_preset(folder)
    for cls in (hub.ImageClassifier, hub.ViTImageClassifier):
        loaded = cls.from_preset(folder)
        assert type(loaded) is hub.ViTImageClassifier
        assert differences(given, loaded, x) == 0
        assert loaded.preprocessor.image_converter.image_size == (32, 32)
    assert hub.ImageClassifier.from_preset(folder, num_classes=7)(x).shape == (2, 7)
    found = hub.ImageClassifierPreprocessor.from_preset(folder)
    assert type(found) is type(preprocessor)
    assert isinstance(hub.ViTBackbone.from_preset(folder), type(given.backbone))


_IN_A_NEW_PROCESS = """
import sys
import keras, keras_hub
import keras_softmoe
import numpy as np

x, folder = np.load(sys.argv[1] + "/x.npy"), sys.argv[1]
models = [
    keras.saving.load_model(folder + "/graph.keras"),
    keras.saving.load_model(folder + "/own.keras"),
    keras_hub.models.ImageClassifier.from_preset(folder + "/task"),
    keras_hub.models.Backbone.from_preset(folder + "/task"),
]
x = [x, x[:, :5, :4, 0], x, x]
outputs = [m.predict_on_batch(y) for m, y in zip(models, x)]
np.savez(folder + "/outputs.npz", *outputs)
"""


def test_files_are_read_in_a_new_process(tmp_path):
    """Where `add_experts` was not called, and its room not used."""
    vit = FAMILIES["ViT"]()
    task = hub.ViTImageClassifier(vit, num_classes=3, preprocessor=None)
    task = scrambled(converters.add_experts(task, (1,), ROUTER, verbose=0))
    graph = with_head(task.backbone)
    mlp = keras.layers.Dense(4, activation="relu", name="mlp")
    own = keras.Sequential([keras.Input((5, 4)), mlp])
    own = scrambled(converters.add_experts(own, (0,), ROUTER, ["mlp"], verbose=0))
    graph.save(tmp_path / "graph.keras")
    own.save(tmp_path / "own.keras")
    task.save_to_preset(str(tmp_path / "task"))
    x = inputs_of(vit)
    np.save(tmp_path / "x.npy", x)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IN_A_NEW_PROCESS, str(tmp_path)],
        check=True,
    )
    found = np.load(tmp_path / "outputs.npz")
    pairs = [(graph, x), (own, x[:, :5, :4, 0]), (task, x), (task.backbone, x)]
    for index, (model, inputs) in enumerate(pairs):
        expected = model.predict_on_batch(inputs)
        assert_near(found[f"arr_{index}"], expected, rtol=1e-5, atol=1e-6)


def scribble(value):
    """Empty all dicts and lists in a configuration."""
    for x in value.values() if isinstance(value, dict) else value:
        if isinstance(x, dict | list | tuple):
            scribble(x)
    if isinstance(value, dict | list):
        value.clear()


def graph_with_mlp():
    inputs = keras.Input((6, 8))
    outputs = keras.layers.Dense(8, activation="relu", name="mlp")(inputs)
    return keras.Model(inputs, outputs)


def text():
    return models.TextMoEBackbone(
        20, 6, 2, 2, 8, 12, moe_layers=(1,), router=tiny.SPARSE
    )


def task_with_experts():
    task = hub.ViTImageClassifier(FAMILIES["ViT"](), num_classes=3)
    return converters.add_experts(task, (1,), ROUTER, verbose=0)


CONFIGURED = {
    "add_experts(ViT)": lambda: sparse("ViT"),
    "add_experts(graph)": lambda: converters.add_experts(
        graph_with_mlp(), (0,), ROUTER, sites=["mlp"], verbose=0
    ),
    "add_experts(Sequential)": lambda: converters.add_experts(
        keras.Sequential(graph_with_mlp().layers), (0,), ROUTER, ["mlp"], verbose=0
    ),
    "add_experts(task)": task_with_experts,
    "backbone": tiny.backbone,
    "classifier": tiny.classifier,
    "text": text,
    "two towers": lambda: models.TwoTowerBackbone(
        tiny.backbone(), text(), text_projection_dim=8
    ),
    "layer of a model": lambda: sparse("ViT").layers[-1],
}


def plain(config):
    return str(keras.saving.serialize_keras_object(config))


@tiny.LOADING
@pytest.mark.parametrize("name", CONFIGURED)
def test_configuration_is_a_copy(name, tmp_path):
    """What a caller, or Keras, does to a configuration does not change the model."""
    model = CONFIGURED[name]()
    before = plain(model.get_config())
    type(model).from_config(model.get_config())
    scribble(model.get_config())
    assert plain(model.get_config()) == before
    if isinstance(model, keras.Model):
        keras.models.clone_model(model)
        assert plain(model.get_config()) == before
        assert differences(model, reloaded(model, tmp_path), inputs_of(model)) == 0
        assert plain(model.get_config()) == before


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_layer_around_a_mixture_in_a_graph(capacity_factor):
    """On JAX such a layer is traced with a batch of any size."""
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=capacity_factor)
    inputs = keras.Input((5, 8))
    layer = Scaled(router)
    graph = keras.Model(inputs, layer(inputs))
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype("float32")
    assert_near(
        outputs(graph, x)[0],
        to_numpy(ops.convert_to_tensor(x) + layer.moe(x)),
        atol=1e-6,
    )
