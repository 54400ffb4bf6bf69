"""The ratios of times that the library wants to stay under."""

from typing import NamedTuple


class Target(NamedTuple):
    """One of them.

    Attributes:
        text: What is timed, for the reader.
        section: Section of the results.
        name: Name of the row, or `None` for the one with the largest ratio.
        passes: The passes that count.
        rival: Whose time ours is divided by, or `None` for the only rival of a row.
        at_most: The ratio: one for all backends, or a dict by backend. A backend that
            the dict leaves out has no target, and is shown without one.
    """

    text: str
    section: str
    name: str | None
    passes: tuple
    rival: str | None
    at_most: float | dict


FORWARD, BACKWARD, FIT = ("forward",), ("forward+backward",), ("fit",)
BOTH = FORWARD + BACKWARD

_PRODUCTS = {"jax": 1.15, "tensorflow": 1.25, "torch": 1.25}
_TWIN = {"jax": 1.15, "torch": 1.15}
# Three times as fast, and 1.3 times as fast.
_THIRD, _FASTER = 1 / 3, 1 / 1.3

_SOFT_128 = "Soft MoE layer, 128 experts x 1 slot"
_SOFT_32 = "Soft MoE layer, 32 experts x 6 slots"
_MODEL = "Soft MoE S/16 with 128 experts"
_VIT = "Dense ViT S/16"


def _layer(text, name, passes, rival, at_most):
    return Target(text, "layers", name, passes, rival, at_most)


def _overhead(text, name):
    return Target(text, "overheads", name, FIT, "without", 1.05)


def _reference(text, name, rival="vmoe"):
    return Target(text, "reference", name, BOTH, rival, 1.0)


def _rivals_of_layer(text, name):
    return tuple(
        _layer(text, name, BOTH, rival, _FASTER)
        for rival in ("soft-moe-pytorch", "soft-mixture-of-experts")
    )


TARGETS = (
    _layer(_SOFT_128, "soft_128x1", BOTH, "products", _PRODUCTS),
    _layer(_SOFT_32, "soft_32x6", BOTH, "products", _PRODUCTS),
    _layer("Token choice", "token_choice", BACKWARD, "dense", 1.35),
    _layer("Expert choice", "expert_choice", BACKWARD, "dense", 1.35),
    _layer("Sinkhorn expert choice", "sinkhorn_expert_choice", BOTH, "dense", 1.5),
    _layer("Sparse transport expert choice", "sparse_transport", BOTH, "dense", 3.0),
    _layer("Token choice that drops nothing", "dropless", BOTH, "capacity_1.25", 1.0),
    _layer(
        "Token choice, 4,616 tokens: gather",
        "token_choice_dispatch",
        BOTH,
        "einsum",
        _THIRD,
    ),
    _layer(
        "Expert choice, 4,616 tokens: gather",
        "expert_choice_dispatch",
        BOTH,
        "einsum",
        _THIRD,
    ),
    *_rivals_of_layer(_SOFT_128, "soft_128x1"),
    *_rivals_of_layer(_SOFT_32, "soft_32x6"),
    _reference(_SOFT_128, "soft_128x1"),
    _reference(_SOFT_32, "soft_32x6"),
    _reference("Token choice", "token_choice", "vmoe, einsum"),
    _reference("Token choice", "token_choice", "vmoe, indices"),
    _reference("Expert choice", "expert_choice"),
    Target("More experts, as many slots", "scaling", None, FORWARD, None, 1.25),
    Target(_MODEL, "models", "soft_moe", FORWARD, "dense_twin", _TWIN),
    # With a quarter of a batch nobody asks for it, but it is what training costs.
    Target(_MODEL, "models", "soft_moe", FIT, "dense_twin", {}),
    Target(
        f"{_MODEL}, 32 images",
        "models",
        "soft_moe_whole_batch",
        FIT,
        "dense_twin",
        {"jax": 1.3, "tensorflow": 1.3, "torch": 1.45},
    ),
    Target(_VIT, "models", "dense_vit", BOTH + FIT, "keras-hub", 1.0),
    Target(_VIT, "models", "dense_vit", BOTH + FIT, "transformers", 1.0),
    _overhead("Balancing losses", "auxiliary_losses"),
    _overhead("Sparse router in float32, experts in bfloat16", "float32_router"),
    _overhead("Soft router in float32, experts in bfloat16", "float32_soft_router"),
)
