"""Runs exported files with their own runtimes, in a process without our library.

python run_files.py JOBS, where the file JOBS holds a JSON list of dicts with `format`,
`file`, `inputs` (an `.npz` file with a batch for each name) and `outputs` (the `.npz`
file to write).
"""

import json
import sys

import numpy as np


def runner(format, file):
    """A function from a batch to the first output."""
    if format == "tf_saved_model":
        import tensorflow as tf

        loaded = tf.saved_model.load(file)
        return lambda x: first(loaded.serve(x)).numpy()
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(file)
        (name,) = (x.name for x in session.get_inputs())
        return lambda x: session.run(None, {name: x})[0]
    if format == "litert":
        from ai_edge_litert.interpreter import Interpreter

        return lambda x: run_litert(Interpreter(model_path=file), x)
    if format == "openvino":
        import openvino

        # Without it the product of matrices is rounded to bfloat16 on new processors.
        config = {"INFERENCE_PRECISION_HINT": "f32"}
        model = openvino.compile_model(file, config=config)
        return lambda x: next(iter(model(x).values()))
    import torch

    module = torch.export.load(file).module()
    return lambda x: first(module(torch.from_numpy(x))).detach().cpu().numpy()


def run_litert(interpreter, x):
    index = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(index, x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(index, x)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def first(outputs):
    return outputs[min(outputs)] if isinstance(outputs, dict) else outputs


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    for job in jobs:
        run = runner(job["format"], job["file"])
        inputs = np.load(job["inputs"])
        np.savez(job["outputs"], **{name: run(inputs[name]) for name in inputs})
    # TensorFlow brings Keras along by itself.
    assert "keras_softmoe" not in sys.modules and "keras_hub" not in sys.modules
