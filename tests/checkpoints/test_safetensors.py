"""The reader of safetensors files: what it reads, and what it refuses."""

import json
import os
import random

import ml_dtypes
import numpy as np
import pytest

from keras_softmoe import converters
from keras_softmoe.checkpoints import safetensors
from tests.support import safetensors_file, torch_twin
from tests.support.memory import peak_memory
from tests.support.references import assert_all_equal

ARRAYS = {
    "a": np.arange(6, dtype="float32").reshape(2, 3),
    "b": np.array(2.0, "float64"),
    "c": np.arange(4, dtype="int64"),
    "d": np.arange(3).astype(ml_dtypes.bfloat16),
}


def test_read(tmp_path):
    path = safetensors_file.save(
        tmp_path / "a.safetensors", ARRAYS, metadata={"a": "b"}
    )
    checkpoint = converters.read_checkpoint(path)
    assert checkpoint.shapes == {name: array.shape for name, array in ARRAYS.items()}
    assert checkpoint.dtypes == {name: array.dtype for name, array in ARRAYS.items()}
    np.testing.assert_equal(dict(checkpoint), ARRAYS)


def refused(path, content):
    path.write_bytes(content)
    message = f"'{path}' cannot be read as a safetensors file.*fetch it again"
    with (
        peak_memory() as peak,
        pytest.raises(converters.CheckpointError, match=message),
    ):
        dict(converters.read_checkpoint(path))
    assert peak[0] < 64 * len(content) + (1 << 20)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "a list": "[1, 2]",
    "text": "weights",
    "bytes": b"\xff\xfe\x00",
    "a name twice": '{"a": {}, "a": {}}',
    "deep": "[" * 100_000,
    "a large number": '{"a": ' + "9" * 10_000 + "}",
    "a number as entry": {"a": 3},
    "missing keys": {"a": {"dtype": "F32"}},
    "unknown dtype": {"a": entry("O")},
    "no dtype": {"a": entry([1])},
    "bytes of 8 bits": {"a": entry("F8_E4M3", (8,))},
    "negative shape": {"a": entry(shape=(-2,))},
    "huge shape": {"a": entry(shape=(1 << 62, 1 << 62))},
    "fractions": {"a": entry(shape=(2.0,))},
    "bools": {"a": entry(shape=(True, 2))},
    "many axes": {"a": entry(shape=(1,) * 9)},
    "no offsets": {"a": entry(offsets=())},
    "three offsets": {"a": entry(offsets=(0, 4, 8))},
    "reversed": {"a": entry(offsets=(8, 0))},
    "beyond the end": {"a": entry(offsets=(8, 16))},
    "too long": {"a": entry(shape=(4,), offsets=(0, 16))},
    "too short": {"a": entry(shape=(1,), offsets=(0, 4))},
    "overlap": {"a": entry(), "b": entry()},
    "a gap": {
        "a": entry(shape=(1,), offsets=(0, 4)),
        "b": entry("I8", (1,), (7, 8)),
    },
    "nothing": {},
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers(tmp_path, case):
    content = safetensors_file.file_of(HEADERS[case], bytes(8))
    refused(tmp_path / "a.safetensors", content)


