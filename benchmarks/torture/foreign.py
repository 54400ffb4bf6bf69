"""Graphs over models of KerasHub with experts, and over ours, saved and loaded.

On PyTorch the state of a model is loaded into a second one.
"""

import contextlib
import pathlib
import random
import tempfile

import keras
import keras_hub
import numpy as np

from keras_softmoe import converters, routers
from tests.support import tiny
from tests.support.families import FAMILIES, TEXT, inputs_of

ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=2, capacity_factor=None, normalize_gates=True
)

# Callables without arguments, models of KerasHub.
DENSE = {
    **FAMILIES,
    "RoBERTa": lambda: keras_hub.models.RobertaBackbone(**TEXT),
    "DistilBERT": lambda: keras_hub.models.DistilBertBackbone(**TEXT),
    "OPT": lambda: keras_hub.models.OPTBackbone(**TEXT),
}


def _own_graph():
    x = inputs = keras.Input((5, 4), name="tokens")
    for index in range(2):
        mlp = [keras.layers.Dense(6, "gelu"), keras.layers.Dense(4)]
        x = x + keras.Sequential(mlp, name=f"mlp_{index}")(x)
    return keras.Model(inputs, x)


def _with_experts(make, sites=None):
    return converters.add_experts(make(), (1,), ROUTER, sites, verbose=0)


# Name -> callable without arguments, a model.
MODELS = {
    **{name: lambda f=make: _with_experts(f) for name, make in DENSE.items()},
    "functional": lambda: _with_experts(_own_graph, ["mlp_0", "mlp_1"]),
    "dense again": lambda: converters.to_dense_model(_with_experts(FAMILIES["ViT"])),
    "upcycled": lambda: converters.upcycle(tiny.backbone(**tiny.DENSE), (1,), ROUTER),
    "V-MoE": lambda: tiny.backbone(router=tiny.SPARSE),
    "classifier": tiny.classifier,
}


def _first(outputs):
    return keras.tree.flatten(outputs)[0]


def _head(x):
    token = x if len(x.shape) == 2 else x[:, 0]
    return keras.layers.Dense(3, name="new_head")(keras.layers.Flatten()(token))


def _inner(model):
    """The last layer of a model that has weights and one output."""
    layers = [x for x in model.layers if x.weights]
    return layers[-1]


# === Graphs: each takes a model and returns one that a user builds on it ===


def features(model):
    return keras.Model(model.input, _head(_first(model.output)))


def nested_call(model):
    inputs = keras.tree.map_structure(
        lambda x: keras.Input(x.shape[1:], dtype=x.dtype, name=x.name), model.input
    )
    return keras.Model(inputs, _head(_first(model(inputs))))


def part_of_it(model):
    return keras.Model(model.input, _first(_inner(model).output))


def part_by_name(model):
    layer = model.get_layer(_inner(model).name)
    return keras.Model(model.input, _head(_first(layer.output)))


def clone(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def sequential(model):
    if isinstance(model.input, dict | list) or isinstance(model.output, dict):
        return None
    if None in model.output.shape[1:]:
        return None
    parts = [keras.Input(model.input.shape[1:]), model, keras.layers.Flatten()]
    return keras.Sequential([*parts, keras.layers.Dense(3)])


def over_functional(model):
    return nested_call(features(model))


def twice(model):
    """The same model under two heads."""
    x = _first(model.output)
    return keras.Model(model.input, [_head(x), _first(_inner(model).output)])


GRAPHS = (
    *(features, nested_call, part_of_it, part_by_name, clone, sequential),
    *(over_functional, twice),
)


def graphs(tally, cases, seed):
    """Build graphs over models; saved and loaded they compute the same, or refuse."""
    pairs = [(name, graph) for name in MODELS for graph in GRAPHS]
    random.Random(seed).shuffle(pairs)
    for name, graph in pairs[:cases]:
        # Layers of KerasHub refuse to be saved with errors of any kind.
        case = f"{graph.__name__} of {name}"
        with tally.case(case, any_error=True, seconds=120):
            with _must_work("cannot be built"):
                model = graph(MODELS[name]())
            if model is not None:
                _comes_back(model)


def _comes_back(model):
    x = inputs_of(model)
    expected = _values(model, x)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.keras")
        # The one place where a refusal is right
        model.save(path)
        with _must_work("saved and cannot be loaded"):
            loaded = keras.saving.load_model(path)
    _check_equal(_values(loaded, x), expected)


@contextlib.contextmanager
def _must_work(problem):
    """Scope in which any error is a failure."""
    try:
        yield
    except Exception as error:
        message = f"{problem}: {type(error).__name__}: {str(error)[:200]}"
        raise AssertionError(message) from error


def _values(model, x):
    outputs = keras.tree.flatten(model(x, training=False))
    return [keras.ops.convert_to_numpy(y) for y in outputs]


def _check_equal(found, expected):
    assert len(found) == len(expected), f"{len(found)} outputs for {len(expected)}"
    for y, right in zip(found, expected, strict=True):
        off = np.abs(y - right).max() / np.abs(right).max()
        assert off < 1e-4, f"other outputs, by {off:.1e}"


# === PyTorch's ways ===


def torch_modules(tally, cases, seed):
    """Load the state of one model into a second one; call `.train()`, then predict."""
    names = list(MODELS)
    random.Random(seed).shuffle(names)
    for name in names[: -(-cases // 2)]:
        with tally.case(f"state_dict of {name}", seconds=120):
            keras.utils.clear_session()
            first = MODELS[name]()
            # As in another process: KerasHub puts the name of a model, with a counter,
            # into those of some layers.
            keras.utils.clear_session()
            second = MODELS[name]()
            x = inputs_of(first)
            state = first.state_dict()
            least, most = (
                {id(v) for v in vs} for vs in (first.weights, first.variables)
            )
            assert len(least) <= len(state) <= len(most), (
                f"{len(state)} entries for {len(least)} weights"
            )
            second.load_state_dict(state)
            _check_equal(_values(second, x), _values(first, x))
        with tally.case(f"train() of {name}", seconds=120):
            model = MODELS[name]()
            x = inputs_of(model)
            expected = _values(model, x)
            parameters = [id(p) for p in model.parameters()]
            assert len(parameters) == len(set(parameters)), "a parameter comes twice"
            missing = [
                v.path
                for v in model.trainable_variables
                if id(v.value) not in parameters
            ]
            assert not missing, f"not in parameters(): {missing[:3]}"
            model.train()
            _check_equal(_values(model, x), expected)
