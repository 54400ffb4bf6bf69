"""A dense model's MLPs, copied into experts."""

import keras
import numpy as np
import pytest

from keras_softmoe import converters, routers
from keras_softmoe.converters.upcycling_starts import truncated_kernel
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights, from_preset
from tests.support.references import to_numpy

NUM_EXPERTS = 4
# One batch for all models: a backend compiles anew for every shape.
IMAGES = tiny.images(3)
# 128 tokens
MANY = tiny.images(32, seed=1)


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
        NUM_EXPERTS, num_selected_experts, capacity_factor=factor, **arguments
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
    "balanced by a bias": token_choice(
        2, normalize_gates=True, score="sigmoid", bias_update_rate=0.001
    ),
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
    assert_near(to_numpy(outputs), expected, atol=2e-5)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("case", NOT_THE_SAME)
def test_a_shared_start_computes_what_the_dense_model_does(
    dense, expected, case, split
):
    sparse = upcycled(dense, NOT_THE_SAME[case], start="shared", split=split)
    assert (sparse.shared_mlp_dim, sparse.mlp_dim) == (dense.mlp_dim, dense.mlp_dim)
    assert sparse.expert_mlp_dim == (dense.mlp_dim // 2 if split > 1 else None)
    outputs = sparse(IMAGES)["pooled_output"]
    assert_near(to_numpy(outputs), expected, atol=2e-5)
    # Experts learn from there: the gradient of a zero kernel is that of its products.
    moe = sparse.blocks[1].moe
    kernels = [to_numpy(bank.kernel) for bank in moe.experts.banks]
    assert abs(kernels[0]).max() > 0.1 and not kernels[1].any()
    assert moe.experts.mlp_dim == dense.mlp_dim // split


@pytest.mark.parametrize(
    "case", ["2 of 4, normalized", "all experts", "expert choice, all tokens"]
)
def test_parts_of_an_mlp_compute_what_it_does(dense, expected, case):
    sparse = upcycled(dense, SAME[case], split=2)
    moe = sparse.blocks[1].moe
    assert moe.experts.mlp_dim == dense.mlp_dim // 2
    outputs = sparse(IMAGES)["pooled_output"]
    assert_near(to_numpy(outputs), expected, atol=2e-5)
    # Parts 0, 1, 0, 1, chosen in pairs
    kernel = to_numpy(moe.experts.intermediate_dense.kernel)
    whole = to_numpy(dense.blocks[1].mlp.intermediate_dense.kernel)
    np.testing.assert_array_equal(np.concatenate(kernel[:2], axis=1), whole)
    directions = to_numpy(moe.router.kernel)
    np.testing.assert_array_equal(directions[:, ::2], directions[:, 1::2])
    assert not np.array_equal(directions[:, 0], directions[:, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": 0}, "split=0"),
        ({"split": 5}, "split=5 of 12 units"),
        ({"split": 3}, "split=3 with num_experts=4"),
        ({"split": 2, "router": routers.SoftRouter(4)}, "SoftRouter.*shared"),
        ({"split": 2, "start": "clusters", "images": MANY}, "start='clusters'"),
        ({"start": "shared", "images": MANY}, "start='shared' with images"),
    ],
)
def test_bad_parts(dense, arguments, message):
    router = arguments.pop("router", token_choice(2))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        upcycled(dense, router, **arguments)
    with pytest.raises(TypeError, match="no such argument"):
        upcycled(dense, router, shared_mlp_dim=3)


@pytest.mark.parametrize(
    "case", ["2 of 4, normalized", "all experts", "expert choice, all tokens"]
)
def test_clusters_compute_what_the_dense_model_does(dense, expected, case):
    sparse = upcycled(dense, SAME[case], start="clusters", images=MANY, energy=1)
    outputs = to_numpy(sparse(IMAGES)["pooled_output"])
    assert_near(outputs, expected, atol=2e-5)


@pytest.mark.parametrize("case", NOT_THE_SAME)
def test_does_not_where_theory_says_so(dense, expected, case):
    outputs = to_numpy(upcycled(dense, NOT_THE_SAME[case])(IMAGES)["pooled_output"])
    assert np.isfinite(outputs).all()
    assert np.abs(outputs - expected).max() > 1e-3


def test_groups_are_those_of_a_new_model(dense):
    """And those that were found are found again in a saved configuration."""
    router = routers.SoftmaxTokenChoiceRouter(NUM_EXPERTS)
    sparse = upcycled(dense, router)
    assert sparse.group_images == 32
    assert sparse.routers[1].eval_capacity_factor == "dropless"
    config = {**sparse.get_config(), "group_images": "auto"}
    assert type(sparse).from_config(config).get_config() == sparse.get_config()
    assert upcycled(dense, router, group_images=2).group_images == 2
    assert upcycled(dense, SAME["all experts"]).group_images == 1
    with pytest.raises(ValueError, match="also takes 'auto'. .*group_images='all'"):
        upcycled(dense, router, group_images="all")


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
    assert_same_weights(dense, before)


def test_the_two_models_share_no_memory(dense, expected):
    # On JAX, `predict` gives up the memory of the weights that it is called with.
    sparse = upcycled(dense, SAME["identity"])
    for model in (dense, sparse, dense):
        outputs = tiny.predict(model, IMAGES)["pooled_output"]
        assert_near(outputs, expected, atol=2e-5)


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


def test_noise_is_relative_seeded_and_on_kernels_alone(dense):
    router = SAME["identity"]
    plain, noisy, again, other = (
        converters.to_vmoe_params(upcycled(dense, router, **arguments))
        for arguments in (
            {},
            {"noise_std": 0.1, "seed": 1},
            {"noise_std": 0.1, "seed": 1},
            {"noise_std": 0.1, "seed": 2},
        )
    )
    for name, array in noisy.items():
        np.testing.assert_array_equal(array, again[name])
        if "/Moe/Mlp/" not in name or not name.endswith("kernel"):
            np.testing.assert_array_equal(array, plain[name], name)
            continue
        assert np.abs(array - other[name]).max() > 0
        for expert, (ours, copy) in enumerate(zip(array, plain[name], strict=True)):
            ratio = (ours - copy).std() / copy.std()
            # Of 96 numbers
            assert ratio == pytest.approx(0.1, rel=0.3), (name, expert)


def clustered(model, router, **arguments):
    arguments = {"start": "clusters", "images": MANY, **arguments}
    return upcycled(model, router, **arguments)


def tokens_and_logits(sparse, images=MANY):
    """What the router is given, found from its logits and its kernel."""
    block = sparse.blocks[1]
    inputs = keras.Model(sparse.input, block.input)(images)
    _, tokens = block.before_mlp(inputs)
    logits = sparse.route(images)[1].summary["logits"]
    return to_numpy(tokens).reshape(-1, tokens.shape[-1]), to_numpy(logits)


def test_clusters_are_routed_to_their_experts(dense):
    router = token_choice(1, normalize_gates=True)
    sparse = clustered(dense, router, energy=0.9, confidence=0.8)
    tokens, logits = tokens_and_logits(sparse)
    logits = logits.reshape(-1, NUM_EXPERTS)
    kernel = to_numpy(sparse.blocks[1].moe.router.kernel)
    assert_near(logits, tokens @ kernel, atol=1e-4)
    probabilities = to_numpy(keras.ops.softmax(logits))
    assert probabilities.max(axis=-1).mean() == pytest.approx(0.8, abs=1e-3)
    # Centroids, all of one length: the sums of the directions of their tokens.
    labels = logits.argmax(axis=-1)
    directions = tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)
    for expert in range(NUM_EXPERTS):
        total = directions[labels == expert].sum(axis=0)
        cosine = total @ kernel[:, expert]
        cosine /= np.linalg.norm(total) * np.linalg.norm(kernel[:, expert])
        assert cosine == pytest.approx(1, abs=1e-5)
    # Each expert keeps of the MLP what its own tokens need.
    mlp, experts = dense.blocks[1].mlp, sparse.blocks[1].moe.experts
    kernels = to_numpy(experts.intermediate_dense.kernel)
    given = to_numpy(mlp.intermediate_dense.kernel)
    hidden = to_numpy(mlp.hidden(keras.ops.convert_to_tensor(tokens)))
    second = to_numpy(mlp.output_dense.kernel)
    for expert in range(NUM_EXPERTS):
        own = labels == expert
        twin = truncated_kernel(given, tokens[own], 0.9)
        assert_near(kernels[expert], twin, atol=1e-4)
        twin = truncated_kernel(second, hidden[own], 0.9)
        bank = to_numpy(experts.output_dense.kernel)
        assert_near(bank[expert], twin, atol=1e-4)
        change = tokens[own] @ (given - kernels[expert])
        assert np.sum(change**2) <= 0.1001 * np.sum((tokens[own] @ given) ** 2)


