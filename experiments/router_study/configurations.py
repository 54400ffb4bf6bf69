"""Which models a study trains, and which of them belong together."""

from typing import Any, NamedTuple

from experiments.router_study.permuted_identity import PermutedIdentityRouter
from keras_softmoe import ops, routers


class Family(NamedTuple):
    """Models that differ in the numbers of their experts and slots alone.

    Attributes:
        title: str, what it is called in tables.
        kind: str, who chooses: `"dense"` (there are no experts), `"token"`, `"expert"`,
            `"soft"`, `"half fixed"` or `"fixed"` (routing that does not look at the
            tokens).
        router: class of the router, or `None`.
        settings: dict of further arguments of that class.
    """

    title: str
    kind: str
    router: Any = None
    settings: dict = {}

    @property
    def is_sparse(self):
        """Whether tokens go to slots one by one."""
        return self.kind in ("token", "expert")


# The papers' 300,000 steps can move a scale that starts at 1 by 90, thousands of steps
# hardly at all: see the study "initial_scale".
_SCALED = {"initial_scale": "unit_variance"}

FAMILIES = {
    "dense": Family("Dense ViT", "dense"),
    "softmax_token_choice": Family(
        "Softmax token choice", "token", routers.SoftmaxTokenChoiceRouter
    ),
    "sinkhorn_token_choice": Family(
        "Sinkhorn token choice", "token", routers.SinkhornTokenChoiceRouter
    ),
    "softmax_expert_choice": Family(
        "Softmax expert choice", "expert", routers.SoftmaxExpertChoiceRouter
    ),
    "sinkhorn_expert_choice": Family(
        "Sinkhorn expert choice", "expert", routers.SinkhornExpertChoiceRouter
    ),
    "sparse_expert_choice": Family(
        "Sparsity-constrained expert choice",
        "expert",
        routers.SparseTransportExpertChoiceRouter,
    ),
    "soft": Family("Soft MoE", "soft", routers.SoftRouter, _SCALED),
    "soft_uniform": Family(
        "Soft / uniform",
        "half fixed",
        routers.SoftRouter,
        {"combine": "uniform"} | _SCALED,
    ),
    "uniform_soft": Family(
        "Uniform / soft",
        "half fixed",
        routers.SoftRouter,
        {"dispatch": "uniform"} | _SCALED,
    ),
    "uniform": Family(
        "Uniform",
        "fixed",
        routers.SoftRouter,
        {"dispatch": "uniform", "combine": "uniform"},
    ),
    "identity": Family("Identity", "fixed", routers.IdentityRouter),
    "permuted_identity": Family(
        "Identity of permuted tokens", "fixed", PermutedIdentityRouter
    ),
}


def families(*kinds):
    """Names of the families of some kinds, in the order of the table."""
    return [name for name, family in FAMILIES.items() if family.kind in kinds]


STUDIES = {
    "learning_rate": "Learning rates",
    "close_rates": "Learning rates that are close",
    "headline": "Mixtures against the dense model of the same FLOP",
    "routers": "Routers",
    "fixed": "Soft MoE and fixed routing in the last half of the blocks",
    "initial_scale": "Where the scale of Soft MoE starts",
    "priority": "Batch priority and capacity in training",
    "data": "Less data",
    "combine": "With and without softmax combine",
    "experts": "Experts at fixed slots",
    "slots": "Slots at fixed experts",
    "placement": "Placement of the expert layers",
}
# A name that Keras makes up would count the routers made before.
_NAMED = {"name": "router"}


class Configuration(NamedTuple):
    """One model of a study.

    Attributes:
        name: str, a key that also names files.
        family: str, a key of `FAMILIES`.
        title: str, what the model is called in tables.
        router: router or `None`, the template of the expert layers.
        moe_layers: tuple of ints, blocks with experts.
        group_images: int, images whose tokens are routed together.
        capacity: float or `None`, slots per token (`K` of token choice).
        num_experts: int or `None`, experts per layer.
        learning_rate: float, the peak.
        data_share: float, the part of the images that is seen, again and again.
    """

    name: str
    family: str
    title: str
    router: Any = None
    moe_layers: tuple = ()
    group_images: int = 1
    capacity: float | None = None
    num_experts: int | None = None
    learning_rate: float = 0.0
    data_share: float = 1.0


