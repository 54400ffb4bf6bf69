"""Every public name has types and an example, and every example runs on one backend."""

import inspect

import keras
import numpy as np
import pytest

import keras_softmoe as ksm
from tests.support import docstrings, safetensors_file
from tests.support.references import unpack_checkpoints

# What Keras warns of in ordinary use, among others.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EXAMPLES = docstrings.examples()

# Where examples of a module can run. Others run on PyTorch, which compiles nothing.
# The functions that they call are tested on all backends.
BACKEND_OF = {"distribution": "jax", "exporting": "tensorflow"}
NOT_RUN = {
    "converters.convert_vmoe_checkpoint": "needs a released checkpoint, 1 GB",
    "datasets.from_tfds": "needs the network",
    "presets.convert": "needs a released checkpoint, 200 MB",
}


def backend_of(name):
    return BACKEND_OF.get(name.split(".")[0], "torch")


HERE = [
    name
    for name in EXAMPLES
    if name not in NOT_RUN and backend_of(name) == keras.backend.backend()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Directory with the files that examples read."""
    folder = tmp_path_factory.mktemp("examples")
    unpack_checkpoints(folder / "vmoe_tiny")
    bias = np.zeros(7, "float32")
    safetensors_file.save(folder / "model.safetensors", {"head.bias": bias})
    return folder


@pytest.fixture(scope="module")
def set_up(folder):
    """Callable from a module to the names that its examples go on from."""
    modules = {}

    def names_in(module):
        if module not in modules:
            modules[module] = dict(docstrings.AT_HAND)
            docstrings.execute(module, getattr(ksm, module).__doc__, modules[module])
        return dict(modules[module])

    return names_in


@pytest.fixture
def new_names():
    """Keras numbers names from one on, whichever models there were before."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.mark.parametrize("name", HERE)
def test_examples_run(name, new_names, set_up, folder, monkeypatch):
    monkeypatch.chdir(folder)
    namespace = set_up(name.split(".")[0])
    for part, text in EXAMPLES[name].items():
        assert docstrings.execute(f"{name}: {part}", text, namespace)


def test_every_public_name_has_an_example():
    assert not [name for name, texts in EXAMPLES.items() if name not in texts]
    assert set(NOT_RUN) | set(BACKEND_OF) <= {*EXAMPLES, *docstrings.MODULES}


def signatures():
    """Dict from `module.name`, or `module.name.method`, to the functions that are ours.

    What a class overrides of Keras and KerasHub keeps their signature, without types.
    """
    found = {}
    for name, value in docstrings.public_names().items():
        if inspect.isfunction(value):
            found[name] = inspect.unwrap(value)
            continue
        others = [cls for cls in value.__mro__ if not is_ours(cls)]
        for part, method in vars(value).items():
            method = getattr(method, "__func__", getattr(method, "fget", method))
            is_new = not any(part in vars(cls) for cls in others)
            is_public = part == "__init__" or (not part.startswith("_") and is_new)
            if is_public and inspect.isfunction(method) and is_ours(method):
                found[f"{name}.{part}"] = inspect.unwrap(method)
    return found


def is_ours(value):
    return value.__module__.startswith("keras_softmoe")


def test_every_parameter_has_a_type():
    found = signatures()
    assert len(found) > 100
    for name, function in found.items():
        signature = inspect.signature(function)
        untyped = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty
            and parameter.kind != parameter.VAR_KEYWORD
            and parameter.name not in ("self", "cls")
        ]
        assert not untyped, name
        if not name.endswith("__init__"):
            assert signature.return_annotation is not signature.empty, name
