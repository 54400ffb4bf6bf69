"""The reader of original Vision Transformers' `.npz` files.

Covers `checkpoints/formats.py` and `checkpoints/translation.py`.
"""

import io
import random
import re
import zipfile

import ml_dtypes
import numpy as np
import pytest

from keras_softmoe import converters, models
from tests.support import tiny
from tests.support.layer_checks import assert_same_weights
from tests.support.memory import peak_memory
from tests.support.references import to_numpy

NEW = {
    "SelfAttention": "MultiHeadDotProductAttention_0",
    "LayerNorm_1": "LayerNorm_1",
    "Mlp": "MlpBlock_0",
}
OLD = {
    "SelfAttention": "MultiHeadDotProductAttention_1",
    "LayerNorm_1": "LayerNorm_2",
    "Mlp": "MlpBlock_3",
}


def vit_name(name, numbering):
    """The name in a ViT checkpoint of a parameter with this name in V-MoE."""
    name = re.sub(r"^Encoder/", "Transformer/", name)
    for ours, theirs in numbering.items():
        name = re.sub(f"(encoderblock_[0-9]+)/{ours}/", rf"\1/{theirs}/", name)
    return name


@pytest.fixture(scope="module")
def model():
    return tiny.classifier(representation_dim=5, **tiny.DENSE)


@pytest.fixture(scope="module")
def params(model):
    return converters.to_vmoe_params(model)


def save(path, params, numbering=NEW):
    np.savez(path, **{vit_name(name, numbering): a for name, a in params.items()})
    return path


@pytest.mark.parametrize("numbering", [NEW, OLD], ids=["new", "old"])
def test_both_numberings(tmp_path, params, numbering):
    path = save(tmp_path / "vit.npz", params, numbering)
    with np.load(path) as arrays:
        block = "Transformer/encoderblock_1"
        assert f"{block}/{numbering['Mlp']}/Dense_1/bias" in arrays
        assert f"{block}/{numbering['LayerNorm_1']}/scale" in arrays
    checkpoint = converters.read_checkpoint(path)
    assert checkpoint.shapes == {name: a.shape for name, a in params.items()}
    np.testing.assert_equal(dict(checkpoint), params)


def test_bfloat16(tmp_path, params):
    rounded = {name: a.astype(ml_dtypes.bfloat16) for name, a in params.items()}
    path = save(tmp_path / "vit.npz", rounded)
    with np.load(path) as arrays:
        assert arrays["cls"].dtype == np.dtype("V2")
    checkpoint = converters.read_checkpoint(path)
    for name, array in rounded.items():
        assert checkpoint.dtypes[name] == checkpoint[name].dtype == ml_dtypes.bfloat16
        assert checkpoint[name].tobytes() == array.tobytes()
    # They load like any others.
    model = tiny.classifier(representation_dim=5, **tiny.DENSE)
    converters.load_vmoe_params(model, checkpoint)
    expected = rounded["head/kernel"].astype("float32")
    np.testing.assert_array_equal(to_numpy(model.output_dense.kernel), expected)


def test_convert(tmp_path, model, params):
    path = save(tmp_path / "vit.npz", params, OLD)
    converters.convert_vmoe_checkpoint(path, tmp_path / "preset", verbose=0)
    loaded = models.ViTMoEImageClassifier.from_preset(str(tmp_path / "preset"))
    assert loaded.backbone.moe_layers == ()
    assert_same_weights(loaded, model)


def refused(path, message):
    with pytest.raises(converters.CheckpointError, match=message):
        dict(converters.read_checkpoint(path))


def test_both_numberings_in_one_file(tmp_path, params):
    names = {vit_name(name, n): a for n in (NEW, OLD) for name, a in params.items()}
    np.savez(tmp_path / "vit.npz", **names)
    refused(tmp_path / "vit.npz", "holds '.*' twice, as 'Transformer/")