def test_lengths(tmp_path):
    good = safetensors_file.file_of({"a": entry()}, bytes(8))
    path = tmp_path / "a.safetensors"
    for wrong in (b"", good[:5], good[:-1], good + b"\0", good[: len(good) // 2]):
        refused(path, wrong)
    for length in (0, 1, len(good), 1 << 40, (1 << 64) - 1):
        refused(path, length.to_bytes(8, "little") + good[8:])


def test_file_that_becomes_shorter(tmp_path):
    path = safetensors_file.save(tmp_path / "a.safetensors", ARRAYS)
    checkpoint = converters.read_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(converters.CheckpointError, match="cannot be read as"):
        dict(checkpoint)


def test_the_header_is_read_twice_at_most(tmp_path, monkeypatch):
    """Once for the names, once for the arrays, however many there are."""
    opened, safe_open = [], safetensors.safe_open
    monkeypatch.setattr(
        safetensors, "safe_open", lambda *a, **k: opened.append(a) or safe_open(*a, **k)
    )
    path = tmp_path / "a.safetensors"
    for value in (1.0, 2.0):
        arrays = {str(index): np.full(2, value, "float32") for index in range(5)}
        safetensors_file.save(path, arrays)
        # A clock of files may be coarse.
        os.utime(path, ns=(0, int(value)))
        found = dict(converters.read_checkpoint(path))
        assert_all_equal({name: np.asarray(a) for name, a in found.items()}, arrays)
    assert len(opened) == 4


def test_other_kinds_of_files(tmp_path):
    for name in ("pytorch_model.bin", "model.pt", "model.txt"):
        (tmp_path / name).write_bytes(b"\x80\x04N.")
        with pytest.raises(ValueError, match="pickled files can execute code"):
            converters.dense_model(tmp_path / name)
    with pytest.raises(ValueError, match="has no weights in a supported"):
        converters.dense_model(tmp_path)


@pytest.fixture(scope="module")
def arrays():
    return torch_twin.state("timm", head=True)


def convert(path, arrays, **arguments):
    safetensors_file.save(path / "model.safetensors", arrays)
    arguments = {"num_heads": torch_twin.HEADS, **arguments}
    return converters.dense_model(path / "model.safetensors", **arguments)


FOREIGN = {
    "blocks.0.attn.q_norm.weight": "normalization of queries and keys has an offset",
    "blocks.0.attn.rel_pos.table": "relative positions",
    "blocks.0.mlp.fc1_g.weight": "gates",
    "blocks.0.mlp.w12.weight": "gates",
    "fc_norm.weight": "normalize after the pooling",
    "head_dist.weight": "`head=False`",
    "norm_pre.weight": "CLIP",
    "patch_embed.backbone.conv.weight": "hybrids",
    "rope.periods": "RoPE",
    "optimizer": "have no place in one. Received: optimizer",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_other_models(tmp_path, arrays, name):
    with pytest.raises(converters.CheckpointError, match=FOREIGN[name]) as error:
        convert(tmp_path, arrays | {name: np.zeros(3, "float32")})
    assert name in str(error.value)


def test_two_heads(tmp_path, arrays):
    second = {name.replace("head.", "head_dist."): arrays[name] for name in arrays}
    with pytest.raises(converters.CheckpointError, match="`head=False`"):
        convert(tmp_path, arrays | second)
    expected = convert(tmp_path, arrays, head=False).get_weights()
    found = convert(tmp_path, arrays | second, head=False).get_weights()
    assert_all_equal(found, expected)


def test_names_that_are_missing(tmp_path, arrays):
    for name in ("blocks.0.attn.qkv.bias", "norm.weight", "cls_token", "pos_embed"):
        fewer = {key: array for key, array in arrays.items() if key != name}
        with pytest.raises(
            ValueError, match="missing|must have the same|gap|size of the images"
        ):
            convert(tmp_path, fewer)
    with pytest.raises(
        converters.CheckpointError, match="exactly one kernel of a patch"
    ):
        convert(tmp_path, {"a": np.zeros(3, "float32")})


def test_heads_that_nothing_tells(tmp_path, arrays):
    with pytest.raises(converters.CheckpointError, match="pass `num_heads`, or put"):
        convert(tmp_path, arrays, num_heads=None)
    with pytest.raises(converters.CheckpointError, match="Received: 5"):
        convert(tmp_path, arrays, num_heads=5)
    about = {"num_attention_heads": torch_twin.HEADS}
    (tmp_path / "config.json").write_text(json.dumps(about))
    convert(tmp_path, arrays, num_heads=None)


@pytest.mark.parametrize(
    "about, message",
    [
        ("[1]", "no JSON object"),
        ("{", "cannot be read"),
        ('{"hidden_act": "quick_gelu"}', "hidden_act='quick_gelu'"),
        ('{"layer_norm_eps": "small"}', "layer_norm_eps='small'"),
        ('{"num_attention_heads": "many"}', "Received: 'many'"),
    ],
)
def test_configuration_beside(tmp_path, arrays, about, message):
    (tmp_path / "config.json").write_text(about)
    with pytest.raises(converters.CheckpointError, match=message):
        convert(tmp_path, arrays, num_heads=None if "many" in about else 3)


def test_images_of_the_source(tmp_path, arrays):
    about = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    model = convert(tmp_path, arrays)
    pixels = np.full((1, 12, 12, 3), 255.0, "float32")
    prepared = np.asarray(model.preprocessor.image_converter(pixels))[0, 0, 0]
    expected = (1.0 - np.array(about["image_mean"])) / about["image_std"]
    np.testing.assert_allclose(prepared, expected, rtol=1e-5)
    about["image_std"] = [0.2, 0.0, "x"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    with pytest.raises(
        converters.CheckpointError, match="preprocessing config next to"
    ):
        convert(tmp_path, arrays)


def test_fuzz(tmp_path, arrays):
    """300 files with some bits flipped or the end cut off, or with other shapes."""
    path = safetensors_file.save(tmp_path / "model.safetensors", arrays)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    rng, outcomes = random.Random(0), {"read": 0, "refused": 0}
    for _ in range(300):
        mutated = bytearray(content)
        # Of what counts, most is in the header.
        end = rng.choice((8, header, header, header, len(content)))
        for _ in range(rng.choice((1, 2, 8))):
            mutated[rng.randrange(end)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            del mutated[rng.randrange(len(mutated)) :]
        path.write_bytes(mutated)
        with peak_memory() as peak:
            try:
                checkpoint = converters.read_checkpoint(path)
                # The names and shapes of a model, without making it.
                dict(safetensors_names(checkpoint, path))
                outcomes["read"] += 1
            except converters.CheckpointError:
                outcomes["refused"] += 1
        assert peak[0] < 16 * len(content) + (1 << 20)
    assert outcomes["refused"] > 150 and outcomes["read"] > 20


def safetensors_names(checkpoint, path):
    from keras_softmoe.checkpoints import read_vit_settings
    from keras_softmoe.checkpoints.safetensors import read_torch_names

    found = read_torch_names(checkpoint, str(path), num_heads=torch_twin.HEADS)
    read_vit_settings(found.shapes)
    return found