@pytest.mark.parametrize(
    "router",
    [
        routers.SoftmaxTokenChoiceRouter(4, priority="max", capacity_factor=1.0),
        routers.SinkhornExpertChoiceRouter(4),
        routers.SoftRouter(2, slots_per_expert=2),
        routers.SoftRouter(4, normalize=False, combine="uniform"),
    ],
    ids=lambda router: type(router).__name__,
)
def test_clusters_for_every_router_with_weights(dense, router):
    sparse = clustered(dense, router, group_images=2)
    logits = sparse.route(MANY)[1].summary["logits"]
    # (tokens, experts or slots)
    logits = keras.ops.reshape(logits, (-1, 4))
    probabilities = to_numpy(keras.ops.softmax(logits))
    assert probabilities.max(axis=-1).mean() == pytest.approx(0.9, abs=2e-3)


def test_clusters_are_seeded(dense):
    router = routers.SoftmaxExpertChoiceRouter(4)
    first, again, other = (
        converters.to_vmoe_params(clustered(dense, router, seed=seed))
        for seed in (0, 0, 1)
    )
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
        assert ("/Moe/" in name and "bias" not in name) == np.any(array != other[name])


def test_clusters_of_a_classifier(tmp_path):
    dense = tiny.classifier(**tiny.DENSE)
    pixels = tiny.pixels(32)
    settings = {"router": routers.SoftmaxExpertChoiceRouter(4), "noise_std": 0.01}
    sparse = clustered(dense, images=pixels, **settings)
    # The preprocessor of the classifier makes of pixels what the backbone takes.
    images = to_numpy(dense.preprocessor(pixels))
    same = clustered(dense.backbone, images=images, **settings)
    assert_same_weights(sparse.backbone, same)
    before = tiny.predict(sparse, pixels[:3])
    loaded = from_preset(sparse, tmp_path)
    assert_near(tiny.predict(loaded, pixels[:3]), before, atol=1e-6)


