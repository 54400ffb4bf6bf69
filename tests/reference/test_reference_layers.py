"""Whole MoE layers against the released code's numbers (files a and bc_layer)."""

import keras
import pytest

from keras_softmoe import layers, ops, routers
from tests.support import references
from tests.support.gradients import layer_gradients, outputs, recorded

SOFT_FILES = [
    f"a_soft_{case}"
    for case in "banker base noise odd p1_group scale_on_inputs tiny_norms".split()
]
SPARSE_CASES = "tc_einsum tc_indices ec_einsum tc_einsum_bf16 ec_einsum_bf16".split()
EXPERT_WEIGHTS = [
    f"Mlp/Dense_{i}/{weight}" for i in (0, 1) for weight in ("kernel", "bias")
]


def load_experts(layer, params):
    """Saved weights into the expert banks, in order of creation."""
    for weight, name in zip(layer.experts.weights, EXPERT_WEIGHTS, strict=True):
        # The banks may keep their biases with an axis for the slots.
        weight.assign(params[name].reshape(weight.shape))


def in_groups(tokens, group_size):
    """(B, S, D) to (G, group_size, D): groups may begin inside an image."""
    return tokens.reshape(-1, group_size, tokens.shape[-1])


@pytest.mark.parametrize("name", SOFT_FILES)
def test_soft_layer(name, set_noise):
    reference = references.Reference(name)
    config = reference.config
    inputs = reference.given("inputs")
    tokens = in_groups(inputs, config["group_size"])
    slots_per_expert = config["num_slots_arg"] or ops.expert_capacity(
        config["group_size"],
        config["num_experts"],
        config["capacity_factor"],
        rounding="round",
        multiple_of=None,
    )
    assert slots_per_expert == config["slots_per_expert"]
    router = routers.SoftRouter(
        config["num_experts"], slots_per_expert, noise_std=config["noise_std"]
    )
    layer = layers.MoE(router, config["mlp_dim"])
    layer.build(tokens.shape)
    params = reference.given_under("params/")
    load_experts(layer, params)
    layer.router.mu.assign(params["Router/mu"])
    layer.router.scale.assign(params["Router/scale"])

    def compute(tokens):
        training = not config["deterministic"]
        clean = layer.router(tokens).summary["logits"]
        with routers.record() as decisions:
            exact = layer(tokens, training=training)
        (decision,) = decisions.values()
        slots = ops.dispatch(tokens, decision.routing)
        layer.dispatch_dtype = "bfloat16"
        return clean, exact, decision, slots, layer(tokens, training=training)

    if "noise_raw" in reference:
        set_noise(*2 * [reference.given("noise_raw")])
    clean, exact, (routing, summary), slots, rounded = outputs(compute, tokens)
    reference.check("logits_clean", clean)
    reference.check("logits", summary["logits"])
    reference.check("dispatch_weights", routing.dispatch)
    reference.check("combine_weights", routing.combine)
    reference.check("slot_inputs_f32", slots)
    reference.check("outputs_f32", exact.reshape(inputs.shape))
    reference.check("outputs_bf16", rounded.reshape(inputs.shape))
    references.check_auxiliary_loss(
        reference, "metrics/auxiliary_loss", summary["auxiliary_loss"]
    )
    check_weight_means(reference, "metrics/", routing)
    references.finish(reference)


def check_weight_means(reference, prefix, routing):
    """Means of the extreme weights: of a token's slots, of a slot's tokens."""
    for name, weights, axes in (
        ("combine", routing.combine, (2, 3)),
        ("dispatch", routing.dispatch, (1,)),
    ):
        weights = references.to_numpy(weights)
        for extreme in ("min", "max"):
            mean = getattr(weights, extreme)(axis=axes).mean()
            reference.check(f"{prefix}{name}_weights_{extreme}_mean", mean)


def sparse_router(case, config):
    arguments = {
        "capacity_factor": config["capacity_factor"],
        "rounding": config["ceil_or_round"],
        "multiple_of": config["multiple_of"],
        "noise_std": 0.0,
    }
    if case.startswith("ec"):
        return routers.SoftmaxExpertChoiceRouter(config["E"], **arguments)
    weights = {f"{n}_loss_weight": w for n, w in config["loss_weights"].items()}
    return routers.SoftmaxTokenChoiceRouter(
        config["E"],
        num_selected_experts=config["k"],
        priority="max" if config["batch_priority"] else "position",
        losses=references.losses_of(weights, noise_std=0.0),
        **arguments,
    )


@pytest.mark.parametrize("dispatcher", ["gather", "einsum"])
@pytest.mark.parametrize("case", SPARSE_CASES)
@pytest.mark.parametrize("name", ["bc_layer_even", "bc_layer_odd"])
def test_sparse_layer(name, case, dispatcher):
    reference = references.Reference(name)
    config = reference.config
    inputs = reference.given("inputs")
    tokens = in_groups(inputs, config["group_size"])
    layer = layers.MoE(
        sparse_router(case, config),
        config["mlp_dim"],
        dispatcher=dispatcher,
        dispatch_dtype="bfloat16" if case.endswith("bf16") else None,
    )
    layer.build(tokens.shape)
    params = reference.given_under("params/")
    load_experts(layer, params)
    layer.router.kernel.assign(params["Router/dense/kernel"])

    found, (routing, summary) = recorded(layer, tokens)
    reference.check(f"{case}/outputs", references.to_numpy(found).reshape(inputs.shape))
    references.check_auxiliary_loss(
        reference, f"{case}/metrics/auxiliary_loss", summary["auxiliary_loss"]
    )
    if case.startswith("tc"):
        probabilities = summary["probabilities"]
        reference.check(
            f"{case}/metrics/importance_loss", ops.importance_loss(probabilities)
        )
        # A loss of weight 0 is reported all the same.
        reference.check(f"{case}/metrics/gshard_loss", ops.gshard_loss(probabilities))
    else:
        references.check_statistics(
            reference, f"{case}/metrics/", routing, summary["selection"]
        )
    if f"{case}/grad_inputs" in reference:
        check_gradients(reference, case, layer, tokens)
    references.finish(reference, f"{case}/")


def check_gradients(reference, case, layer, tokens):
    cotangent = in_groups(reference.given("cotangent"), tokens.shape[1])
    cotangent = keras.ops.convert_to_tensor(cotangent)

    def loss(outputs, losses):
        # The layer adds the mean over the groups, the reference takes the sum.
        return keras.ops.sum(outputs * cotangent) + len(tokens) * sum(losses)

    _, for_tokens, for_weights = layer_gradients(layer, tokens, loss, training=True)
    shape = reference.given("inputs").shape
    reference.check(f"{case}/grad_inputs", for_tokens.reshape(shape))
    names = {layer.router.kernel.path: "Router/dense/kernel"}
    for weight, name in zip(layer.experts.weights, EXPERT_WEIGHTS, strict=True):
        names[weight.path] = name
    for path, gradient in for_weights.items():
        key = f"{case}/grad_params/{names[path]}"
        reference.check(key, gradient.reshape(reference.given(key).shape))
