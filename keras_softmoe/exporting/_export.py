"""Exporting a model from any backend to any format."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import keras

from keras_softmoe.architecture import moe_layers_of
from keras_softmoe.checks import check_choice
from keras_softmoe.exporting._write import image_converter, write
from keras_softmoe.keras_adapter import flatten_layers
from keras_softmoe.routers import Router


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        suffix: str, how the name of the file ends; empty for a directory.
        backend: str, the backend of Keras that writes it.
        packages: tuple of str, what else has to be installed to write it.
        has_half_precision: bool, whether it takes models that compute in float16 or
            bfloat16.
        has_quantized: bool, whether it takes quantized models.
    """

    suffix: str
    backend: str
    packages: tuple = ()
    has_half_precision: bool = False
    has_quantized: bool = True


FORMATS = {
    "tf_saved_model": Format("", "tensorflow", has_half_precision=True),
    "onnx": Format(".onnx", "tensorflow", ("onnx", "tf2onnx")),
    "litert": Format(".tflite", "tensorflow", has_quantized=False),
    "openvino": Format(".xml", "tensorflow", ("openvino",), has_quantized=False),
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
    """Write a model as a file that runs without Keras and without this library.

    What is written is prediction: the routers with their settings as they are now,
    without noise and without dropout. A format is written by one backend, whichever is
    in use: SavedModel, ONNX, LiteRT and OpenVINO by TensorFlow, `.pt2` by PyTorch. On
    another one the model is handed to a process of its own that runs the right one, so
    that a file is the same from everywhere. That takes some seconds more.

    The models of this library have this function as their method `export`; it takes
    any other Keras model as well, with `SoftMoE` or `MoE` somewhere in it.

    Args:
        model: `keras.Model` that is built.
        filepath: str or path. What was there is replaced when the new file is complete.
        format: str, one of `FORMATS`:

            - `"tf_saved_model"`: a directory; `tf.saved_model.load(filepath).serve(x)`.
            - `"onnx"`: `.onnx`, for ONNX Runtime and others.
            - `"litert"`: `.tflite`, for the LiteRT (TFLite) interpreter; set the size
              of the batch with its `resize_tensor_input`.
            - `"openvino"`: `.xml`, and a `.bin` beside it with the weights.
            - `"torch"`: `.pt2`; `torch.export.load(filepath).module()(x)`.
        verbose: bool or `None`, whether to say what was written; `None` for yes.
        input_signature: `None` for batches of any size; or as in `keras.Model.export`,
            for example `[keras.InputSpec(shape=(8, 32, 32, 3), dtype="float32")]`.
        preprocessing: bool, whether the file takes pixels from 0 to 255 as users have
            them, of the model's size (or of the one in `input_signature`, from which
            they are resized), instead of prepared images. The model must have a
            preprocessor with an image converter, and images as its only input.
        **kwargs: options of the format, as in `keras.Model.export`.

    Raises:
        ValueError: if the format is unknown, the name of the file does not fit it, or
            the model has something that a file cannot hold: groups of the whole batch
            where its size is open, routing at random, half precision where the format
            has none, or classes that only the running program knows.
        ImportError: if a package that writes the format is not installed.
        RuntimeError: if the process that was to write the file failed.

    Examples:
        >>> model = ksm.models.ViTMoEImageClassifier.from_preset(
        ...     "soft_moe_tiny_patch4_16e_32_glyphs"
        ... )
        >>> model.export("classifier.onnx", format="onnx", preprocessing=True)
    """
    job = checked_job(model, filepath, format, input_signature, preprocessing, kwargs)
    backend = FORMATS[format].backend
    if keras.backend.backend() == backend:
        write(model, filepath, **job)
    else:
        if verbose is not False:
            print(f"Writing with {backend}, in a process of its own ...")
        with tempfile.TemporaryDirectory() as directory:
            run_jobs([save_job(model, filepath, job, backend, directory)], backend)
    if verbose is not False:
        print(f"Saved {format} at '{filepath}'.")


def checked_job(
    model, filepath, format, input_signature=None, preprocessing=False, options=None
):
    """What `write` has to know besides model and file, a dict.

    Raises:
        ValueError: as `export_model`.
        ImportError: as `export_model`.
    """
    _check(model, filepath, format, preprocessing)
    signature = _signature(model, input_signature)
    _check_groups(model, signature)
    if preprocessing and format == "torch":
        _check_size(model, signature)
    return {
        "format": format,
        "input_signature": signature,
        "preprocessing": preprocessing,
        "options": options or {},
    }


# === What cannot be exported ===


def _check(model, filepath, format, preprocessing):
    """Raise if it is known at once that the file cannot be written."""
    check_choice("format", format, tuple(FORMATS))
    suffix, backend, packages, has_half_precision, has_quantized = FORMATS[format]
    if suffix and Path(filepath).suffix != suffix:
        raise ValueError(
            f"The name of a file of format '{format}' ends in '{suffix}'. "
            f"Received: filepath={str(filepath)!r}."
        )
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(
            "Only a `keras.Model` that is built can be exported; call it once, or put "
            f"the layer into a functional model. Received: model={model!r}."
        )
    missing = [p for p in (backend, *packages) if find_spec(p) is None]
    if missing:
        raise ImportError(
            f"The format '{format}' is written with {' and '.join(missing)}, not "
            f"installed here: `pip install {' '.join(missing)}`."
        )
    if preprocessing:
        # Which says what is missing.
        image_converter(model)
    layers = flatten_layers(model)
    computed = {layer.compute_dtype for layer in layers}
    half = sorted(computed & {"float16", "bfloat16"})
    if half and not has_half_precision:
        raise ValueError(
            f"The format '{format}' takes models that compute in float32. Received: a "
            f"model with layers in {' and '.join(half)}. Load it with "
            "`from_preset(..., dtype='float32')`, or choose 'tf_saved_model' or "
            "'torch'."
        )
    if not has_quantized and any(getattr(x, "quantization_mode", 0) for x in layers):
        raise ValueError(
            f"The format '{format}' does not take quantized models. Export the model "
            "before it is quantized, and let the tools of the format do that (LiteRT: "
            "`optimizations=[tf.lite.Optimize.DEFAULT]`), or choose "
            f"{' or '.join(n for n, f in FORMATS.items() if f.has_quantized)}."
        )
    for router in layers:
        if isinstance(router, Router):
            _check_deterministic(router)
            _check_slots(router)


def _check_deterministic(router):
    random_logits = getattr(router, "random_logits", False)
    priority = getattr(router, "priority", None)
    if random_logits or priority == "random":
        raise ValueError(
            "A file gives the same result each time, so routing at random cannot be "
            f"exported. Received: {router.path} with random_logits={random_logits!r}, "
            f"priority={priority!r}. Change them with "
            "`set_routing(random_logits=False, priority='max')`."
        )


def _check_slots(router):
    if router.num_rows(1) is not None:
        factor = router.num_experts / router.choices_per_token
        raise ValueError(
            "A file holds slots, whose number is fixed. Received: "
            f"{router.path} with capacity_factor=None. Set one that drops nothing "
            f"either: `set_routing(capacity_factor={factor:g})`."
        )


def _check_groups(model, signature):
    """Raise if groups are to be the whole batch, and its size is open."""
    batches = {spec.shape[0] for spec in keras.tree.flatten(signature)}
    is_whole = any(layer.group_images is None for layer in moe_layers_of(model))
    if None in batches and is_whole:
        raise ValueError(
            "`group_images=None` routes a whole batch as one group, so the file has to "
            "know the size of the batch. Pass, for example, `input_signature="
            "[keras.InputSpec(shape=(8, 224, 224, 3))]`, or route so many images "
            "together with `set_routing(group_images=8)`. Received: "
            f"batch sizes {sorted(batches, key=str)}."
        )


def _check_size(model, signature):
    """Raise if pixels are to be resized in a `.pt2` file."""
    if tuple(signature[0].shape[1:3]) != tuple(model.input.shape[1:3]):
        raise ValueError(
            "PyTorch cannot export the resizing of images for batches of any size. "
            f"Received: input_signature={signature} for a model of images "
            f"{model.input.shape[1:]}. Leave `input_signature` out and resize the "
            "images before, or choose another format."
        )


# === What goes in ===


def _signature(model, input_signature):
    """A list with the inputs, each a `keras.InputSpec` or a structure of them."""
    if input_signature is None:
        if not hasattr(model, "input"):
            raise ValueError(
                f"A `{type(model).__name__}` does not say what its inputs look like. "
                "Pass `input_signature=[keras.InputSpec(shape=(None, ...))]`. "
                "Received: input_signature=None."
            )
        input_signature = [model.input]
    return keras.tree.map_structure(_as_spec, list(input_signature))


def _as_spec(tensor):
    return keras.InputSpec(
        dtype=keras.backend.standardize_dtype(tensor.dtype or "float32"),
        shape=tuple(tensor.shape),
        name=getattr(tensor, "name", None),
    )


# === Another process ===


def save_job(model, filepath, job, backend, directory):
    """Save what another process has to know to write a model, for `run_jobs`.

    Args:
        model: `keras.Model`.
        filepath: str or path of the file to write.
        job: dict of the other arguments of `write`.
        backend: str, that of the other process.
        directory: path of an empty directory.

    Returns:
        Path of a file.

    Raises:
        ValueError: if the other process could not know a class or an option.
    """
    saved, file = Path(directory, "model.keras"), Path(directory, "job.json")
    job = {
        **job,
        "model": str(saved),
        "filepath": str(Path(filepath).absolute()),
        "modules": _modules_of(model, job["format"], backend),
    }
    file.write_text(job_to_json(job, backend), encoding="utf-8")
    model.save(saved)
    return file


def run_jobs(jobs, backend):
    """Write what jobs say, in a process of its own.

    Args:
        jobs: list of paths from `save_job`.
        backend: str, of the process.

    Raises:
        RuntimeError: if it failed.
    """
    process = subprocess.run(
        [sys.executable, "-m", "keras_softmoe.exporting", *map(str, jobs)],
        # Not beside this process on an accelerator, whose memory it may hold.
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
            f"The process that was to export with {backend} failed. Its last words:\n"
            f"{process.stderr[-2000:]}"
        )


def _modules_of(model, format, backend):
    """Modules that register the classes of a model's layers, for another process."""
    layers = flatten_layers(model)
    modules = sorted({type(layer).__module__ for layer in layers})
    if "__main__" in modules:
        names = {type(x).__name__ for x in layers if type(x).__module__ == "__main__"}
        raise ValueError(
            f"The format '{format}' is written by another process, which does not know "
            f"classes of this program. Received: {', '.join(sorted(names))}, defined "
            "in `__main__`. Move them to a module that both can import, or run this "
            f"program with KERAS_BACKEND={backend}."
        )
    return [name for name in modules if name.split(".")[0] not in ("keras", "torch")]


def job_to_json(job, backend):
    """The text of a job, in which each `keras.InputSpec` is a dict."""

    def as_dict(value):
        if isinstance(value, keras.InputSpec):
            spec = {"shape": value.shape, "dtype": value.dtype, "name": value.name}
            return {"input_spec": spec}
        raise ValueError(
            f"The format '{job['format']}' is written by another process, to which "
            f"not every option can be sent. Received: {value!r} among the options "
            f"{sorted(job['options'])}. Leave it out, or export with "
            f"KERAS_BACKEND={backend}."
        )

    return json.dumps(job, default=as_dict)


def job_from_json(text):
    """What `job_to_json` was given."""

    def as_spec(value):
        if "input_spec" in value:
            return keras.InputSpec(**value["input_spec"])
        return value

    return json.loads(text, object_hook=as_spec)
