"""Token choice without capacity: nothing is dropped, nothing is padded."""

import keras
import numpy as np
import pytest

import keras_softmoe as ksm
from keras_softmoe import layers, ops, routers
from keras_softmoe.exporting.export import checked_job
from keras_softmoe.ops.grouped import grouped_affine
from tests.skips import only_on
from tests.support import tiny, twins
from tests.support.close import assert_near, assert_sum_near
from tests.support.gradients import layer_gradients, outputs, recorded
from tests.support.layer_checks import normal, randomize
from tests.support.products import counted
from tests.support.references import to_numpy

NUM_EXPERTS, NUM_TOKENS = 4, 6
SHAPE = (5, NUM_TOKENS, 8)


def build(num_selected_experts=1, shape=SHAPE, mlp_dim=12, router=None, **kwargs):
    router = router or routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, num_selected_experts, capacity_factor=None, noise_std=0.0
    )
    layer = layers.MoE(router, mlp_dim, **{"group_images": 2, **kwargs})
    layer.build(shape)
    randomize(layer, 0)
    return layer


def arrays_of(layer):
    banks = layer.experts.intermediate_dense, layer.experts.output_dense
    weights = [layer.router.kernel, *(w for b in banks for w in (b.kernel, b.bias))]
    return {weight.path: to_numpy(weight).astype("float64") for weight in weights}


def twin(num_selected_experts, mask, x, kernel, *expert_weights):
    """Each token to its experts, one by one."""
    probabilities = twins.softmax(x @ kernel)
    outputs = np.zeros_like(x)
    for place in zip(*np.nonzero(mask), strict=True):
        for e in np.argsort(-probabilities[place])[:num_selected_experts]:
            w0, b0, w1, b1 = (w[e] for w in expert_weights)
            hidden = twins.gelu(x[place] @ w0 + np.ravel(b0))
            outputs[place] += probabilities[(*place, e)] * (hidden @ w1 + np.ravel(b1))
    return outputs


