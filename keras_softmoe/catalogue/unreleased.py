"""Models of the papers whose weights were never released, and their dense twins.

Models that differ only in settings of a loaded model (experts per token, capacity,
images per group) are one entry with a list of settings, of which the first is the
entry's own; in V-MoE's table each row is an entry. Routers have the nearest whole
number of slots, which reproduces the FLOPs of V-MoE table 8 and Soft MoE table 10.
"""

import functools

from keras_softmoe import ops, routers
from keras_softmoe.architecture import LIMoE
from keras_softmoe.catalogue import papers, row
from keras_softmoe.ops.capacity import RELEASED


def unreleased():
    """Return a list of `Row` of all these models."""
    families = _vmoe, _soft_moe, _soft_moe_baselines, _router_study, _limoe
    return [model for family in families for model in family()]


# === V-MoE ===

_VMOE_15B_NOTE = (
    "Pooled by attention, as appendix B.3 says. The table's count is met to its last "
    "digit by a class token, no pre-logits and a head for JFT-3B's 29,593 classes; "
    "this model with 18,291 classes is 0.07 % above it."
)
_RELEASED_NOTE = (
    "With 8 experts, as the released checkpoints have. Those are presets of "
    "their own (`imagenet` in the name)."
)


def _vmoe():
    for title, model, placement, k, parameters in papers.VMOE:
        published = {
            "row": f"table 8, {title}" + (f", K = {k}" if placement else ""),
            "parameters": parameters,
            "head_classes": papers.VMOE_CLASSES,
        }
        yield _vmoe_model(model, placement, 32, k, published)
    yield _vmoe_model("15B/14")
    for model in papers.VMOE_RELEASED:
        yield _vmoe_model(model, "every2", 8, 2)


def _vmoe_model(model, placement=None, num_experts=None, k=None, published=None):
    twin, arguments = _vmoe_dense(model)
    is_15b, is_released = model == "15B/14", num_experts == 8
    rest = {
        "source": "V-MoE, "
        + ("released code" if is_released else "section 3.1 and table 8"),
        "published": published,
        "note": _VMOE_15B_NOTE if is_15b else _RELEASED_NOTE if is_released else None,
    }
    if placement is None:
        title = "Dense twin of V-MoE-15B" if is_15b else f"ViT-{model} of V-MoE"
        return row.Row(twin, title, "", arguments=arguments, **rest)
    layers, where = row.placed(arguments["num_layers"], placement)
    marks = (placement, f"{num_experts}e", "" if k == 2 else f"k{k}")
    return row.Row(
        row.preset_name("vmoe", papers.VMOE_SIZES, model, *marks),
        "V-MoE-15B" if is_15b else f"V-MoE-{model}",
        f"{num_experts} experts in {where}, K = {k}",
        # In the released code all experts of a block start equal.
        arguments=arguments | row.experts(layers, 8) | {"equal_experts": True},
        router=row.template(
            routers.SoftmaxTokenChoiceRouter,
            num_experts,
            num_selected_experts=k,
            **(RELEASED if is_released else {}),
        ),
        twin=twin,
        **rest,
    )


def _vmoe_dense(model):
    """Return name and arguments of a dense model in V-MoE's set-up."""
    arguments = row.vit(papers.VMOE_SIZES, model)
    if model == "15B/14":
        arguments["pooling"] = "map"
    else:
        arguments["representation_dim"] = arguments["hidden_dim"]
    return row.preset_name("vmoe_dense", papers.VMOE_SIZES, model), arguments


# === Soft MoE and its baselines ===


def _soft_moe():
    for model, rows in papers.SOFT.items():
        twin, dense = _soft_dense(model)
        for num_experts, parameters, gflop, number in rows:
            tables = (parameters and "table 9", number and f"table 10, row {number}")
            tables = "; ".join(filter(None, tables))
            published = {"row": tables} if tables else None
            if parameters:
                published |= {
                    "parameters": parameters,
                    "head_classes": papers.SOFT_CLASSES,
                    "gflop_per_image": gflop,
                }
            rest = {
                "source": "Soft MoE, sections 3.3 and 3.4, tables 9 and 10",
                "published": published,
            }
            if not num_experts:
                title = f"ViT-{model} of Soft MoE"
                yield row.Row(twin, title, "", arguments=dense, **rest)
                continue
            yield row.Row(
                row.preset_name("soft_moe", papers.SIZES, model, f"{num_experts}e"),
                f"Soft MoE {model}",
                f"{num_experts} experts with one slot in the second half",
                arguments=dense | row.experts(_second_half(dense)),
                router=row.template(routers.SoftRouter, num_experts),
                twin=twin,
                **rest,
            )


