"""What the reference tests share: probes and statistics of a routing."""

import keras
import numpy as np

from keras_softmoe import ops, routers
from tests.reference import INEXPRESSIBLE
from tests.support import twins
from tests.support.references import to_numpy


def build(router, reference):
    """The router with the saved kernel, and the saved tokens."""
    tokens = reference.given("inputs")
    router.build((None, None, tokens.shape[-1]))
    router.kernel.assign(reference.given("params/dense/kernel"))
    return router, keras.ops.convert_to_tensor(tokens)


class AffineProbe(keras.layers.Layer):
    """A router whose experts all compute 2 x + 1, as in the reference numbers."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    def build(self, tokens_shape):
        # The router comes built, with the saved kernel.
        pass

    def call(self, tokens):
        return affine_output(tokens, self.router(tokens).routing)


def affine_output(tokens, routing):
    slots = ops.dispatch(tokens, routing)
    return ops.combine(2.0 * slots + 1.0, routing, tokens.shape[1])


def slot_routing(token, filled, scores):
    """A `SlotRouting` whose gates are the `scores` (G, S, E) at (token, expert)."""
    by_expert = keras.ops.transpose(keras.ops.convert_to_tensor(scores), (0, 2, 1))
    gate = keras.ops.take_along_axis(by_expert, token, axis=-1)
    return ops.SlotRouting(token, filled, keras.ops.where(filled, gate, 0.0))


def check_dense(reference, case, routing):
    """Dispatch mask exactly, and combine weights where they are saved."""
    shape = reference.given(f"{case}dispatch_weights").shape
    dispatch, combine = ops.to_dense(routing, shape[1])
    dispatch = to_numpy(dispatch)
    assert set(np.unique(dispatch)) <= {0.0, 1.0}
    reference.check(f"{case}dispatch_weights", dispatch.astype(bool))
    if f"{case}combine_weights" in reference:
        reference.check(f"{case}combine_weights", combine)


def check_statistics(reference, prefix, routing, selection, tolerance=2e-5):
    """Statistics of expert choice, those that are saved below `prefix`.

    The selected gates are the `selection` scores (G, S, E) of the seated tokens.
    """
    token, filled, _ = map(to_numpy, routing)
    gate = twins.gates(to_numpy(selection), token, filled)
    num_groups, num_experts, _ = token.shape
    dispatch, _ = twins.to_dense(token, filled, gate, selection.shape[1])
    # (G, S): experts that process each token
    counts = dispatch.sum((2, 3)).astype("int32")
    gates = np.where(filled, gate, np.nan).reshape(num_groups, -1)
    statistics = {
        "max_selected_gate": np.nanmax(gates, -1),
        "min_selected_gate": np.nanmin(gates, -1),
        "num_experts_per_item_max": counts.max(-1),
        "num_experts_per_item_min": counts.min(-1),
        **{
            f"ratio_processed_items_by_at_least_{n}_experts": (counts >= n).mean(-1)
            for n in range(1, num_experts + 1)
        },
    }
    for name, value in statistics.items():
        key = f"{prefix}{name}"
        if key in reference:
            # Saved without an axis of groups where there is only one group.
            value = value.reshape(reference.given(key).shape)
            reference.check(key, value, tolerance)


def check_auxiliary_loss(reference, key, actual):
    """Losses that are 0 for every group are saved as one number."""
    actual = to_numpy(actual)
    expected = reference.given(key)
    reference.check(
        key, np.broadcast_to(actual.mean(), ()) if not expected.ndim else actual
    )


def finish(reference, prefix=""):
    reference.leave(INEXPRESSIBLE)
    reference.finish(prefix)


def losses_of(weights, noise_std):
    """Losses of a router from their weights by name: no load loss without noise.

    Those of V-MoE's router have weights of 0.005 where the settings have none.
    """
    weights = {
        "importance_loss_weight": 0.005,
        "load_loss_weight": 0.005,
        **weights,
    }
    functions = {
        "gshard_loss_weight": ops.gshard_loss,
        "importance_loss_weight": ops.importance_loss,
        "load_loss_weight": ops.load_loss,
    }
    return [
        routers.RoutingLoss(functions[name], weight=weight)
        for name, weight in weights.items()
        if weight and (noise_std or name != "load_loss_weight")
    ]
