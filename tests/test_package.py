"""The package as a whole: names, version, lazy imports, and what a wheel carries."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import keras_softmoe

ROOT = pathlib.Path(__file__).parent.parent


def run(arguments, cwd=ROOT, **environment):
    """Standard output of a Python that runs apart from this one."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", keras_softmoe.__version__)


# What users reach through the subpackages above.
INTERNAL = {
    "backbones",
    "architecture",
    "catalogue",
    "checks",
    "checkpoints",
    "drawing",
    "files",
    "keras_adapter",
    "sharding",
    "types",
}


def test_every_subpackage_is_public_or_internal():
    subpackages = {
        path.stem
        for path in (ROOT / "keras_softmoe").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    public = set(keras_softmoe.__all__) - {"__version__"}
    assert public == subpackages - {"__init__"} - INTERNAL
    assert set(keras_softmoe.__all__) <= set(dir(keras_softmoe))


@pytest.mark.parametrize("subpackage", sorted(keras_softmoe.__all__))
def test_every_public_name_is_there(subpackage):
    assert getattr(keras_softmoe, subpackage) is not None


def test_unknown_name():
    with pytest.raises(AttributeError, match="'keras_softmoe'.*'nothing'"):
        _ = keras_softmoe.nothing


PRESET_FILES = {"README.md", "assets/vocabulary.txt", "config.json", "model.weights.h5"}
TRAINED = "vit_tiny_patch8_32_icons"
EXPECTED_FILES = {
    *(f"small/{name}" for name in PRESET_FILES),
    *(f"{TRAINED}/{path.name}" for path in (ROOT / "presets" / TRAINED).iterdir()),
}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Directory with an unpacked wheel and source archive, holding two presets."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "keras_softmoe", tree / "keras_softmoe")
    for name in PRESET_FILES | {"train.py", "../train_all.py"}:
        path = tree / "presets" / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}")

    shutil.copytree(ROOT / "presets" / TRAINED, tree / "presets" / TRAINED)

    run(["-m", "hatchling", "build", "-d", "dist"], cwd=tree)
    (wheel,) = (tree / "dist").glob("*.whl")
    (archive,) = (tree / "dist").glob("*.tar.gz")
    shutil.unpack_archive(wheel, tree / "dist" / "wheel", "zip")
    shutil.unpack_archive(archive, tree / "dist")
    return tree / "dist"


def files_below(directory):
    return {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_wheel_carries_the_package_and_its_presets(distributions):
    wheel = distributions / "wheel"
    version = keras_softmoe.__version__
    assert {path.name for path in wheel.iterdir()} == {
        "keras_softmoe",
        f"keras_softmoe-{version}.dist-info",
    }
    assert files_below(wheel / "keras_softmoe" / "_presets") == EXPECTED_FILES


def test_source_archive_carries_the_presets_and_their_scripts(distributions):
    archive = distributions / f"keras_softmoe-{keras_softmoe.__version__}"
    assert files_below(archive / "presets") == {
        "train_all.py",
        "small/train.py",
        *EXPECTED_FILES,
    }


def test_wheel_works_outside_the_checkout(distributions, tmp_path):
    site = distributions / "wheel"
    script = f"""
import keras, keras_hub
import keras_softmoe as ksm

# Files find the models before anyone has looked for them.
print(keras.saving.get_registered_object("keras_softmoe>ViTMoEBackbone").__name__)
classifier = ksm.models.ViTMoEImageClassifier.from_preset({TRAINED!r})
# What has no directory is data in the package.
backbone = ksm.models.ViTMoEBackbone.from_preset(
    "vmoe_small_patch32_last2_32e_224", load_weights=False, num_layers=2,
    moe_layers=(1,), hidden_dim=8, mlp_dim=8, num_heads=2,
)
print(backbone.name, backbone.router.num_experts, len(ksm.presets.names()))
print(classifier.num_classes, ksm.presets.describe({TRAINED!r}).path)
"""
    output = run(["-c", script], cwd=tmp_path, PYTHONPATH=str(site))
    path = site / "keras_softmoe" / "_presets" / TRAINED
    assert output.splitlines()[-3:] == [
        "ViTMoEBackbone",
        # 135 rows and the two directories that this wheel was made with
        "vmoe_small_patch32_last2_32e_224 32 137",
        f"1229 {path}",
    ]
