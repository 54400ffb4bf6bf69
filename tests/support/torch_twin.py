"""Vision Transformers in PyTorch's layouts, in plain NumPy.

Parameters are dicts under the names of `timm` and `transformers`; the forward pass is
what their code does. `test_torch_files.py` compares with them where they are installed.
"""

import math

import numpy as np

WIDTH, HEADS, MLP, LAYERS, PATCH, CLASSES = 12, 3, 20, 2, 4, 3
_TIMM = {
    "patch": "patch_embed.proj",
    "class": "cls_token",
    "distillation": "dist_token",
    "registers": "reg_token",
    "positions": "pos_embed",
    "norm": "norm",
    "head": "head",
    "pre_logits": "pre_logits.fc",
    "block": {
        "norm1": "blocks.{}.norm1",
        "norm2": "blocks.{}.norm2",
        "qkv": "blocks.{}.attn.qkv",
        "out": "blocks.{}.attn.proj",
        "fc1": "blocks.{}.mlp.fc1",
        "fc2": "blocks.{}.mlp.fc2",
        "scale1": "blocks.{}.ls1.gamma",
        "scale2": "blocks.{}.ls2.gamma",
    },
}
_HF = {
    "patch": "embeddings.patch_embeddings.projection",
    "class": "embeddings.cls_token",
    "distillation": "embeddings.distillation_token",
    "registers": "embeddings.register_tokens",
    "positions": "embeddings.position_embeddings",
    "norm": "layernorm",
    "head": "classifier",
    "pre_logits": "pooler.dense",
    "block": {
        "norm1": "encoder.layer.{}.layernorm_before",
        "norm2": "encoder.layer.{}.layernorm_after",
        "query": "encoder.layer.{}.attention.attention.query",
        "key": "encoder.layer.{}.attention.attention.key",
        "value": "encoder.layer.{}.attention.attention.value",
        "out": "encoder.layer.{}.attention.output.dense",
        "fc1": "encoder.layer.{}.intermediate.dense",
        "fc2": "encoder.layer.{}.output.dense",
    },
}
_DINO = {
    **_HF,
    "block": {
        **_HF["block"],
        "norm1": "encoder.layer.{}.norm1",
        "norm2": "encoder.layer.{}.norm2",
        "fc1": "encoder.layer.{}.mlp.fc1",
        "fc2": "encoder.layer.{}.mlp.fc2",
        "scale1": "encoder.layer.{}.layer_scale1.lambda1",
        "scale2": "encoder.layer.{}.layer_scale2.lambda1",
    },
}
NAMES = {"timm": _TIMM, "vit": _HF, "deit": _HF, "dinov2": _DINO}
# How many registers have a position, as `class_has_position` of the class token.
EPSILON = {"timm": 1e-6, "vit": 1e-12, "deit": 1e-12, "dinov2": 1e-6}


def state(kind, prefix="", registers=0, distillation=False, layer_scale=False, **more):
    """Random parameters.

    Args:
        kind: str, one of `NAMES`.
        prefix: str, what `transformers` puts in front of names inside a task.
        registers: int, number of registers.
        distillation: bool, whether there is a distillation token.
        layer_scale: bool.
        **more: `head` and `pre_logits`, bools; `positions`, int, how many tokens in
            front of the nine patches have positions.
    """
    names, rng, arrays = NAMES[kind], np.random.default_rng(3), {}

    def add(name, *shape, center=0.0):
        values = center + 0.3 * rng.normal(size=shape)
        arrays[name] = values.astype("float32")

    def dense(name, outputs, inputs):
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    def norm(name):
        add(f"{name}.weight", WIDTH, center=1.0)
        add(f"{name}.bias", WIDTH)

    add(f"{prefix}{names['patch']}.weight", WIDTH, 3, PATCH, PATCH)
    add(f"{prefix}{names['patch']}.bias", WIDTH)
    add(prefix + names["class"], 1, 1, WIDTH)
    if distillation:
        add(prefix + names["distillation"], 1, 1, WIDTH)
    if registers:
        add(prefix + names["registers"], 1, registers, WIDTH)
    covered = more.get("positions", 1 + distillation)
    add(prefix + names["positions"], 1, 9 + covered, WIDTH)
    block = {key: prefix + name for key, name in names["block"].items()}
    for i in range(LAYERS):
        norm(block["norm1"].format(i))
        norm(block["norm2"].format(i))
        if "qkv" in block:
            dense(block["qkv"].format(i), 3 * WIDTH, WIDTH)
        else:
            for key in ("query", "key", "value"):
                dense(block[key].format(i), WIDTH, WIDTH)
        dense(block["out"].format(i), WIDTH, WIDTH)
        dense(block["fc1"].format(i), MLP, WIDTH)
        dense(block["fc2"].format(i), WIDTH, MLP)
        if layer_scale:
            add(block["scale1"].format(i), WIDTH, center=1.0)
            add(block["scale2"].format(i), WIDTH, center=1.0)
    norm(prefix + names["norm"])
    if more.get("pre_logits"):
        dense(prefix + names["pre_logits"], WIDTH, WIDTH)
    if more.get("head"):
        dense(names["head"], CLASSES, WIDTH)
    return arrays


