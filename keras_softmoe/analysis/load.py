"""How much each expert of any model has to do."""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_softmoe.evaluation.decisions import routers_of, watch
from keras_softmoe.evaluation.routing import backbone_of
from keras_softmoe.ops.routing import SlotRouting


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


def expert_load(model, data, batch_size=64, preprocessor=None, verbose=1):
    """Count how many tokens each expert takes, in any model with any router.

    Args:
        model: any built `keras.Model` with `layers.MoE` or `layers.SoftMoE`, as in
            `soft_statistics`.
        data: as in `soft_statistics`.
        batch_size: int, inputs of an array at a time.
        preprocessor: as in `soft_statistics`.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        dict from each MoE block, as in `soft_statistics`, to its `ExpertLoad`.

    Raises:
        ValueError: if the model has no routers or is not built, there are no data, or
            they are not what the model takes.

    Source: V-MoE, section 5; Soft MoE, appendices B and H.

    Example:

    >>> load = ksm.evaluation.expert_load(model, images)
    >>> {block: x.imbalance for block, x in load.items()}
    {'moe': 1.31, 'moe_1': 1.08}
    """
    routers = routers_of(backbone_of(model)[0])
    totals = {name: np.zeros(3) for name in routers}
    loads = dict.fromkeys(routers, 0.0)

    def see(name, decision, valid):
        load, count = _load(decision, valid)
        loads[name] += load
        totals[name] += count

    watch(model, data, see, routers, batch_size, preprocessor, verbose)
    found = {}
    for name, (groups, tokens, dropped) in totals.items():
        if groups:
            share = float(dropped / tokens)
            found[name] = ExpertLoad(int(groups), int(tokens), loads[name], share)
    return found


def _load(decision, valid):
    """Load `(E,)`; groups, tokens and dropped tokens of a decision."""
    routing, summary = decision
    if isinstance(routing, SlotRouting):
        load, dropped = (
            ops.convert_to_numpy(summary[name]) for name in ("load", "dropped")
        )
        places, load = dropped.shape, load.sum(axis=0, dtype="float64")
        dropped = dropped.sum()
    else:
        # (G, S, E)
        weight = ops.convert_to_numpy(ops.sum(routing.combine, axis=-1))
        places, dropped = weight.shape[:2], 0
        kept = weight if valid is None else weight[valid][None]
        load = kept.sum(axis=(0, 1), dtype="float64")
    tokens = np.prod(places) if valid is None else valid.sum()
    return load, np.array([places[0], tokens, dropped])
