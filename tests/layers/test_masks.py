"""Masked tokens: the others are routed as in a sequence without them.

Slots and losses of groups of different lengths are in `routers/sparse.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, models, ops, routers
from keras_softmoe.layers.limoe_block import LIMoEBlock
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients, outputs
from tests.support.references import assert_each_near, to_numpy

LOSSES = (
    routers.RoutingLoss(ops.importance_loss),
    routers.RoutingLoss(ops.gshard_loss),
    routers.RoutingLoss(ops.z_loss),
)
ROUTERS = {
    "soft": lambda: routers.SoftRouter(4, 2),
    "uniform": lambda: routers.SoftRouter(4, 2, dispatch="uniform", combine="uniform"),
    "token choice": lambda: routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=0.75, noise_std=0.0
    ),
    "batch priority": lambda: routers.SoftmaxTokenChoiceRouter(
        4, priority="max", capacity_factor=0.5, noise_std=0.0
    ),
    "pair priority": lambda: routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, priority="pair", capacity_factor=0.5, noise_std=0.0
    ),
    "balanced": lambda: routers.SoftmaxTokenChoiceRouter(
        4, 2, capacity_factor=0.75, score="sigmoid", bias_update_rate=0.1
    ),
    "race": lambda: routers.ExpertRaceRouter(4, 2, capacity_factor=0.75),
    "dropless": lambda: routers.SoftmaxTokenChoiceRouter(
        4, capacity_factor=None, losses=LOSSES, noise_std=0.0
    ),
    "skipping": lambda: routers.SoftmaxTokenChoiceRouter(
        4, priority="sum", keep_fraction=0.6, noise_std=0.0
    ),
    "Sinkhorn token choice": lambda: routers.SinkhornTokenChoiceRouter(
        4, num_selected_experts=2, combine="plan", noise_std=0.0
    ),
    "expert choice": lambda: routers.SoftmaxExpertChoiceRouter(4),
    "Sinkhorn expert choice": lambda: routers.SinkhornExpertChoiceRouter(
        4, combine="plan", losses=LOSSES, noise_std=0.0
    ),
    "sparse transport": lambda: routers.SparseTransportExpertChoiceRouter(4),
    "identity": lambda: routers.IdentityRouter(4),
}
LENGTH, PADDED, WIDTH = 12, 16, 5
# What masked tokens hold: nothing of it may arrive anywhere.
WORST = np.array([np.nan, np.inf, -np.inf, 1e30], "float32")


def padded(batch, seed=0):
    """Short sequences; the same with tokens between that are masked; where they are."""
    rng = np.random.default_rng(seed)
    real = np.sort(rng.permutation(PADDED)[:LENGTH])
    short = rng.normal(size=(batch, LENGTH, WIDTH)).astype("float32")
    long = rng.normal(size=(batch, PADDED, WIDTH)).astype("float32")
    mask = np.zeros((batch, PADDED), bool)
    mask[:, real] = True
    long[~mask] = np.resize(WORST, (batch * (PADDED - LENGTH), 1))
    long[:, real] = short
    return short, long, mask, real


def squares(x, losses):
    return keras.ops.sum(keras.ops.square(x)) + sum(losses)


@pytest.mark.parametrize(
    ("router", "group_images", "dispatcher"),
    [
        *((name, 4, "auto") for name in ROUTERS),
        *((name, 1, "auto") for name in ("soft", "batch priority")),
        *((name, None, "gather") for name in ("soft", "expert choice", "identity")),
        *((name, 4, "einsum") for name in ("dropless", "Sinkhorn token choice")),
    ],
)
def test_like_a_shorter_sequence(router, group_images, dispatcher):
    """Outputs, losses and gradients, also where images fill up the last group."""
    layer = layers.MoE(
        ROUTERS[router](), 8, group_images=group_images, dispatcher=dispatcher
    )
    short, long, mask, real = padded(batch=6)
    layer.build(long.shape)
    expected = outputs(layer, short)
    found = outputs(lambda x: layer(x, mask=mask), long)
    assert_near(found[:, real], expected, atol=1e-5)
    assert not found[~mask].any()

    loss, of_inputs, of_weights = layer_gradients(layer, short, squares, training=True)
    masked = layer_gradients(layer, long, squares, mask=mask, training=True)
    np.testing.assert_allclose(masked[0], loss, rtol=1e-5)
    assert_near(masked[1][:, real], of_inputs, atol=1e-5)
    assert not masked[1][~mask].any()
    assert_each_near(masked[2], of_weights, rtol=1e-7)


@pytest.mark.parametrize("router", ROUTERS)
def test_sequence_without_any_token(router):
    """Zeros, and gradients that are finite; the other sequences as they were."""
    layer = layers.MoE(ROUTERS[router](), mlp_dim=8)
    _, long, mask, _ = padded(batch=3)
    mask[1] = False
    long[~mask] = np.nan
    layer.build(long.shape)
    rest = mask[[0, 2]]
    alone = outputs(lambda x: layer(x, mask=rest), long[[0, 2]])
    found = outputs(lambda x: layer(x, mask=mask), long)
    assert_near(found[[0, 2]], alone, atol=1e-6)
    assert not found[1].any()
    loss, of_inputs, of_weights = layer_gradients(
        layer, long, squares, mask=mask, training=True
    )
    without = layer_gradients(layer, long[[0, 2]], squares, mask=rest, training=True)
    np.testing.assert_allclose(loss, without[0], rtol=1e-5)
    for gradient in (of_inputs, *of_weights.values()):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    "settings", [{"priority": "random"}, {"random_logits": "permuted"}]
)
def test_random_choices(settings):
    """Drawn as if masked tokens held zeros."""
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=0.5, **settings)
    layer = layers.MoE(router, mlp_dim=8, group_images=2)
    _, long, mask, _ = padded(batch=3)
    layer.build(long.shape)

    def call(x):
        layer.router.seed_generator.state.assign([1, 2])
        return to_numpy(layer(x, mask=mask, training=True))

    np.testing.assert_array_equal(call(long), call(np.where(mask[..., None], long, 0)))


@pytest.mark.parametrize("router", ["soft", "batch priority"])
def test_statistics_leave_masked_tokens_out(router):
    layer = layers.MoE(ROUTERS[router](), mlp_dim=8)
    _, long, mask, _ = padded(batch=2)
    with routers.record() as decisions:
        layer(long, mask=mask)
    (decision,) = decisions.values()
    np.testing.assert_array_equal(to_numpy(decision.summary["valid"]), mask)
    for name, values in decision.summary.items():
        assert np.isfinite(to_numpy(values)).all(), name
    if router == "soft":
        assert not to_numpy(decision.routing.dispatch)[~mask].any()
    else:
        assert not to_numpy(decision.summary["dropped"])[~mask].any()
        # Half of 12 tokens for 4 experts: 1.5, which is 2; of 16 it would be as many.
        assert to_numpy(decision.summary["load"]).max() <= 2


@pytest.mark.parametrize("mlp", ["dense", "soft", "token choice"])
def test_encoder_block(mlp):
    """A block is one for the shorter sequence, gradients of its weights included."""
    experts = layers.MLP(8) if mlp == "dense" else layers.MoE(ROUTERS[mlp](), 8)
    layer = layers.EncoderBlock(2, experts, use_qk_norm=True, layer_scale=0.5)
    rng = np.random.default_rng(0)
    _, long, mask, real = padded(batch=2)
    long = np.concatenate([long, np.where(mask[..., None], long[..., :3], 0)], -1)
    short = long[:, real]
    layer.build(long.shape)
    for weight in layer.weights:
        weight.assign(rng.normal(size=weight.shape))

    def loss(y, losses):
        y = keras.ops.take(y, real, axis=1) if y.shape[1] == PADDED else y
        return squares(y, losses)

    expected = layer_gradients(layer, short, loss, training=True)
    found = layer_gradients(layer, long, loss, mask=mask, training=True)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    assert_near(found[1][:, real], expected[1], rtol=1e-3, atol=1e-3)
    assert not found[1][~mask].any()
    for path, gradient in expected[2].items():
        scale = np.abs(gradient).max()
        assert_near(found[2][path] / scale, gradient / scale, atol=1e-4, err_msg=path)


def test_attention_pooling():
    """Of a sequence without any token: as of zeros. The others as without padding."""
    layer = layers.AttentionPooling(num_heads=1, mlp_dim=8)
    short, long, mask, _ = padded(batch=3)
    mask[2] = False
    long[~mask] = np.nan
    layer.build(long.shape)
    for weight in layer.weights:
        weight.assign(np.random.default_rng(0).normal(size=weight.shape))
    found = layer_gradients(layer, long, squares, mask=mask)
    short[2] = 0
    expected = layer_gradients(layer, short, squares)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert not found[1][~mask].any()
    assert_each_near(found[2], expected[2], rtol=1e-3, atol=1e-3)


MASKED = {
    "soft": lambda: layers.SoftMoE(4, mlp_dim=8),
    "sparse": lambda: layers.MoE(ROUTERS["batch priority"](), 8, group_images=2),
    "identity": lambda: layers.MoE(ROUTERS["identity"](), 8),
    "block": lambda: layers.EncoderBlock(1, layers.MLP(8)),
    "LIMoE": lambda: LIMoEBlock(1, layers.MoE(routers.LIMoERouter(2), 8)),
    "pooling": lambda: layers.AttentionPooling(num_heads=1, mlp_dim=8),
}


@pytest.mark.parametrize("floatx", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MASKED)
def test_masks_of_any_dtype(name, floatx):
    """Tokenizers give int32. Keras on JAX makes float32 of bools beside bfloat16."""
    _, long, mask, _ = padded(batch=3)
    keras.config.set_floatx(floatx)
    is_limoe = name == "LIMoE"
    try:
        layer = MASKED[name]()
        x = {"text": long} if is_limoe else long
        masks = [mask, *(mask.astype(dtype) for dtype in ("int32", "float32"))]
        masks += [keras.ops.convert_to_tensor(m, m.dtype.name) for m in masks]
        found = [layer(x, mask={"text": m} if is_limoe else m) for m in masks]
        found = [to_numpy(y["text"] if is_limoe else y) for y in found]
    finally:
        keras.config.set_floatx("float32")
    assert np.isfinite(found[0]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_mask_of_an_embedding_arrives():
    """`Embedding(mask_zero=True)` in a model, and the layers after ours."""
    ids = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(10, 8, mask_zero=True)(ids)
    x = layers.SoftMoE(4, mlp_dim=8, name="moe")(x)
    x = layers.EncoderBlock(2, layers.SoftMoE(2, mlp_dim=8))(x)
    model = keras.Model(ids, keras.layers.GlobalAveragePooling1D()(x))
    short = keras.Sequential([keras.Input((3,), dtype="int32"), *model.layers[1:]])
    text = np.array([[1, 2, 3], [4, 5, 6]])
    expected = outputs(short, text)
    assert_near(outputs(model, np.pad(text, ((0, 0), (0, 3)))), expected, atol=1e-6)


TEXT = {**tiny.SIZES_OF_BLOCKS, "vocabulary_size": 20, "moe_layers": (1,)}


def long_and_short(cls, settings):
    """Backbones for texts of eight and of four tokens, with the same weights."""
    long, short = (cls(sequence_length=n, **settings) for n in (8, 4))
    for to, of in zip(short.weights, long.weights, strict=True):
        value = to_numpy(of)
        to.assign(value[:, :4] if value.shape != tuple(to.shape) else value)
    return long, short


@pytest.mark.parametrize("pooling", ["last", "first", "gap", "gmp", "map"])
def test_text_tower(pooling):
    """With `mask_padding` a padded text is a shorter one."""
    settings = {
        **TEXT,
        "router": routers.SoftmaxTokenChoiceRouter(2, capacity_factor=1.0),
        "pooling": pooling,
        "mask_padding": True,
    }
    long, short = long_and_short(models.TextMoEBackbone, settings)
    text = np.array([[1, 2, 3, 4], [5, 6, 7, 1]])
    expected = outputs(short, text)["pooled_output"]
    # The third text is empty.
    found = outputs(long, np.pad(text, ((0, 1), (0, 4))))["pooled_output"]
    assert_near(found[:2], expected, atol=1e-5)
    assert np.isfinite(found).all()
    assert models.TextMoEBackbone.from_config(long.get_config()).mask_padding


def test_limoe_masks_padding_on_request():
    """Text that is padded is routed like a shorter one, beside images."""
    settings = {
        **tiny.SIZES,
        **TEXT,
        "router": routers.LIMoERouter(2),
        "group_images": 2,
        "mask_padding": True,
    }
    long, short = long_and_short(models.LIMoEBackbone, settings)
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    text = np.array([[1, 2, 3, 4], [5, 6, 7, 1]])
    expected = outputs(short, {"images": images, "token_ids": text})
    padding = np.pad(text, ((0, 0), (0, 4)))
    found = outputs(long, {"images": images, "token_ids": padding})
    for name in ("image_embedding", "text_embedding"):
        assert_near(found[name], expected[name], atol=1e-5)
    expected = outputs(short.text_encoder, text)["text_embedding"]
    found = outputs(long.text_encoder, padding)["text_embedding"]
    assert_near(found, expected, atol=1e-5)
    # As in the paper if it is not asked for.
    plain = models.LIMoEBackbone(
        sequence_length=8, **{**settings, "mask_padding": False}
    )
    assert to_numpy(plain.route(images, padding)[1].summary["valid"]).all()


# === Several axes of tokens ===


@pytest.mark.parametrize("router", ["soft", "expert choice"])
def test_tokens_of_any_rank(router):
    """A feature map and a video are the sequences of their tokens."""
    layer = layers.MoE(ROUTERS[router](), mlp_dim=8, group_images=2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 4, 3, 5)).astype("float32")
    mask = rng.random((3, 2, 4, 3)) < 0.8
    flat, flat_mask = x.reshape(3, 24, 5), mask.reshape(3, 24)
    expected = outputs(lambda x: layer(x, mask=flat_mask), flat)
    found = outputs(lambda x: layer(x, mask=mask), x)
    assert_near(found.reshape(3, 24, 5), expected, atol=1e-6)
    inputs = keras.Input((2, 4, 3, 5))
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, 2, 4, 3, 5)
    assert_near(outputs(model, x).reshape(3, 24, 5), outputs(layer, flat), atol=1e-6)


def test_tokens_without_an_axis():
    router = routers.SoftmaxTokenChoiceRouter(2)
    message = (
        r"\(batch, ..., width\). Received: .*\(16, 64\), with 2 axes.*`tokens\[None\]`"
    )
    for layer in (layers.SoftMoE(2, mlp_dim=4), layers.MoE(router, mlp_dim=4)):
        for tokens in (np.zeros((16, 64), "float32"), keras.KerasTensor((16, 64))):
            with pytest.raises(ValueError, match=message):
                layer(tokens)
            with pytest.raises(ValueError, match=r"\(groups.*Received: .*\(16, 64\)"):
                router(tokens)
    with pytest.raises(ValueError, match="width is known beforehand.*keras.Input"):
        layers.SoftMoE(2, mlp_dim=4)(keras.Input((7, None)))