def forward(kind, arrays, images, prefix="", heads=HEADS):
    """Tokens and the vector that a head is put on (or its logits).

    Args:
        kind: str, one of `NAMES`.
        arrays: dict of parameters, for images of this size.
        images: `(B, height, width, 3)` array.
        prefix: as in `state`.
        heads: int.

    Returns:
        `(tokens, vector)`, `(B, S, D)` and `(B, D)` arrays.
    """
    names, epsilon = NAMES[kind], EPSILON[kind]

    def get(name):
        return arrays[prefix + name].astype("float64")

    def dense(x, name, prefix=prefix):
        weight, bias = (arrays[f"{prefix}{name}.{p}"] for p in ("weight", "bias"))
        return x @ weight.astype("float64").T + bias

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        return x * get(f"{name}.weight") + get(f"{name}.bias")

    x = _patches(images) @ get(f"{names['patch']}.weight").reshape(WIDTH, -1).T
    x = x + get(f"{names['patch']}.bias")
    tokens = [
        get(names[key])
        for key in ("class", "distillation", "registers")
        if prefix + names[key] in arrays
    ]
    positions = get(names["positions"])
    covered = positions.shape[1] - x.shape[1]
    tokens = np.concatenate(tokens, axis=1)
    tokens = tokens + np.pad(
        positions[:, :covered], ((0, 0), (0, tokens.shape[1] - covered), (0, 0))
    )
    tokens = np.broadcast_to(tokens, (len(x), *tokens.shape[1:]))
    x = np.concatenate([tokens, x + positions[:, covered:]], axis=1)
    for i in range(LAYERS):
        block = {key: name.format(i) for key, name in names["block"].items()}
        y = norm(x, block["norm1"])
        if "qkv" in block:
            query, key, value = np.split(dense(y, block["qkv"]), 3, axis=-1)
        else:
            query, key, value = (dense(y, block[k]) for k in ("query", "key", "value"))
        y = dense(_attend(query, key, value, heads), block["out"])
        has_scale = prefix + block.get("scale1", "-") in arrays
        x = x + y * (get(block["scale1"]) if has_scale else 1.0)
        y = dense(_gelu(dense(norm(x, block["norm2"]), block["fc1"])), block["fc2"])
        x = x + y * (get(block["scale2"]) if has_scale else 1.0)
    x = norm(x, names["norm"])
    vector = x[:, 0]
    if f"{prefix}{names['pre_logits']}.weight" in arrays:
        vector = np.tanh(dense(vector, names["pre_logits"]))
    if f"{names['head']}.weight" in arrays:
        vector = dense(vector, names["head"], prefix="")
    return x, vector


def _patches(images):
    """`(B, S, 3 * patch * patch)` in PyTorch's order: channels first."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // PATCH, PATCH, width // PATCH, PATCH, channels)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(batch, -1, channels * PATCH**2)


def _attend(query, key, value, heads):
    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    query, key, value = map(split, (query, key, value))
    logits = query @ key.transpose(0, 1, 3, 2) / math.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    means = (weights @ value).transpose(0, 2, 1, 3)
    return means.reshape(*means.shape[:2], -1)


def _gelu(x):
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
