"""From a released checkpoint to a preset directory."""

import contextlib
import importlib
import json
import os
import tempfile
from pathlib import Path

import keras

from keras_softmoe.converters.architecture import read_architecture
from keras_softmoe.converters.checkpoint import Checkpoint, read_checkpoint
from keras_softmoe.converters.vit import read_vit_checkpoint
from keras_softmoe.converters.vmoe import load_vmoe_params

_PACKAGE = __name__.partition(".")[0]


def convert_vmoe_checkpoint(
    prefix,
    preset_dir,
    image_shape=None,
    router=None,
    group_images=None,
    dispatch_dtype="bfloat16",
    pooling=None,
    position_embedding=None,
    preprocessor=None,
    verbose=1,
):
    """Convert a released V-MoE or ViT checkpoint to a preset directory.

    Names and shapes of the parameters tell nearly all of the model: sizes, which
    blocks have experts and how many, class token or pooling, pre-logits and head. The
    arguments say the rest. They are by default as the released V-MoE models have them,
    and whoever loads the preset can change them still.

    The model is built once in memory, and the arrays are read one at a time. The
    directory appears when all of it is written, or not at all.

    (This room knows no class of a model. It writes down the configuration of one,
    under the name by which Keras has it registered, and has Keras make it.)

    Args:
        prefix: str or path: the common part of a sharded checkpoint's files
            (`PREFIX.index`, `PREFIX.data-00000-of-00001`, ...), or the `.npz` file of
            an original Vision Transformer. With `://` in it (`gs://bucket/name`) it is
            read through `tf.io.gfile`. Or a `Checkpoint`.
        preset_dir: str or path of the directory to write. It must not exist yet, or be
            empty.
        image_shape: `(height, width, channels)` in pixels. By default a square, from
            the number of learned positions.
        router: a router from `keras_softmoe.routers`, a template. By default
            `SoftmaxTokenChoiceRouter(num_experts, num_selected_experts=2,
            capacity_factor=1.05)`, or the `SoftRouter` that the parameters belong to.
        group_images: int, images whose tokens are routed together. By default 8, and 1
            for a `SoftRouter`.
        dispatch_dtype: `"bfloat16"` or `None`, see `layers.MoE`. The released code
            rounds to bfloat16.
        pooling: `"gap"` (default) or `"first"`, for a checkpoint that has neither a
            class token nor attention pooling.
        position_embedding: `"sincos2d"` (default) or `"none"`, for a checkpoint
            without learned positions.
        preprocessor: a preprocessor of an image classifier. By default one that
            resizes to `image_shape` and maps pixels from 0..255 to -1..1.
        verbose: 0 or 1, whether to show a progress bar.

    Returns:
        str, `preset_dir`: with a classifier if the checkpoint has a head, otherwise
        with a backbone.

    Raises:
        CheckpointError: (a `ValueError`) if the checkpoint is damaged, or holds
            something else than such a model.
        ValueError: if an argument contradicts the checkpoint, or `preset_dir` holds
            files already.

    Source: V-MoE's released code (names, format and settings of its checkpoints).

    Example:

    >>> ksm.converters.convert_vmoe_checkpoint("downloads/vmoe_b16", "my_vmoe_b16")
    >>> model = ksm.models.ViTMoEImageClassifier.from_preset("my_vmoe_b16")
    """
    with _written_aside(preset_dir) as directory:
        checkpoint = _parameters(prefix)
        architecture = read_architecture(checkpoint.shapes)
        image_shape = architecture.image_shape(image_shape)
        arguments = {
            "image_shape": image_shape,
            "patch_size": architecture.patch_size,
            "num_layers": architecture.num_layers,
            "num_heads": architecture.num_heads,
            "hidden_dim": architecture.hidden_dim,
            "mlp_dim": architecture.mlp_dim,
            "pooling": architecture.pooling(pooling),
            "position_embedding": architecture.position_embedding(position_embedding),
            "use_qk_norm": architecture.use_qk_norm,
            "representation_dim": architecture.representation_dim,
            "dtype": "float32",
        }
        if architecture.moe_layers:
            if group_images is None:
                group_images = 8 if architecture.slots_per_expert is None else 1
            arguments |= {
                "moe_layers": architecture.moe_layers,
                "router": architecture.router(router),
                "group_images": group_images,
                "dispatch_dtype": dispatch_dtype,
            }
        if preprocessor is None:
            preprocessor = _registered("ViTMoEImageClassifierPreprocessor")(
                _registered("ViTMoEImageConverter")(image_size=image_shape[:2])
            )
        model = _registered("ViTMoEBackbone")(**arguments)
        if architecture.num_classes is not None:
            model = _registered("ViTMoEImageClassifier")(
                model, architecture.num_classes, preprocessor=preprocessor
            )
        load_vmoe_params(model, checkpoint, verbose=verbose)
        model.save_to_preset(directory)
        if architecture.num_classes is None:
            preprocessor.save_to_preset(directory)
        _note_origin(directory, prefix)
    return str(preset_dir)


