"""Time of whole models: a Soft MoE by its dense twin, and a dense ViT by others.

A contest has up to three passes: forward, forward and backward (of the dense ViTs), and
a full step of `fit` with plain gradient descent (Adam's two moments of the large models
would take 7.5 GB). The other dense ViTs are KerasHub's `ViTBackbone` and, on PyTorch,
the ViT of `transformers`, see `rivals.py`. (Without an accelerator all but the forward
pass of the Soft MoE is measured on a quarter of a batch, and its step of `fit` on a
whole one too: the more images, the less the updates of many experts weigh.)
"""

import gc
from typing import NamedTuple

import keras
import numpy as np
import report
import rivals
from timing import fit_step, one_pass, row_of_pass

import keras_softmoe as ksm


class Shapes(NamedTuple):
    """Sizes of a benchmark: images in a batch, and a model in which half is Soft MoE.

    Each expert has one slot.
    """

    images: int
    image_size: int
    patch_size: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    mlp_dim: int
    num_experts: int

    @property
    def vit(self):
        """The arguments that all dense ViTs need."""
        return dict(list(self._asdict().items())[1:7])


SHAPES = {
    "small": Shapes(8, 64, 16, 4, 4, 96, 192, num_experts=16),
    # Soft MoE S/16 with 128 experts.
    "paper": Shapes(32, 224, 16, 12, 6, 384, 1536, num_experts=128),
}

NUM_CLASSES = 1000


def backbone(shapes, **changes):
    """A `ViTMoEBackbone`: the dense twin of the Soft MoE, unless `changes` say else."""
    sizes = shapes.vit
    side = sizes.pop("image_size")
    arguments = {
        "image_shape": (side, side, 3),
        **sizes,
        "pooling": "gap",
        "position_embedding": "sincos2d",
        "use_qk_norm": True,
    }
    return ksm.models.ViTMoEBackbone(**{**arguments, **changes})


def soft_moe(shapes, **changes):
    """The Soft MoE: experts in the second half of the blocks."""
    moe = {
        "moe_layers": range(shapes.num_layers // 2, shapes.num_layers),
        "router": ksm.routers.SoftRouter(shapes.num_experts),
        # They are there sooner than random ones, and take no less time when called.
        "equal_experts": True,
    }
    return backbone(shapes, **{**moe, **changes})


def dense_vit(shapes):
    """Our dense ViT as others have it, from images to tokens."""
    vit = backbone(
        shapes, pooling="token", position_embedding="learned", use_qk_norm=False
    )
    return keras.Model(vit.input, vit.output["sequence_output"])


def classifier(features):
    """A compiled classifier on `features`, `(B, D)` symbolic outputs of a model."""
    outputs = keras.layers.Dense(NUM_CLASSES)(features)
    (images,) = keras.utils.get_source_inputs(outputs)
    model = keras.Model(images, outputs)
    model.compile(
        keras.optimizers.SGD(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def data(shapes):
    """A batch of images in `[-1, 1]`, and labels."""
    rng = np.random.default_rng(0)
    images = rng.uniform(
        -1, 1, (shapes.images, shapes.image_size, shapes.image_size, 3)
    )
    labels = rng.integers(NUM_CLASSES, size=shapes.images)
    return images.astype("float32"), labels


def quick(shapes):
    """The shapes with a quarter of the images, unless there is an accelerator.

    They are done sooner. Experts get a quarter of the rows, which is harder on them.
    """
    if report.accelerator(keras.backend.backend()):
        return shapes
    return shapes._replace(images=shapes.images // 4)


def measure_twins(shapes, patience, jit_compile=False):
    """The Soft MoE beside its dense twin. Yields one row per pass."""
    models = {"soft_moe": soft_moe(shapes), "dense_twin": backbone(shapes)}
    images, _ = data(shapes)
    inputs = dict.fromkeys(models, images)
    row = one_pass("soft_moe", models, inputs, False, patience, jit_compile)
    yield {**row, "images": len(images)}
    images, labels = data(quick(shapes))
    inputs = dict.fromkeys(models, images)
    features = {key: model.output["pooled_output"] for key, model in models.items()}
    yield fit_pass("soft_moe", features, inputs, labels, patience)
    # A step takes ten seconds on a processor: five rounds all the same.
    longer = patience._replace(
        rounds=min(5, patience.rounds), seconds=60 * patience.seconds
    )
    images, labels = data(shapes)
    inputs = dict.fromkeys(models, images)
    yield fit_pass("soft_moe_whole_batch", features, inputs, labels, longer)


def dense_vits(shapes, images):
    """Our dense ViT and those of others, and what each takes: two dicts by name."""
    models = {
        "dense_vit": dense_vit(shapes),
        rivals.KERAS_HUB: rivals.keras_hub_vit(**shapes.vit),
    }
    inputs = dict.fromkeys(models, images)
    torch = keras.backend.backend() == "torch"
    if torch and rivals.installed(rivals.TRANSFORMERS):
        models[rivals.TRANSFORMERS] = rivals.transformers_vit(**shapes.vit)
        inputs[rivals.TRANSFORMERS] = images.transpose(0, 3, 1, 2).copy()
    return models, inputs


def measure_dense(shapes, patience, jit_compile=False):
    """Our dense ViT beside those of others. Yields one row per pass."""
    shapes = quick(shapes)
    images, labels = data(shapes)
    models, inputs = dense_vits(shapes, images)
    # They differ by percents forward, which takes more rounds to see.
    longer = patience._replace(seconds=3 * patience.seconds)
    for backward in (False, True):
        of_pass = patience if backward else longer
        row = one_pass("dense_vit", models, inputs, backward, of_pass, jit_compile)
        yield {**row, "images": len(images)}
    features = {key: model.output[:, 0] for key, model in models.items()}
    yield fit_pass("dense_vit", features, inputs, labels, patience)


def fit_pass(name, features, inputs, labels, patience):
    """Let models take turns at a step of `fit`. It compiles what `fit` compiles.

    Comes last, as `fit` on JAX takes the weights over that other steps hold.

    Args:
        name: What the row is called.
        features: Dict from name to `(B, D)` symbolic outputs of a model.
        inputs: Dict from name to array of images.
        labels: Array.
        patience: `Patience`.
    """
    steps = {
        key: fit_step(classifier(of_model), inputs[key], labels)
        for key, of_model in features.items()
    }
    row = row_of_pass(name, steps, True, patience)
    return {**row, "pass": "fit", "images": len(labels)}


def measure_all(options):
    """Rows of all contests of models."""
    shapes, patience = SHAPES[options.shapes], report.patience(options)
    yield from measure_twins(shapes, patience, options.jit_compile)
    gc.collect()
    yield from measure_dense(shapes, patience, options.jit_compile)
