"""Exported files, run by their own runtimes, compared with their models.

They are written by `exporting/export.py` and `exporting/write.py`.

All routers to all formats, and the table of it:

    KERAS_BACKEND=torch python -m pytest tests/exporting --all-exports
"""

import json
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import onnx
import pytest

import keras_softmoe as ksm
from experiments import measured as kept
from keras_softmoe import layers, models, routers
from keras_softmoe.exporting import export as export_file, export_model
from keras_softmoe.exporting.export import FORMATS
from tests import skips
from tests.support import close, gradients, tiny, tiny_limoe

BACKEND = keras.backend.backend()
RUNNER = Path(__file__).parents[1] / "support" / "run_files.py"
BATCHES = (1, 3, 16)
TOLERANCE = 1e-4

ROUTERS = {
    "soft": lambda: routers.SoftRouter(4, 2),
    **dict.fromkeys(
        ("token choice, gather", "token choice, einsum"),
        lambda: routers.SoftmaxTokenChoiceRouter(4, 2, capacity_factor=0.75),
    ),
    "batch priority": lambda: routers.SoftmaxTokenChoiceRouter(
        4, priority="max", capacity_factor=0.5
    ),
    "predictions without a capacity": lambda: routers.SoftmaxTokenChoiceRouter(
        4, 2, eval_capacity_factor="dropless"
    ),
    "Sinkhorn token choice": lambda: routers.SinkhornTokenChoiceRouter(4),
    "expert choice": lambda: routers.SoftmaxExpertChoiceRouter(4),
    "Sinkhorn expert choice": lambda: routers.SinkhornExpertChoiceRouter(4),
    "sparse transport": lambda: routers.SparseTransportExpertChoiceRouter(4),
    "balanced by a bias": lambda: routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, score="sigmoid", bias_update_rate=0.001
    ),
    "expert race": lambda: routers.ExpertRaceRouter(4, num_selected_experts=2),
    "identity": lambda: routers.IdentityRouter(4),
}
# A short run: formats of TensorFlow, and routers with operations that others
# lack. The file of PyTorch and those of other processes are in the tests below.
SHORT = {
    "tensorflow": [
        ("Sinkhorn expert choice", "onnx"),
        ("batch priority", "litert"),
        ("predictions without a capacity", "tf_saved_model"),
    ],
    "torch": [("predictions without a capacity", "torch")],
}.get(BACKEND, [])
WHERE_WRITTEN = skips.only_on("tensorflow", "torch", because="one file")
WHERE_ONNX_IS_WRITTEN = skips.only_on("tensorflow", because="one file")


def classifier(router):
    """A small classifier that routes the tokens of four images together."""
    keras.utils.set_random_seed(0)
    backbone = models.ViTMoEBackbone(
        *((16, 16, 3), 4, 2, 2, 16, 32),
        moe_layers=(1,),
        router=ROUTERS[router](),
        group_images=4,
        dispatcher="einsum" if "einsum" in router else "gather",
        pooling="gap",
        position_embedding="sincos2d",
    )
    preprocessor = models.ViTMoEImageClassifierPreprocessor(
        models.ViTMoEImageConverter(image_size=(16, 16))
    )
    model = models.ViTMoEImageClassifier(backbone, 5, preprocessor, compile=False)
    # It starts with zeros, and all results would be equal.
    model.output_dense.kernel.assign(np.random.default_rng(0).normal(size=(16, 5)))
    return model


def images(batch, size=16, low=-1, high=1):
    x = np.random.default_rng(batch).uniform(low, high, (batch, size, size, 3))
    return x.astype("float32")


