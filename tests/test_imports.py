"""What may import what, and where private parts of Keras are used: in one place."""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "keras_softmoe"
parse = functools.cache(ast.parse)
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Subpackages and modules, each of which imports itself and those listed before it.
PARTS = (
    "types checks files keras_adapter ops sharding routers layers architecture "
    "checkpoints catalogue exporting models presets converters datasets drawing "
    "evaluation analysis training distribution"
).split()


def part_of(file):
    """First part of a path inside the package: `layers/moe.py` -> `layers`."""
    return pathlib.PurePosixPath(file).with_suffix("").parts[0]


def imported_modules(source, file):
    """Absolute dotted names that a file imports, at its top or inside functions.

    `from a import b` gives `a.b`, whether `b` is a module or a name in `a`.
    """
    package = ("keras_softmoe", *pathlib.PurePosixPath(file).parts[:-1])
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple((node.module or "").split(".")) if node.module else ()
            yield from (".".join((*base, alias.name)) for alias in node.names)


def later_imports(source, file):
    """Imports of parts listed later, or of the package, which imports all."""
    allowed = PARTS[: PARTS.index(part_of(file)) + 1]
    for module in imported_modules(source, file):
        package, _, inside = module.partition(".")
        if package == "keras_softmoe" and inside.split(".")[0] not in allowed:
            yield module


def test_every_part_is_listed():
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts
    assert parts <= set(PARTS)


def offences(rule, excepted=()):
    """Dict from files to what a rule finds in them, where it finds something."""
    found = {
        file: list(rule((PACKAGE / file).read_text(encoding="utf-8"), file))
        for file in FILES
        if file not in excepted
    }
    return {file: offences for file, offences in found.items() if offences}


def test_nothing_listed_later_is_imported():
    assert offences(later_imports, excepted=["__init__.py"]) == {}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("layers/moe.py", "from keras_softmoe.models import ViTMoEBackbone"),
        ("layers/moe.py", "from keras_softmoe.models.backbone import ViTMoEBackbone"),
        ("layers/moe.py", "from keras_softmoe import ops, models"),
        ("layers/moe.py", "import keras_softmoe.models as models"),
        ("layers/moe.py", "import keras_softmoe"),
        ("layers/moe.py", "from keras_softmoe import *"),
        ("layers/moe.py", "def build():\n    from keras_softmoe import models"),
        ("layers/moe.py", "if True:\n    import numpy, keras_softmoe.presets"),
        ("layers/__init__.py", "from ..checkpoints import vit"),
        ("layers/moe.py", "from .. import evaluation"),
        ("catalogue/entries.py", "from keras_softmoe.models import ViTMoEBackbone"),
        ("catalogue/entries.py", "from .. import models"),
        ("checkpoints/vit.py", "from keras_softmoe import catalogue"),
        ("models/loading.py", "def convert():\n    from .. import presets"),
    ],
)
def test_an_import_of_a_later_one_is_caught(file, source):
    assert len(list(later_imports(source, file))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("layers/moe.py", "import keras, keras_hub.models\nfrom keras import ops"),
        ("layers/moe.py", "from keras_softmoe.layers.experts import Experts"),
        ("layers/moe.py", "from keras_softmoe import ops, routers"),
        ("layers/moe.py", "import keras_softmoe.ops._routing as routing"),
        ("layers/moe.py", "from . import experts\nfrom .experts import Experts"),
        ("layers/moe.py", "from ..ops.routing import combine\nfrom .. import ops"),
        ("layers/moe.py", "text = 'import keras_softmoe.models'"),
        ("presets.py", "def __getattr__(name):\n    from . import models"),
        ("models/backbone.py", "from keras_softmoe import catalogue"),
    ],
)
def test_an_import_of_an_earlier_one_is_allowed(file, source):
    assert list(later_imports(source, file)) == []


def test_layers_pictures_and_plans_need_neither_kerashub_nor_tensorflow():
    """Nor any of the extras."""
    script = """
import sys

extras = ("matplotlib", "PIL", "sklearn", "tensorflow_datasets")
sys.modules.update(dict.fromkeys(extras))
import keras_softmoe as ksm

ksm.layers.SoftMoE
print(*sys.modules)
print(len(ksm.datasets.sample("icons").images))
print(len(ksm.distribution.plan("soft_moe_huge_patch14_256e_224", 8, 80e9).meshes))
print(*sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    loaded, *numbers, loaded_at_last = result.stdout.splitlines()
    assert numbers == ["1000", "4"]
    heavy = {"keras_hub", "tensorflow_text", "tensorflow"}
    assert not heavy.intersection(loaded_at_last.split())
    loaded = loaded.split()
    parts = {name.split(".")[1] for name in loaded if name.startswith("keras_softmoe.")}
    light = {"checks", "keras_adapter", "ops", "sharding"}
    assert parts == {*light, "layers", "routers", "types"}


def dynamic_imports(source, file):
    """Calls that import this package by a string, which no import statement shows."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func).rpartition(".")[2]
            arguments = " ".join(map(ast.unparse, node.args))
            # Of other packages names are not put together.
            ours = re.search(r"keras_softmoe|__name__|__package__|'\.|\bf'", arguments)
            if function in ("import_module", "__import__") and ours:
                yield ast.unparse(node)


