"""The one test that every layer and every router has to pass."""

import inspect
import json

import keras
import numpy as np

from keras_softmoe import layers
from tests.support.close import assert_near
from tests.support.references import to_numpy

# One size for all calls, because a backend compiles anew for every shape. It is odd, so
# that a group of two images is half padding.
BATCH = 3


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


def encoder_block(
    num_heads,
    mlp_dim,
    router=None,
    use_qk_norm=False,
    dropout_rate=0.0,
    dtype=None,
    trainable=True,
    cls=layers.EncoderBlock,
    **moe_settings,
):
    """An `EncoderBlock`, with a mixture of experts if there is a router."""
    mlp = layers.MLP(mlp_dim, dtype=dtype, name="mlp")
    if router is not None:
        mlp = layers.MoE(router, mlp_dim, dtype=dtype, name="moe", **moe_settings)
    return cls(
        num_heads,
        mlp,
        use_qk_norm=use_qk_norm,
        dropout_rate=dropout_rate,
        dtype=dtype,
        trainable=trainable,
    )


def randomize(layer, seed=0):
    """Give every weight a value at which forgetting it would show."""
    rng = np.random.default_rng(seed)
    for weight in layer.weights:
        # Around one for scales, around zero for all others.
        center = 1.0 if weight.path.endswith(("gamma", "/scale")) else 0.0
        weight.assign(center + 0.3 * rng.normal(size=weight.shape))


def revive(layer):
    """The layer once more from its configuration, which is plain JSON."""
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
    return keras.saving.deserialize_keras_object(config)


def reloaded(model, folder, **kwargs):
    """A model from a file in a folder, to which it is saved."""
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras", **kwargs)


def from_preset(model, folder, cls=None, **kwargs):
    """A model from the preset that it is saved to, by another class than its own."""
    model.save_to_preset(str(folder))
    return (cls or type(model)).from_preset(str(folder), **kwargs)


def sample(shape, ids=None):
    """A batch of one input: normal numbers, or ints under `ids`."""
    if ids is None:
        return normal((BATCH, *shape))
    return np.random.default_rng(0).integers(0, ids, (BATCH, *shape), "int32")


def symbol(shape, ids=None):
    return keras.Input(shape, dtype="float32" if ids is None else "int32")


def check_layer(
    make, shape, output_shape, num_weights, num_seeds=0, num_losses=0, ids=None
):
    """Weights, configuration, shapes, dtypes, frames, frozen parts and a training step.

    Args:
        make: Callable from `dtype` and `trainable` to a new layer.
        shape: Shape of one input, without the batch.
        output_shape: Shape of one output, without the batch.
        num_weights: Number of trainable weights.
        num_seeds: Number of seed generators.
        num_losses: Number of losses that a training call adds.
        ids: Number of different ids, if the inputs are such.
    """
    check_weights(make, shape, num_weights, num_seeds, num_losses, ids)
    check_configuration(make, shape, ids)
    check_shapes(make, shape, output_shape, ids)
    check_mixed_precision(make, shape, ids)
    check_training_step(make, shape, output_shape, ids)
    check_frames(make, shape, num_losses, ids)
    check_frozen(make, shape, num_weights, ids)


def check_weights(
    make, shape, num_weights, num_seeds, num_losses, ids=None, num_states=0
):
    layer = make()
    assert not layer.weights
    layer.build((None, *shape))
    assert len(layer.trainable_weights) == num_weights
    # What is not trained is the states of random generators, and weights that follow
    # the choices of some routers.
    assert len(layer.non_trainable_weights) == num_states
    assert len(layer.non_trainable_variables) == num_states + num_seeds
    paths = [weight.path for weight in layer.weights]
    assert len(set(paths)) == len(paths)
    layer(sample(shape, ids), training=True)
    assert len(layer.losses) == num_losses


def check_configuration(make, shape, ids=None):
    layer = make()
    named = set()
    if isinstance(layer, layers.MoE) or "__init__" in vars(type(layer)):
        named = set(inspect.signature(type(layer)).parameters) - {"kwargs"}
    assert set(layer.get_config()) == named | {"name", "trainable", "dtype"}
    revived = revive(layer)
    assert type(revived) is type(layer)
    serialize = keras.saving.serialize_keras_object
    assert serialize(revived) == serialize(layer)
    for each in (layer, revived):
        each.build((None, *shape))
    randomize(layer)
    revived.set_weights(layer.get_weights())
    inputs = sample(shape, ids)
    np.testing.assert_allclose(
        to_numpy(revived(inputs)), to_numpy(layer(inputs)), rtol=1e-6
    )


