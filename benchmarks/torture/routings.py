"""Random routings of every router, against the plain NumPy twins and the invariants.

A setup is a router with random settings for a random shape; several batches of tokens,
with ties, huge numbers and padding, are routed with each. (Backends compile anew for
every shape, which takes longer than the routing.)
"""

import keras
import numpy as np

from keras_softmoe import layers, routers
from tests.support import cases, limoe_router_twin, twins
from tests.support.close import assert_near
from tests.support.references import to_numpy
from tests.support.sparse_routers import as_numpy

# Numbers can be compared with the twin's; others only follow from what is reported.
COMPARED = ("normal", "ties", "equal", "zero")
FLAVOURS = (*cases.FLAVOURS, "normal", "normal")
FACTORS = (0.3, 0.5, 0.75, 1.0, 1.05, 2.0, 8.0, 1e7)
TOLERANCE = {"rtol": 1e-4, "atol": 5e-5}


def routings(tally, num_routings, seed):
    """Route batches with random routers; each batch is a case."""
    # Few enough of a setup that each kind of router has one.
    batches = min(40, max(1, num_routings // len(KINDS)))
    for setup in range(-(-num_routings // batches)):
        rng = np.random.default_rng((seed, setup))
        kind = KINDS[setup % len(KINDS)]
        name = f"{kind.__name__}, seed {seed}, setup {setup}"
        with tally.case(f"{name}: made", seconds=60):
            check = kind(rng)
        for batch in range(min(batches, num_routings - setup * batches)):
            with tally.case(f"{name}, batch {batch}", seconds=60):
                check(str(rng.choice(FLAVOURS)), int(rng.integers(1 << 30)))


def _shape(rng, least_tokens=1):
    """Groups, tokens, width and experts."""
    groups, width = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    return groups, int(rng.integers(least_tokens, 14)), width, int(rng.integers(1, 8))


def _padding(rng, shape):
    """`(G, S)` mask or `None`; now and then a group is empty, or all of it real."""
    if rng.random() < 0.3:
        return None
    valid = rng.random(shape) < rng.choice([0.2, 0.6, 0.9])
    valid[rng.integers(shape[0])] = rng.random() < 0.5
    return valid


def _built(make, num_tokens, width, **settings):
    """A router with clear weights, and a capacity factor that leaves a slot."""
    if "capacity_factor" in settings:
        settings["rounding"] = "ceil"
    router = make(**settings)
    router.build((None, num_tokens, width))
    rng = np.random.default_rng(7)
    for weight in router.weights:
        if weight.dtype == "float32":
            weight.assign(rng.normal(size=weight.shape))
    return router


def _call(router, tokens, valid, **kwargs):
    if valid is not None:
        valid = keras.ops.convert_to_tensor(valid)
    tokens = keras.ops.convert_to_tensor(tokens)
    return as_numpy(router(tokens, valid=valid, **kwargs))


# === Kinds of routers ===


def token_choice(rng):
    groups, num_tokens, width, num_experts = _shape(rng)
    sinkhorn = rng.random() < 0.4
    cls = (
        routers.SinkhornTokenChoiceRouter
        if sinkhorn
        else routers.SoftmaxTokenChoiceRouter
    )
    multiple_of = [None, None, 2, 4][rng.integers(4)]
    router = _built(
        cls,
        num_tokens,
        width,
        num_experts=num_experts,
        num_selected_experts=int(rng.integers(1, min(4, num_experts) + 1)),
        capacity_factor=float(rng.choice(FACTORS)),
        priority=str(rng.choice(["position", "max", "sum", "pair"])),
        keep_fraction=float(rng.choice([1.0, 1.0, 0.5, 0.9])),
        multiple_of=multiple_of,
        noise_std=0.0,
    )

    def check(flavour, seed):
        tokens = cases.array(flavour, (groups, num_tokens, width), seed)
        valid = _padding(np.random.default_rng(seed), (groups, num_tokens))
        routing, summary = _call(router, tokens, valid)
        capacity = min(
            twins.expert_capacity(
                num_tokens * router.num_selected_experts,
                num_experts,
                router.capacity_factor,
                "ceil",
                multiple_of,
            ),
            num_tokens,
        )
        seats = twins.token_choice(
            summary["selection"],
            router.num_selected_experts,
            capacity,
            router.priority,
            valid,
            router.keep_fraction,
        )
        _check_sparse(router, tokens, valid, flavour, routing, summary, seats)
        taken = twins.to_dense(*routing, num_tokens)[0].sum((2, 3))
        assert taken.max(initial=0) <= router.num_selected_experts

    return check


def expert_choice(rng):
    groups, num_tokens, width, num_experts = _shape(rng)
    cls = [
        routers.SoftmaxExpertChoiceRouter,
        routers.SinkhornExpertChoiceRouter,
        routers.SparseTransportExpertChoiceRouter,
    ][rng.integers(3)]
    settings = {"capacity_factor": float(rng.choice(FACTORS))}
    router = _built(cls, num_tokens, width, num_experts=num_experts, **settings)

    def check(flavour, seed):
        tokens = cases.array(flavour, (groups, num_tokens, width), seed)
        valid = _padding(np.random.default_rng(seed), (groups, num_tokens))
        routing, summary = _call(router, tokens, valid)
        capacity = min(
            twins.expert_capacity(
                num_tokens, num_experts, router.capacity_factor, "ceil"
            ),
            num_tokens,
        )
        seats = twins.expert_choice(summary["selection"], capacity, valid)
        _check_sparse(router, tokens, valid, flavour, routing, summary, seats)

    return check


def limoe(rng):
    groups, _, width, num_experts = _shape(rng)
    modalities = (("image", int(rng.integers(1, 5))), ("text", int(rng.integers(1, 4))))
    times = int(rng.integers(1, 4))
    names = [name for name, count in modalities for _ in range(count)] * times
    num_choices = int(rng.integers(1, min(2, num_experts) + 1))
    split = int(rng.integers(num_choices, num_experts + 1))
    router = _built(
        routers.LIMoERouter,
        len(names),
        width,
        num_experts=num_experts,
        num_selected_experts=num_choices,
        capacity_factor=float(rng.choice(FACTORS)),
        priority=str(
            rng.choice(["position", "max", "sum", "image_first", "text_first"])
        ),
        per_modality=bool(rng.random() < 0.5),
        image_experts=split if rng.random() < 0.5 else None,
        losses=(),
        noise_std=0.0,
    )
    if router.per_modality:
        kernels = {
            n: to_numpy(getattr(router, f"{n}_kernel").value) for n in set(names)
        }
    else:
        kernels = {None: to_numpy(router.kernel.value)}

    def check(flavour, seed):
        tokens = cases.array(flavour, (groups, len(names), width), seed)
        valid = _padding(np.random.default_rng(seed), (groups, len(names)))
        routing, summary = _call(router, tokens, valid, modalities=modalities)
        capacity = min(
            twins.expert_capacity(
                len(names) * num_choices, num_experts, router.capacity_factor, "ceil"
            ),
            len(names),
        )
        seats = limoe_router_twin.token_choice(
            summary["selection"], num_choices, capacity, router.priority, names, valid
        )
        logits = limoe_router_twin.logits(tokens, names, kernels, router.image_experts)
        _check_sparse(router, tokens, valid, flavour, routing, summary, seats, logits)

    return check


def soft(rng):
    groups, num_tokens, width, num_experts = _shape(rng)
    slots = int(rng.integers(1, 4))
    router = _built(
        routers.SoftRouter,
        num_tokens,
        width,
        num_experts=num_experts,
        slots_per_expert=slots,
        dispatch=str(rng.choice(["soft", "soft", "uniform"])),
        combine=str(rng.choice(["soft", "soft", "uniform"])),
        normalize=bool(rng.random() < 0.7),
    )
    weights = {w.name: to_numpy(w.value) for w in router.weights}

    def check(flavour, seed):
        tokens = cases.array(flavour, (groups, num_tokens, width), seed)
        valid = _padding(np.random.default_rng(seed), (groups, num_tokens))
        (dispatch, combine), summary = _call(router, tokens, valid)
        real = np.ones((groups, num_tokens), bool) if valid is None else valid
        some = real.any(1)
        for weight in (dispatch, combine, *summary.values()):
            assert np.isfinite(weight).all()
        assert (combine[~real] == 0).all() and (dispatch[some][~real[some]] == 0).all()
        np.testing.assert_allclose(dispatch[some].sum(1), 1, **TOLERANCE)
        np.testing.assert_allclose(combine[real].sum((1, 2)), 1, **TOLERANCE)
        if flavour in COMPARED and some.all():
            expected = twins.soft_router(
                tokens,
                weights.get("mu", np.zeros((width, num_experts, slots))),
                weights.get("scale", 1.0),
                router.dispatch,
                router.combine,
                router.normalize,
                valid=valid,
            )
            np.testing.assert_allclose(dispatch, expected[0], **TOLERANCE)
            np.testing.assert_allclose(combine, expected[1], **TOLERANCE)

    return check


def identity(rng):
    groups, capacity, width, num_experts = _shape(rng)
    num_tokens = capacity * num_experts
    router = routers.IdentityRouter(num_experts)
    router.build((None, num_tokens, width))

    def check(flavour, seed):
        tokens = cases.array(flavour, (groups, num_tokens, width), seed)
        valid = _padding(np.random.default_rng(seed), (groups, num_tokens))
        (token, filled, gate), _ = _call(router, tokens, valid)
        real = np.ones((groups, num_tokens), bool) if valid is None else valid
        dispatch, _ = twins.to_dense(token, filled, gate, num_tokens)
        np.testing.assert_array_equal(dispatch.sum((2, 3)), real)
        assert (gate == filled).all()
        if valid is None:
            expected = twins.identity(groups, num_tokens, num_experts)
            np.testing.assert_array_equal(token, expected[0])
            np.testing.assert_array_equal(filled, expected[1])

    return check


def layer(rng):
    """A whole mixture of experts: groups that span images, batches of any size."""
    _, num_tokens, width, num_experts = _shape(rng)
    group_images = int(rng.integers(1, 5))
    router = [
        lambda: routers.SoftRouter(num_experts),
        lambda: routers.SoftmaxTokenChoiceRouter(
            num_experts, capacity_factor=0.75, rounding="ceil", priority="max"
        ),
        lambda: routers.SoftmaxExpertChoiceRouter(num_experts, rounding="ceil"),
    ][rng.integers(3)]()
    moe = layers.MoE(
        router,
        mlp_dim=5,
        group_images=group_images,
        dispatcher=str(rng.choice(["auto", "gather", "einsum"])),
    )
    moe.build((None, num_tokens, width))
    weights = np.random.default_rng(5)
    for weight in moe.weights:
        if weight.dtype == "float32":
            weight.assign(weights.normal(size=weight.shape))
    first, second = moe.experts.intermediate_dense, moe.experts.output_dense
    experts = [first.kernel, first.bias, second.kernel, second.bias]
    experts = [to_numpy(weight.value) for weight in experts]
    batch = int(rng.integers(1, 6))

    def check(flavour, seed):
        tokens = cases.array(flavour, (batch, num_tokens, width), seed)
        mask = None
        if seed % 2:
            mask = np.random.default_rng(seed).random((batch, num_tokens)) < 0.8
        with routers.record() as decisions:
            outputs = to_numpy(moe(keras.ops.convert_to_tensor(tokens), mask=mask))
        assert outputs.shape == tokens.shape and np.isfinite(outputs).all()
        if mask is not None:
            assert (outputs[~mask] == 0).all()
        (decision,) = decisions.values()
        padded = -(-batch // group_images) * group_images
        filled = np.zeros((padded, num_tokens, width))
        filled[:batch] = tokens
        grouped = filled.reshape(-1, group_images * num_tokens, width)
        routing = [to_numpy(x) for x in decision.routing]
        if len(routing) == 3:
            routing = twins.to_dense(*routing, grouped.shape[1])
        expected = twins.moe(grouped, *routing, experts)
        expected = expected.reshape(-1, num_tokens, width)[:batch]
        assert_near(outputs, expected, rtol=1e-3, atol=1e-4)

    return check


KINDS = (token_choice, expert_choice, limoe, token_choice, soft, identity, layer)


def _check_sparse(router, tokens, valid, flavour, routing, summary, seats, logits=None):
    """Seats, gates and statistics of a routing of single tokens."""
    token, filled, gate = routing
    groups, num_tokens, _ = tokens.shape
    real = np.ones((groups, num_tokens), bool) if valid is None else valid
    np.testing.assert_array_equal(filled, seats[1])
    np.testing.assert_array_equal(token, seats[0])
    assert token.min(initial=0) >= 0 and token.max(initial=0) < num_tokens
    for name, value in (("gate", gate), *summary.items()):
        assert np.isfinite(value).all(), name
    assert (gate[~filled] == 0).all() and ((gate >= 0) & (gate <= 1 + 1e-5)).all()
    dispatch, _ = twins.to_dense(token, filled, gate, num_tokens)
    slots = dispatch.sum(-1)
    assert slots.max(initial=0) <= 1, "a token twice with one expert"
    assert (slots[~real] == 0).all(), "a padded token in a slot"
    np.testing.assert_array_equal(summary["load"], filled.sum(-1))
    np.testing.assert_array_equal(
        summary["dropped"], (dispatch.sum((2, 3)) == 0) & real
    )
    if flavour not in COMPARED:
        return
    if logits is None:
        logits = np.float64(tokens) @ np.float64(to_numpy(router.kernel.value))
    kept = np.isfinite(logits) & real[..., None]
    np.testing.assert_allclose(summary["logits"][kept], logits[kept], **TOLERANCE)
    probabilities = twins.softmax(logits)
    np.testing.assert_allclose(
        summary["probabilities"][real], probabilities[real], **TOLERANCE
    )
    np.testing.assert_allclose(
        gate, twins.gates(probabilities, token, filled), **TOLERANCE
    )
