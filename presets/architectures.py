"""The models of the papers whose weights were never released, as configurations.

Models that differ only in what can be changed on a loaded model (experts per token,
capacity, images per group) are one entry with a list of settings, of which the first
is the entry's own. V-MoE's table names its models by the experts per token: there,
each row is an entry.
"""

from typing import NamedTuple

from paper_tables import (
    EXPERT_CHOICE,
    SIZES,
    SOFT,
    SOFT_CLASSES,
    STUDY,
    TOKEN_CHOICE,
    VMOE,
    VMOE_CLASSES,
    VMOE_RELEASED,
    VMOE_SIZES,
)

from keras_softmoe import models, ops, routers

IMAGE_SIZE = 224

VMOE_15B_NOTE = (
    "Pooled by attention, as appendix B.3 says. The table's count is met to its last "
    "digit by a class token, no pre-logits and a head for JFT-3B's 29,593 classes; "
    "this model with 18,291 classes is 0.07 % above it."
)

# Router study, section 3.1: 32 experts in every second block, K or capacity 1 and 2.
STUDY_TOKEN_CHOICE = {
    "token_choice": routers.SoftmaxTokenChoiceRouter,
    "sinkhorn_token_choice": routers.SinkhornTokenChoiceRouter,
}
STUDY_EXPERT_CHOICE = {
    "expert_choice": routers.SoftmaxExpertChoiceRouter,
    "sinkhorn_expert_choice": routers.SinkhornExpertChoiceRouter,
    "sparse_transport_expert_choice": routers.SparseTransportExpertChoiceRouter,
}

# An expert has the nearest whole number of slots: V-MoE, section 2.3. That rounding
# reproduces the training FLOPs of V-MoE table 8 and Soft MoE table 10. The released
# code's, the default of our routers, goes up to a multiple of four.
NEAREST = {"rounding": "round", "multiple_of": None}


class Architecture(NamedTuple):
    """An architecture-only preset.

    Attributes:
        name: str, of the preset.
        title: str, what the paper calls it.
        what: str, its experts and where they are; empty for a dense model.
        source: str, paper and section or table.
        config: dict, arguments of the backbone.
        twin: str, name of the preset of its dense twin, or `None`.
        published: dict, what the paper says about it, or `None`.
        settings: list of dicts, settings that the paper trained it with, or `None`.
        note: str, what else to know, or `None`.
        backbone: class of the backbone.
    """

    name: str
    title: str
    what: str
    source: str
    config: dict
    twin: str | None = None
    published: dict | None = None
    settings: list | None = None
    note: str | None = None
    backbone: type = models.ViTMoEBackbone


def image_architectures():
    """Those that take images alone, a list of `Architecture`."""
    return [*vmoe(), *soft_moe(), *soft_moe_baselines(), *router_study()]


# === V-MoE ===


def vmoe():
    for row, model, placement, k, parameters in VMOE:
        published = {
            "row": f"table 8, {row}" + (f", K = {k}" if placement else ""),
            "parameters": parameters,
            "head_classes": VMOE_CLASSES,
        }
        yield _vmoe(model, placement, 32, k, published)
    yield _vmoe("15B/14", None, None, None, None)
    for model in VMOE_RELEASED:
        yield _vmoe(model, "every2", 8, 2, None)


def _vmoe(model, placement, num_experts, k, published):
    twin, config = vmoe_dense(model)
    is_15b = model == "15B/14"
    rest = {
        "source": "V-MoE, section 3.1 and table 8",
        "published": published,
        "note": VMOE_15B_NOTE if is_15b else None,
    }
    if num_experts == 8:
        rest["source"] = "V-MoE, released code"
        rest["note"] = (
            "With 8 experts, as the released checkpoints have. Those are presets of "
            "their own (`imagenet` in the name)."
        )
    if placement is None:
        title = "Dense twin of V-MoE-15B" if is_15b else f"ViT-{model} of V-MoE"
        return Architecture(twin, title, "", config=config, **rest)
    router = routers.SoftmaxTokenChoiceRouter(
        num_experts,
        num_selected_experts=k,
        name="router",
        **(NEAREST if num_experts == 32 else {}),
    )
    name = preset_name(
        "vmoe",
        VMOE_SIZES,
        model,
        placement,
        f"{num_experts}e",
        "" if k == 2 else f"k{k}",
    )
    number = int(placement[-1])
    if placement == "every2":
        layers, where = models.every_n(config["num_layers"]), "every second block"
    else:
        layers = models.last_n(config["num_layers"], number)
        where = f"the last {number} of every second block"
    return Architecture(
        name,
        "V-MoE-15B" if is_15b else f"V-MoE-{model}",
        f"{num_experts} experts in {where}, K = {k}",
        # The released code starts all experts of a block equal.
        config=config | sparse(layers, router, 8) | {"equal_experts": True},
        twin=twin,
        **rest,
    )


def vmoe_dense(model):
    """Name and configuration of a dense model in V-MoE's set-up."""
    config = vit(VMOE_SIZES, model)
    if model == "15B/14":
        config["pooling"] = "map"
    else:
        config["representation_dim"] = config["hidden_dim"]
    return preset_name("vmoe_dense", VMOE_SIZES, model), config


# === Soft MoE and its baselines ===