def difference(sparse, expected):
    change = to_numpy(sparse(IMAGES)["pooled_output"]) - expected
    return np.linalg.norm(change) / np.linalg.norm(expected)


@pytest.fixture(scope="module")
def placed():
    """A dense model whose tokens say more of their place than of the image."""
    model = tiny.backbone(pooling="gap", **tiny.DENSE)
    embedding = next(w for w in model.weights if "position_embedding" in w.path)
    embedding.assign(30 * to_numpy(embedding))
    return model


@pytest.mark.parametrize(
    "router",
    [routers.SoftRouter(4, slots_per_expert=2), routers.SoftRouter(4, normalize=False)],
)
def test_positions_are_close_to_the_dense_model(placed, router):
    expected = to_numpy(placed(IMAGES)["pooled_output"])
    sparse = upcycled(
        placed, router, start="positions", images=MANY, confidence=1 - 1e-6
    )
    random = upcycled(placed, router)
    assert difference(sparse, expected) < 1e-3 < 1e-2 < difference(random, expected)
    combine = to_numpy(sparse.route(IMAGES)[1].routing.combine)
    # Every place has its slots: the sum over those of a place is near one.
    combine = combine.reshape(*combine.shape[:2], 4, -1).sum(axis=-1)
    assert_near(combine, np.broadcast_to(np.eye(4), combine.shape), atol=1e-2)


def test_fewer_slots_than_positions(placed):
    router = routers.SoftRouter(2)
    sparse = upcycled(
        placed, router, start="positions", images=MANY, confidence=1 - 1e-6
    )
    dispatch = to_numpy(sparse.route(IMAGES)[1].routing.dispatch)[..., 0]
    # Each of two slots takes two neighbours.
    places = [dispatch[:, :2, 0].sum(axis=1), dispatch[:, 2:, 1].sum(axis=1)]
    assert_near(places, 1, atol=1e-2)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (routers.IdentityRouter(4), "`IdentityRouter` has no weights"),
        (
            routers.SoftRouter(4, dispatch="uniform", combine="uniform"),
            "`SoftRouter` with dispatch='uniform', combine='uniform' has no weights",
        ),
    ],
)
def test_routers_without_weights(dense, router, message):
    with pytest.raises(ValueError, match=message):
        clustered(dense, router)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "random"}, "Unknown `start`.*'clusters'"),
        (
            {"start": "clusters", "images": None},
            "needs some hundred images. Received: images=None",
        ),
        ({"start": "copies"}, "Copies need no images"),
        ({"start": "positions"}, "a `SoftmaxTokenChoiceRouter`"),
        ({"energy": 0}, "`energy`.*over 0"),
        ({"energy": 1.5}, "`energy` must be .* over 0 and at most 1"),
        ({"confidence": 1.0}, "`confidence`.*under 1"),
        ({"confidence": 0.25}, "`confidence`.*over 0.25"),
        ({"noise_std": -1}, "`noise_std`.*at least 0"),
        ({"seed": -1}, "`seed`"),
        ({"images": MANY[0]}, "Make a batch of one"),
        ({"images": MANY[:0]}, "Received: 0 images"),
        ({"images": MANY[:, :4]}, "Resize them"),
        ({"images": np.where(MANY < 0.9, MANY, np.nan)}, "must be finite.*image 0 of"),
        ({"images": tiny.pixels(2).astype("uint8")}, r"floats in \[-1, 1\]"),
    ],
)
def test_arguments(dense, arguments, message):
    with pytest.raises(ValueError, match=message):
        clustered(dense, token_choice(1), **arguments)


def test_models_and_images(dense):
    with pytest.raises(ValueError, match=r"Only a dense.*experts in the blocks \(1,\)"):
        upcycled(tiny.backbone(), SAME["identity"])
    with pytest.raises(ValueError, match="moe_layers"):
        converters.upcycle(dense, moe_layers=(2,), router=SAME["identity"])
    with pytest.raises(ValueError, match="8 clusters.*4 tokens in all"):
        clustered(dense, routers.SoftRouter(8), images=MANY[:1])
    of_text = tiny_limoe.backbone(moe_layers=(), router=None)
    with pytest.raises(ValueError, match="images alone.*LIMoEBackbone"):
        clustered(of_text, token_choice(1))
