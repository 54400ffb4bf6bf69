"""Checkpoints written by the released code: read bit for bit, and converted."""

import ml_dtypes
import numpy as np
import pytest

from keras_softmoe import converters, models, routers
from tests.support import twins
from tests.support.close import assert_near
from tests.support.references import Reference, losses_of, to_numpy, unpack_checkpoints

TOLERANCE = 1e-4

# File of the arrays -> prefix of the checkpoint, prefix of the arrays' names
CHECKPOINTS = {
    "k_checkpoint_vmoe_tiny": ("ckpt", "params/"),
    "k_checkpoint_misc": ("misc_ckpt_1234", ""),
    "k_checkpoint_subchunks": ("sub_ckpt", ""),
}
MODEL = "k_checkpoint_vmoe_tiny"


@pytest.fixture(scope="module")
def prefix_of(tmp_path_factory):
    """Callable from a name to the prefix of the checkpoint's files."""
    folder = tmp_path_factory.mktemp("checkpoints")
    unpack_checkpoints(folder)
    return lambda name: folder / CHECKPOINTS[name][0]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_arrays_are_equal_bit_for_bit(name, prefix_of):
    reference = Reference(name)
    checkpoint = converters.read_checkpoint(prefix_of(name))
    _, names_below = CHECKPOINTS[name]
    dtypes = reference.config.get("dtypes", {})
    for key, array in checkpoint.items():
        expected = reference.given(names_below + key)
        dtype = dtypes.get(key, "float32")
        assert checkpoint.dtypes[key] == array.dtype == dtype
        assert checkpoint.shapes[key] == array.shape == expected.shape
        if dtype == "bfloat16":
            # NumPy's files have no such dtype, so they hold it widened.
            array = array.astype("float32")
        assert array.dtype == expected.dtype
        assert array.tobytes() == expected.tobytes()
    for key in ("images", "logits", "auxiliary_loss"):
        if key in reference:
            reference.given(key)
    reference.finish()


def router_of(moe):
    settings, dispatcher = moe["router"], moe["router"]["dispatcher"]
    weights = ("importance_loss_weight", "load_loss_weight")
    return routers.SoftmaxTokenChoiceRouter(
        moe["num_experts"],
        num_selected_experts=settings["num_selected_experts"],
        capacity_factor=dispatcher["capacity_factor"],
        rounding=dispatcher["capacity_ceil_or_round"],
        multiple_of=dispatcher["capacity_multiple_of"],
        priority="max" if dispatcher["batch_priority"] else "position",
        noise_std=settings["noise_std"],
        losses=losses_of(
            {name: settings[name] for name in weights}, settings["noise_std"]
        ),
    )


@pytest.fixture(scope="module")
def preset(tmp_path_factory, prefix_of):
    """Callable: the checkpoint, converted once, with the settings it was run with."""
    target = tmp_path_factory.mktemp("converted") / "vmoe_tiny"

    def convert(reference):
        moe = reference.config["model"]["encoder"]["moe"]
        num_tokens = reference.given("params/Encoder/posembed_input/pos_embedding")
        if not target.exists():
            converters.convert_vmoe_checkpoint(
                prefix_of(MODEL),
                target,
                router=router_of(moe),
                group_images=moe["group_size"] // num_tokens.shape[1],
                dispatch_dtype=None,
                verbose=0,
            )
        return str(target)

    return convert


def test_logits_of_the_converted_preset(preset):
    reference = Reference(MODEL)
    model = models.ViTMoEImageClassifier.from_preset(preset(reference))
    images = reference.given("images")
    settings = reference.config["model"]
    assert model.backbone.moe_layers == tuple(settings["encoder"]["moe"]["layers"])
    assert model.backbone.image_shape == images.shape[1:]
    reference.check("logits", model(images), TOLERANCE)
    decisions = model.backbone.route(images).values()
    losses = [to_numpy(d.summary["auxiliary_loss"]) for d in decisions]
    reference.check("auxiliary_loss", sum(losses), TOLERANCE)