def _soft_moe_baselines():
    for (model, num_experts), rows in papers.EXPERT_CHOICE.items():
        settings = [
            {"row": number, "group_images": images, "capacity_factor": factor}
            for number, (images, factor) in rows.items()
        ]
        router = functools.partial(row.template, routers.SoftmaxExpertChoiceRouter)
        yield _baseline("expert_choice", model, num_experts, router, settings)
    for (model, num_experts), rows in papers.TOKEN_CHOICE.items():
        names = ("row", "group_images", "num_selected_experts", "capacity_factor")
        settings = [
            dict(zip(names, (number, 8, k, factor), strict=True))
            for number, (k, factor) in rows.items()
        ]
        router = functools.partial(
            row.template, routers.SoftmaxTokenChoiceRouter, priority="max"
        )
        yield _baseline("token_choice", model, num_experts, router, settings)


def _baseline(family, model, num_experts, router, settings):
    twin, dense = _soft_dense(model)
    first = settings[0]
    rows = ", ".join(str(number) for number in sorted(s["row"] for s in settings))
    return row.Row(
        row.preset_name(family, papers.SIZES, model, f"{num_experts}e"),
        f"{family.replace('_', ' ').capitalize()} {model} of Soft MoE",
        f"{num_experts} experts in the second half",
        "Soft MoE, section 3.3 and table 10",
        dense | row.experts(_second_half(dense), first["group_images"]),
        router(num_experts, capacity_factor=first["capacity_factor"]),
        twin,
        {"row": f"table 10, row{'s' * (len(settings) > 1)} {rows}"},
        settings,
    )


