"""Write the presets that describe an architecture without weights.

    python presets/write_architectures.py

Their weights were never released (or, for the dense twins, are not ours to ship), so
a preset holds the configuration alone: `from_preset(name, load_weights=False)`. The
table says in which paper a model is described; nothing is built, so the largest costs
as little as the smallest.
"""

import json
from pathlib import Path

import keras

from keras_softmoe import models, presets, routers

PRESETS = Path(__file__).resolve().parent

# Width, blocks, heads, hidden width of an MLP. V-MoE calls another model "small".
SMALL = (384, 12, 6, 1536)
VMOE_SMALL = (512, 8, 8, 2048)
BASE = (768, 12, 12, 3072)
LARGE = (1024, 24, 16, 4096)

SOFT = {"pooling": "gap", "position_embedding": "sincos2d", "use_qk_norm": True}
SOFT_SOURCE = "Soft MoE, section 3.4 and table 2; never released"
VMOE_SOURCE = "V-MoE, section 3 and table 8"
VIT_SOURCE = "Dosovitskiy et al. 2021, table 1, and Soft MoE, table 2"


def main():
    second_half = {12: tuple(range(6, 12)), 24: tuple(range(12, 24))}
    for size, shape in (("small", SMALL), ("base", BASE), ("large", LARGE)):
        write(
            f"vit_{size}_patch16_224",
            f"Dense ViT, {shape[0]} wide, {shape[1]} blocks, patch 16 at 224 x 224.",
            VIT_SOURCE,
            shape,
            **SOFT,
        )
        write(
            f"soft_moe_{size}_patch16_128e_224",
            f"Soft MoE, {shape[0]} wide, {shape[1]} blocks, 128 experts with one slot "
            "in the second half, patch 16 at 224 x 224.",
            SOFT_SOURCE,
            shape,
            moe_layers=second_half[shape[1]],
            router=routers.SoftRouter(128),
            **SOFT,
        )
    for size, shape, patch in (("small", VMOE_SMALL, 32), ("base", BASE, 16)):
        write(
            f"vmoe_{size}_patch{patch}_every2_8e_224",
            f"V-MoE, {shape[0]} wide, {shape[1]} blocks, 8 experts in every second "
            f"block, K = 2, patch {patch} at 224 x 224.",
            VMOE_SOURCE,
            shape,
            patch_size=patch,
            moe_layers=tuple(range(1, shape[1], 2)),
            router=routers.SoftmaxTokenChoiceRouter(8, num_selected_experts=2),
            representation_dim=shape[0],
            group_images=8,
            equal_experts=True,
        )


def write(name, description, source, shape, patch_size=16, **arguments):
    hidden_dim, num_layers, num_heads, mlp_dim = shape
    config = {
        "image_shape": (224, 224, 3),
        "patch_size": patch_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        **arguments,
    }
    parameters = count_parameters(**config)
    router = keras.saving.serialize_keras_object(config.pop("router", None))
    directory = PRESETS / name
    directory.mkdir(exist_ok=True)
    converter = models.ViTMoEImageConverter(image_size=(224, 224))
    models.ViTMoEImageClassifierPreprocessor(converter).save_to_preset(str(directory))
    backbone = models.ViTMoEBackbone
    save(
        directory / presets.CONFIG_FILE,
        {
            "module": backbone.__module__,
            "class_name": backbone.__name__,
            "config": {"name": name, "trainable": True, "router": router, **config},
            "registered_name": f"keras_softmoe>{backbone.__name__}",
        },
    )
    save(
        directory / presets.METADATA_FILE,
        {
            "keras_version": keras.version(),
            "parameter_count": parameters,
            "tasks": ["ImageClassifier"],
            "kind": "architecture",
            "description": description,
            "source": source,
            "licence": "Apache-2.0",
        },
    )
    print(f"{name}: {parameters:,} parameters")


def count_parameters(
    image_shape,
    patch_size,
    num_layers,
    hidden_dim,
    mlp_dim,
    moe_layers=(),
    router=None,
    pooling="token",
    position_embedding="learned",
    use_qk_norm=False,
    representation_dim=None,
    num_heads=1,
    **_,
):
    """Parameters of a backbone, from its configuration alone."""
    height, width, channels = image_shape
    num_tokens = (height // patch_size) * (width // patch_size) + (pooling == "token")
    embedding = patch_size**2 * channels * hidden_dim + hidden_dim
    if pooling == "token":
        embedding += hidden_dim
    if position_embedding == "learned":
        embedding += num_tokens * hidden_dim
    attention = 4 * hidden_dim * (hidden_dim + 1)
    if use_qk_norm:
        attention += 2 * hidden_dim // num_heads
    norms = 4 * hidden_dim
    mlp = 2 * hidden_dim * mlp_dim + mlp_dim + hidden_dim
    total = embedding + num_layers * (attention + norms) + 2 * hidden_dim
    total += (num_layers - len(moe_layers)) * mlp
    if moe_layers:
        scores = hidden_dim * router.num_experts
        if isinstance(router, routers.SoftRouter):
            scores = scores * router.slots_per_expert + 1
        total += len(moe_layers) * (router.num_experts * mlp + scores)
    if representation_dim is not None:
        total += (hidden_dim + 1) * representation_dim
    return total


def save(file, content):
    aside = file.with_name(f".{file.name}.tmp")
    aside.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
    aside.replace(file)


if __name__ == "__main__":
    main()
