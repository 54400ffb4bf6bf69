"""What is left of a trained V-MoE when its routers no longer see what they route.

The preset of token choice with batch priority is measured again with routers that are
given something else than the tokens, beside the dense preset. Nothing is trained.

    python -m experiments.controls     # minutes of a core

Writes `experiments/glyphs/controls.json`. What the routers at random leave of each of
the six trainings is in `experiments/trained`, see `glyph_presets`.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from keras import ops

from experiments.glyph_presets import (
    BATCH_SIZE,
    IMAGE_SIZE,
    LAYOUTS,
    TWINS,
    VALIDATION_IMAGES,
    VALIDATION_SEED,
    build_backbone,
    draw_glyphs,
    upstream,
)
from experiments.lib.runs import write_json
from experiments.synthetic import GLYPH_CLASSES, glyphs
from keras_softmoe import analysis, models, routers

RESULTS = Path(__file__).resolve().parent / "glyphs" / "controls.json"
# Neither trained nor measured on.
MEANS_SEED = VALIDATION_SEED + 1
TITLES = {
    "trained": "V-MoE as trained",
    "position": "... its routers see the mean token of each place, no content",
    "scrambled": "... its routers see the tokens of an image in a random order",
    "random": "... its routers are random",
    "dense": "dense",
}


@keras.saving.register_keras_serializable(package="controls")
class BlindRouter(routers.SoftmaxTokenChoiceRouter):
    """Routes tokens by others that are put in their places.

    Attributes:
        swap: callable from the tokens, `(G, S, D)`, to those that are routed by.
    """

    swap = staticmethod(lambda tokens: tokens)

    def call(self, tokens, valid=None, training=False, num_tokens=None, modalities=()):
        return super().call(self.swap(tokens), valid, training, num_tokens, modalities)


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=VALIDATION_IMAGES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    write_json(options.output, measure(options.images))


def measure(images):
    """Dict that JSON can hold: accuracies by control and layout, and shares of place.

    Args:
        images: int, of each layout.
    """
    keras.utils.set_random_seed(VALIDATION_SEED)
    dense, trained = (
        models.ViTMoEImageClassifier.from_preset(TWINS[twin].name)
        for twin in ("dense", "token_choice")
    )
    blind = blind_copy(trained)
    found = {
        "dense": upstream(dense, images),
        "trained": upstream(blind, images),
    }
    means = mean_tokens(blind, draw_glyphs(images, MEANS_SEED)[0])
    for block, router in blind.backbone.routers.items():
        router.swap = same(means[block])
    found["position"] = upstream(recompiled(blind), images)
    for router in blind.backbone.routers.values():
        # A generator that the model knows of, which JAX needs.
        router.swap = scrambled(router.seed_generator)
    found["scrambled"] = upstream(recompiled(blind), images)
    shares = {
        name: position_shares(trained, images, layout)
        for name, layout in LAYOUTS.items()
    }
    trained.set_routing(random_logits=True)
    found["random"] = upstream(trained, images)
    return {"images": images, "accuracy": found, "position_share": shares}


def blind_copy(classifier):
    """A classifier with the same weights and `BlindRouter`s."""
    router = BlindRouter(16, priority="max")
    copy = models.ViTMoEImageClassifier(
        build_backbone(router, 1),
        num_classes=len(GLYPH_CLASSES),
        preprocessor=classifier.preprocessor,
    )
    copy.set_weights(classifier.get_weights())
    return copy


def recompiled(classifier):
    """The classifier, which traces its routers anew."""
    classifier.make_predict_function(force=True)
    return classifier


def mean_tokens(classifier, images):
    """Dict from blocks to the mean token of each place, `(S, D)` arrays."""
    sums = {}
    for block, router in classifier.backbone.routers.items():

        def add(tokens, block=block):
            found = ops.convert_to_numpy(tokens).astype("float64").sum(0)
            sums[block] = sums.get(block, 0.0) + found
            return tokens

        router.swap = add
    for start in range(0, len(images), BATCH_SIZE):
        batch = images[start : start + BATCH_SIZE]
        classifier(classifier.preprocessor(batch), training=False)
    return {block: total / len(images) for block, total in sums.items()}


def same(mean):
    """Callable that puts the same tokens, `(S, D)`, in the place of any others."""

    def swap(tokens):
        return ops.broadcast_to(ops.cast(mean, tokens.dtype), ops.shape(tokens))

    return swap


def scrambled(seed):
    """Callable that puts the tokens of each image in a random order."""

    def swap(tokens):
        order = ops.argsort(keras.random.uniform(ops.shape(tokens)[:2], seed=seed))
        return ops.take_along_axis(tokens, ops.expand_dims(order, -1), axis=1)

    return swap


def position_shares(classifier, images, layout):
    """How much of the entropy of the expert of a token its place explains, by block."""
    drawn, labels = glyphs(images, IMAGE_SIZE, VALIDATION_SEED, verbose=0, **layout)
    blocks = analysis.analyze(classifier, drawn, labels, verbose=0).blocks
    return [float(np.round(b.information.position_share, 4)) for b in blocks.values()]


if __name__ == "__main__":
    main()