def configurations(scale, studies=tuple(STUDIES)):
    """The models of a study, none twice.

    `"learning_rate"`: what the learning rates of the others were chosen from, with a
    seed of its own; `"close_rates"`: those that it does not decide between, with more
    such seeds. `"headline"`: a dense model, and mixtures of its cost, with more
    seeds. `"routers"`: a dense model and six routers with one and two slots per token
    (router study, section 3). `"fixed"`: Soft MoE with one slot per expert in the last
    half of the blocks, and routing that is fixed in part or whole (Soft MoE, table 3);
    identity of permuted tokens is the control of what their positions are worth.
    `"initial_scale"`: Soft MoE whose scale starts elsewhere, and without normalization.
    `"priority"`: token choice with and without batch priority at low capacity (Soft
    MoE, table 8; V-MoE, appendix C). `"data"`: a sixteenth of the images, seen sixteen
    times (V-MoE, appendix E.6 and figure 37). `"combine"`: Sinkhorn token choice that
    weighs by the plan (router study, figure 3). `"experts"`: more experts with fewer
    slots (Soft MoE, figure 6 and appendix B). `"slots"`: more slots for the same
    experts (figure 12). `"placement"`: as many experts in few or many layers (tables 5
    to 7). A model that several studies share has the same name in all of them.

    Args:
        scale: `Scale`.
        studies: sequence of the names above.

    Returns:
        dict from each study to a dict from names to `Configuration`.

    Raises:
        ValueError: if there is no such study, or an expert would get no slot.

    Example:

    >>> found = configurations(SMALL)
    >>> len(found["routers"])
    13
    """
    makers = {
        "learning_rate": lambda scale: _rates(scale, scale.learning_rates),
        "close_rates": lambda scale: _rates(scale, scale.close_rates),
        "headline": _headline,
        "routers": _routers,
        "fixed": _fixed,
        "initial_scale": _initial_scale,
        "priority": _priority,
        "data": _data,
        "combine": _combine,
        "experts": _experts,
        "slots": _slots,
        "placement": _placement,
    }
    if not studies or any(study not in makers for study in studies):
        raise ValueError(
            f"The studies are {', '.join(map(repr, makers))}; name one at least. "
            f"Received: studies={studies}."
        )
    return {study: {c.name: c for c in makers[study](scale)} for study in studies}


# === Studies ===


def _rates(scale, rates):
    for rate in rates:
        yield _dense(scale, rate)
        for family in ("softmax_token_choice", "softmax_expert_choice", "soft"):
            yield _mixture(scale, family, learning_rate=rate)


def _headline(scale):
    yield _dense(scale)
    yield _mixture(scale, "soft")
    yield _mixture(scale, "soft", initial_scale=1.0)
    yield _mixture(scale, "softmax_token_choice", priority="max")
    # Where Soft MoE's own experiments have the experts.
    last = _last_half(scale)
    yield _mixture(scale, "soft", moe_layers=last)
    yield _mixture(scale, "softmax_token_choice", priority="max", moe_layers=last)


def _routers(scale):
    yield _dense(scale)
    for factor in (1, 2):
        for family in families("token", "expert", "soft"):
            yield _mixture(scale, family, factor)


def _fixed(scale):
    yield _dense(scale)
    for family in families("soft", "half fixed", "fixed"):
        yield _mixture(scale, family, moe_layers=_last_half(scale))


def _initial_scale(scale):
    for start in ("unit_variance", 1.0, 4.0, None):
        yield _mixture(scale, "soft", initial_scale=start)


def _priority(scale):
    for factor in (0.25, 0.5, 1.0):
        for priority in ("position", "max"):
            yield _mixture(
                scale,
                "softmax_token_choice",
                capacity_factor=factor,
                priority=priority,
            )


def _data(scale):
    for share in (1.0, 1 / 16):
        dense = _dense(scale)
        mixture = _mixture(scale, "softmax_token_choice", priority="max")
        for c in (dense, mixture):
            if share < 1:
                c = c._replace(
                    name=f"{c.name}_data{share:g}",
                    title=f"{c.title}, {share:g} of the images",
                    data_share=share,
                )
            yield c


def _combine(scale):
    for k in (1, 2):
        yield _mixture(scale, "sinkhorn_token_choice", k)
        yield _mixture(scale, "sinkhorn_token_choice", k, combine="plan")


def _experts(scale):
    for num_experts in scale.expert_counts:
        # As many slots as experts at most, of a soft router.
        capacity = max(scale.expert_counts) / scale.num_tokens
        yield _mixture(scale, "soft", max(capacity, 1), num_experts)
        for family in ("softmax_expert_choice", "softmax_token_choice"):
            yield _mixture(scale, family, num_experts=num_experts)


def _slots(scale):
    for capacity in scale.capacities:
        yield _mixture(scale, "soft", capacity)
        yield _mixture(scale, "softmax_expert_choice", capacity)