def test_no_part_is_imported_by_a_string():
    assert offences(dynamic_imports, excepted=["__init__.py"]) == {}


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module('keras_softmoe.models')",
        "def f():\n    import_module('.models', 'keras_softmoe')",
        "def f():\n    __import__('keras_softmoe.models')",
        "importlib.import_module(f'{__name__}.models')",
        "importlib.import_module('.models', __package__)",
    ],
)
def test_an_import_by_a_string_is_caught(source):
    assert len(list(dynamic_imports(source, "layers/moe.py"))) == 1


# Methods and attributes of named tuples, which are public in spite of their names.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
ADAPTER = [file for file in FILES if part_of(file) == "keras_adapter"]


def private_names(source):
    """Names that begin with one underscore and are looked up in an object."""
    for node in ast.walk(parse(source)):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            of_attributes = ("getattr", "setattr", "hasattr", "delattr", "__setattr__")
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in of_attributes and isinstance(node.args[1], ast.Constant):
                name = node.args[1].value
        elif isinstance(node, ast.Subscript):
            if ast.unparse(node.value).endswith("__dict__"):
                name = getattr(node.slice, "value", "")
        if name.startswith("_") and not name.startswith("__"):
            yield name


def defined_names(source):
    """Names that a file defines: functions, classes, attributes, constants."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr


def foreign_private_names(source, ours):
    """What a file uses of the private parts of other packages."""
    modules = imported_modules(source, "keras_adapter.py")
    private = re.compile(
        r"(keras|keras_hub)\.src\b|tensorflow\.python\b|\w+(\.\w+)*\._(?!_)"
    )
    others = (m for m in modules if m.partition(".")[0] != "keras_softmoe")
    yield from (module for module in others if private.match(module))
    yield from (name for name in private_names(source) if name not in ours)


def test_only_the_adapter_uses_private_parts_of_keras():
    sources = (
        (PACKAGE / file).read_text("utf-8") for file in FILES if file not in ADAPTER
    )
    ours = {name for source in sources for name in defined_names(source)}

    def rule(source, file):
        return foreign_private_names(source, ours | OF_NAMED_TUPLES)

    assert offences(rule, excepted=ADAPTER) == {}


KERAS_CLASSES = (
    keras.Model,
    keras.Variable,
    keras.StatelessScope,
    keras.callbacks.Callback,
    keras.distribution.ModelParallel,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
)


def test_no_method_takes_the_place_of_a_private_one_of_keras():
    private = {name for cls in KERAS_CLASSES for name in dir(cls) if name[0] == "_"}
    private = {name for name in private if not name.startswith("__")}
    assert {"_flatten_layers", "_update_model_variables_moving_average"} <= private

    def rule(source, file):
        for cls in ast.walk(parse(source)):
            if isinstance(cls, ast.ClassDef):
                methods = (n for n in cls.body if isinstance(n, ast.FunctionDef))
                yield from {method.name for method in methods} & private

    assert offences(rule, excepted=ADAPTER) == {}


def test_the_adapter_says_what_would_replace_each_hook():
    trees = [ast.parse((PACKAGE / file).read_text("utf-8")) for file in ADAPTER]
    kinds = (ast.FunctionDef, ast.ClassDef)
    hooks = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    assert len(hooks) > 5
    for hook in hooks:
        assert "Would be replaced by: " in ast.get_docstring(hook), hook.name


@pytest.mark.parametrize(
    "source",
    [
        "from keras.src.backend import distribution_lib",
        "def f():\n    import keras.src.backend as backend",
        "from keras_hub.src.utils import preset_utils",
        "from jax._src import core",
        "from tensorflow.python.ops import control_flow_util",
        "layers = model._flatten_layers()",
        "model._jax_state = None",
        "value = getattr(variable, '_value', None)",
        "object.__setattr__(layer, '_tracker', None)",
        "self.__dict__['_metrics'] = []",
    ],
)
def test_a_private_hook_is_caught(source):
    assert len(list(foreign_private_names(source, {"_mine"}))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import keras\nkeras.StatelessScope()",
        "self._mine = other._mine",
        "from __future__ import annotations\nx.__class__",
        "from keras_softmoe.layers.moe import MoE",
    ],
)
def test_what_is_public_or_ours_is_allowed(source):
    assert list(foreign_private_names(source, {"_mine"})) == []


def private_imports(source, file):
    """Names of other parts that begin with an underscore."""
    for module in imported_modules(source, file):
        package, *parts = module.split(".")
        inside = package == "keras_softmoe" and parts and parts[0] != part_of(file)
        if inside and any(part.startswith("_") for part in parts):
            yield module


def test_private_names_are_imported_only_in_their_part():
    assert offences(private_imports, excepted=["__init__.py"]) == {}


def test_a_private_import_is_caught():
    source = "from keras_softmoe.ops.routing import _combine"
    assert len(list(private_imports(source, "layers/moe.py"))) == 1
    assert list(private_imports(source, "ops/router_losses.py")) == []
    source = "from keras_softmoe.ops import _routing"
    assert len(list(private_imports(source, "layers/moe.py"))) == 1
    assert list(private_imports("import keras._src", "layers/moe.py")) == []


def test_file_names_tell_their_subject():
    """What is private is a name in a file, and not the file."""
    private = [file for file in FILES if "/_" in f"/{file}" and "/__" not in f"/{file}"]
    assert private == []
