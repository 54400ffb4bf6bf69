"""The models of the study, and how long and how they are trained."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

import keras_softmoe as ksm
from experiments.letters.pictures import IMAGE_SIZE, PATCH_SIZE
from keras_softmoe import routers

# === V-MoE's router with a changed view of the tokens ===


@keras.saving.register_keras_serializable(package="letters")
class ViewRouter(routers.SoftmaxTokenChoiceRouter):
    """V-MoE's router, which may see other tokens than those that it routes.

    Attributes:
        view: callable from the `(G, S, D)` tokens to those that the logits are computed
            of, or `None`. Compiled functions keep the view that they were compiled
            with.
    """

    view = None

    def call(self, tokens, *args, **kwargs):
        if self.view is not None:
            tokens = self.view(tokens)
        return super().call(tokens, *args, **kwargs)


def position_only(tokens, positions):
    """At each position, the mean of the tokens of all images.

    Logits are linear in the tokens, so they too are means.

    Args:
        tokens: `(G, S, D)` tensor, `S` a multiple of `positions`.
        positions: int, tokens of an image.
    """
    return _by_image(tokens, positions, lambda x: x * 0 + ops.mean(x, 0, keepdims=True))


def content_only(tokens, positions):
    """Tokens less the mean of their position, plus the mean of all."""

    def view(x):
        return x - ops.mean(x, 0, keepdims=True) + ops.mean(x, (0, 1), keepdims=True)

    return _by_image(tokens, positions, view)


def other_image(tokens, positions):
    """At each position, the token of another image: content is scrambled."""
    return _by_image(tokens, positions, lambda x: ops.roll(x, 1, axis=0))


VIEWS = {view.__name__: view for view in (position_only, content_only, other_image)}


def _by_image(tokens, positions, view):
    """Apply a view to `(images, positions, D)` tokens."""
    width = tokens.shape[-1]
    images = view(ops.reshape(tokens, (-1, positions, width)))
    return ops.reshape(images, (-1, tokens.shape[1], width))


# === Models ===


@dataclasses.dataclass(frozen=True)
class Scale:
    """Everything that all models have in common.

    Attributes:
        name: str.
        seeds: tuple of ints. A seed gives weights, pictures and their order; all models
            of a seed see the same pictures.
        rate_seed: int, of the trainings that rate and length are chosen from.
        num_layers, num_heads, hidden_dim, mlp_dim, layer_scale: of `ViTMoEBackbone`.
        moe_layers: tuple of ints, the blocks with experts.
        num_experts: int, experts where nothing else is said.
        group_images: int, images that tokens or experts are chosen in together.
        batch_size: int, images of a step. Divides, or is, a block of pictures.
        epochs, steps_per_epoch: int. A backup is written after each epoch.
        learning_rate: float, the peak.
        warmup_steps: int.
        weight_decay, clip_norm: float.
        longer: float, how many times as long a dense model trains that takes as much
            time as the slowest mixture of the same cost.
        test_images: int, images of a measurement.
        watched_images: int, of these, those of each point of the learning curve.
        candidates: str or `None`, characters that may be classes; all if `None`.
    """

    name: str
    seeds: tuple
    rate_seed: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    mlp_dim: int
    layer_scale: float | None
    moe_layers: tuple
    num_experts: int
    group_images: int
    batch_size: int
    epochs: int
    steps_per_epoch: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    longer: float
    test_images: int
    watched_images: int
    candidates: str | None = None

    @property
    def steps(self):
        """Steps of a training."""
        return self.epochs * self.steps_per_epoch


NUM_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2

STUDY = Scale(
    name="study",
    seeds=(40, 41, 42, 43, 44, 45),
    rate_seed=1040,
    num_layers=4,
    num_heads=4,
    hidden_dim=64,
    mlp_dim=128,
    layer_scale=None,
    moe_layers=(1, 3),
    num_experts=25,
    group_images=8,
    batch_size=128,
    epochs=8,
    steps_per_epoch=500,
    learning_rate=4e-3,
    warmup_steps=500,
    weight_decay=0.01,
    clip_norm=1.0,
    longer=1.25,
    test_images=8192,
    watched_images=1024,
)

# Seconds of each training, for tests.
SMOKE = dataclasses.replace(
    STUDY,
    name="smoke",
    seeds=(0, 1),
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    mlp_dim=8,
    moe_layers=(0, 1),
    epochs=2,
    steps_per_epoch=2,
    warmup_steps=1,
    longer=1.5,
    test_images=128,
    watched_images=128,
    candidates="ABDEFGHIKLMNPRTUVXYZ",
)

SCALES = {scale.name: scale for scale in (STUDY, SMOKE)}


ALL, FIRST = slice(None), slice(3)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the study.

    Attributes:
        title: str.
        router: callable from a `Scale` to a router, or `None`.
        in_groups: bool, whether images are routed in groups.
        width: callable from a `Scale` to the hidden width of MLPs and experts, that of
            the scale if `None`.
        is_longer: bool, whether it trains `Scale.longer` times as long.
        seeds_at: dict from the placements where it is trained to a slice, which seeds
            it has there.
    """

    title: str
    router: Callable | None = None
    in_groups: bool = False
    width: Callable | None = None
    is_longer: bool = False
    seeds_at: dict = dataclasses.field(default_factory=lambda: {"anywhere": ALL})

    def group_images(self, scale):
        """Images that are routed together."""
        return scale.group_images if self.in_groups else 1

    def epochs(self, scale):
        """Epochs of its training."""
        return round(scale.epochs * (scale.longer if self.is_longer else 1))

    def seeds(self, scale, placement):
        """Seeds that it is trained with on a placement."""
        return scale.seeds[self.seeds_at[placement]]


