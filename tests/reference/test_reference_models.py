"""Whole models against the released code's numbers (files e)."""

import keras
import numpy as np
import pytest

from keras_softmoe import ops, routers
from keras_softmoe.ops.position import sincos_2d_table
from tests.reference.test_reference_layers import check_weight_means
from tests.support import references
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients, outputs

MODELS = (
    "e_dense_gap_sincos_qknorm_rect e_dense_map e_dense_map_qknorm_noposemb "
    "e_dense_token e_dense_token_sincos e_expert_choice_gap_odd e_expert_choice_map "
    "e_soft_gap_grads e_soft_map_odd e_top1_first_odd e_top2_bpr_token "
    "e_top2_bpr_token_grads"
).split()
NOISY_MODELS = ["e_expert_choice_map", "e_top1_first_odd", "e_top2_bpr_token_grads"]
GRADIENT_MODELS = ["e_soft_gap_grads", "e_top2_bpr_token_grads"]
TOLERANCE = 1e-4


def make_router(moe, noisy):
    """The router of a MoE configuration of the released code."""
    settings, num_experts = moe["router"], moe["num_experts"]
    kind = settings["name"].rpartition(".")[2]
    if kind == "SoftRouter":
        slots = settings.get("num_slots") or ops.expert_capacity(
            moe["group_size"], num_experts, 1.0, rounding="round", multiple_of=None
        )
        return routers.SoftRouter(num_experts, slots)
    dispatcher = settings["dispatcher"]
    arguments = {
        "capacity_factor": dispatcher["capacity_factor"],
        "rounding": dispatcher["capacity_ceil_or_round"],
        "multiple_of": dispatcher["capacity_multiple_of"],
        "noise_std": settings["noise_std"] if noisy else 0.0,
    }
    if kind == "NoisyTopItemsPerExpertRouter":
        return routers.SoftmaxExpertChoiceRouter(num_experts, **arguments)
    weights = ("gshard_loss_weight", "importance_loss_weight", "load_loss_weight")
    return routers.SoftmaxTokenChoiceRouter(
        num_experts,
        num_selected_experts=settings["num_selected_experts"],
        priority="max" if dispatcher["batch_priority"] else "position",
        **arguments,
        losses=references.losses_of(
            {name: settings[name] for name in weights if name in settings},
            arguments["noise_std"],
        ),
    )


def position_embedding(reference, params):
    """Kind of position embedding; adds a learned table where ours has no such kind."""
    settings = reference.config["model"]["encoder"].get(
        "position_emb", {"name": "learned"}
    )
    if "temperature" not in settings:
        return settings["name"]
    # Another temperature than 10000: as a learned table, the class token's row zero.
    height, width = (
        size // patch
        for size, patch in zip(
            reference.config["image"],
            reference.config["model"]["patch_size"],
            strict=True,
        )
    )
    table = references.to_numpy(
        sincos_2d_table(
            height,
            width,
            reference.config["model"]["hidden_size"],
            settings["temperature"],
        )
    )
    token = np.zeros((1, table.shape[-1]))
    params["Encoder/posembed_input/pos_embedding"] = np.concatenate([token, table])[
        None
    ]
    return "learned"


def make_model(reference, params, noisy=False):
    """Classifier (or backbone without a head) of the configuration, with `params`."""
    from keras_softmoe import converters, models

    model, encoder = reference.config["model"], reference.config["model"]["encoder"]
    height, width = reference.config["image"]
    moe = encoder.get("moe")
    arguments = {}
    if moe:
        num_tokens = reference.given("encoder_output_f32").shape[1]
        group_images, remainder = divmod(moe["group_size"], num_tokens)
        assert not remainder
        arguments = {
            "moe_layers": tuple(moe["layers"]),
            "router": make_router(moe, noisy),
            "group_images": group_images,
        }
    backbone = models.ViTMoEBackbone(
        image_shape=(height, width, 3),
        patch_size=tuple(model["patch_size"]),
        num_layers=encoder["num_layers"],
        num_heads=encoder["num_heads"],
        hidden_dim=model["hidden_size"],
        mlp_dim=encoder["mlp_dim"],
        pooling={"0": "first"}.get(model["classifier"], model["classifier"]),
        position_embedding=position_embedding(reference, params),
        use_qk_norm=encoder["attention_qk_norm"],
        representation_dim=model["representation_size"],
        **arguments,
    )
    if model["num_classes"] is None:
        converters.load_vmoe_params(backbone, params)
        return backbone, backbone
    classifier = models.ViTMoEImageClassifier(
        backbone, num_classes=model["num_classes"]
    )
    converters.load_vmoe_params(classifier, params)
    return classifier, backbone


