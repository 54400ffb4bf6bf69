"""Export of a model from any backend to any format."""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import keras

from keras_softmoe.architecture import moe_layers_of
from keras_softmoe.checks import check_choice, received
from keras_softmoe.exporting.write import image_converter, write
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.routers import Router


class Format(NamedTuple):
    """Format of exported files.

    `suffix` of a directory is empty, `backend` writes the files, `packages` are needed
    to write them, and `quantized` are the supported modes, `None` for all.
    """

    suffix: str
    backend: str
    packages: tuple = ()
    has_half_precision: bool = False
    quantized: tuple | None = None


FORMATS = {
    "tf_saved_model": Format("", "tensorflow", has_half_precision=True),
    "onnx": Format(".onnx", "tensorflow", ("onnx", "tf2onnx"), quantized=("int8",)),
    "litert": Format(".tflite", "tensorflow", quantized=()),
    "openvino": Format(".xml", "tensorflow", ("openvino",), quantized=()),
    "torch": Format(".pt2", "torch", has_half_precision=True),
}


def export_model(
    model: keras.Model,
    filepath: str | os.PathLike,
    format: str = "tf_saved_model",
    verbose: bool | None = None,
    input_signature: Sequence | None = None,
    preprocessing: bool = False,
    **kwargs,
) -> None:
    """Export a model to a file that runs without Keras and without this library.

    The file computes predictions, with the current settings of routers. Some formats
    are written by TensorFlow, `.pt2` by PyTorch; on another backend in a subprocess.
    Models of this library have it as their method `export`.

    Args:
        model: `keras.Model` that is built.
        filepath: str or path, replaced when the new file is complete.
        format: str, one of:

            - `"tf_saved_model"`: a directory; `tf.saved_model.load(filepath).serve(x)`.
            - `"onnx"`: `.onnx`, for ONNX Runtime and others.
            - `"litert"`: `.tflite`, for the LiteRT interpreter.
            - `"openvino"`: `.xml`, and a `.bin` beside it with the weights.
            - `"torch"`: `.pt2`; `torch.export.load(filepath).module()(x)`.
        verbose: bool or `None`, whether to print a message; `None` for yes.
        input_signature: `None` for batches of any size; or as in `keras.Model.export`,
            for example `[keras.InputSpec(shape=(8, 32, 32, 3), dtype="float32")]`.
        preprocessing: bool, whether the inputs are pixels from 0 to 255, of the model's
            size or of that in `input_signature`, for its own image converter.
        **kwargs: options of the format, as in `keras.Model.export`.

    Raises:
        ValueError: if a format is unknown, or does not fit the name or the model.
        ImportError: if a package that writes the format is not installed.
        RuntimeError: if the subprocess that writes the file failed.

    Examples:
        >>> name = "soft_moe_tiny_patch8_16e_32_icons"
        >>> model = ksm.models.ViTMoEImageClassifier.from_preset(name)
        >>> model.export("classifier.onnx", format="onnx", preprocessing=True)
    """
    job = checked_job(model, filepath, format, input_signature, preprocessing, kwargs)
    backend = FORMATS[format].backend
    if keras.backend.backend() == backend:
        write(model, filepath, **job)
    else:
        if verbose is not False:
            print(f"Writing with {backend} in a subprocess ...")
        with tempfile.TemporaryDirectory() as directory:
            run_jobs([save_job(model, filepath, job, backend, directory)], backend)
    if verbose is not False:
        print(f"Saved {format} at '{filepath}'.")


def checked_job(
    model, filepath, format, input_signature=None, preprocessing=False, options=None
):
    """Return the other arguments of `write`, or raise as `export_model` does."""
    if preprocessing:
        image_converter(model)  # raises without one
    _check(model, filepath, format)
    signature = _signature(model, input_signature)
    batches = {spec.shape[0] for spec in keras.tree.flatten(signature)}
    # For predictions of single images `None` is no batch.
    whole = any(m.images_of_group() is None for m in moe_layers_of(model))
    if None in batches and whole:
        raise ValueError(
            "`group_images=None` routes a whole batch as one group, so "
            "`input_signature` must have the size of the batch. Received: batch sizes "
            f"{sorted(batches, key=str)}. Another way is `set_routing(group_images=8)`."
        )
    if preprocessing and format == "torch":
        sizes = [tuple(x.shape[1:3]) for x in (signature[0], model.input)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "PyTorch cannot export the resizing of images for batches of any size. "
                f"Received: input_signature={signature} for a model of images "
                f"{model.input.shape[1:]}."
            )
    return {
        "format": format,
        "input_signature": signature,
        "preprocessing": preprocessing,
        "options": options or {},
    }


