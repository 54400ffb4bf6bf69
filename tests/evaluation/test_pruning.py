"""Metrics of pruned models, as curves, against models pruned by hand.

The curves are made in `evaluation/sweeps.py`.
"""

import numpy as np
import pytest

from keras_softmoe import evaluation, models
from tests.support import tiny, tiny_limoe

# Of the four experts of blocks 0 and 1.
USAGE = {0: [5, 1, 7, 0], 1: np.array([0.1, 0.2, 0.3, 0.4])}
IDS = tiny_limoe.token_ids()


def embedding(backbone):
    return tiny.predict(backbone.text_encoder, IDS)["text_embedding"]


def norms(model):
    """Two numbers that depend on the weights of a backbone, or a task's."""
    return embedding(getattr(model, "backbone", model))[:2, 0]


@pytest.mark.parametrize("make", [tiny_limoe.backbone, tiny_limoe.task])
def test_curve(make):
    model = make()
    seen = []

    def metric(pruned):
        assert type(pruned) is type(model)
        if pruned is not model and hasattr(model, "preprocessor"):
            assert pruned.preprocessor is model.preprocessor
        seen.append(pruned is model)
        return norms(pruned)

    curve = evaluation.pruning_curve(model, USAGE, metric, verbose=0)
    assert isinstance(curve, evaluation.Sweep)
    # Each once, and once the model itself.
    assert seen == 6 * [False] + [True]
    whole = curve.baselines["not pruned"]
    np.testing.assert_allclose(whole, norms(model), rtol=1e-6)
    assert [tuple(row.settings.values()) for row in curve.rows] == [
        (count, method)
        for count in (1, 2, 4)
        for method in ("router_pred", "router_drop")
    ]
    for row in curve.rows:
        count, method = row.settings["experts_kept"], row.settings["method"]
        found = row.scores["accuracy"]
        assert found.shape == (2,) and found.dtype == "float64"
        pruned = models.prune_experts(model, USAGE, count, method)
        np.testing.assert_allclose(found, norms(pruned), rtol=1e-6)
        # All experts are as good as the model.
        assert np.allclose(found, whole, rtol=1e-6) == (count == 4)


def test_one_number_and_chosen_counts():
    model = tiny_limoe.backbone()
    curve = evaluation.pruning_curve(
        model,
        USAGE,
        lambda pruned: pruned.count_params(),
        num_experts=(3, 2),
        methods=["router_drop"],
        verbose=0,
        name="size",
    )
    assert [row.settings["experts_kept"] for row in curve.rows] == [2, 3]
    (fewer,), (more,) = curve.scores("size")
    assert fewer < more < curve.baselines["not pruned"] == [model.count_params()]
    (ax,) = curve.plot("experts_kept", "size", by="method").axes
    left, right = ax.get_xlim()
    assert left > right and ax.get_ylabel() == "size"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_experts": ()}, r"Received: num_experts=\[\]"),
        ({"methods": ()}, r"methods=\[\]"),
        ({"num_experts": (2, 9)}, "num_experts=9"),
        ({"usage": {0: USAGE[0]}}, r"blocks \[1\] is missing"),
    ],
)
def test_bad_arguments_come_before_the_work(arguments, message):
    def metric(model):
        raise AssertionError

    arguments = {"usage": USAGE, **arguments}
    with pytest.raises(ValueError, match=message):
        evaluation.pruning_curve(
            tiny_limoe.backbone(), metric=metric, verbose=0, **arguments
        )


def test_a_dense_model_is_not_pruned():
    model = tiny_limoe.backbone(**tiny_limoe.DENSE)
    with pytest.raises(ValueError, match="can be pruned"):
        evaluation.pruning_curve(model, {}, norms, verbose=0)