# Models of primary outcomes have all seeds, controls three.
BOTH = {"anywhere": ALL, "centred": FIRST}
FEW = {"anywhere": FIRST}
LATER = {"anywhere": slice(3, None)}
# Where learning a scale from 1 would take longer than these trainings.
_SCALED = {"initial_scale": "unit_variance"}


def _token(num_experts=None, capacity_factor=1.0, **settings):
    """V-MoE: one choice, as many slots as tokens, batch priority."""

    def router(scale):
        return ViewRouter(
            num_experts or scale.num_experts,
            capacity_factor=capacity_factor,
            priority="max",
            name="router",
            **settings,
        )

    return router


def _soft(num_experts=None):
    def router(scale):
        count = num_experts or scale.num_experts
        return routers.SoftRouter(count, NUM_TOKENS // count, name="router", **_SCALED)

    return router


def _of(kind):
    return lambda scale: kind(scale.num_experts, name="router")


def _width_of_all_experts(scale):
    """Hidden width with which dense blocks have the MLP weights of all experts."""
    sparse = len(scale.moe_layers)
    total = scale.num_layers - sparse + sparse * scale.num_experts
    return scale.mlp_dim * total // scale.num_layers


MODELS = {
    "dense": Model("Dense", seeds_at=BOTH),
    "soft": Model("Soft MoE", _soft(), seeds_at=BOTH),
    "vmoe": Model("V-MoE", _token(), True, seeds_at=BOTH),
    "expert": Model("Expert choice", _of(routers.SoftmaxExpertChoiceRouter), True),
    # Token `s` of each image to expert `s`.
    "position": Model("Fixed by position", _of(routers.IdentityRouter), seeds_at=BOTH),
    # Its kernel is not used.
    "random": Model(
        "V-MoE, random logits",
        _token(random_logits=True, trainable=False),
        True,
        seeds_at=BOTH,
    ),
    "longer": Model(
        "Dense, as much time as the mixtures", is_longer=True, seeds_at=FEW
    ),
    "soft_1": Model("Soft MoE, 1 expert", _soft(1)),
    "soft_5": Model("Soft MoE, 5 experts", _soft(5)),
    "vmoe_5": Model("V-MoE, 5 experts", _token(5), True),
    # The upper line costs several times as much.
    "wide": Model(
        "Dense, as wide as all experts", width=_width_of_all_experts, seeds_at=FEW
    ),
    # Asked after the answers, see "Afterwards" in the plan.
    "vmoe_all": Model(
        "V-MoE, no token dropped", _token(capacity_factor=None), True, seeds_at=LATER
    ),
    "random_all": Model(
        "V-MoE, random logits, no token dropped",
        _token(capacity_factor=None, random_logits=True, trainable=False),
        True,
        seeds_at=LATER,
    ),
    "vmoe_bias": Model(
        "V-MoE, a bias in place of losses",
        _token(score="sigmoid", bias_update_rate=0.001, losses=(), noise_std=0.0),
        True,
        seeds_at=LATER,
    ),
}
# A V-MoE with one expert is the dense model: one gate of 1, and a slot for each token.
CURVES = {
    "V-MoE": {1: "dense", 5: "vmoe_5", 25: "vmoe"},
    "Soft MoE": {1: "soft_1", 5: "soft_5", 25: "soft"},
}


def backbone_arguments(scale, model):
    """Arguments of the backbone of a model, a dict."""
    router: Any = model.router and model.router(scale)
    return {
        "image_shape": (IMAGE_SIZE, IMAGE_SIZE, 3),
        "patch_size": PATCH_SIZE,
        "num_layers": scale.num_layers,
        "num_heads": scale.num_heads,
        "hidden_dim": scale.hidden_dim,
        "mlp_dim": (model.width or (lambda scale: scale.mlp_dim))(scale),
        "moe_layers": scale.moe_layers if router else (),
        "router": router,
        "group_images": model.group_images(scale),
        "layer_scale": scale.layer_scale,
        "pooling": "gap",
        "position_embedding": "sincos2d",
    }


def build(scale, model, num_classes):
    """A classifier with new weights, not compiled, for pixels from 0 to 255."""
    return ksm.models.ViTMoEImageClassifier(
        ksm.models.ViTMoEBackbone(**backbone_arguments(scale, model)),
        num_classes,
        preprocessor=ksm.models.ViTMoEImageClassifierPreprocessor(
            ksm.models.ViTMoEImageConverter((IMAGE_SIZE, IMAGE_SIZE))
        ),
        head_dtype="float32",
        compile=False,
    )


def count(scale, model, num_classes):
    """Parameters, and operations of a prediction and of a training, a dict."""
    counted = ksm.evaluation.cost(
        backbone_arguments(scale, model), num_classes=num_classes
    )
    images = model.epochs(scale) * scale.steps_per_epoch * scale.batch_size
    return {
        "title": model.title,
        "parameters": counted.parameters,
        "gflop_per_image": counted.gflop_per_image,
        # Forward once, and twice as much backward.
        "training_gflop": 3 * counted.gflop_per_image * images,
    }