def run(files, inputs, folder):
    """What files make of inputs, in one process: a list of dicts by size of batch."""
    np.savez(folder / "inputs.npz", **{str(len(x)): x for x in inputs})
    jobs = [
        {
            "format": format,
            "file": str(file),
            "inputs": str(folder / "inputs.npz"),
            "outputs": str(folder / f"outputs{index}.npz"),
        }
        for index, (format, file) in enumerate(files)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(folder / "jobs.json")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [dict(np.load(job["outputs"])) for job in jobs]


def difference(outputs, function, inputs):
    """The largest difference of the outputs for all batches."""
    return max(
        close.difference(outputs[str(len(x))], to_numpy(function(x))) for x in inputs
    )


def to_numpy(x):
    return keras.ops.convert_to_numpy(x)


def export_all(models_and_files, folder):
    """`export_model` for many, which needs one other process for each backend only."""
    by_backend = {}
    for number, (model, format, file) in enumerate(models_and_files):
        backend = FORMATS[format].backend
        if backend == BACKEND:
            export_model(model, file, format, verbose=False)
            continue
        job = export_file.checked_job(model, file, format)
        aside = folder / f"job{number}"
        aside.mkdir()
        saved = export_file.save_job(model, file, job, backend, aside)
        by_backend.setdefault(backend, []).append(saved)
    for backend, jobs in by_backend.items():
        export_file.run_jobs(jobs, backend)


@pytest.mark.filterwarnings("ignore:.*predicts without a capacity")
def test_every_router_and_every_format(tmp_path, pytestconfig):
    """Outputs of the files for one image, an open group and several groups."""
    complete = pytestconfig.getoption("--all-exports")
    if not complete and not SHORT:
        pytest.skip(skips.REASONS["one file"])
    cells = [(r, f) for r in ROUTERS for f in FORMATS] if complete else SHORT
    of_router = {router: classifier(router) for router in dict(cells)}
    files = [
        (format, tmp_path / f"{index}{FORMATS[format].suffix}")
        for index, (_, format) in enumerate(cells)
    ]
    jobs = [
        (of_router[router], format, file)
        for (router, format), (_, file) in zip(cells, files, strict=True)
    ]
    export_all(jobs, tmp_path)
    inputs = [images(batch) for batch in BATCHES]
    outputs = dict(zip(cells, run(files, inputs, tmp_path), strict=True))
    found = {
        (router, format): difference(outputs[router, format], of_router[router], inputs)
        for router, format in cells
    }
    if complete:
        kept.write_exports(BACKEND, found)
    assert {cell: error for cell, error in found.items() if error > TOLERANCE} == {}


@WHERE_WRITTEN
def test_pixels(tmp_path):
    """A file with the preprocessing inside takes what `predict` takes."""
    router, format = {
        "tensorflow": ("soft", "onnx"),
        "torch": ("token choice, einsum", "torch"),
    }[BACKEND]
    model = classifier(router)
    file = tmp_path / f"model{FORMATS[format].suffix}"
    model.export(file, format=format, preprocessing=True, verbose=False)
    inputs = [images(batch, low=0, high=255) for batch in BATCHES]
    (outputs,) = run([(format, file)], inputs, tmp_path)
    assert difference(outputs, lambda x: model.predict(x, verbose=0), inputs) < 1e-4


@WHERE_ONNX_IS_WRITTEN
def test_pixels_of_another_size(tmp_path):
    model = classifier("soft")
    signature = [keras.InputSpec(shape=(None, 24, 24, 3), dtype="float32")]
    file = tmp_path / "model.onnx"
    model.export(
        file, "onnx", preprocessing=True, input_signature=signature, verbose=False
    )
    inputs = [images(3, size=24, low=0, high=255)]
    (outputs,) = run([("onnx", file)], inputs, tmp_path)
    assert difference(outputs, lambda x: model.predict(x, verbose=0), inputs) < 1e-4
    with pytest.raises(ValueError, match="resizing of images"):
        model.export(
            tmp_path / "model.pt2",
            "torch",
            preprocessing=True,
            input_signature=signature,
        )


# The other process has to be told.
@skips.only_on("jax", because="one file")
def test_settings_of_routers_as_they_stand(tmp_path):
    """A file has the settings of the moment, and not those of the constructor."""
    model = classifier("batch priority")
    inputs = [images(4)]
    before = gradients.outputs(model, inputs[0])
    model.set_routing(capacity_factor=0.25, group_images=2)
    file = tmp_path / "model.onnx"
    model.export(file, format="onnx", verbose=False)
    (outputs,) = run([("onnx", file)], inputs, tmp_path)
    now = gradients.outputs(lambda x: model(x), inputs[0])
    assert difference(outputs, lambda x: now, inputs) < TOLERANCE
    assert np.abs(outputs["4"] - before).max() > 1e-3


@WHERE_ONNX_IS_WRITTEN
def test_what_dense_models_were_trained_with(tmp_path):
    """Runtimes know no complementary error function, which TensorFlow's GELU has."""
    model = models.ViTMoEBackbone(
        *((8, 8, 3), 4, 2, 2, 8, 12, (1,), ksm.routers.SoftRouter(4)),
        pooling="gap",
        activation="gelu",
        num_registers=2,
        layer_scale=0.5,
    )
    formats = {"onnx": "a.onnx", "litert": "a.tflite", "openvino": "a.xml"}
    files = [(format, tmp_path / name) for format, name in formats.items()]
    for format, file in files:
        ksm.exporting.export_model(model, file, format, verbose=False)
    data = [images(batch, size=8) for batch in BATCHES]
    for outputs in run(files, data, tmp_path):
        pooled = difference(outputs, lambda x: model(x)["pooled_output"], data)
        assert pooled < TOLERANCE


@WHERE_ONNX_IS_WRITTEN
def test_functional_model_of_a_user(tmp_path):
    inputs = keras.Input((10, 8))
    x = layers.SoftMoE(4, 16)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    file = tmp_path / "model.onnx"
    ksm.exporting.export_model(model, file, "onnx", verbose=False)
    data = [np.random.default_rng(b).normal(size=(b, 10, 8)) for b in BATCHES]
    data = [x.astype("float32") for x in data]
    (outputs,) = run([("onnx", file)], data, tmp_path)
    assert difference(outputs, model, data) < TOLERANCE


@WHERE_ONNX_IS_WRITTEN
def test_int8_experts_are_int8_in_the_file(tmp_path):
    """A byte for each weight, and the results that int8 has here."""
    inputs = keras.Input((6, 64))
    x = inputs + layers.SoftMoE(8, 128)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    num_weights = model.count_params()
    model.quantize("int8")
    file = tmp_path / "model.onnx"
    ksm.exporting.export_model(model, file, "onnx", verbose=False)
    assert file.stat().st_size < 2 * num_weights
    graph = onnx.load(file).graph
    for value in (*graph.input, *graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    data = [np.random.default_rng(b).normal(size=(b, 6, 64)) for b in BATCHES]
    data = [x.astype("float32") for x in data]
    (outputs,) = run([("onnx", file)], data, tmp_path)
    # An input that lies between two steps may be rounded to the other one.
    errors = [np.abs(outputs[str(len(x))] - to_numpy(model(x))) for x in data]
    assert np.concatenate(errors).mean() < 1e-3


@WHERE_WRITTEN
def test_experts_of_any_layer(tmp_path):
    """A template, and a shared and gated MLP, and images that are routed whole."""
    expert = keras.Sequential([keras.layers.Dense(12, "silu"), keras.layers.Dense(8)])
    inputs = keras.Input((2, 5, 8))
    router = routers.SoftmaxTokenChoiceRouter(4, 2, noise_std=0.0)
    x = layers.MoE(router, expert=expert, shared_mlp_dim=8, gated=True)(inputs)
    router = routers.SoftmaxExpertChoiceRouter(2)
    x += layers.ImageMoE(router, 12, gated=True, group_images=2)(x)
    model = keras.Model(inputs, x)
    format = {"tensorflow": "onnx", "torch": "torch"}[BACKEND]
    file = tmp_path / f"model{FORMATS[format].suffix}"
    ksm.exporting.export_model(model, file, format, verbose=False)
    data = [np.random.default_rng(b).normal(size=(b, 2, 5, 8)) for b in BATCHES]
    data = [x.astype("float32") for x in data]
    (outputs,) = run([(format, file)], data, tmp_path)
    assert difference(outputs, model, data) < TOLERANCE


@WHERE_ONNX_IS_WRITTEN
def test_encoders_of_limoe(tmp_path):
    backbone = tiny_limoe.backbone()
    image, text = tmp_path / "image.onnx", tmp_path / "text.onnx"
    jobs = [
        (backbone.image_encoder, "onnx", image),
        (backbone.text_encoder, "onnx", text),
    ]
    export_all(jobs, tmp_path)
    inputs = [tiny.images(batch) for batch in BATCHES]
    (outputs,) = run([("onnx", image)], inputs, tmp_path)
    encode = backbone.image_encoder
    assert difference(outputs, lambda x: encode(x)["image_embedding"], inputs) < 1e-4
    inputs = [tiny_limoe.token_ids(batch) for batch in BATCHES]
    (outputs,) = run([("onnx", text)], inputs, tmp_path)
    encode = backbone.text_encoder
    assert difference(outputs, lambda x: encode(x)["text_embedding"], inputs) < 1e-4


@WHERE_WRITTEN
def test_fixed_batch_for_groups_of_the_whole_batch(tmp_path):
    model = classifier("expert choice")
    model.set_routing(group_images=None)
    file = tmp_path / f"model{'' if BACKEND == 'tensorflow' else '.pt2'}"
    format = "tf_saved_model" if BACKEND == "tensorflow" else "torch"
    with pytest.raises(ValueError, match="size of the batch"):
        model.export(file, format=format)
    signature = [keras.InputSpec(shape=(6, 16, 16, 3), dtype="float32")]
    model.export(file, format=format, input_signature=signature, verbose=False)
    assert model.backbone.group_images is None
    (outputs,) = run([(format, file)], [images(6)], tmp_path)
    assert difference(outputs, model, [images(6)]) < TOLERANCE


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        ("m", {"format": "pb"}, "Accepted: 'tf_saved_model'.*Received: format='pb'"),
        ("m.pb", {"format": "onnx"}, "must end in '.onnx'. Received: .*m.pb"),
    ],
)
def test_unknown_format(tmp_path, file, arguments, message):
    model = classifier("soft")
    with pytest.raises(ValueError, match=message):
        model.export(tmp_path / file, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_missing_package(tmp_path, monkeypatch):
    found = export_file.find_spec
    monkeypatch.setattr(
        export_file,
        "find_spec",
        lambda name: None if name == "tf2onnx" else found(name),
    )
    with pytest.raises(ImportError, match="pip install tf2onnx"):
        classifier("soft").export(tmp_path / "model.onnx", format="onnx")


def test_models_that_no_file_can_hold(tmp_path):
    model = classifier("batch priority")
    file = tmp_path / "model.onnx"
    model.set_routing(priority="random")
    with pytest.raises(ValueError, match="deterministic.*priority='random'"):
        model.export(file, format="onnx")
    model.set_routing(priority="max", random_logits=True)
    with pytest.raises(ValueError, match="random_logits=True"):
        model.export(file, format="onnx")
    with pytest.raises(ValueError, match="needs a model with images as its only"):
        model.backbone.export(file, format="onnx", preprocessing=True)
    half = layers.SoftMoE(2, 4, dtype="mixed_bfloat16")
    inputs = keras.Input((3, 4))
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        export_model(keras.Model(inputs, half(inputs)), file, "onnx")
    with pytest.raises(ValueError, match="must be a `keras.Model` that is built"):
        export_model(half, file, "onnx")
    assert list(tmp_path.iterdir()) == []


def test_quantized_models(tmp_path):
    model = classifier("soft")
    model.quantize("int8")
    for format in ("litert", "openvino"):
        file = tmp_path / f"model{FORMATS[format].suffix}"
        message = "quantized to int8.*choose tf_saved_model or onnx or torch. Received"
        with pytest.raises(ValueError, match=message):
            model.export(file, format)
    # It would hold them as float32.
    model = classifier("soft")
    model.quantize("int4", filters=lambda x: "experts" not in str(x.path))
    message = "quantized to int4.*choose tf_saved_model or torch. Received"
    with pytest.raises(ValueError, match=message):
        model.export(tmp_path / "model.onnx", "onnx")


@skips.only_on("jax", "torch", because="own onnx")
def test_classes_and_options_of_this_program_only(tmp_path, monkeypatch):
    """What another process could not know is refused before anything is saved."""
    cls = types.new_class("Own", (keras.layers.Dense,))
    cls.__module__ = "__main__"
    inputs = keras.Input((3,))
    model = keras.Model(inputs, cls(2)(inputs))
    file = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match="defined in `__main__`.*Own.*KERAS_BACKEND"):
        export_model(model, file, "onnx")
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    with pytest.raises(ValueError, match="such an option cannot be sent"):
        export_model(model, file, "onnx", extra=object())
    with pytest.raises(RuntimeError, match="failed in a subprocess. End of stderr:"):
        export_model(model, file, "onnx", opset_version="none", verbose=False)
    assert list(tmp_path.iterdir()) == []
