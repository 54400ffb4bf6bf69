"""The promise of SECURITY.md: a preset from a stranger does no harm, whatever it is."""

import json
import shutil

import h5py
import numpy as np
import pytest

from benchmarks.torture.campaign import Tally
from benchmarks.torture.damage import Canary
from keras_softmoe import models
from tests.support import tiny, tiny_limoe

pytestmark = tiny.LOADING_WRONG_WEIGHTS


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    return Canary(tmp_path_factory.mktemp("outside"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tiny.classifier().save_to_preset(str(folder / "classifier"))
    tiny.backbone().save_to_preset(str(folder / "sharded"), max_shard_size=6e-6)
    tiny_limoe.task().save_to_preset(str(folder / "pairs"))
    return folder


@pytest.fixture
def refused(good, canary, tmp_path):
    """Callable that damages a preset, loads it, and expects a refusal by name."""
    number = 0

    def run(kind, change, cls=models.ViTMoEImageClassifier):
        nonlocal number
        number += 1
        preset = shutil.copytree(good / kind, tmp_path / f"preset_{number}")
        change(preset)
        # Ten seconds, one GB, and nothing outside
        tally = Tally(kind)
        with tally.case(str(number), mentions=[preset.name]), canary:
            cls.from_preset(str(preset))
            raise AssertionError("was loaded")
        assert not tally.failures
        assert tally.refusals.total() == 1

    return run


def put(preset, file, keys, value):
    """Replace what stands at the end of a path of keys in a file."""
    saved = json.loads((preset / file).read_text())
    place = saved
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (preset / file).write_text(json.dumps(saved))


@pytest.mark.parametrize(
    "file, keys",
    [
        ("config.json", ("config", "router")),
        ("config.json", ("config", "router", "config", "losses")),
        ("config.json", ("config", "moe_layers")),
        ("task.json", ("config", "activation")),
        ("task.json", ("config", "preprocessor")),
        ("task.json", ("config", "backbone")),
        ("task.json", ("config", "backbone", "config", "router")),
        ("task.json", ("config", "preprocessor", "config", "image_converter")),
    ],
)
def test_configurations(refused, canary, file, keys):
    for value in canary.values():
        wrong = [value] if keys[-1] in ("losses", "moe_layers") else value
        cls = models.ViTMoEImageClassifier
        if file == "config.json":
            cls = models.ViTMoEBackbone
        refused("classifier", lambda p, v=wrong: put(p, file, keys, v), cls)


@pytest.mark.parametrize("file", ["config.json", "task.json"])
def test_class_of_another_module(refused, canary, file):
    for name in ("builtins>eval", "os>system", "keras>Lambda", canary.secret.name):
        refused("classifier", lambda p, n=name: put(p, file, ["registered_name"], n))


def test_weights_that_lead_elsewhere(refused, canary):
    secret = str(canary.secret)

    def link(make):
        def change(preset):
            with h5py.File(preset / "model.weights.h5", "a") as file:
                group = file["layers/encoder_block/attention_norm/vars"]
                shape = group["0"].shape
                del group["0"]
                make(group, shape)

        return change

    def virtual(group, shape):
        layout = h5py.VirtualLayout(shape, "float32")
        layout[:] = h5py.VirtualSource(secret, "0", shape)
        group.create_virtual_dataset("0", layout)

    def outside(group, shape):
        group.create_dataset("0", shape, "float32", external=[(secret, 0, 1000)])

    def bomb(group, shape):
        group.create_dataset("0", (1 << 36,), "float32", chunks=(1 << 20,))

    def external(group, shape):
        group["0"] = h5py.ExternalLink(secret, "/0")

    def soft(group, shape):
        group["0"] = h5py.SoftLink("/layers")

    for make in (external, soft, virtual, outside, bomb):
        refused("classifier", link(make))


def test_parts_of_weights_that_climb_out(refused, canary):
    def rename(name):
        def change(preset):
            saved = json.loads((preset / "model.weights.json").read_text())
            saved["weight_map"] = dict.fromkeys(saved["weight_map"], name)
            (preset / "model.weights.json").write_text(json.dumps(saved))

        return change

    for name in (f"../{canary.secret.name}", str(canary.secret), "..", "", None, 7):
        refused("sharded", rename(name), models.ViTMoEBackbone)


def test_paths_of_vocabularies(refused, canary):
    for file, keys in (
        ("task.json", ("config", "preprocessor", "config", "tokenizer")),
        ("tokenizer.json", ()),
    ):
        cls = models.LIMoEContrastive if keys else models.LIMoETokenizer
        refused(
            "pairs",
            lambda p, f=file, k=keys: put(
                p, f, (*k, "config", "proto"), str(canary.secret)
            ),
            cls,
        )


def test_the_canary_sings(canary, tmp_path):
    """What is not to happen would be seen."""
    for harm in (
        lambda: canary.secret.read_bytes(),
        lambda: h5py.File(canary.secret).close(),
        lambda: canary.made.touch(),
        lambda: (tmp_path / "new").write_text("x"),
        lambda: (tmp_path / "new").rename(tmp_path / "newer"),
        lambda: np.save(tmp_path / "array", np.zeros(3)),
    ):
        with pytest.raises(AssertionError, match="opened|wrote|was executed"):
            with canary:
                harm()
        canary.made.unlink(missing_ok=True)