CASES = {
    "one choice": (1, SHAPE, 12, 0.0, False),
    "two choices, some tokens masked": (2, SHAPE, 12, 0.0, True),
    # More rows than the mean, in pieces on JAX; experts without rows
    "nearly all tokens to one expert": (1, SHAPE, 12, 3.0, True),
    # Rows that PyTorch's grouped product does not take
    "odd widths": (2, (5, NUM_TOKENS, 7), 5, 0.0, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_twin(case):
    choices, shape, mlp_dim, bias, masked = CASES[case]
    layer = build(choices, shape, mlp_dim)
    kernel = to_numpy(layer.router.kernel)
    # Tokens have a common part, which one expert likes.
    kernel[0, 1] += bias
    layer.router.kernel.assign(kernel)
    x = normal(shape) + bias * np.eye(shape[-1], dtype="float32")[0]
    mask = np.random.default_rng(2).random(shape[:2]) < (0.7 if masked else 2.0)
    weight = normal(shape, seed=3)
    kwargs = {"mask": keras.ops.convert_to_tensor(mask)} if masked else {}

    arrays = arrays_of(layer)
    wanted = twin(choices, mask, x.astype("float64"), *arrays.values())
    found = outputs(lambda x: layer(x, **kwargs), x)
    assert_near(found, wanted, atol=2e-5)

    _, of_inputs, of_weights = layer_gradients(
        layer, x, lambda y, _: keras.ops.sum(keras.ops.multiply(y, weight)), **kwargs
    )
    found = [of_inputs, *(of_weights[path] for path in arrays)]
    values = [x.astype("float64"), *arrays.values()]
    for i, (value, gradient) in enumerate(zip(values, found, strict=True)):
        # The twin's slope in a random direction
        direction = normal(value.shape, seed=i)
        change = []
        for step in (1e-5, -1e-5):
            moved = [v + (step * direction if v is value else 0) for v in values]
            change.append((weight * twin(choices, mask, *moved)).sum())
        slope = (change[0] - change[1]) / 2e-5
        assert_sum_near(gradient * direction, slope, atol=5e-4)


def test_as_many_slots_as_tokens_are_the_same():
    # By slots, by one-hot weights, and with hidden activations computed again.
    x, weight = normal(SHAPE), normal(SHAPE, seed=1)
    layer = build(2)
    slots = layer.router.with_settings(capacity_factor=NUM_EXPERTS / 2)
    others = [build(2, dispatcher="einsum"), build(2, remat_experts=True)]
    results = []
    for other in (layer, build(router=slots), *others):
        other.set_weights(layer.get_weights())
        found = layer_gradients(
            other, x, lambda y, _: keras.ops.sum(keras.ops.multiply(y, weight))
        )
        results.append([outputs(other, x), found[1], *found[2].values()])
    for result in results[1:]:
        for one, two in zip(results[0], result, strict=True):
            assert_near(one, two, atol=5e-5)


def test_what_padding_holds_does_not_matter():
    layer = build(2)
    mask = np.arange(NUM_TOKENS) < [[6], [4], [6], [1], [3]]
    x = normal(SHAPE)
    broken = np.where(mask[..., None], x, np.float32("nan"))

    def found(x):
        kept = {"mask": keras.ops.convert_to_tensor(mask)}
        _, of_inputs, of_weights = layer_gradients(
            layer, x, lambda y, _: keras.ops.sum(keras.ops.square(y)), **kept
        )
        experts = [g for path, g in of_weights.items() if "experts" in path]
        return [outputs(lambda x: layer(x, **kept), x), of_inputs[mask], *experts]

    for one, two in zip(found(x), found(broken), strict=True):
        assert_near(one, two, atol=1e-5)


def test_what_observers_see():
    layer = build(2)
    _, decision = recorded(layer, normal(SHAPE))
    routing, summary = decision
    assert isinstance(routing, ops.ChoiceRouting)
    load = to_numpy(summary["load"])
    # Predictions are in groups of one image.
    assert load.shape == (5, NUM_EXPERTS)
    np.testing.assert_array_equal(load.sum(-1), 5 * [12])
    assert not to_numpy(summary["dropped"]).any()
    np.testing.assert_array_equal(to_numpy(routing.count).sum(), 5 * 12)


@pytest.mark.parametrize(
    "router",
    [
        routers.SinkhornTokenChoiceRouter(NUM_EXPERTS, capacity_factor=None),
        routers.LIMoERouter(NUM_EXPERTS, capacity_factor=None),
    ],
    ids=["sinkhorn", "limoe"],
)
def test_other_routers(router):
    # Saved and loaded, in a compiled training step of two modalities
    inputs = keras.Input((6, 8))
    layer = layers.MoE(router, 12, group_images=2)
    model = keras.Model(inputs, layer(inputs, modalities=(("image", 4), ("text", 2))))
    model = keras.Model.from_config(model.get_config())
    x = normal((3, 6, 8))
    model.compile("sgd", "mse", jit_compile=keras.backend.backend() == "jax")
    before = [to_numpy(w) for w in model.trainable_weights]
    loss = model.fit(x, x, verbose=0).history["loss"]
    assert np.isfinite(loss).all()
    after = [to_numpy(w) for w in model.trainable_weights]
    assert all((a != b).any() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("layer", [layers.MoE, layers.ImageMoE])
@pytest.mark.parametrize(
    "router",
    [
        routers.SinkhornTokenChoiceRouter(NUM_EXPERTS, capacity_factor=None),
        routers.SoftmaxTokenChoiceRouter(
            NUM_EXPERTS, capacity_factor=None, keep_fraction=0.5, priority="max"
        ),
    ],
    ids=["sinkhorn", "some tokens"],
)
def test_choices_that_depend_on_the_group(router, layer):
    """Predictions compare the tokens of a group; such a router has no groups alone."""
    layer = layer(router, 12, group_images=5)
    x = normal(SHAPE)
    _, decision = recorded(layer, x)
    assert len(decision.summary["load"]) == 1
    backbone = tiny.backbone(router=type(router)(NUM_EXPERTS))
    assert backbone.group_images == (1 if layer.router.scores.compares_tokens else 32)


def test_where_rows_cannot_be_counted():
    # In int8, and compiled by XLA on TensorFlow: by slots, with the same result.
    layer = build(2)
    x = normal(SHAPE)
    inputs = keras.Input(SHAPE[1:])
    model = keras.Model(inputs, layer(inputs))
    wanted = outputs(lambda x: layer(x), x)
    if keras.backend.backend() == "tensorflow":
        model.compile(jit_compile=True)
        assert_near(model.predict(x, batch_size=5, verbose=0), wanted, atol=1e-5)
    layer.experts.intermediate_dense.quantize("int8")
    layer.experts.output_dense.quantize("int8")
    error = np.abs(outputs(lambda x: layer(x), x) - wanted).max()
    assert 0 < error < 0.1 * np.abs(wanted).max()


# === Costs, and who refuses it ===


def test_skipped_tokens():
    router = routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, capacity_factor=None, keep_fraction=0.5, priority="max"
    )
    layer = build(router=router, group_images=1)
    outputs, decision = recorded(layer, normal(SHAPE))
    dropped = to_numpy(decision.summary["dropped"])
    np.testing.assert_array_equal(dropped.sum(-1), 3)
    assert not to_numpy(outputs)[dropped].any()
    sure = to_numpy(decision.summary["probabilities"]).max(-1)
    assert (
        np.where(dropped, sure, 1).min(-1) <= np.where(dropped, 1, sure).min(-1)
    ).all()


def test_predictions_alone():
    """Trained with slots; a prediction depends on no other image of its group."""
    settings = {"num_selected_experts": 2, "capacity_factor": 0.75, "noise_std": 0.0}

    def layer_with(**changed):
        router = routers.SoftmaxTokenChoiceRouter(NUM_EXPERTS, **settings | changed)
        return build(router=router, group_images=None)

    layer = layer_with(eval_capacity_factor="dropless")
    x = normal(SHAPE)
    trained = outputs(lambda x: layer(x, training=True), x)
    slots = layer_with()
    assert_near(trained, outputs(lambda x: slots(x, training=True), x), atol=1e-6)
    found = outputs(layer, x)
    assert abs(found - trained).max() > 1e-2
    assert_near(found, outputs(layer_with(capacity_factor=None), x), atol=1e-6)
    for index in range(len(x)):
        alone = outputs(layer, x[index : index + 1])
        assert_near(alone[0], found[index], atol=1e-6)
    again = layers.MoE.from_config(layer.get_config())
    assert again.router.eval_capacity_factor == "dropless"
    with pytest.raises(ValueError, match="eval_capacity_factor.*Received.*'dense'"):
        layer_with(eval_capacity_factor="dense")


def test_routers_that_choose_tokens_refuse_it():
    for kind in (
        routers.SoftmaxExpertChoiceRouter,
        routers.SinkhornExpertChoiceRouter,
        routers.SparseTransportExpertChoiceRouter,
    ):
        with pytest.raises(ValueError, match="experts choose.*capacity_factor=None"):
            kind(NUM_EXPERTS, capacity_factor=None)
        with pytest.raises(ValueError, match="eval_capacity_factor='dropless'"):
            kind(NUM_EXPERTS, eval_capacity_factor="dropless")


def test_cost():
    layer = layers.MoE(
        routers.SoftmaxTokenChoiceRouter(8, 2, capacity_factor=None), mlp_dim=32
    )
    # Without slots to spare: what two dense layers cost for each choice
    weights, products = counted(layer, (3, 50, 16))
    assert products == 3 * 50 * (2 * 2 * 16 * 32 + 16 * 8)
    assert weights == 8 * (2 * 16 * 32 + 32 + 16) + 16 * 8


def test_a_distribution_refuses_it(monkeypatch):
    layer = build(2)
    monkeypatch.setattr("keras_softmoe.layers.moe.is_distributed", lambda: True)
    with pytest.raises(ValueError, match="`capacity_factor=2` keeps every token, too"):
        layer(normal(SHAPE))


def test_a_distribution_refuses_whole_images(monkeypatch):
    router = routers.SoftmaxTokenChoiceRouter(4, 2, capacity_factor=None)
    layer = layers.ImageMoE(router, 12, group_images=2)
    layer(normal(SHAPE))
    monkeypatch.setattr("keras_softmoe.layers.image_moe.is_distributed", lambda: True)
    with pytest.raises(ValueError, match="`capacity_factor=2` keeps every token, too"):
        layer(normal(SHAPE))


def test_a_file_computes_all_tokens(tmp_path):
    """Files, which have fixed shapes, are told what that costs."""
    backbone = ksm.models.ViTMoEBackbone(
        **tiny.SIZES, moe_layers=(1,), router=routers.SoftmaxTokenChoiceRouter(4)
    )
    with pytest.warns(UserWarning, match="4 times the compute"):
        checked_job(backbone, tmp_path / "file", "tf_saved_model")
    backbone.set_routing(eval_capacity_factor=2.0, group_images=1)
    checked_job(backbone, tmp_path / "file", "tf_saved_model")


def test_the_same_predictions_on_several_devices(monkeypatch):
    router = routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, 2, capacity_factor=0.5, eval_capacity_factor="dropless"
    )
    layer, x = build(router=router), normal(SHAPE)
    found = outputs(layer, x)
    for room in ("layers.moe", "routers.sparse"):
        monkeypatch.setattr(f"keras_softmoe.{room}.is_distributed", lambda: True)
    assert_near(outputs(layer, x), found, atol=1e-6)


# Of what PyTorch does where its graph breaks
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@only_on("torch", because="own loop")
def test_torch_compile():
    import torch

    shapes = (6, 8), (3, 8, 4), (3, 1, 4)
    arrays = [
        keras.ops.convert_to_tensor(normal(shape)).requires_grad_() for shape in shapes
    ]
    count = keras.ops.convert_to_tensor([2, 0, 4], "int32")
    # The part of it that reads the program; what follows does not depend on this one.
    compiled = torch.compile(grouped_affine, backend="eager")
    results = []
    for fn in (grouped_affine, compiled):
        found = fn(*arrays, count)
        results.append([found, *torch.autograd.grad(found.square().sum(), arrays)])
    for one, two in zip(*results, strict=True):
        assert_near(to_numpy(one), to_numpy(two), atol=1e-6)