def convert_as_configured(checkpoint, preset_dir, config, preprocessor, verbose=1):
    """Convert a checkpoint whose model is known beforehand.

    Args:
        checkpoint: `Checkpoint`.
        preset_dir: str or path of the directory to write, see
            `convert_vmoe_checkpoint`.
        config: dict, the configuration of the backbone as a preset has it, and
            `"num_classes"`. Whether there are pre-logits is left to the checkpoint.
        preprocessor: dict, the serialized preprocessor.
        verbose: 0 or 1, whether to show a progress bar.

    Raises:
        ValueError: if the checkpoint is another model's.
    """
    found = read_architecture(checkpoint.shapes)._asdict()
    router = keras.saving.deserialize_keras_object(config["router"])
    expected = {**config, "num_experts": router.num_experts}
    differing = [
        f"{key} is {value}, not {expected[key]}"
        for key, value in found.items()
        if key in expected and key != "representation_dim"
        # In JSON all sequences are lists.
        if (list(value) if isinstance(value, tuple) else value) != expected[key]
    ]
    if differing:
        raise ValueError(
            f"The checkpoint is that of another model: {'; '.join(differing)}."
        )
    convert_vmoe_checkpoint(
        checkpoint,
        preset_dir,
        image_shape=config["image_shape"],
        router=router,
        group_images=config["group_images"],
        dispatch_dtype=config["dispatch_dtype"],
        preprocessor=_revive(preprocessor),
        verbose=verbose,
    )


def _revive(config):
    """Make an object of this library from its serialized form.

    Keras finds a class by the name that it is registered under when its module is
    imported, and imports only modules of its own packages for that. Ours are imported
    here.

    Args:
        config: dict, as `keras.saving.serialize_keras_object` makes it.

    Returns:
        The object.
    """
    _import_models()
    return keras.saving.deserialize_keras_object(config)


def _registered(class_name):
    """A class of this library, by the name under which Keras has it registered."""
    _import_models()
    return keras.saving.get_registered_object(f"{_PACKAGE}>{class_name}")


def _import_models():
    importlib.import_module(f"{_PACKAGE}.models")


def _parameters(prefix):
    """The `Checkpoint` with the parameters of a model."""
    if isinstance(prefix, Checkpoint):
        checkpoint = prefix
    elif os.fspath(prefix).endswith(".npz"):
        checkpoint = read_vit_checkpoint(prefix)
    else:
        checkpoint = read_checkpoint(prefix)
    if any(name.startswith("params/") for name in checkpoint):
        # The state of a training: the optimizer's part is of no use here.
        return checkpoint.below("params/")
    return checkpoint


def _note_origin(directory, prefix):
    file = Path(directory, "metadata.json")
    metadata = json.loads(file.read_text(encoding="utf-8"))
    metadata |= {"kind": "converted", "checkpoint": str(prefix)}
    file.write_text(json.dumps(metadata, indent=4), encoding="utf-8")


@contextlib.contextmanager
def _written_aside(preset_dir):
    """Yield a directory to write to, which is put in place when all is written."""
    target = Path(preset_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"The directory '{target}' is not empty. Received: "
            f"preset_dir={str(preset_dir)!r}. Choose another one, or remove it."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}."
    ) as aside:
        new = Path(aside, "new")
        yield str(new)
        if target.exists():
            target.rmdir()
        new.rename(target)
