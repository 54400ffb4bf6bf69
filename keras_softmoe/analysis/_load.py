"""How much each expert of any model has to do."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_softmoe.analysis._streaming import observe
from keras_softmoe.ops import DenseRouting
from keras_softmoe.routers import Decision
from keras_softmoe.types import Data


class ExpertLoad(NamedTuple):
    """What the experts of one block process, summed up over groups of tokens.

    Attributes:
        num_groups: int, groups of tokens that were routed together.
        num_tokens: int, tokens in all groups together, without padding.
        load: `(E,)` float64 array, tokens that each expert takes, over all groups. Of a
            router that mixes tokens the sum of its combine weights.
        dropped: float, the share of tokens that no expert takes.
    """

    num_groups: int
    num_tokens: int
    load: np.ndarray
    dropped: float

    @property
    def imbalance(self):
        """Float, the largest load over the mean: 1 if all experts do the same."""
        return float(self.load.max() / self.load.mean())


def expert_load(
    model: keras.Model,
    data: Data,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> dict:
    """Count how many tokens each expert takes, in any model with any router.

    Args:
        model: any built `keras.Model` with `layers.MoE` or `layers.SoftMoE`, as in
            `observe`.
        data: as in `observe`.
        batch_size: int, inputs of an array at a time.
        preprocessor: as in `observe`.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        dict from each MoE block, as in `observe`, to its `ExpertLoad`.

    Raises:
        ValueError: if the model has no routers or is not built, there are no data, or
            they are not what the model takes.

    Source: V-MoE, section 5; Soft MoE, appendices B and H.

    Examples:
        >>> load = ksm.analysis.expert_load(sparse, images)
        >>> {block: x.imbalance for block, x in load.items()}
    """
    reducers = [LoadReducer()]
    (found,) = observe(model, data, reducers, batch_size, preprocessor, verbose)
    return found


class LoadReducer:
    """Reducer to a dict from each block to its `ExpertLoad`, see `observe`.

    Examples:
        >>> (load,) = ksm.analysis.observe(sparse, images, [ksm.analysis.LoadReducer()])
    """

    def __init__(self):
        # Groups, tokens, load and dropped tokens of each block.
        self._sums = {}

    def update(self, name: int | str, decision: Decision, inputs: Any) -> None:
        load, dropped = load_and_dropped(decision)
        valid = decision.summary["valid"]
        load = load.sum(axis=0, dtype="float64")
        values = len(valid), valid.sum(), load, dropped.sum()
        sums = self._sums.get(name, (0, 0, 0, 0))
        self._sums[name] = [x + y for x, y in zip(sums, values, strict=True)]

    def result(self) -> dict:
        return {
            name: ExpertLoad(groups, int(tokens), load, float(dropped / max(tokens, 1)))
            for name, (groups, tokens, load, dropped) in self._sums.items()
        }


def load_and_dropped(decision):
    """How much experts take in each group, and which tokens none of them takes.

    Args:
        decision: `Decision` of NumPy arrays with a complete summary.

    Returns:
        `(G, E)` float array, tokens that each expert takes; of a router that mixes
        tokens the sum of its combine weights. `(G, S)` bool array. Padding counts in
        neither.
    """
    routing, summary = decision
    if not isinstance(routing, DenseRouting):
        return summary["load"], summary["dropped"]
    valid = summary["valid"]
    # (G, S, E)
    weight = routing.combine.sum(axis=-1)
    dropped = valid & ~routing.dispatch.any(axis=(2, 3))
    return (weight * valid[..., None]).sum(axis=1, dtype="float64"), dropped
