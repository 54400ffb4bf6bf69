"""A dense model's MLPs, copied into experts."""

import numpy as np
import pytest

from keras_softmoe import converters, routers
from tests.models import tiny
from tests.references import to_numpy

NUM_EXPERTS = 4
# One batch for all models: a backend compiles anew for every shape.
IMAGES = tiny.images(3)


@pytest.fixture(scope="module")
def dense():
    return tiny.backbone(representation_dim=5, pooling="gap", **tiny.DENSE)


@pytest.fixture(scope="module")
def expected(dense):
    return to_numpy(dense(IMAGES)["pooled_output"])


def token_choice(num_selected_experts, room=1.0, **arguments):
    """With just enough slots for every choice, times `room`."""
    factor = room * NUM_EXPERTS / num_selected_experts
    return routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS,
        num_selected_experts,
        capacity_factor=factor,
        **arguments,
    )


def expert_choice(capacity_factor):
    return routers.SoftmaxExpertChoiceRouter(
        NUM_EXPERTS, capacity_factor=capacity_factor
    )


SAME = {
    "identity": routers.IdentityRouter(NUM_EXPERTS),
    **{
        f"{k} of {NUM_EXPERTS}, normalized": token_choice(k, normalize_gates=True)
        for k in range(1, NUM_EXPERTS + 1)
    },
    "all experts": token_choice(NUM_EXPERTS),
    "expert choice, all tokens": expert_choice(NUM_EXPERTS),
}
NOT_THE_SAME = {
    "gates that do not sum to one": token_choice(2),
    "too few slots": token_choice(2, room=0.25, normalize_gates=True),
    "expert choice, half of the tokens": expert_choice(NUM_EXPERTS / 2),
    "soft": routers.SoftRouter(NUM_EXPERTS),
}


def upcycled(model, router, **arguments):
    return converters.upcycle(model, moe_layers=(1,), router=router, **arguments)


@pytest.mark.parametrize("case", SAME)
def test_computes_what_the_dense_model_does(dense, expected, case):
    outputs = upcycled(dense, SAME[case])(IMAGES)["pooled_output"]
    np.testing.assert_allclose(to_numpy(outputs), expected, atol=2e-5)


@pytest.mark.parametrize("case", NOT_THE_SAME)
def test_does_not_where_theory_says_so(dense, expected, case):
    outputs = to_numpy(upcycled(dense, NOT_THE_SAME[case])(IMAGES)["pooled_output"])
    assert np.isfinite(outputs).all()
    assert np.abs(outputs - expected).max() > 1e-3


def test_weights(dense):
    sparse = upcycled(dense, SAME["all experts"], group_images=2, dispatcher="einsum")
    assert type(sparse) is type(dense)
    assert (sparse.moe_layers, sparse.group_images) == ((1,), 2)
    assert sparse.dispatcher == "einsum"
    ours = converters.to_vmoe_params(sparse)
    theirs = converters.to_vmoe_params(dense)
    new = "Encoder/encoderblock_1/Moe/Router/dense/kernel"
    assert np.abs(ours.pop(new)).max() > 0
    for name, array in ours.items():
        source = theirs.pop(name.replace("/Moe/Mlp/", "/Mlp/"))
        if "/Moe/" in name:
            assert len(array) == NUM_EXPERTS
            source = np.broadcast_to(source, array.shape)
        np.testing.assert_array_equal(array, source, name)
    assert not theirs


def test_the_dense_model_stays_as_it_is(dense):
    before = dense.get_weights()
    sparse = upcycled(dense, SAME["identity"])
    for weight in sparse.weights:
        weight.assign(np.zeros(weight.shape))
    for weight, old in zip(dense.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)


def test_the_two_models_share_no_memory(dense, expected):
    # On JAX, `predict` gives up the memory of the weights that it is called with.
    sparse = upcycled(dense, SAME["identity"])
    for model in (dense, sparse, dense):
        outputs = tiny.predict(model, IMAGES)["pooled_output"]
        np.testing.assert_allclose(outputs, expected, atol=2e-5)


def test_experts_may_part(dense):
    # On PyTorch a bank that shares the memory of one MLP could not.
    bank = upcycled(dense, SAME["identity"]).blocks[1].moe.experts.output_dense.kernel
    value = to_numpy(bank).copy()
    value[0] += 1.0
    bank.assign(value)
    np.testing.assert_array_equal(to_numpy(bank), value)


def test_classifier():
    dense = tiny.classifier(**tiny.DENSE)
    sparse = upcycled(dense, SAME["all experts"])
    assert type(sparse) is type(dense)
    assert sparse.num_classes == dense.num_classes
    assert sparse.preprocessor.image_converter.image_size == tiny.IMAGE_SHAPE[:2]
    assert sparse.backbone.moe_layers == (1,)
    theirs = converters.to_vmoe_params(dense)
    ours = converters.to_vmoe_params(sparse)
    for name in ("head/kernel", "head/bias", "cls"):
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_model_with_experts():
    with pytest.raises(ValueError, match=r"Only a dense.*experts in the blocks \(1,\)"):
        upcycled(tiny.backbone(), SAME["identity"])


def test_layers_that_do_not_exist(dense):
    with pytest.raises(ValueError, match="moe_layers"):
        converters.upcycle(dense, moe_layers=(2,), router=SAME["identity"])