def test_other_arrays(tmp_path, params):
    arrays = {vit_name(name, NEW): a for name, a in params.items()}
    arrays["conv_root/kernel"] = np.zeros((7, 7, 3, 4))
    np.savez(tmp_path / "hybrid.npz", **arrays)
    refused(tmp_path / "hybrid.npz", "1 have no place.*Received: conv_root/kernel")


def test_pickles(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    np.savez(tmp_path / "vit.npz", cls=np.array([Bomb()], object))
    refused(tmp_path / "vit.npz", "'cls.npy'.*is not the array of shape")


def archive(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def npy(array, shape=None):
    file = io.BytesIO()
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header | {"shape": shape or array.shape})
    return file.getvalue() + array.tobytes()


def test_arrays_that_claim_more(tmp_path):
    content = npy(np.zeros(4, "f4"), shape=(1 << 50,))
    path = archive(tmp_path / "vit.npz", {"cls.npy": content})
    with peak_memory() as peak:
        refused(path, "is not the array of shape")
    assert peak[0] < 1 << 20


def test_archives_that_grow(tmp_path):
    path = archive(
        tmp_path / "vit.npz", {"cls.npy": bytes(1 << 27)}, zipfile.ZIP_DEFLATED
    )
    with peak_memory() as peak:
        refused(path, "would grow from .* to 134,217,728 bytes")
    assert peak[0] < 1 << 20


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_names_that_come_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / "vit.npz", "w") as file:
        for value in (0.0, 1.0):
            file.writestr("cls.npy", npy(np.full((1, 1, 4), value)))
    refused(tmp_path / "vit.npz", "holds a name twice")


