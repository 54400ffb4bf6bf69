"""Masked tokens: the others are routed as in a sequence without them."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, models, routers
from tests.gradients import layer_gradients, outputs
from tests.references import to_numpy

ROUTERS = {
    "soft": lambda: routers.SoftRouter(4, 2),
    "uniform": lambda: routers.SoftRouter(4, 2, dispatch="uniform", combine="uniform"),
    "token choice": lambda: routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=0.75, noise_std=0.0
    ),
    "batch priority": lambda: routers.SoftmaxTokenChoiceRouter(
        4, priority="max", capacity_factor=0.5, noise_std=0.0
    ),
    "skipping": lambda: routers.SoftmaxTokenChoiceRouter(
        4, priority="sum", keep_fraction=0.6, noise_std=0.0
    ),
    "Sinkhorn token choice": lambda: routers.SinkhornTokenChoiceRouter(
        4, num_selected_experts=2, combine="plan", noise_std=0.0
    ),
    "expert choice": lambda: routers.SoftmaxExpertChoiceRouter(4),
    "Sinkhorn expert choice": lambda: routers.SinkhornExpertChoiceRouter(
        4, noise_std=0.0
    ),
    "sparse transport": lambda: routers.SparseTransportExpertChoiceRouter(4),
    "identity": lambda: routers.IdentityRouter(4),
}
LENGTH, PADDED, WIDTH = 12, 16, 5


def padded(batch, seed=0):
    """Short sequences; the same with tokens between that are masked; where they are."""
    rng = np.random.default_rng(seed)
    real = np.sort(rng.permutation(PADDED)[:LENGTH])
    short = rng.normal(size=(batch, LENGTH, WIDTH)).astype("float32")
    long = rng.normal(size=(batch, PADDED, WIDTH)).astype("float32")
    long[:, real] = short
    mask = np.zeros((batch, PADDED), bool)
    mask[:, real] = True
    return short, long, mask, real


def squares(x, losses):
    return keras.ops.sum(keras.ops.square(x)) + sum(losses)


@pytest.mark.parametrize(
    ("router", "group_images"),
    [*((name, 4) for name in ROUTERS), ("soft", 1), ("batch priority", 1)],
)
def test_like_a_shorter_sequence(router, group_images):
    """Outputs, losses and gradients, also where images fill up the last group."""
    layer = layers.MoE(ROUTERS[router](), mlp_dim=8, group_images=group_images)
    short, long, mask, real = padded(batch=6)
    layer.build(long.shape)
    expected = outputs(layer, short)
    found = outputs(lambda x: layer(x, mask=mask), long)
    np.testing.assert_allclose(found[:, real], expected, atol=1e-5)
    assert not found[~mask].any()

    loss, of_inputs, of_weights = layer_gradients(layer, short, squares, training=True)
    masked = layer_gradients(layer, long, squares, mask=mask, training=True)
    np.testing.assert_allclose(masked[0], loss, rtol=1e-5)
    np.testing.assert_allclose(masked[1][:, real], of_inputs, atol=1e-5)
    assert not masked[1][~mask].any()
    for path, gradient in of_weights.items():
        np.testing.assert_allclose(masked[2][path], gradient, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("router", ROUTERS)
def test_sequence_without_any_token(router):
    """Zeros, and gradients that are finite; the other sequences as they were."""
    layer = layers.MoE(ROUTERS[router](), mlp_dim=8)
    _, long, mask, _ = padded(batch=3)
    mask[1] = False
    layer.build(long.shape)
    rest = mask[[0, 2]]
    alone = outputs(lambda x: layer(x, mask=rest), long[[0, 2]])
    found = outputs(lambda x: layer(x, mask=mask), long)
    np.testing.assert_allclose(found[[0, 2]], alone, atol=1e-6)
    assert not found[1].any()
    loss, of_inputs, of_weights = layer_gradients(
        layer, long, squares, mask=mask, training=True
    )
    without = layer_gradients(layer, long[[0, 2]], squares, mask=rest, training=True)
    np.testing.assert_allclose(loss, without[0], rtol=1e-5)
    for gradient in (of_inputs, *of_weights.values()):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("router", ["soft", "batch priority"])
def test_statistics_leave_masked_tokens_out(router):
    layer = layers.MoE(ROUTERS[router](), mlp_dim=8)
    _, long, mask, _ = padded(batch=2)
    with routers.record() as decisions:
        layer(long, mask=mask)
    (decision,) = decisions.values()
    np.testing.assert_array_equal(to_numpy(decision.summary["valid"]), mask)
    if router == "soft":
        weights = to_numpy(decision.routing.dispatch)
        assert not weights[~mask].any()
    else:
        assert not to_numpy(decision.summary["dropped"])[~mask].any()
        # Half of 12 tokens for 4 experts: 1.5, which is 2; of 16 it would be as many.
        assert to_numpy(decision.summary["load"]).max() <= 2


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
    found = outputs(model, np.pad(text, ((0, 0), (0, 3))))
    np.testing.assert_allclose(found, expected, atol=1e-6)


TEXT = {
    "vocabulary_size": 20,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "mlp_dim": 16,
    "moe_layers": (1,),
}


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
    longer = np.pad(text, ((0, 1), (0, 4)))
    found = outputs(long, longer)["pooled_output"]
    np.testing.assert_allclose(found[:2], expected, atol=1e-5)
    assert np.isfinite(found).all()
    again = models.TextMoEBackbone.from_config(long.get_config())
    assert again.mask_padding


def test_limoe_masks_padding_on_request():
    """Text that is padded is routed like a shorter one, beside images."""
    settings = {
        "image_shape": (8, 8, 3),
        "patch_size": 4,
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
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    expected = outputs(short.text_encoder, text)["text_embedding"]
    found = outputs(long.text_encoder, padding)["text_embedding"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # As in the paper if it is not asked for.
    plain = models.LIMoEBackbone(
        sequence_length=8, **{**settings, "mask_padding": False}
    )
    decision = plain.route(images, padding)[1]
    assert to_numpy(decision.summary["valid"]).all()


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
    np.testing.assert_allclose(found.reshape(3, 24, 5), expected, atol=1e-6)
    inputs = keras.Input((2, 4, 3, 5))
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, 2, 4, 3, 5)
    np.testing.assert_allclose(
        outputs(model, x).reshape(3, 24, 5), outputs(layer, flat), atol=1e-6
    )


def test_tokens_without_an_axis():
    layer = layers.SoftMoE(2, mlp_dim=4)
    with pytest.raises(ValueError, match=r"\(batch, ..., width\).*Received: .*\(3, 4"):
        layer(np.zeros((3, 4), "float32"))
    with pytest.raises(ValueError, match="known beforehand.*keras.Input"):
        layers.SoftMoE(2, mlp_dim=4)(keras.Input((None, 7, 4)))
