"""Export of a model from any backend to any format."""

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
from keras_softmoe.exporting.write import image_converter, write
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.routers import Router


class Format(NamedTuple):
    """Format of exported files.

    Attributes:
        suffix: str, suffix of the file; empty for a directory.
        backend: str, the backend of Keras that writes it.
        packages: tuple of str, other packages needed to write it.
        has_half_precision: bool, whether it supports models that compute in float16 or
            bfloat16.
        quantized: tuple of str, the modes of quantized models that it supports, `None`
            for all. (ONNX files would hold int4 kernels as float32.)
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

    The file computes predictions: the routers with their current settings, without
    noise and without dropout. Each format is written by one backend: SavedModel, ONNX,
    LiteRT and OpenVINO by TensorFlow, `.pt2` by PyTorch. On another backend the model
    is exported in a subprocess with that one, so that the file is the same. That takes
    some seconds more.

    It is the method `export` of this library's models, and also accepts any other Keras
    model with `SoftMoE` or `MoE` layers.

    Args:
        model: `keras.Model` that is built.
        filepath: str or path. An existing file is replaced when the new one is
            complete.
        format: str, one of:

            - `"tf_saved_model"`: a directory; `tf.saved_model.load(filepath).serve(x)`.
            - `"onnx"`: `.onnx`, for ONNX Runtime and others.
            - `"litert"`: `.tflite`, for the LiteRT (TFLite) interpreter; set the size
              of the batch with its `resize_tensor_input`.
            - `"openvino"`: `.xml`, and a `.bin` beside it with the weights.
            - `"torch"`: `.pt2`; `torch.export.load(filepath).module()(x)`.
        verbose: bool or `None`, whether to print a message; `None` for yes.
        input_signature: `None` for batches of any size; or as in `keras.Model.export`,
            for example `[keras.InputSpec(shape=(8, 32, 32, 3), dtype="float32")]`.
        preprocessing: bool, whether the inputs are pixels from 0 to 255, of the model's
            size (or of the size in `input_signature`, from which they are resized),
            instead of preprocessed images. The model must have a preprocessor with an
            image converter, and images as its only input.
        **kwargs: options of the format, as in `keras.Model.export`.

    Raises:
        ValueError: if the format is unknown, the name of the file does not fit it, or
            the model cannot be exported: groups of the whole batch with an open size,
            random routing, half precision or a quantization in a format without it, or
            classes defined in `__main__`.
        ImportError: if a package that writes the format is not installed.
        RuntimeError: if the subprocess that writes the file failed.

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
            print(f"Writing with {backend} in a subprocess ...")
        with tempfile.TemporaryDirectory() as directory:
            run_jobs([save_job(model, filepath, job, backend, directory)], backend)
    if verbose is not False:
        print(f"Saved {format} at '{filepath}'.")


def checked_job(
    model, filepath, format, input_signature=None, preprocessing=False, options=None
):
    """Return the other arguments of `write`, or raise as `export_model` does."""
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


# === Checks ===


def _check(model, filepath, format, preprocessing):
    """Raise if the model or the format cannot be exported."""
    check_choice("format", format, tuple(FORMATS))
    suffix, backend, packages, has_half_precision, quantized = FORMATS[format]
    if suffix and Path(filepath).suffix != suffix:
        raise ValueError(
            f"The name of a file of format '{format}' must end in '{suffix}'. "
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
        # It raises the error.
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
    modes = {getattr(layer, "quantization_mode", None) for layer in layers} - {None}
    if quantized is not None and modes - {*quantized}:
        taken = [
            name
            for name, other in FORMATS.items()
            if other.quantized is None or modes <= {*other.quantized}
        ]
        raise ValueError(
            f"The format '{format}' does not take models quantized to "
            f"{' and '.join(sorted(modes))}. Export the model "
            "before it is quantized, and let the tools of the format do that (LiteRT: "
            "`optimizations=[tf.lite.Optimize.DEFAULT]`), or choose "
            f"{' or '.join(taken)}. Received: format={format!r}."
        )
    for router in layers:
        if isinstance(router, Router):
            _check_router(router)


def _check_router(router):
    """Raise if a router is random, or has no fixed number of slots."""
    random_logits = getattr(router, "random_logits", False)
    priority = getattr(router, "priority", None)
    if random_logits or priority == "random":
        raise ValueError(
            "Random routing cannot be exported: an exported model must be "
            f"deterministic. Received: {router.path} with "
            f"random_logits={random_logits!r}, "
            f"priority={priority!r}. Change them with "
            "`set_routing(random_logits=False, priority='max')`."
        )
    if router.num_rows(1) is not None:
        factor = router.num_experts / router.choices_per_token
        raise ValueError(
            "An exported model has a fixed number of slots. Received: "
            f"{router.path} with capacity_factor=None. Set one that drops nothing "
            f"either: `set_routing(capacity_factor={factor:g})`."
        )


def _check_groups(model, signature):
    """Raise if a group is the whole batch and the batch size is open."""
    batches = {spec.shape[0] for spec in keras.tree.flatten(signature)}
    is_whole = any(layer.group_images is None for layer in moe_layers_of(model))
    if None in batches and is_whole:
        raise ValueError(
            "`group_images=None` routes a whole batch as one group, so the size of the "
            "batch must be known. Pass, for example, `input_signature="
            "[keras.InputSpec(shape=(8, 224, 224, 3))]`, or set the size of a group "
            "with `set_routing(group_images=8)`. Received: "
            f"batch sizes {sorted(batches, key=str)}."
        )


def _check_size(model, signature):
    """Raise if a `.pt2` file would have to resize pixels."""
    if tuple(signature[0].shape[1:3]) != tuple(model.input.shape[1:3]):
        raise ValueError(
            "PyTorch cannot export the resizing of images for batches of any size. "
            f"Received: input_signature={signature} for a model of images "
            f"{model.input.shape[1:]}. Leave `input_signature` out and resize the "
            "images before, or choose another format."
        )


# === Inputs ===


def _signature(model, input_signature):
    """Return a list of the inputs, each a `keras.InputSpec` or a structure of them."""
    if input_signature is None:
        if not hasattr(model, "input"):
            raise ValueError(
                f"The inputs of a `{type(model).__name__}` are unknown. "
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
    """Save a model and a job for `run_jobs`.

    Args:
        model: `keras.Model`.
        filepath: str or path of the file to write.
        job: dict, the other arguments of `write`.
        backend: str, backend of the subprocess.
        directory: path of an empty directory.

    Returns:
        Path of a file.

    Raises:
        ValueError: if a class or an option cannot be passed to the subprocess.
    """
    saved, file = Path(directory, "model.keras"), Path(directory, "job.json")
    job = {
        **job,
        "model": str(saved),
        "filepath": str(Path(filepath).absolute()),
        "modules": _modules_of(model, job["format"], backend),
    }

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

    file.write_text(json.dumps(job, default=as_dict), encoding="utf-8")
    model.save(saved)
    return file


def run_jobs(jobs, backend):
    """Run jobs in a subprocess.

    Args:
        jobs: list of paths from `save_job`.
        backend: str, backend of the subprocess.

    Raises:
        RuntimeError: if it failed.
    """
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


def _modules_of(model, format, backend):
    """Return the modules that register the classes of a model's layers."""
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
