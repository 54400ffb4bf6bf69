"""LIMoE's routers as the tests use them: one group shape, every form."""

import functools

import numpy as np

from keras_softmoe import ops, routers
from tests.support import cases, limoe_router_twin
from tests.support.references import to_numpy
from tests.support.sparse_routers import PLAIN, WIDTH, as_numpy

# A pruned router, which is not trained
Pruned = functools.partial(routers.LIMoERouter, losses=())

EVERY_LOSS = (
    routers.RoutingLoss(ops.importance_loss),
    routers.RoutingLoss(ops.load_loss, "image"),
    routers.RoutingLoss(ops.z_loss, "text"),
    routers.RoutingLoss(ops.local_entropy_loss, "text"),
    routers.RoutingLoss(ops.target_entropy_loss, "image"),
    routers.RoutingLoss(ops.merged_entropy_loss, "text"),
    routers.RoutingLoss(ops.global_entropy_loss, "text", soft_minimum=2.5),
    routers.RoutingLoss(ops.global_entropy_loss, "text", threshold=0.5),
    routers.RoutingLoss(ops.mutual_information_loss),
)
# Two pairs of four patches and two words in a group.
MODALITIES = (("image", 4), ("text", 2))
NAMES = (["image"] * 4 + ["text"] * 2) * 2
GROUPS, NUM_TOKENS, NUM_EXPERTS = 2, len(NAMES), 4

# Kinds of routers: appendix E.3, and experts that only partly overlap.
FORMS = {
    "joint": {},
    "per_modality": {"per_modality": True},
    "disjoint": {"image_experts": 2, "text_experts": 2},
    "overlapping": {"image_experts": 3, "text_experts": 2},
    "disjoint_per_modality": {
        "per_modality": True,
        "image_experts": 2,
        "text_experts": 2,
    },
}


def build(num_experts=NUM_EXPERTS, cls=routers.LIMoERouter, **kwargs):
    """A built router with logits that differ clearly."""
    router = cls(num_experts, **{**PLAIN, "losses": (), **kwargs})
    router.build((None, NUM_TOKENS, WIDTH))
    rng = np.random.default_rng(3)
    for weight in router.weights:
        weight.assign(rng.normal(size=weight.shape))
    return router


def tokens(seed=0):
    return cases.array("normal", (GROUPS, NUM_TOKENS, WIDTH), seed)


def padding():
    """The second group lacks its second pair, as when a batch is filled up."""
    valid = np.ones((GROUPS, NUM_TOKENS), bool)
    valid[1, NUM_TOKENS // 2 :] = False
    return valid


def call(router, x, valid=None, modalities=MODALITIES, **kwargs):
    return as_numpy(router(x, valid=valid, modalities=modalities, **kwargs))


def kernels(router):
    """Kernels of a router by modality, `None` for both."""
    if router.per_modality:
        names = ("image", "text")
        return {n: to_numpy(getattr(router, f"{n}_kernel").value) for n in names}
    return {None: to_numpy(router.kernel.value)}


def routed(router, x, valid=None, noise=None, names=NAMES, values=None):
    """What the twin's losses are computed from."""
    clean = limoe_router_twin.logits(
        x,
        names,
        kernels(router) if values is None else values,
        router.image_experts,
        router.text_experts,
    )
    std = router.noise_std / router.num_experts
    return limoe_router_twin.Routed(
        clean,
        clean if noise is None else clean + std * noise,
        limoe_router_twin.members(names, len(x), valid),
        router.num_selected_experts,
        std,
    )