def soft_moe():
    for model, rows in SOFT.items():
        twin, dense = soft_dense(model)
        for num_experts, parameters, gflop, row in rows:
            in_table_10 = [f"table 10, row {row}"] if row else []
            published = {"row": "; ".join(in_table_10)} if row else {}
            if parameters:
                published = {
                    "row": "; ".join(["table 9", *in_table_10]),
                    "parameters": parameters,
                    "head_classes": SOFT_CLASSES,
                    "gflop_per_image": gflop,
                }
            rest = {
                "source": "Soft MoE, sections 3.3 and 3.4, tables 9 and 10",
                "published": published or None,
            }
            if not num_experts:
                title = f"ViT-{model} of Soft MoE"
                yield Architecture(twin, title, "", config=dense, **rest)
                continue
            router = routers.SoftRouter(num_experts, name="router")
            layers = models.second_half(dense["num_layers"])
            yield Architecture(
                preset_name("soft_moe", SIZES, model, f"{num_experts}e"),
                f"Soft MoE {model}",
                f"{num_experts} experts with one slot in the second half",
                config=dense | sparse(layers, router),
                twin=twin,
                **rest,
            )


def soft_moe_baselines():
    for (model, num_experts), rows in EXPERT_CHOICE.items():
        settings = [
            {"row": row, "group_images": images, "capacity_factor": factor}
            for row, (images, factor) in rows.items()
        ]
        router = routers.SoftmaxExpertChoiceRouter(
            num_experts, settings[0]["capacity_factor"], name="router", **NEAREST
        )
        yield _baseline("expert_choice", model, router, settings)
    for (model, num_experts), rows in TOKEN_CHOICE.items():
        settings = [
            {
                "row": row,
                "group_images": 8,
                "num_selected_experts": k,
                "capacity_factor": factor,
            }
            for row, (k, factor) in rows.items()
        ]
        router = routers.SoftmaxTokenChoiceRouter(
            num_experts,
            capacity_factor=settings[0]["capacity_factor"],
            priority="max",
            name="router",
            **NEAREST,
        )
        yield _baseline("token_choice", model, router, settings)


def _baseline(family, model, router, settings):
    twin, dense = soft_dense(model)
    experts = f"{router.num_experts}e"
    layers = models.second_half(dense["num_layers"])
    rows = ", ".join(str(row) for row in sorted(s["row"] for s in settings))
    return Architecture(
        preset_name(family, SIZES, model, experts),
        f"{family.replace('_', ' ').capitalize()} {model} of Soft MoE",
        f"{router.num_experts} experts in the second half",
        "Soft MoE, section 3.3 and table 10",
        dense | sparse(layers, router, settings[0]["group_images"]),
        twin,
        {"row": f"table 10, row{'s' * (len(settings) > 1)} {rows}"},
        settings,
    )


def soft_dense(model):
    """Name and configuration of a dense model in Soft MoE's set-up."""
    return preset_name("vit", SIZES, model), vit(SIZES, model) | {
        "pooling": "gap",
        "position_embedding": "sincos2d",
        "use_qk_norm": True,
    }


# === Router study ===


def router_study():
    """The six routers in V-MoE's set-up, which the study takes over."""
    for model in STUDY:
        for family, router in STUDY_TOKEN_CHOICE.items():
            template = router(32, capacity_factor=1.0, name="router", **NEAREST)
            settings = [{"num_selected_experts": k} for k in (1, 2)]
            yield _study(family, model, template, settings)
        for family, router in STUDY_EXPERT_CHOICE.items():
            template = router(32, capacity_factor=1.0, name="router", **NEAREST)
            settings = [{"capacity_factor": float(c)} for c in (1, 2)]
            yield _study(family, model, template, settings)
        patch = int(model.split("/")[1])
        num_tokens = (IMAGE_SIZE // patch) ** 2 + 1
        for factor in (1.0, 2.0):
            slots = ops.expert_capacity(num_tokens, 32, factor, **NEAREST)
            template = routers.SoftRouter(32, slots_per_expert=slots, name="router")
            yield _study("soft_moe", model, template, None, f"{slots}s")


def _study(family, model, router, settings, mark=""):
    twin, dense = vmoe_dense(model)
    what = "32 experts in every second block"
    if mark:
        what = f"32 experts with {router.slots_per_expert} slots in every second block"
    group_images = 1 if mark else 8
    return Architecture(
        preset_name(family, VMOE_SIZES, model, "every2", "32e", mark),
        f"{family.replace('_', ' ').capitalize()} {model} of the router study",
        what,
        "Router study, section 3.1",
        dense | sparse(models.every_n(dense["num_layers"]), router, group_images),
        twin,
        settings=settings,
    )


# === Parts ===


def preset_name(family, sizes, model, *marks, image_size=IMAGE_SIZE):
    letter, patch = model.split("/")
    parts = [family, sizes[letter][0], f"patch{patch}", *filter(None, marks)]
    return "_".join([*parts, str(image_size)])


def vit(sizes, model, image_size=IMAGE_SIZE):
    letter, patch = model.split("/")
    _, hidden_dim, num_layers, num_heads, mlp_dim = sizes[letter]
    return {
        "image_shape": (image_size, image_size, 3),
        "patch_size": int(patch),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
    }


def sparse(layers, router, group_images=1):
    group = {"group_images": group_images} if group_images > 1 else {}
    return {"moe_layers": layers, "router": router, **group}
