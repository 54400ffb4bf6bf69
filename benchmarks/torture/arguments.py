"""Arguments that are of no use, to everything that takes some.

A target is a callable with good arguments, and the kinds of them; for each kind there
are values that must be refused. `test_checks.py` tries each target with few values, the
campaign draws from all pairs.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from keras_softmoe import (
    analysis,
    distribution,
    evaluation,
    layers,
    models,
    ops,
    routers,
)
from keras_softmoe.checks import quote
from keras_softmoe.layers.attention import Attention
from keras_softmoe.layers.embedding import TokenEmbedding
from tests.support import tiny, tiny_limoe

SOFT = routers.SoftRouter(4)

# === Values that must be refused, by the kind of argument ===

NO_SIZES = [0, -1, 2.5, 4.0, "4", True, None, [4], 10**30]
_ODD = [float("nan"), 1j, b"4", {}, object, np.zeros(2), "x" * 10**5]
_NOT_POSITIVE = [0, -1.0, "1.0", None, float("inf"), 1e308, 10**400, *_ODD]
WRONG = {
    "size": [*NO_SIZES, *_ODD, -(10**12), "8" * 10**5, range(10**6)],
    "optional size": [*(v for v in NO_SIZES if v is not None), *_ODD],
    "rate": [-0.1, 1.0, "0.1", None, float("inf"), [0.1], 10**400, *_ODD],
    "positive": _NOT_POSITIVE,
    "optional positive": [v for v in _NOT_POSITIVE if v is not None],
    "deviation": [-1.0, "a", None, float("inf"), 1e308, *_ODD],
    "number": ["a", None, [1.0], float("inf"), 1e308, 10**400, *_ODD],
    "optional number": ["a", float("inf"), 1e308, 10**400, ["a"], [1.0, None], *_ODD],
    "pair": [8, (8,), (8, 0), (8, -1), (8, "8"), (8.0, 8), "88", (8, 8, 3), {}, *_ODD],
    "choice": ["x", "", 3, 2.5, ["max"], {"a": 1}, *_ODD],
    "bool": ["yes", 2, -1, 0.5, None, [True], *_ODD],
    "shape": [
        8,
        (8, 8),
        (8, 8, 0),
        (8, 8, "3"),
        "8x8",
        None,
        (10**9,) * 3,
        (8,) * 10**5,
    ],
    "blocks": [1, "1", (1.0,), ("1",), (True,), (-1,), (2,), (1, 1), range(10**6)],
    "router": ["soft", 4, {}, None, object(), [SOFT, SOFT], routers.SoftRouter],
    "preset": [None, 3, "", "no_such_preset", "../presets", "a" * 10**5, b"x", ["x"]],
    "model": [None, 3, object(), []],
}


class Target(NamedTuple):
    """Something that takes arguments.

    Attributes:
        call: callable that takes them by name.
        good: dict of arguments with which it works.
        kinds: dict from arguments to their kinds, see `WRONG`.
    """

    call: Any
    good: dict
    kinds: dict


BACKBONE = {
    "image_shape": (8, 8, 3),
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "mlp_dim": 12,
}
TEXT = {
    "vocabulary_size": 20,
    "sequence_length": 4,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "mlp_dim": 12,
}
BACKBONES = {
    models.ViTMoEBackbone: BACKBONE | {"representation_dim": 8},
    models.TextMoEBackbone: TEXT,
    models.LIMoEBackbone: BACKBONE | TEXT | {"embedding_dim": 8},
}


def of(**names):
    """Dict from arguments to kinds, given kinds and names: `size="a b", rate="c"`."""
    return {
        name: kind.replace("_", " ")
        for kind, listed in names.items()
        for name in listed.split()
    }


_MOE = {"moe_layers": (1,), "router": SOFT}
_MOE_KINDS = of(
    optional_size="group_images",
    choice="dispatcher",
    bool="equal_experts remat_experts",
    rate="expert_dropout_rate",
)
_SPARSE = of(
    size="num_experts", positive="capacity_factor", choice="rounding random_logits"
)
# `None` for a routing in which nothing is dropped
_TOKENS = of(
    size="num_experts num_selected_experts",
    optional_positive="capacity_factor",
    choice="rounding random_logits priority",
    deviation="noise_std",
)
# Router -> kinds of its arguments
_ROUTERS = {
    routers.SoftRouter: of(
        size="num_experts slots_per_expert",
        choice="dispatch combine",
        bool="normalize",
        positive="initial_scale",
        deviation="noise_std",
    ),
    routers.IdentityRouter: of(size="num_experts"),
    routers.SoftmaxTokenChoiceRouter: _TOKENS
    | of(
        positive="keep_fraction",
        bool="normalize_gates",
        choice="score",
        size="bias_update_every",
    ),
    routers.ExpertRaceRouter: of(
        size="num_experts",
        optional_positive="capacity_factor",
        choice="rounding random_logits",
    ),
    routers.SinkhornTokenChoiceRouter: _TOKENS
    | of(size="num_iterations", choice="combine"),
    routers.SoftmaxExpertChoiceRouter: _SPARSE,
    routers.SinkhornExpertChoiceRouter: _SPARSE
    | of(size="num_iterations", choice="combine"),
    routers.SparseTransportExpertChoiceRouter: _SPARSE
    | of(size="num_iterations", positive="learning_rate"),
    routers.LIMoERouter: _TOKENS
    | of(
        optional_size="image_experts text_experts",
        positive="single_modality_capacity_factor",
        bool="per_modality",
    ),
}
# Layer, good arguments -> kinds
_LAYERS = (
    (
        layers.MoE,
        {"router": SOFT, "mlp_dim": 8},
        of(router="router", size="mlp_dim") | _MOE_KINDS,
    ),
    (
        layers.SoftMoE,
        {"num_experts": 4, "mlp_dim": 8},
        of(size="num_experts mlp_dim slots_per_expert"),
    ),
    (
        layers.Experts,
        {"num_experts": 4, "mlp_dim": 8},
        of(size="num_experts mlp_dim", rate="dropout_rate"),
    ),
    (layers.MLP, {"mlp_dim": 8}, of(size="mlp_dim")),
    (Attention, {"num_heads": 2}, of(size="num_heads")),
    (
        layers.AttentionPooling,
        {"num_heads": 2, "mlp_dim": 8},
        of(size="num_heads mlp_dim"),
    ),
    (
        layers.EncoderBlock,
        {"num_heads": 2, "mlp": layers.MLP(8)},
        of(size="num_heads", rate="dropout_rate", bool="use_qk_norm"),
    ),
    (
        layers.PatchEmbedding,
        {"patch_size": 4, "hidden_dim": 8},
        of(size="hidden_dim patch_size"),
    ),
    (layers.PositionEmbedding, {"grid": 2}, of(size="grid", choice="kind")),
    (
        TokenEmbedding,
        {"vocabulary_size": 9, "sequence_length": 4, "output_dim": 8},
        of(size="vocabulary_size sequence_length output_dim"),
    ),
)


def _sizes(arguments):
    special = {"image_shape": "shape", "representation_dim": "optional size"}
    return {name: special.get(name, "size") for name in arguments}


@functools.cache
def targets():
    """Dict from names to `Target`s. (Made on demand: some are models.)"""
    classifier = tiny.classifier(router=tiny.SPARSE)
    data = {"model": classifier, "data": tiny.pixels(2), "verbose": 0}
    images = tiny.images(6), tiny.labels(6)
    found = {cls.__name__: Target(cls, *rest) for cls, *rest in _LAYERS}
    for cls, kinds in _ROUTERS.items():
        found[cls.__name__] = Target(cls, {"num_experts": 4}, kinds)
    for cls, arguments in BACKBONES.items():
        kinds = {**_sizes(arguments), **_MOE_KINDS}
        kinds |= of(
            rate="dropout_rate",
            blocks="moe_layers",
            router="router",
            bool="use_qk_norm",
        )
        found[cls.__name__] = Target(cls, {**arguments, **_MOE}, kinds)
    return found | {
        "expert_capacity": Target(
            ops.expert_capacity,
            {"num_tokens": 8, "num_experts": 4, "capacity_factor": 1.0},
            of(positive="capacity_factor", choice="rounding"),
        ),
        "cost": Target(
            lambda **x: evaluation.cost(x),
            {**BACKBONE, **_MOE},
            {**_sizes(BACKBONE), **_MOE_KINDS, "pooling": "choice"},
        ),
        "cost of": Target(
            evaluation.cost, {"model": {**BACKBONE, **_MOE}}, of(model="model")
        ),
        "plan": Target(
            distribution.plan,
            {"preset": {**BACKBONE, **_MOE}, "devices": 4, "memory": 80e9},
            of(
                model="preset",
                size="devices",
                positive="memory",
                optional_size="batch_size",
            ),
        ),
        "Backup": Target(
            distribution.Backup, {"directory": "unused"}, of(optional_size="every")
        ),
        "classifier": Target(
            models.ViTMoEImageClassifier,
            {"backbone": classifier.backbone, "num_classes": 3},
            of(model="backbone", size="num_classes", rate="dropout"),
        ),
        "image converter": Target(
            models.ViTMoEImageConverter,
            {},
            of(
                pair="image_size",
                optional_number="scale",
                choice="interpolation",
                bool="antialias",
            ),
        ),
        "set_routing": Target(
            classifier.set_routing,
            {},
            of(
                optional_positive="capacity_factor",
                size="num_selected_experts",
                choice="priority random_logits",
                optional_size="group_images",
                bool="normalize_gates",
            ),
        ),
        "fit": Target(
            classifier.fit,
            {"x": tiny.pixels(2), "y": tiny.labels(2), "verbose": 0},
            of(optional_size="batch_size"),
        ),
        "predict": Target(
            classifier.predict,
            {"x": tiny.pixels(2), "verbose": 0},
            of(optional_size="batch_size"),
        ),
        "zero_shot": Target(
            tiny_limoe.task().zero_shot,
            {"images": tiny.pixels(2), "class_names": ["a", "b"]},
            of(size="batch_size"),
        ),
        "few_shot_probe": Target(
            evaluation.few_shot_probe,
            {"backbone": classifier.backbone, "train": images, "test": images}
            | {"shots": (1,), "verbose": 0},
            of(size="batch_size"),
        ),
        "analyze": Target(analysis.analyze, data, of(size="batch_size")),
        "observe": Target(
            analysis.observe,
            data | {"data": tiny.images(2), "reducers": ()},
            of(size="batch_size"),
        ),
        "RoutingLoss": Target(
            routers.RoutingLoss, {"function": ops.z_loss}, of(number="weight")
        ),
        "from_preset": Target(
            functools.partial(models.ViTMoEBackbone.from_preset, load_weights=False),
            {"preset": "vit_tiny_patch8_32_icons"},
            {"preset": "preset", **_sizes(BACKBONE)},
        ),
    }


def bad_calls(tally, num_calls, seed):
    """Call targets with one wrong argument each; a case is a call."""
    calls = [
        (name, argument, kind, index)
        for name, target in targets().items()
        for argument, kind in target.kinds.items()
        for index in range(len(WRONG[kind]))
    ]
    order = np.random.default_rng(seed).permutation(len(calls))
    for number in range(num_calls):
        name, argument, kind, index = calls[order[number % len(calls)]]
        target, value = targets()[name], WRONG[kind][index]
        what = f"{name}({argument}={quote(value)})"
        with tally.case(what, mentions=[argument], seconds=60):
            target.call(**{**target.good, argument: value})
            raise AssertionError("was accepted")


def good_calls(tally):
    """The same targets with good arguments alone, which they take."""
    for name, target in targets().items():
        with tally.case(f"{name} as it should be", seconds=60):
            try:
                target.call(**target.good)
            except ValueError as error:
                raise AssertionError(f"was refused: {error}") from error