def test_logits_with_tokens_in_bfloat16(preset):
    reference = Reference(MODEL)
    images = reference.given("images")
    params = reference.given_under("params/")
    # The plain model computes the saved logits, ...
    reference.check("logits", vmoe_logits(params, images, reference.config), TOLERANCE)
    # ... and with the released setting, which makes a difference, the same as ours.
    expected = vmoe_logits(params, images, reference.config, rounds=True)
    assert np.abs(expected - reference.given("logits")).max() > 10 * TOLERANCE
    model = models.ViTMoEImageClassifier.from_preset(
        preset(reference), dispatch_dtype="bfloat16"
    )
    assert_near(to_numpy(model(images)), expected, rtol=TOLERANCE, atol=TOLERANCE)


def vmoe_logits(params, images, config, rounds=False):
    """Logits of the model; `rounds`: tokens and experts' outputs to bfloat16."""
    encoder = config["model"]["encoder"]
    patch, _ = config["model"]["patch_size"]
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // patch, patch, width // patch, patch, -1)
    patches = grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, patch**2 * channels)
    kernel = params["embedding/kernel"]
    x = patches @ kernel.reshape(-1, kernel.shape[-1]) + params["embedding/bias"]
    token = np.broadcast_to(params["cls"], (batch, 1, x.shape[-1]))
    x = np.concatenate([token, x], axis=1)
    x = x + params["Encoder/posembed_input/pos_embedding"]
    for index in range(encoder["num_layers"]):
        name = f"Encoder/encoderblock_{index}"
        block = {
            key.removeprefix(f"{name}/"): value
            for key, value in params.items()
            if key.startswith(f"{name}/")
        }
        x = x + attention(block, layer_norm(x, block, "LayerNorm_0"))
        tokens = layer_norm(x, block, "LayerNorm_1")
        if index in encoder["moe"]["layers"]:
            x = x + mixture(block, tokens, encoder["moe"], rounds)
        else:
            x = x + mlp(block, "Mlp", tokens)
    x = layer_norm(x, params, "Encoder/encoder_norm")[:, 0]
    return x @ params["head/kernel"] + params["head/bias"]


def layer_norm(x, params, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * params[f"{name}/scale"] + params[f"{name}/bias"]


def attention(block, x):
    query, key, value = (
        np.einsum("bsd,dhe->bhse", x, block[f"SelfAttention/{name}/kernel"])
        + block[f"SelfAttention/{name}/bias"][:, None]
        for name in ("query", "key", "value")
    )
    scores = np.einsum("bhse,bhte->bhst", query, key) / np.sqrt(query.shape[-1])
    x = np.einsum("bhst,bhte->bshe", twins.softmax(scores), value)
    return (
        np.einsum("bshe,hed->bsd", x, block["SelfAttention/out/kernel"])
        + block["SelfAttention/out/bias"]
    )


def mlp(block, name, x, expert=...):
    x = x @ block[f"{name}/Dense_0/kernel"][expert]
    x = twins.gelu(x + block[f"{name}/Dense_0/bias"][expert])
    x = x @ block[f"{name}/Dense_1/kernel"][expert]
    return x + block[f"{name}/Dense_1/bias"][expert]


def mixture(block, tokens, moe, rounds):
    settings, dispatcher = moe["router"], moe["router"]["dispatcher"]
    assert moe["group_size"] == tokens.shape[1]
    gates = twins.softmax(tokens @ block["Moe/Router/dense/kernel"])
    capacity = twins.expert_capacity(
        moe["group_size"] * settings["num_selected_experts"],
        moe["num_experts"],
        dispatcher["capacity_factor"],
        dispatcher["capacity_ceil_or_round"],
        dispatcher["capacity_multiple_of"],
    )
    token, filled = twins.token_choice(
        gates, settings["num_selected_experts"], capacity, priority="max"
    )
    gate = twins.gates(gates, token, filled)
    dispatch, combine = twins.to_dense(token, filled, gate, tokens.shape[1])
    slots = twins.dispatch_tokens(to_bfloat16(tokens, rounds), dispatch)
    outputs = [
        mlp(block, "Moe/Mlp", slots[:, expert], expert)
        for expert in range(moe["num_experts"])
    ]
    outputs = to_bfloat16(np.stack(outputs, axis=1), rounds)
    return twins.combine_outputs(outputs, combine)


def to_bfloat16(x, rounds):
    """Round to bfloat16, by way of float32 as the released code has it."""

    return x.astype("f4").astype(ml_dtypes.bfloat16).astype("f8") if rounds else x
