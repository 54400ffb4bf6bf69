"""What is trained: from which dense model, for how long, and as what."""

import dataclasses
from typing import NamedTuple

from experiments.router_study.scales import SMALL as SMALL_STUDY, SMOKE as SMOKE_STUDY
from keras_softmoe import routers

DENSE = "dense"
# Of what the dense model is continued as, see `variants`.
VARIANTS = (
    DENSE,
    "copies",
    "noise",
    "clusters",
    "soft",
    "clusters_gated",
    "copies_groups",
    "clusters_groups",
)
# Cost more, and show what dropped tokens are worth, and more experts per token.
CONTROLS = ("copies_room", "noise_four")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A dense model, and how long it and its mixtures are trained further.

    Attributes:
        scale: `router_study.scales.Scale` of the dense start: model, images, training.
            `scale.seeds` are those of which there are results, `scale.rate_seeds` those
            with which the learning rate of the continuation is chosen. A seed gives the
            start, the images and all that is random.
        epochs: int, epochs of the continuation, on images that the start has not seen.
        warmup_steps: int, steps over which its learning rate rises again; then it falls
            to 0 along a cosine, once more.
        learning_rates: tuple of floats, the peaks that the dense model is tried with.
        learning_rate: float, the best of them, which all models have.
        num_images: int, images that clusters and positions are found with: the first
            ones of the continuation.
    """

    scale: object
    epochs: int
    warmup_steps: int
    learning_rates: tuple
    learning_rate: float
    num_images: int

    @property
    def name(self):
        """What the plan is called, a str."""
        return self.scale.name

    @property
    def steps(self):
        """Steps of the continuation."""
        return self.epochs * self.scale.steps_per_epoch

    @property
    def settings(self):
        """All attributes, as they are written to JSON."""
        settings = {**dataclasses.asdict(self), "scale": self.scale.settings}
        return {**settings, "learning_rates": list(self.learning_rates)}


class Variant(NamedTuple):
    """What a dense model is continued as.

    Attributes:
        title: str.
        router: router, the template, or `None` for the dense model.
        start: dict of arguments of `upcycle`; `images` are added where they are needed.
        group_images: int, images that are routed together.
    """

    title: str
    router: object = None
    start: dict = {}
    group_images: int = 1


def variants(scale):
    """What is compared, a dict from names to `Variant`.

    All have as many slots as tokens, so that they cost what the dense model costs but
    for the router. Gates of token choice are normalized: with room for every token the
    first prediction is then the dense one, and it is the losses alone that train the
    router. Groups are those of the study, or half a batch: tokens of an image are
    alike, above all in the last block, so that those of few images crowd at few
    experts. The controls have two and four times as many slots.
    """

    def token_choice(
        title,
        normalize_gates=True,
        capacity_factor=1.0,
        num_selected_experts=1,
        group_images=scale.group_images,
        **start,
    ):
        router = routers.SoftmaxTokenChoiceRouter(
            scale.num_experts,
            num_selected_experts=num_selected_experts,
            capacity_factor=capacity_factor,
            priority="max",
            normalize_gates=normalize_gates,
            name="router",
        )
        return Variant(f"Token choice, {title}", router, start, group_images)

    soft = routers.SoftRouter(
        scale.num_experts, scale.num_tokens // scale.num_experts, name="router"
    )
    clusters = {"start": "clusters"}
    groups = {"group_images": scale.batch_size // 2}
    in_groups = f"groups of {scale.batch_size // 2} images"
    found = (
        Variant("Dense, continued"),
        token_choice("copies"),
        token_choice("copies with noise", noise_std=0.1),
        token_choice("clusters", **clusters),
        Variant("Soft MoE, clusters", soft, {"start": "clusters", "energy": 1}),
        token_choice(
            "clusters, gates not normalized", normalize_gates=False, **clusters
        ),
        token_choice(f"copies, {in_groups}", **groups),
        token_choice(f"clusters, {in_groups}", **clusters, **groups),
        token_choice("copies, twice the slots (costs more)", capacity_factor=2.0),
        token_choice(
            "copies with noise, four experts per token (costs more)",
            num_selected_experts=4,
            noise_std=0.1,
        ),
    )
    return dict(zip(VARIANTS + CONTROLS, found, strict=True))


def soft_starts(scale):
    """Ways into a Soft MoE that are measured and not trained, as `variants`."""
    soft = variants(scale)["soft"]
    scaled = routers.SoftRouter(
        **{**soft.router.get_config(), "initial_scale": "unit_variance"}
    )
    found = {
        "soft_random": Variant("random", soft.router),
        "soft_scaled": Variant("random, scale from the root of the width", scaled),
    }
    for confidence in (0.5, 0.9, 0.99):
        for start, settings in (("clusters", {"energy": 1}), ("positions", {})):
            found[f"soft_{start}_{confidence:g}"] = Variant(
                f"{start}, confidence {confidence:g}",
                soft.router,
                {"start": start, "confidence": confidence, **settings},
            )
    return found


SMOKE = Plan(
    scale=SMOKE_STUDY,
    epochs=2,
    warmup_steps=1,
    learning_rates=(3e-4, 1e-3),
    learning_rate=1e-3,
    num_images=16,
)

# So long that all of it takes about an hour of one core. The start is half as long as
# in the study, the continuation half as long as the start.
SMALL = Plan(
    scale=dataclasses.replace(SMALL_STUDY, epochs=8, rate_seeds=(100,), more_seeds=()),
    epochs=4,
    warmup_steps=100,
    learning_rates=(1e-3, 2e-3, 4e-3, 8e-3),
    learning_rate=8e-3,
    num_images=512,
)

PLANS = {plan.name: plan for plan in (SMOKE, SMALL)}