def _check(model, filepath, format):
    """Raise if the model or the format cannot be exported."""
    check_choice("format", format, tuple(FORMATS))
    suffix, backend, packages, has_half_precision, quantized = FORMATS[format]
    if suffix and Path(filepath).suffix != suffix:
        raise ValueError(
            f"The name of a file of format '{format}' must end in '{suffix}'. "
            + received(filepath=str(filepath))
        )
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(
            f"`model` must be a `keras.Model` that is built. {received(model=model)}"
        )
    missing = [p for p in (backend, *packages) if find_spec(p) is None]
    if missing:
        raise ImportError(
            f"The format '{format}' is written with {' and '.join(missing)}, not "
            f"installed here: `pip install {' '.join(missing)}`."
        )
    layers = flatten_layers(model)
    half = sorted({layer.compute_dtype for layer in layers} & {"float16", "bfloat16"})
    if half and not has_half_precision:
        raise ValueError(
            f"A model in the format '{format}' must compute in float32. Received: a "
            f"model with layers in {' and '.join(half)}. Load it with "
            "`from_preset(..., dtype='float32')`, or choose another format: "
            "'tf_saved_model', 'torch'."
        )
    modes = {getattr(layer, "quantization_mode", None) for layer in layers} - {None}
    if quantized is not None and modes - {*quantized}:
        others = {name: other.quantized for name, other in FORMATS.items()}
        possible = [n for n, q in others.items() if q is None or modes <= {*q}]
        raise ValueError(
            f"The format '{format}' has no models quantized to "
            f"{' and '.join(sorted(modes))}. Export the model before it is quantized, "
            f"or choose {' or '.join(possible)}. {received(format=format)}"
        )
    for router in (layer for layer in layers if isinstance(layer, Router)):
        random_logits = getattr(router, "random_logits", False)
        priority = getattr(router, "priority", None)
        if random_logits or priority == "random":
            raise ValueError(
                "Random routing cannot be exported: an exported model must be "
                f"deterministic. Received: {router.path} with {random_logits=}, "
                f"{priority=}. Call `set_routing(random_logits=False, priority='max')`."
            )
        rows = router.num_rows(1)
        factor = rows and router.num_experts / rows
        if factor and factor > 1:
            less = 2 if factor > 2 else 1.05
            warnings.warn(
                f"{router.path} predicts without a capacity: in an exported model each "
                f"expert computes all tokens of an image, {factor:g} times the compute."
                f" `set_routing(eval_capacity_factor={less})` computes less, and drops "
                "tokens of full experts.",
                stacklevel=4,
            )
            break


def _signature(model, input_signature):
    """Return a list of the inputs, each a `keras.InputSpec` or a structure of them."""
    if input_signature is None and not hasattr(model, "input"):
        raise ValueError(
            f"The inputs of a `{type(model).__name__}` are unknown, so "
            "`input_signature` must be given: `[keras.InputSpec(shape=(None, ...))]`. "
            + received(input_signature=input_signature)
        )

    def as_spec(tensor):
        return keras.InputSpec(
            dtype=keras.backend.standardize_dtype(tensor.dtype or "float32"),
            shape=tuple(tensor.shape),
            name=getattr(tensor, "name", None),
        )

    given = [model.input] if input_signature is None else list(input_signature)
    return keras.tree.map_structure(as_spec, given)


def save_job(model, filepath, job, backend, directory):
    """Save a model and a job for `run_jobs`, and return the path of the job."""
    saved, file = Path(directory, "model.keras"), Path(directory, "job.json")
    layers = flatten_layers(model)
    own = {type(x).__name__ for x in layers if type(x).__module__ == "__main__"}
    other_process = (
        f"The format '{job['format']}' is written by another process, to which {{}} "
        f"cannot be sent. Received: {{}}. Run it all with KERAS_BACKEND={backend}."
    )
    if own:
        names = ", ".join(sorted(own))
        raise ValueError(other_process.format("classes defined in `__main__`", names))
    modules = sorted({type(layer).__module__ for layer in layers})
    job = {
        **job,
        "model": str(saved),
        "filepath": str(Path(filepath).absolute()),
        # They register the classes of layers.
        "modules": [m for m in modules if m.split(".")[0] not in ("keras", "torch")],
    }

    def as_dict(value):
        if isinstance(value, keras.InputSpec):
            spec = {"shape": value.shape, "dtype": value.dtype, "name": value.name}
            return {"input_spec": spec}
        options = f"{value!r} among the options {sorted(job['options'])}"
        raise ValueError(other_process.format("such an option", options))

    file.write_text(json.dumps(job, default=as_dict), encoding="utf-8")
    model.save(saved)
    return file


def run_jobs(jobs, backend):
    """Run jobs, paths from `save_job`, in a subprocess with a backend."""
    process = subprocess.run(
        [sys.executable, "-m", "keras_softmoe.exporting", *map(str, jobs)],
        # Not on an accelerator, whose memory this process may occupy.
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(
            f"Export with {backend} failed in a subprocess. End of stderr:\n"
            f"{process.stderr[-2000:]}"
        )