def check_shapes(make, shape, output_shape, ids=None):
    layer = make()
    symbolic = layer(symbol(shape, ids))
    assert symbolic.shape == (None, *output_shape)
    assert make().compute_output_shape((None, *shape)) == (None, *output_shape)
    real = layer(sample(shape, ids))
    assert not layer.losses
    assert tuple(real.shape) == (BATCH, *output_shape)
    assert dtype_of(real) == dtype_of(symbolic) == "float32"


def check_mixed_precision(make, shape, ids=None):
    layer = make(dtype="mixed_bfloat16")
    assert dtype_of(layer(symbol(shape, ids))) == "bfloat16"
    inputs = sample(shape, ids)
    outputs = layer(inputs)
    assert dtype_of(outputs) == "bfloat16"
    assert {dtype_of(weight) for weight in layer.trainable_weights} <= {"float32"}
    for child in layer._flatten_layers(include_self=False):
        in_router = "router" in child.path.split("/")
        assert child.compute_dtype == ("float32" if in_router else "bfloat16"), child
    # The layer is the same function in low precision: half the bits of the mantissa
    # of bfloat16 are right, or a token went to another expert, which is rare.
    exact = make()
    exact.build(inputs.shape)
    exact.set_weights(layer.get_weights())
    assert np.median(np.abs(to_numpy(outputs) - to_numpy(exact(inputs)))) < 0.05


def check_training_step(make, shape, output_shape, ids=None):
    layer = make()
    model = keras.Sequential([symbol(shape, ids), layer])
    randomize(layer)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = layer.get_weights()
    loss = model.train_on_batch(sample(shape, ids), normal((BATCH, *output_shape), 1))
    assert np.isfinite(loss)
    assert_trained(layer, before)


def check_frames(make, shape, num_losses, ids=None):
    """Each frame of a video by itself, in the wrapper of Keras for it."""
    layer, frames = make(), 2
    video = np.stack([sample(shape, ids)] * frames, axis=1)
    video[:, 1] = video[::-1, 0]
    wrapper = keras.layers.TimeDistributed(layer)
    symbolic = wrapper(symbol((frames, *shape), ids))
    outputs = to_numpy(wrapper(video))
    assert symbolic.shape[1:] == outputs.shape[1:]
    for frame in range(frames):
        expected = to_numpy(layer(video[:, frame]))
        assert_near(outputs[:, frame], expected, rtol=1e-5, atol=1e-6)
    wrapper(video, training=True)
    assert len(wrapper.losses) == frames * num_losses


def check_frozen(make, shape, num_weights, ids=None):
    """What is frozen when it is made, and parts of what is not, also in a file."""
    frozen = make(trainable=False)
    model = keras.Sequential([symbol(shape, ids), frozen])
    # Keras asks the variables of a model, not the layers that they are in.
    assert not model.trainable_weights
    frozen.trainable = True
    assert len(model.trainable_weights) == num_weights
    every_part = [model, *frozen._flatten_layers(), *frozen.weights]
    for part in every_part[2::2]:
        part.trainable = False
    for top in (True, False):
        # (Not by the setter, which would freeze all that is in the layer.)
        frozen._trainable = top
        assert flags(revive(model)) == flags(model)


def flags(layer):
    """What of a layer is trainable: pairs of name and bool, of weights and layers."""
    # What has no weights has nothing to train.
    parts = [part for part in layer._flatten_layers() if part.weights]
    return [(part.name, part.trainable) for part in (*layer.weights, *parts)]


def assert_same_weights(model, expected, **tolerances):
    """Weights equal those of another model, or a list of arrays."""
    tolerances = {"rtol": 0, "atol": 0, **tolerances}
    expected = getattr(expected, "weights", expected)
    for weight, value in zip(model.weights, expected, strict=True):
        value = to_numpy(value)
        assert_near(to_numpy(weight), value, err_msg=weight.path, **tolerances)


def assert_trained(model, before, least=1e-7):
    """Each weight that is trained differs from what it was, a list of arrays."""
    for weight, old in zip(model.weights, before, strict=True):
        # Softmax does not feel what is added to all keys.
        if weight.trainable and not weight.path.endswith("key/bias"):
            assert np.abs(to_numpy(weight) - old).max() > least, weight.path
