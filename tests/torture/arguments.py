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
_MOE = {"moe_layers": (1,), "router": SOFT}
_MOE_KINDS = {
    "group_images": "optional size",
    "dispatcher": "choice",
    "equal_experts": "bool",
    "expert_dropout_rate": "rate",
    "remat_experts": "bool",
}
_SPARSE_KINDS = {
    "num_experts": "size",
    "capacity_factor": "positive",
    "rounding": "choice",
    "random_logits": "choice",
}
_CHOICE_KINDS = _SPARSE_KINDS | {
    # `None` for a routing in which nothing is dropped.
    "capacity_factor": "optional positive",
    "num_selected_experts": "size",
    "noise_std": "deviation",
    "priority": "choice",
}


def _sizes(arguments):
    special = {"image_shape": "shape", "representation_dim": "optional size"}
    return {name: special.get(name, "size") for name in arguments}


@functools.cache
def _classifier():
    return tiny.classifier(router=tiny.SPARSE)


@functools.cache
def _pair_model():
    return tiny_limoe.task()


@functools.cache
def targets():
    """Dict from names to `Target`s. (Made on demand: some are models.)"""
    found = {
        "MoE": Target(
            layers.MoE,
            {"router": SOFT, "mlp_dim": 8},
            {"router": "router", "mlp_dim": "size", **_MOE_KINDS},
        ),
        "SoftMoE": Target(
            layers.SoftMoE,
            {"num_experts": 4, "mlp_dim": 8},
            {"num_experts": "size", "mlp_dim": "size", "slots_per_expert": "size"},
        ),
        "Experts": Target(
            layers.Experts,
            {"num_experts": 4, "mlp_dim": 8},
            {"num_experts": "size", "mlp_dim": "size", "dropout_rate": "rate"},
        ),
        "MLP": Target(layers.MLP, {"mlp_dim": 8}, {"mlp_dim": "size"}),
        "Attention": Target(Attention, {"num_heads": 2}, {"num_heads": "size"}),
        "AttentionPooling": Target(
            layers.AttentionPooling,
            {"num_heads": 2, "mlp_dim": 8},
            {"num_heads": "size", "mlp_dim": "size"},
        ),
        "EncoderBlock": Target(
            layers.EncoderBlock,
            {"num_heads": 2, "mlp": layers.MLP(8)},
            {"num_heads": "size", "dropout_rate": "rate", "use_qk_norm": "bool"},
        ),
        "PatchEmbedding": Target(
            layers.PatchEmbedding,
            {"patch_size": 4, "hidden_dim": 8},
            {"hidden_dim": "size", "patch_size": "size"},
        ),
        "PositionEmbedding": Target(
            layers.PositionEmbedding, {"grid": 2}, {"grid": "size", "kind": "choice"}
        ),
        "TokenEmbedding": Target(
            TokenEmbedding,
            {"vocabulary_size": 9, "sequence_length": 4, "output_dim": 8},
            {
                "vocabulary_size": "size",
                "sequence_length": "size",
                "output_dim": "size",
            },
        ),
        "SoftRouter": Target(
            routers.SoftRouter,
            {"num_experts": 4},
            {
                "num_experts": "size",
                "slots_per_expert": "size",
                "dispatch": "choice",
                "combine": "choice",
                "normalize": "bool",
                "initial_scale": "positive",
                "noise_std": "deviation",
            },
        ),
        "IdentityRouter": Target(
            routers.IdentityRouter, {"num_experts": 4}, {"num_experts": "size"}
        ),
        "SoftmaxTokenChoiceRouter": Target(
            routers.SoftmaxTokenChoiceRouter,
            {"num_experts": 4},
            {
                **_CHOICE_KINDS,
                "keep_fraction": "positive",
                "normalize_gates": "bool",
                "score": "choice",
                "bias_update_every": "size",
            },
        ),
        "ExpertRaceRouter": Target(
            routers.ExpertRaceRouter, {"num_experts": 4}, _SPARSE_KINDS
        ),
        "SinkhornTokenChoiceRouter": Target(
            routers.SinkhornTokenChoiceRouter,
            {"num_experts": 4},
            {**_CHOICE_KINDS, "num_iterations": "size", "combine": "choice"},
        ),
        "SoftmaxExpertChoiceRouter": Target(
            routers.SoftmaxExpertChoiceRouter, {"num_experts": 4}, _SPARSE_KINDS
        ),
        "SinkhornExpertChoiceRouter": Target(
            routers.SinkhornExpertChoiceRouter,
            {"num_experts": 4},
            {**_SPARSE_KINDS, "num_iterations": "size", "combine": "choice"},
        ),
        "SparseTransportExpertChoiceRouter": Target(
            routers.SparseTransportExpertChoiceRouter,
            {"num_experts": 4},
            {**_SPARSE_KINDS, "num_iterations": "size", "learning_rate": "positive"},
        ),
        "LIMoERouter": Target(
            routers.LIMoERouter,
            {"num_experts": 4},
            {
                **_CHOICE_KINDS,
                "image_experts": "optional size",
                "text_experts": "optional size",
                "single_modality_capacity_factor": "positive",
                "per_modality": "bool",
            },
        ),
        "expert_capacity": Target(
            ops.expert_capacity,
            {"num_tokens": 8, "num_experts": 4, "capacity_factor": 1.0},
            {"capacity_factor": "positive", "rounding": "choice"},
        ),
        "cost": Target(
            lambda **x: evaluation.cost(x),
            {**BACKBONE, **_MOE},
            {**_sizes(BACKBONE), **_MOE_KINDS, "pooling": "choice"},
        ),
        "cost of": Target(
            evaluation.cost, {"model": {**BACKBONE, **_MOE}}, {"model": "model"}
        ),
        "plan": Target(
            distribution.plan,
            {"preset": {**BACKBONE, **_MOE}, "devices": 4, "memory": 80e9},
            {
                "preset": "model",
                "devices": "size",
                "memory": "positive",
                "batch_size": "optional size",
            },
        ),
        "Backup": Target(
            distribution.Backup, {"directory": "unused"}, {"every": "optional size"}
        ),
        "classifier": Target(
            models.ViTMoEImageClassifier,
            {"backbone": _classifier().backbone, "num_classes": 3},
            {"backbone": "model", "num_classes": "size", "dropout": "rate"},
        ),
        "image converter": Target(
            models.ViTMoEImageConverter,
            {},
            {
                "image_size": "pair",
                "scale": "optional number",
                "interpolation": "choice",
                "antialias": "bool",
            },
        ),
        "set_routing": Target(
            _classifier().set_routing,
            {},
            {
                "capacity_factor": "optional positive",
                "num_selected_experts": "size",
                "priority": "choice",
                "group_images": "optional size",
                "normalize_gates": "bool",
                "random_logits": "choice",
            },
        ),
        "fit": Target(
            _classifier().fit,
            {"x": tiny.pixels(2), "y": tiny.labels(2), "verbose": 0},
            {"batch_size": "optional size"},
        ),
        "predict": Target(
            _classifier().predict,
            {"x": tiny.pixels(2), "verbose": 0},
            {"batch_size": "optional size"},
        ),
        "zero_shot": Target(
            _pair_model().zero_shot,
            {"images": tiny.pixels(2), "class_names": ["a", "b"]},
            {"batch_size": "size"},
        ),
        "few_shot_probe": Target(
            evaluation.few_shot_probe,
            {
                "backbone": _classifier().backbone,
                "train": (tiny.images(6), tiny.labels(6)),
                "test": (tiny.images(6), tiny.labels(6)),
                "shots": (1,),
                "verbose": 0,
            },
            {"batch_size": "size"},
        ),
        "analyze": Target(
            analysis.analyze,
            {"model": _classifier(), "data": tiny.pixels(2), "verbose": 0},
            {"batch_size": "size"},
        ),
        "observe": Target(
            analysis.observe,
            {
                "model": _classifier(),
                "data": tiny.images(2),
                "reducers": (),
                "verbose": 0,
            },
            {"batch_size": "size"},
        ),
        "RoutingLoss": Target(
            routers.RoutingLoss, {"function": ops.z_loss}, {"weight": "number"}
        ),
    }
    for cls, arguments in BACKBONES.items():
        kinds = {**_sizes(arguments), **_MOE_KINDS, "dropout_rate": "rate"}
        kinds |= {"moe_layers": "blocks", "router": "router", "use_qk_norm": "bool"}
        found[cls.__name__] = Target(cls, {**arguments, **_MOE}, kinds)
    found["from_preset"] = Target(
        functools.partial(models.ViTMoEBackbone.from_preset, load_weights=False),
        {"preset": "vit_tiny_patch4_32_glyphs"},
        {"preset": "preset", **_sizes(BACKBONE), "mlp_dim": "size"},
    )
    return found


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
