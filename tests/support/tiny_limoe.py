"""LIMoEs small enough for tests, and what their losses should be in plain NumPy.

All tests share one batch, since a backend compiles anew for every shape: three pairs,
in groups of two, so that the last group is half padding.
"""

import functools

import keras
import numpy as np

from keras_softmoe import models, ops, routers
from tests.support import limoe_router_twin as twin, tiny
from tests.support.layer_checks import randomize
from tests.support.references import to_numpy

BATCH, GROUP = 3, 2
NUM_PATCHES, LENGTH = 4, 8
VOCABULARY_SIZE = 110
CAPTIONS = [
    "a red circle",
    "two blue stars",
    "a green ring",
    "a heart",
    "a cross above a ring",
    "big square",
]
LOSSES = (
    routers.RoutingLoss(ops.local_entropy_loss, "text"),
    routers.RoutingLoss(ops.global_entropy_loss, "text", soft_minimum=3.9),
    routers.RoutingLoss(ops.global_entropy_loss, "image", soft_minimum=3.9),
    routers.RoutingLoss(ops.mutual_information_loss),
    routers.RoutingLoss(ops.importance_loss),
    routers.RoutingLoss(ops.z_loss, "image"),
)
LOSS_TWINS = [
    (twin.local, "text"),
    (twin.at_least(3.9), "text"),
    (twin.at_least(3.9), "image"),
    (twin.mutual_information, None),
    (twin.importance, None),
    (twin.z, "image"),
]
# Drops tokens.
ROUTER = routers.LIMoERouter(
    4, capacity_factor=0.75, losses=LOSSES, loss_weight=0.5, noise_std=0.0
)
# Has room for all.
AMPLE = routers.LIMoERouter(
    4, capacity_factor=4.0, losses=LOSSES, loss_weight=0.5, noise_std=0.0
)
DENSE = {"moe_layers": (), "router": None}
# Of a model whose numbers of tokens, of widths and of words differ, for sums by hand.
DISTINCT = {
    **tiny.SIZES,
    "vocabulary_size": 11,
    "sequence_length": 3,
    "embedding_dim": 5,
}


@functools.cache
def vocabulary():
    """Bytes of a SentencePiece model."""
    from keras_softmoe import datasets

    return datasets.train_vocabulary(CAPTIONS, VOCABULARY_SIZE)


def backbone(**overrides):
    """A LIMoE of two blocks, both mixtures of experts."""
    arguments = {
        **tiny.SIZES,
        "vocabulary_size": VOCABULARY_SIZE,
        "sequence_length": LENGTH,
        "moe_layers": (0, 1),
        "router": ROUTER,
        "embedding_dim": 6,
        "group_images": GROUP,
        **overrides,
    }
    model = models.LIMoEBackbone(**arguments)
    randomize(model)
    return model


def preprocessor(cls=models.LIMoEPreprocessor, **overrides):
    return cls(
        models.LIMoETokenizer(vocabulary()),
        models.ViTMoEImageConverter(tiny.IMAGE_SHAPE[:2]),
        **{"sequence_length": LENGTH, **overrides},
    )


def task(**overrides):
    """A contrastive model on `backbone(**overrides)`, which learns nothing."""
    model = models.LIMoEContrastive(backbone(**overrides), preprocessor())
    model.compile(keras.optimizers.SGD(0.0))
    return model


def captions(num_pairs=BATCH):
    return [CAPTIONS[i % len(CAPTIONS)] for i in range(num_pairs)]


def token_ids(num_pairs=BATCH, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY_SIZE, (num_pairs, LENGTH), "int32")


def pairs(num_pairs=BATCH, seed=0):
    """What a backbone takes."""
    return {
        "images": tiny.images(num_pairs, seed=seed),
        "token_ids": token_ids(num_pairs, seed),
    }


def as_numpy(outputs):
    return {name: to_numpy(x) for name, x in outputs.items()}


def logits(outputs):
    """(B, B) from what a model returns, in float64."""
    outputs = {name: np.float64(to_numpy(x)) for name, x in outputs.items()}
    similarity = outputs["image_embedding"] @ outputs["text_embedding"].T
    return outputs["logit_scale"][0] * similarity + outputs.get("logit_bias", [0.0])[0]


def softmax_loss(outputs):
    return twin.softmax_contrastive_loss(logits(outputs)).mean()


def sigmoid_loss(outputs):
    return twin.sigmoid_contrastive_loss(logits(outputs)).mean()


def auxiliary_loss(model, inputs, losses=LOSS_TWINS, weight=0.5, noise=None):
    """Sum over blocks of the mean over groups, for the logits that `route` reports.

    `noise` is a (G, S, E) array of normal numbers, of which a router adds a part.
    """
    batch = len(inputs["images"])
    num_groups = -(-batch // GROUP)
    names = (["image"] * NUM_PATCHES + ["text"] * LENGTH) * GROUP
    valid = np.arange(num_groups * GROUP) < batch
    valid = valid.repeat(len(names) // GROUP).reshape(num_groups, len(names))
    total = 0.0
    for index, decision in model.route(**inputs).items():
        router = model.routers[index]
        clean = np.float64(to_numpy(decision.summary["logits"]))
        std = router.noise_std / router.num_experts
        routed = twin.Routed(
            clean,
            clean if noise is None else clean + std * noise,
            twin.members(names, num_groups, valid),
            router.num_selected_experts,
            std,
        )
        total += twin.auxiliary_loss(losses, routed, weight).mean()
    return total