def check_route(reference, decisions):
    """Losses and statistics of each MoE block, and the sum of the losses."""
    total = sum(d.summary["auxiliary_loss"] for d in decisions.values())
    if decisions:
        references.check_auxiliary_loss(reference, "auxiliary_loss", total)
    else:
        reference.check("auxiliary_loss", 0.0)
    for index, (routing, summary) in decisions.items():
        case = f"metrics/encoderblock_{index}/"
        references.check_auxiliary_loss(
            reference, f"{case}auxiliary_loss", summary["auxiliary_loss"]
        )
        if isinstance(routing, ops.DenseRouting):
            check_weight_means(reference, case, routing)
            continue
        if f"{case}gshard_loss" in reference:
            probabilities = summary["probabilities"]
            for loss in ("gshard_loss", "importance_loss"):
                value = getattr(ops, loss)(probabilities)
                reference.check(f"{case}{loss}", value, TOLERANCE)
        references.check_statistics(
            reference, case, routing, summary["selection"], TOLERANCE
        )


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    reference = references.Reference(name)
    images = reference.given("images")
    model, backbone = make_model(reference, reference.given_under("params/"))
    whole = keras.Model(
        backbone.input, [backbone.get_layer("block_0").output, backbone.output]
    )

    def run(x):
        with routers.record() as decisions:
            logits = model(x)
        return whole(x), logits, list(decisions.values())

    (block_output, features), logits, decisions = outputs(run, images)
    decisions = dict(zip(backbone.moe_layers, decisions, strict=True))
    reference.check("encoderblock_0_output_f32", block_output, TOLERANCE)
    reference.check("encoder_output_f32", features["sequence_output"], TOLERANCE)
    reference.check("pre_logits_f32", features["pooled_output"], TOLERANCE)
    if model is backbone:
        logits = logits["pooled_output"]
    reference.check("logits", logits, TOLERANCE)
    check_route(reference, decisions)
    if "logits_bf16" in reference:
        for index in backbone.moe_layers:
            backbone.blocks[index].moe.dispatch_dtype = "bfloat16"
        logits = outputs(lambda x: model(x), images)
        reference.check("logits_bf16", logits, TOLERANCE)
    reference.given_under("noisy/")
    reference.given_under("grads/")
    reference.leave({(r".*_grads", "loss"): "compared beside the gradients"})
    references.finish(reference)


@pytest.mark.parametrize("name", NOISY_MODELS)
def test_noisy_model(name, set_noise):
    reference = references.Reference(name)
    model, backbone = make_model(
        reference, reference.given_under("params/"), noisy=True
    )
    layers = reference.config["model"]["encoder"]["moe"]["layers"]
    undrawn = set_noise(
        *(reference.given(f"noisy/noise_raw_{i}") for i in range(len(layers)))
    )

    def run(images):
        with keras.StatelessScope(collect_losses=True):
            return model(images, training=True), model.losses

    logits, losses = outputs(run, reference.given("images"))
    assert not undrawn
    reference.check("noisy/logits", logits, TOLERANCE)
    # One loss for each layer, the mean over its groups; Keras keeps no order.
    losses = sorted(map(float, losses))
    expected = sorted(
        reference.given(f"noisy/metrics/encoderblock_{i}/auxiliary_loss").mean()
        for i in layers
    )
    if not losses:
        losses = [0.0] * len(layers)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    total = reference.given("noisy/auxiliary_loss").mean()
    np.testing.assert_allclose(sum(losses), total, rtol=TOLERANCE)
    references.finish(reference, "noisy/")


@pytest.mark.parametrize("name", GRADIENT_MODELS)
def test_gradients(name):
    from keras_softmoe import converters

    reference = references.Reference(name)
    model, _ = make_model(reference, reference.given_under("params/"))
    value, _, gradients = layer_gradients(
        model,
        reference.given("images"),
        lambda logits, losses: keras.ops.mean(logits**2) + sum(losses),
        training=True,
    )
    reference.check("loss", value, TOLERANCE)
    # The saved gradients carry the parameters' names: load them as if they were some.
    saved = reference.given_under("grads/")
    converters.load_vmoe_params(model, saved)
    assert len(gradients) == len(saved)
    for variable in model.trainable_variables:
        assert_near(
            gradients[variable.path],
            references.to_numpy(variable.value),
            rtol=TOLERANCE,
            atol=TOLERANCE,
            err_msg=variable.path,
        )
    references.finish(reference, "grads/")
    references.finish(reference, "loss")
