"""
Title: Exporting a mixture of experts
Author: keras_softmoe authors
Date created: 2026/11/22
Last modified: 2026/11/27
Description: One preset as SavedModel, ONNX, LiteRT, OpenVINO and PyTorch file.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Setup

    pip install -e ".[torch,export,datasets]"

A model leaves Keras as a file that runs without Keras and without this library: in a
server, in a browser, on a telephone. Any backend will do; a format is written by one
of them, and if another is in use the model is handed to a process of its own.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tempfile
import time
from pathlib import Path

import keras
import numpy as np

import keras_softmoe as ksm

# The tests run this guide with fewer formats.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
FILES = {
    "tf_saved_model": "classifier",
    "onnx": "classifier.onnx",
    "litert": "classifier.tflite",
    "openvino": "classifier.xml",
    "torch": "classifier.pt2",
}
if SHORT:
    FILES = {"onnx": "classifier.onnx"}
FOLDER = Path(tempfile.mkdtemp())

"""
## A model and what it predicts

Tokens choose experts here, those that are surest of theirs first, and experts that are
full drop the others: the kind of decision that exporters find hardest. (The preset
predicts without a limit, which a file could only keep by computing all tokens in each
expert. Two slots for each of 8 experts are as many as an image has tokens. In groups of
one image a prediction does not depend on the other images of a batch.)
"""

name = "vmoe_tiny_patch8_8e_32_icons"
classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
classifier.set_routing(capacity_factor=1.0, group_images=1)
images, *_ = ksm.datasets.sample("icons", 64)
images = images.astype("float32")
expected = classifier.predict(images, verbose=0)

"""
## Export

`preprocessing=True` puts the image converter into the file, which then takes pixels
from 0 to 255, as `predict` does. Leave it out for a file that takes what the backbone
takes. Batches may have any size.

The settings of the routers are those of the moment. After
`classifier.set_routing(capacity_factor=0.5)` the file would drop as many tokens.
"""

files = {}
for format, file in FILES.items():
    files[format] = FOLDER / file
    classifier.export(files[format], format=format, preprocessing=True, verbose=False)
    print(f"wrote {format}")

"""
## Run

Each file in the runtime that it is made for. Nothing below needs Keras. (OpenVINO
rounds products to bfloat16 on processors that have it, unless it is told not to.)
"""


def load(format, file):
    """A function from pixels to logits."""
    if format == "tf_saved_model":
        import tensorflow as tf

        loaded = tf.saved_model.load(str(file))
        return lambda x: loaded.serve(x).numpy()
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file))
        return lambda x: session.run(None, {"pixels": x})[0]
    if format == "litert":
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(model_path=str(file))
        index = interpreter.get_input_details()[0]["index"]
        output = interpreter.get_output_details()[0]["index"]

        def run(x):
            interpreter.resize_tensor_input(index, x.shape)
            interpreter.allocate_tensors()
            interpreter.set_tensor(index, x)
            interpreter.invoke()
            return interpreter.get_tensor(output)

        return run
    if format == "openvino":
        import openvino

        config = {"INFERENCE_PRECISION_HINT": "f32"}
        model = openvino.compile_model(str(file), config=config)
        return lambda x: next(iter(model(x).values()))
    import torch

    module = torch.export.load(file).module()
    return lambda x: module(torch.from_numpy(x)).detach().numpy()


def size(file):
    """Megabytes, with the files that belong to it."""
    parts = file.rglob("*") if file.is_dir() else file.parent.glob(f"{file.stem}.*")
    suffixes = {".xml": (".xml", ".bin")}.get(file.suffix, (file.suffix,))
    return (
        sum(
            part.stat().st_size
            for part in parts
            if part.is_file() and (file.is_dir() or part.suffix in suffixes)
        )
        / 2**20
    )


def milliseconds(run):
    """Median time of a batch."""
    seconds = []
    for _ in range(3 if SHORT else 20):
        start = time.perf_counter()
        run(images)
        seconds.append(time.perf_counter() - start)
    return 1e3 * np.median(seconds[1:])


def of_keras(x):
    prepared = x / 127.5 - 1.0
    return keras.ops.convert_to_numpy(classifier(prepared, training=False))


print(f"{'':16} {'MB':>6} {'ms for 64 images':>18} {'difference':>12}")
print(f"{'Keras, ' + keras.backend.backend():16} {'':6} {milliseconds(of_keras):18.1f}")
for format, file in files.items():
    run = load(format, file)
    difference = np.abs(run(images) - expected).max()
    for batch in (1, 3):
        part = run(images[:batch])
        assert np.abs(part - expected[:batch]).max() < 1e-3
    print(f"{format:16} {size(file):6.1f} {milliseconds(run):18.1f} {difference:12.0e}")

"""
## What cannot be exported

What a file could not do is refused at once, with the reason: routing at random, groups
that are a whole batch where its size is open, half precision or int8 where a format has
none.
"""

classifier.set_routing(priority="random")
try:
    classifier.export(FOLDER / "random.onnx", format="onnx")
except ValueError as error:
    print(f"refused: {error}")
