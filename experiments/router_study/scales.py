"""How large a study is: its model, its data and how long they are trained."""

import dataclasses

from keras_softmoe.catalogue import moe_blocks


@dataclasses.dataclass(frozen=True)
class Scale:
    """Everything that all models of a study have in common.

    Change parts of it with `dataclasses.replace`. The hyperparameters of training are
    the same for every model, but for the learning rate: each kind of router has the
    best of a few for one router of its kind, see the study `"learning_rate"`.

    Attributes:
        name: str, what the scale is called.
        seeds: tuple of ints. A seed gives the weights, the images and their order; all
            models of a seed see the same images.
        more_seeds: tuple of ints, seeds that the models of the study `"headline"` have
            besides.
        rate_seeds: tuple of ints, seeds with which learning rates are chosen: all rates
            with the first, `close_rates` with all of them. No result is of these.
        image_size: int, side of the images in pixels.
        placement: str, where glyphs lie, as in `experiments.synthetic.glyphs`.
        distractors: int, pieces of other glyphs in an image, as there.
        glyph_size: int, side of a glyph in pixels, as there.
        patch_size: int, side of a patch in pixels.
        num_layers: int, encoder blocks.
        num_heads: int, attention heads.
        hidden_dim: int, width of a token.
        mlp_dim: int, hidden width of MLPs and experts.
        pooling: str, as in `ksm.models.ViTMoEBackbone`.
        num_experts: int, experts of a layer in the comparison of the routers.
        group_images: int, images that sparse routers route together.
        expert_counts: tuple of ints, for the study of experts at fixed slots.
        capacities: tuple of floats, slots per token, for the study of slots at fixed
            experts.
        placed_experts: int, experts of all layers together, for the study of where
            they go.
        batch_size: int, images per step.
        epochs: int, parts of a training, after each of which a backup is written and a
            point of the learning curve measured.
        steps_per_epoch: int, steps of a part.
        learning_rates: tuple of floats, the peaks that are tried.
        close_rates: tuple of floats, those of them between which the first seed does
            not decide: some kind of router is within half a point of its best there.
        rates: dict from `"dense"`, `"token"`, `"expert"` and `"soft"` to the peak that
            was best. Routings that are fixed in part or whole have that of `"soft"`,
            whose ablations they are.
        warmup_steps: int, steps over which the learning rate rises from 0.
        weight_decay: float, as AdamW counts it.
        clip_norm: float or `None`, largest norm of the gradient.
        validation_images: int, images that are classified after training.
        watched_images: int, of these, those that are classified after each epoch.
        routed_images: int, of these, those over which tokens and experts are counted.
        transfer_images: int or `None`, the most images of each half of the new task;
            all if `None`.
        shots: tuple of ints, labelled images per class of the new task.
        draws: int, draws of these images.
        fine_tuning_epochs: int, times that the new task's images are seen.
        fine_tuning_rate: float, peak learning rate.
        timed_rounds: int, training steps of which the median time is taken.
        tfds: str or `None`, a data set of TensorFlow Datasets. If `None`
            `experiments.synthetic.glyphs`, which needs no network.

    Source: router study, section 3.1 (the set-up); the sizes of all but `full` are
    ours.

    Example:

    >>> longer = dataclasses.replace(SMALL, name="longer", epochs=24)
    """

    name: str
    seeds: tuple
    more_seeds: tuple
    rate_seeds: tuple
    image_size: int
    placement: str
    distractors: int
    glyph_size: int
    patch_size: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    mlp_dim: int
    pooling: str
    num_experts: int
    group_images: int
    expert_counts: tuple
    capacities: tuple
    placed_experts: int
    batch_size: int
    epochs: int
    steps_per_epoch: int
    learning_rates: tuple
    close_rates: tuple
    rates: dict
    warmup_steps: int
    weight_decay: float
    clip_norm: float | None
    validation_images: int
    watched_images: int
    routed_images: int
    transfer_images: int | None
    shots: tuple
    draws: int
    fine_tuning_epochs: int
    fine_tuning_rate: float
    timed_rounds: int
    tfds: str | None = None

    @property
    def steps(self):
        """Steps of a whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def all_seeds(self):
        """Seeds of which there are results."""
        return self.seeds + self.more_seeds

    def seeds_of(self, study):
        """Seeds of the models of a study, see `configurations`."""
        if study == "learning_rate":
            return self.rate_seeds[:1]
        if study == "close_rates":
            return self.rate_seeds
        return self.all_seeds if study == "headline" else self.seeds

    def rate(self, kind):
        """Peak learning rate of a kind of router, see `configurations.Family`."""
        return self.rates.get(kind, self.rates["soft"])

    @property
    def num_tokens(self):
        """Tokens of an image."""
        return (self.image_size // self.patch_size) ** 2 + (self.pooling == "token")

    @property
    def moe_layers(self):
        """Blocks with experts where nothing else is said: every second one."""
        return moe_blocks(self.num_layers, every=2)

    @property
    def settings(self):
        """All attributes, as they are written to JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }


SMOKE = Scale(
    name="smoke",
    seeds=(0, 1),
    more_seeds=(2,),
    rate_seeds=(100, 101),
    image_size=16,
    placement="center",
    distractors=0,
    glyph_size=16,
    patch_size=4,
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    mlp_dim=16,
    pooling="gap",
    num_experts=4,
    group_images=2,
    expert_counts=(2, 4, 16),
    capacities=(0.5, 1, 2),
    placed_experts=8,
    batch_size=8,
    epochs=2,
    steps_per_epoch=2,
    learning_rates=(3e-4, 1e-3),
    close_rates=(1e-3,),
    rates={"dense": 1e-3, "token": 1e-3, "expert": 1e-3, "soft": 1e-3},
    warmup_steps=1,
    weight_decay=0.01,
    clip_norm=1.0,
    validation_images=64,
    watched_images=16,
    routed_images=16,
    transfer_images=200,
    shots=(1, 5, 10),
    draws=2,
    fine_tuning_epochs=1,
    fine_tuning_rate=1e-3,
    timed_rounds=3,
)

SMALL = Scale(
    name="small",
    seeds=(0, 1, 2),
    more_seeds=(3, 4, 5),
    rate_seeds=(100, 101, 102),
    image_size=16,
    placement="center",
    distractors=0,
    glyph_size=16,
    patch_size=4,
    num_layers=4,
    num_heads=4,
    hidden_dim=64,
    mlp_dim=128,
    pooling="gap",
    num_experts=16,
    group_images=8,
    expert_counts=(4, 16, 64),
    capacities=(1, 2, 4),
    placed_experts=32,
    batch_size=128,
    epochs=16,
    steps_per_epoch=250,
    learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    close_rates=(4e-3, 8e-3),
    rates={"dense": 4e-3, "token": 8e-3, "expert": 4e-3, "soft": 8e-3},
    warmup_steps=200,
    weight_decay=0.01,
    clip_norm=1.0,
    validation_images=16384,
    watched_images=2048,
    routed_images=2048,
    transfer_images=None,
    shots=(1, 5, 10),
    draws=40,
    fine_tuning_epochs=5,
    fine_tuning_rate=1e-3,
    timed_rounds=20,
)

# Where a patch lies tells nothing about what it shows.
ANYWHERE = dataclasses.replace(
    SMALL,
    name="anywhere",
    image_size=24,
    placement="anywhere",
    distractors=2,
    epochs=32,
    learning_rates=(1e-3, 2e-3, 4e-3, 8e-3),
    close_rates=(),
    # The best of three with seed 100, see `anywhere.json`. Two rates of dense and of
    # Soft MoE are within half a point, and no more seeds were tried. Expert choice was
    # not tried and has token choice's.
    rates={"dense": 4e-3, "token": 4e-3, "expert": 4e-3, "soft": 2e-3},
    # An image has 36 tokens.
    num_experts=36,
    group_images=4,
    expert_counts=(4, 12, 36),
    placed_experts=72,
)

# B/32 with V-MoE's recipe, which the router study takes over. JFT-300M was never
# released: 90 epochs of ImageNet take its place.
FULL = Scale(
    name="full",
    seeds=(0, 1, 2),
    more_seeds=(3, 4, 5),
    rate_seeds=(100,),
    image_size=224,
    placement="center",
    distractors=0,
    glyph_size=224,
    patch_size=32,
    num_layers=12,
    num_heads=12,
    hidden_dim=768,
    mlp_dim=3072,
    pooling="token",
    num_experts=32,
    group_images=8,
    # Of 50 tokens, so that there are 50 slots each time.
    expert_counts=(5, 10, 25, 50),
    capacities=(1, 2, 4),
    placed_experts=128,
    batch_size=4096,
    epochs=90,
    steps_per_epoch=312,
    learning_rates=(4e-4, 8e-4, 1.6e-3),
    close_rates=(),
    rates={"dense": 8e-4, "token": 8e-4, "expert": 8e-4, "soft": 8e-4},
    warmup_steps=10_000,
    weight_decay=0.1,
    clip_norm=None,
    validation_images=50_000,
    watched_images=4096,
    routed_images=4096,
    transfer_images=None,
    shots=(1, 5, 10),
    draws=20,
    fine_tuning_epochs=10,
    fine_tuning_rate=1e-4,
    timed_rounds=20,
    tfds="imagenet2012",
)

SCALES = {scale.name: scale for scale in (SMOKE, SMALL, ANYWHERE, FULL)}
