"""Imports point to the ground, and the ground floor stays light."""

import ast
import pathlib
import subprocess
import sys

import keras
import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "keras_softmoe"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# From the ground up: a room imports itself and the rooms listed before it.
ROOMS = (
    "files",
    "ops",
    "routers",
    "layers",
    "converters",
    "presets",
    "models",
    "datasets",
    "evaluation",
    "training",
    "distribution",
    "visualization",
)


def room_of(file):
    """First part of a path inside the package: `layers/moe.py` -> `layers`."""
    return pathlib.PurePosixPath(file).with_suffix("").parts[0]


def imported_modules(source, file):
    """Absolute dotted names that a file imports, at its top or inside functions.

    `from a import b` gives `a.b`, whether `b` is a module or a name in `a`.
    """
    package = ("keras_softmoe", *pathlib.PurePosixPath(file).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple((node.module or "").split(".")) if node.module else ()
            yield from (".".join((*base, alias.name)) for alias in node.names)


def upward_imports(source, file):
    """Imports of a file that lead to a room above its own, or to the roof.

    The roof is the package itself, which stands on every room.
    """
    allowed = ROOMS[: ROOMS.index(room_of(file)) + 1]
    for module in imported_modules(source, file):
        package, _, inside = module.partition(".")
        if package == "keras_softmoe" and inside.split(".")[0] not in allowed:
            yield module


def test_every_room_is_listed():
    rooms = {room_of(file) for file in FILES} - {"__init__"}
    assert rooms
    assert rooms <= set(ROOMS)


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_point_to_the_ground(file):
    source = (PACKAGE / file).read_text(encoding="utf-8")
    assert list(upward_imports(source, file)) == []


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
        ("layers/__init__.py", "from ..converters import vmoe"),
        ("layers/moe.py", "from .. import evaluation"),
        ("presets.py", "from keras_softmoe.models import ViTMoEBackbone"),
        ("presets.py", "from . import models"),
        ("converters/vmoe.py", "from keras_softmoe import presets"),
    ],
)
def test_an_upward_import_is_caught(file, source):
    assert len(list(upward_imports(source, file))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("layers/moe.py", "import keras, keras_hub.models\nfrom keras import ops"),
        ("layers/moe.py", "from keras_softmoe.layers.experts import Experts"),
        ("layers/moe.py", "from keras_softmoe import ops, routers"),
        ("layers/moe.py", "import keras_softmoe.ops.routing as routing"),
        ("layers/moe.py", "from . import experts\nfrom .experts import Experts"),
        ("layers/moe.py", "from ..ops.routing import combine\nfrom .. import ops"),
        ("layers/moe.py", "text = 'import keras_softmoe.models'"),
        ("presets.py", "from . import converters"),
        ("models/backbone.py", "from keras_softmoe import presets"),
    ],
)
def test_a_downward_import_is_allowed(file, source):
    assert list(upward_imports(source, file)) == []


def test_the_layers_need_neither_kerashub_nor_tensorflow():
    script = "import sys, keras_softmoe as ksm; ksm.layers.SoftMoE; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    heavy = {"keras_hub", "tensorflow_text", "tensorflow"} - {keras.backend.backend()}
    assert not heavy.intersection(loaded)
    rooms = {name.split(".")[1] for name in loaded if name.startswith("keras_softmoe.")}
    assert rooms == {"ops", "routers", "layers"}