def _second_half(dense):
    return row.moe_blocks(dense["num_layers"], last=dense["num_layers"] // 2)


def _soft_dense(model):
    """Return name and arguments of a dense model in Soft MoE's set-up."""
    return row.preset_name("vit", papers.SIZES, model), row.vit(papers.SIZES, model) | {
        "pooling": "gap",
        "position_embedding": "sincos2d",
        "use_qk_norm": True,
    }


# === Router study, section 3.1: 32 experts, K or capacity 1 and 2 ===

_STUDY_TOKEN_CHOICE = {
    "token_choice": routers.SoftmaxTokenChoiceRouter,
    "sinkhorn_token_choice": routers.SinkhornTokenChoiceRouter,
}
_STUDY_EXPERT_CHOICE = {
    "expert_choice": routers.SoftmaxExpertChoiceRouter,
    "sinkhorn_expert_choice": routers.SinkhornExpertChoiceRouter,
    "sparse_transport_expert_choice": routers.SparseTransportExpertChoiceRouter,
}


def _router_study():
    """Yield the models of the six routers, in V-MoE's set-up."""
    choices = [{"num_selected_experts": k} for k in (1, 2)]
    capacities = [{"capacity_factor": float(c)} for c in (1, 2)]
    sparse = [(*item, choices) for item in _STUDY_TOKEN_CHOICE.items()]
    sparse += [(*item, capacities) for item in _STUDY_EXPERT_CHOICE.items()]
    for model in papers.STUDY:
        for family, router, settings in sparse:
            router = row.template(router, 32, capacity_factor=1.0)
            yield _study(family, model, router, settings=settings, group_images=8)
        num_tokens = (row.IMAGE_SIZE // int(model.split("/")[1])) ** 2 + 1
        for factor in (1.0, 2.0):
            slots = ops.expert_capacity(num_tokens, 32, factor)
            router = row.template(routers.SoftRouter, 32, slots_per_expert=slots)
            yield _study("soft_moe", model, router, slots)


def _study(family, model, router, slots=None, settings=None, group_images=1):
    twin, dense = _vmoe_dense(model)
    layers = row.moe_blocks(dense["num_layers"], every=2)
    marks = ("every2", "32e", f"{slots}s" if slots else "")
    with_slots = f" with {slots} slots" if slots else ""
    return row.Row(
        row.preset_name(family, papers.VMOE_SIZES, model, *marks),
        f"{family.replace('_', ' ').capitalize()} {model} of the router study",
        f"32 experts{with_slots} in every second block",
        "Router study, section 3.1",
        # The experts of a block start equal, as in V-MoE.
        dense | row.experts(layers, group_images) | {"equal_experts": True},
        router,
        twin,
        settings=settings,
    )


# === LIMoE ===

_LIMOE_EXPERTS = 32
# Appendix E.5: routing worked in groups of this size and larger ones.
_GROUP_PAIRS = 32
# The paper says 288, of which 14 is no divisor. At 294 an image has 441 patches, 27.6
# for each token of a text; appendix G says "close to 1:27". (280 gives 25.)
_H14_IMAGE_SIZE = 294
# Appendix A: 512 for all but H/14, for which it is not printed.
_EMBEDDING_DIM, _H14_EMBEDDING_DIM = 512, 1280
_TEXT = {
    # Pieces of T5's SentencePiece model, which returns no other ids. (The T5 models
    # have 128 more rows, for sentinels and padding.)
    "vocabulary_size": 32_000,
    "sequence_length": 16,
}
_LIMOE_NOTE = (
    "The vocabulary is T5's SentencePiece model of 32,000 pieces; 0 is the padding."
)
_H14_NOTE = (
    "Chosen here, since the paper does not print it or it cannot be: images of 294 x "
    "294 pixels (it says 288, which patches of 14 do not divide; at 294 there are 27.6 "
    'patches for each text token, "close to 1:27" in appendix G), and embeddings as '
    "wide as the model (it only says that they are not 512 wide)."
)


def _limoe():
    """Yield the dense twin and the LIMoE of each size."""
    for model, (of_dense, of_limoe, soft_minimum) in papers.LIMOE.items():
        is_h14 = model == "H/14"
        image_size = _H14_IMAGE_SIZE if is_h14 else row.IMAGE_SIZE
        name = functools.partial(row.preset_name, image_size=image_size)
        dense = {
            **row.vit(papers.VMOE_SIZES, model, image_size),
            **_TEXT,
            "embedding_dim": _H14_EMBEDDING_DIM if is_h14 else _EMBEDDING_DIM,
        }
        rest = {
            "source": "LIMoE, appendices A and C.1",
            "note": f"{_LIMOE_NOTE} {_H14_NOTE}" if is_h14 else _LIMOE_NOTE,
            "kind": LIMoE,
        }
        twin = name("limoe_dense", papers.VMOE_SIZES, model)
        title = f"Dense one-tower model {model} of LIMoE"
        yield row.Row(
            twin,
            title if of_dense else f"Dense twin of LIMoE-{model}",
            "",
            arguments=dense,
            published=of_dense and _limoe_results(f"Dense {model}", of_dense),
            **rest,
        )
        layers, where = row.placed(dense["num_layers"], "every2")
        if is_h14:
            layers = tuple(block - 1 for block in papers.LIMOE_H14_BLOCKS)
            where = f"{len(layers)} blocks"
        text_experts, image_experts = soft_minimum
        yield row.Row(
            name("limoe", papers.VMOE_SIZES, model, f"{_LIMOE_EXPERTS}e"),
            f"LIMoE-{model}",
            f"{_LIMOE_EXPERTS} experts in {where}",
            arguments=dense | row.experts(layers, _GROUP_PAIRS),
            router=functools.partial(_limoe_router, text_experts, image_experts),
            twin=twin,
            published=_limoe_results(f"LIMoE {model}", of_limoe)
            | {"text_experts": text_experts, "image_experts": image_experts},
            **rest,
        )


def _limoe_router(text_experts, image_experts):
    losses = routers.classic_losses() + routers.entropy_losses(
        _LIMOE_EXPERTS, text_experts, image_experts
    )
    return routers.LIMoERouter(_LIMOE_EXPERTS, losses=losses, name="router")


def _limoe_results(title, results):
    names = ("imagenet_zero_shot", "imagenet_10_shot")
    names += ("coco_text_to_image", "coco_image_to_text")
    return {"row": f"table 4, {title}", **dict(zip(names, results, strict=True))}