def _placement(scale):
    for layers in placements(scale.num_layers):
        num_experts = scale.placed_experts // len(layers)
        for family in ("soft", "softmax_token_choice", "softmax_expert_choice"):
            settings = {"num_experts": num_experts, "moe_layers": layers}
            if family == "soft":
                # One slot for each expert, as in the paper: cost varies.
                settings["slots"] = 1
            elif family == "softmax_token_choice":
                settings["priority"] = "max"
            yield _mixture(scale, family, **settings)


def _last_half(scale):
    return tuple(range(scale.num_layers // 2, scale.num_layers))


def placements(num_layers):
    """Where experts can go: one, two, four or eight layers, at the end or spread.

    Args:
        num_layers: int, blocks of the model.

    Returns:
        list of tuples of ints. Of twelve blocks they are those of Soft MoE, table 5.
    """
    last = num_layers - 1
    found = [(last,), (last - 1,)]
    for count in (2, 4, 8):
        if count > num_layers:
            break
        found.append(tuple(range(num_layers - count, num_layers)))
        if num_layers % count == 0:
            every = num_layers // count
            found.append(tuple(range(every - 1, num_layers, every)))
        else:
            half = count // 2
            found.append((*range(1, 1 + half), *range(num_layers - half, num_layers)))
    return list(dict.fromkeys(found))


# === One model ===


def _dense(scale, learning_rate=None):
    name, title = "dense", FAMILIES["dense"].title
    if learning_rate is not None:
        name += f"_lr{learning_rate:g}"
        title += f", learning rate {learning_rate:g}"
    rate = learning_rate or scale.rate("dense")
    return Configuration(name, "dense", title, learning_rate=rate)


def _mixture(
    scale,
    family,
    capacity=1,
    num_experts=None,
    moe_layers=None,
    combine="softmax",
    priority="position",
    slots=None,
    capacity_factor=1.0,
    initial_scale="unit_variance",
    learning_rate=None,
):
    """A mixture of experts. What differs from the scale's default is in its name."""
    known = FAMILIES[family]
    experts = num_experts or scale.num_experts
    layers = scale.moe_layers if moe_layers is None else moe_layers
    group = scale.group_images if known.is_sparse else 1
    name, title = [family], [known.title]
    settings = {**known.settings, **_NAMED}

    if "identity" in family:
        # It has no slots to spare: as many experts as share the tokens of an image.
        experts = max(n for n in range(1, experts + 1) if scale.num_tokens % n == 0)
    elif known.is_sparse:
        if combine != "softmax":
            settings["combine"] = combine
        letter = "K" if known.kind == "token" else "c"
        if known.kind == "token":
            settings |= {"num_selected_experts": capacity, "priority": priority}
            settings["capacity_factor"] = capacity_factor
        else:
            settings["capacity_factor"] = float(capacity)
        name.append(f"{letter.lower()}{capacity:g}")
        title.append(f"{letter} = {capacity:g}")
    else:
        slots = slots or ops.expert_capacity(scale.num_tokens, experts, capacity)
        settings["slots_per_expert"] = slots
        capacity = slots * experts / scale.num_tokens
        if family == "soft":
            name.append(f"{slots}s")
            title.append(f"{slots} slot{'s' * (slots > 1)} each")
            if initial_scale is None:
                settings |= {"initial_scale": 1.0, "normalize": False}
                name.append("plain")
                title.append("plain logits")
            elif initial_scale != "unit_variance":
                settings["initial_scale"] = initial_scale
                name.append(f"scale{initial_scale:g}")
                title.append(f"scale from {initial_scale:g}")
    router = known.router(experts, **settings)
    if known.is_sparse:
        # Says now, not after hours, that an expert would get no slot.
        router.capacity(group * scale.num_tokens)
    if experts != scale.num_experts:
        name.append(f"{experts}e")
        title.append(f"{experts} experts")
    if layers != scale.moe_layers:
        name.append("at" + "-".join(map(str, layers)))
        title.append(f"blocks {', '.join(map(str, layers))}")
    if capacity_factor != 1:
        name.append(f"c{capacity_factor:g}")
        title.append(f"C = {capacity_factor:g}")
    if combine != "softmax":
        name.append(combine)
        title.append("weighed by the plan")
    if priority == "max":
        name.append("bpr")
        title.append("batch priority")
    if learning_rate is not None:
        name.append(f"lr{learning_rate:g}")
        title.append(f"learning rate {learning_rate:g}")
    return Configuration(
        "_".join(name),
        family,
        ", ".join(title),
        router,
        layers,
        group,
        capacity,
        experts,
        learning_rate or scale.rate(known.kind),
    )