def test_what_is_no_archive(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    refused(tmp_path / "array.npz", "cannot be read as an .npz file")
    refused(tmp_path / "absent.npz", "cannot be read.*no such file")
    path = archive(tmp_path / "text.npz", {"cls.npy": b"text"})
    refused(path, "cannot be read as an .npz file")


def big_vision(params, stacked):
    """The same parameters under big_vision's names."""
    arrays = {}
    for name, array in params.items():
        name = vit_name(name, NEW)
        name = name.replace(
            "MapHead/MultiHeadDotProductAttention",
            "MAPHead_0/MultiHeadDotProductAttention_0",
        )
        name = name.replace("MapHead/LayerNorm", "MAPHead_0/LayerNorm_0")
        name = name.replace("MapHead/Mlp", "MAPHead_0/MlpBlock_0")
        name = name.replace("MapHead/", "MAPHead_0/")
        if name == "Transformer/posembed_input/pos_embedding":
            name = "pos_embedding"
            if "cls" in params:
                # Its class token has none.
                assert not array[:, 0].any()
                array = array[:, 1:]
        arrays[f"params/{name}"] = array
    if stacked:
        parts = {}
        for name in sorted(arrays):
            joint = re.sub("encoderblock_[0-9]+", "encoderblock", name)
            parts.setdefault(joint, []).append(arrays[name])
        arrays = {
            name: np.stack(found) if "encoderblock" in name else found[0]
            for name, found in parts.items()
        }
    return arrays


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("pooling", ["map", "token", "gap"])
def test_big_vision(tmp_path, pooling, stacked):
    model = tiny.classifier(pooling=pooling, **tiny.DENSE)
    if pooling == "token":
        table = model.backbone.get_layer("position_embedding").embedding
        table.assign(to_numpy(table) * np.array([[[0.0]] + [[1.0]] * 4]))
    arrays = big_vision(converters.to_vmoe_params(model), stacked)
    assert ("params/Transformer/encoderblock/LayerNorm_0/scale" in arrays) == stacked
    np.savez(tmp_path / "model.npz", **arrays)
    loaded = converters.dense_model(tmp_path / "model.npz")
    assert_same_weights(loaded, model)
    assert loaded.backbone.activation == "gelu_tanh"
    images = tiny.images(2)
    np.testing.assert_array_equal(to_numpy(loaded(images)), to_numpy(model(images)))


def test_tower_of_siglip(tmp_path):
    model = tiny.backbone(pooling="map", **tiny.DENSE)
    arrays = big_vision(converters.to_vmoe_params(model), stacked=True)
    arrays = {name.replace("params/", "params/img/"): a for name, a in arrays.items()}
    arrays |= {"params/t": np.zeros(1), "params/txt/head/bias": np.zeros(3)}
    arrays |= {"opt/0/count": np.zeros(1)}
    np.savez(tmp_path / "siglip.npz", **arrays)
    assert_same_weights(converters.dense_model(tmp_path / "siglip.npz"), model)
    # Each of its arrays can be read again.
    checkpoint = converters.read_checkpoint(tmp_path / "siglip.npz")
    np.testing.assert_equal(dict(checkpoint), dict(checkpoint))


BIAS, ONE_NUMBER = "Transformer/encoderblock/LayerNorm_0/bias", "one number of blocks"
BAD_STACKS = {
    "other number of blocks": ({BIAS: np.zeros((3, 8))}, ONE_NUMBER),
    "no blocks": ({BIAS: np.zeros((0, 8))}, ONE_NUMBER),
    "a number": ({BIAS: np.zeros(())}, ONE_NUMBER),
    "blocks in both ways": (
        {"Transformer/encoderblock_0/LayerNorm_1/bias": np.zeros(8)},
        "holds .* twice",
    ),
    "positions twice": (
        {"Transformer/posembed_input/pos_embedding": np.zeros((1, 4, 8))},
        "positions in two places",
    ),
    "positions of another rank": ({"pos_embedding": np.zeros((4, 8))}, "of the shape"),
    "positions that are no square": (
        {"pos_embedding": np.zeros((1, 5, 8))},
        "no square|5 learned positions|pos_embedding",
    ),
}


@pytest.mark.parametrize("case", BAD_STACKS)
def test_bad_stacks(tmp_path, case):
    model = tiny.backbone(pooling="map", **tiny.DENSE)
    arrays = big_vision(converters.to_vmoe_params(model), stacked=True)
    change, message = BAD_STACKS[case]
    arrays |= {f"params/{name}": array for name, array in change.items()}
    np.savez(tmp_path / "model.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        converters.dense_model(tmp_path / "model.npz")


def original_and_some(tmp_path, params):
    some = {n: params[n] for n in ("cls", "embedding/bias", "pre_logits/kernel")}
    save(tmp_path / "vit.npz", some)
    return some


def stacked_and_some(tmp_path, params):
    params = converters.to_vmoe_params(tiny.backbone(pooling="map", **tiny.DENSE))
    kept = ("LayerNorm_0", "Mlp/Dense_0/bias", "MapHead/probe", "embedding/bias")
    some = {
        name: array for name, array in params.items() if any(k in name for k in kept)
    }
    np.savez(tmp_path / "vit.npz", **big_vision(some, stacked=True))
    return some


@pytest.mark.parametrize("write", [original_and_some, stacked_and_some])
def test_fuzz(tmp_path, params, write):
    """300 files with some bits flipped, a fifth of them with the end cut off."""
    some = write(tmp_path, params)
    content = (tmp_path / "vit.npz").read_bytes()
    rng, path, read = random.Random(0), tmp_path / "mutated.npz", 0
    for _ in range(300):
        mutated = bytearray(content)
        for _ in range(rng.choice((1, 2, 8))):
            mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            del mutated[rng.randrange(len(mutated)) :]
        path.write_bytes(mutated)
        with peak_memory() as peak:
            try:
                arrays = dict(converters.read_checkpoint(path))
            except converters.CheckpointError:
                arrays = None
        assert peak[0] < 1 << 20
        if arrays is not None:
            read += 1
            # The archive has checksums: what is read is as it was.
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, some[name])
    assert 10 < read < 250
