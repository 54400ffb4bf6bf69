"""Routing in the logs of a training."""

from collections import deque
from collections.abc import Callable

import keras
import numpy as np

from keras_softmoe.analysis.routing import analyze
from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.types import Data, Texts


class RoutingMonitor(keras.callbacks.Callback):
    """Callback that adds the routing of some data to the logs of each epoch.

    For each MoE block by its name in `analysis.observe`: `dispatch_sharpness_BLOCK` and
    `combine_sharpness_BLOCK` of a soft router, 1 if it does not route; `dropped_BLOCK`,
    `imbalance_BLOCK` and `demand_imbalance_BLOCK` of the others. For a LIMoE whose
    tokens choose experts, `usage` is measured, too.

    Args:
        data: as in `analysis.observe`; a few hundred inputs are enough. `None` for the
            text of a LIMoE alone.
        captions: for a LIMoE, `N` str or `(N, sequence_length)` ints.
        every: int, steps between measurements of the usage; `None` for each epoch.
        last: int, how many of the last measurements of the usage are averaged.
        batch_size: int, inputs of an array at a time.
        preprocessor: as in `analysis.observe`.

    Raises:
        ValueError: if `every` or `last` is under one; at the beginning of the training,
            if the model has no routers or the data do not fit it.

    Source: Soft MoE, appendix E (figures 13 and 14); LIMoE, appendix E.4 (there on the
    batches of the training, with noise).

    Examples:
        >>> monitor = ksm.analysis.RoutingMonitor(scenes, captions, every=1)
        >>> limoe.fit(scenes, captions, epochs=1, callbacks=[monitor])
        >>> pruned = ksm.models.prune_experts(
        ...     limoe, monitor.usage("text"), num_experts=4
        ... )
    """

    def __init__(
        self,
        data: Data = None,
        captions: Texts | None = None,
        every: int | None = None,
        last: int = 50,
        batch_size: int = 64,
        preprocessor: Callable | None = None,
    ):
        super().__init__()
        check_whole_numbers(1, last=last)
        if every is not None:
            check_whole_numbers(1, every=every)
        self.data, self.captions = data, captions
        self.every, self.last = every, last
        self.batch_size = batch_size
        self.preprocessor = preprocessor
        self._shares = deque(maxlen=last)

    def usage(self, modality: str | None) -> dict:
        """Return the mean share of a modality's tokens that each expert processes.

        `modality` is `"image"` or `"text"`. Returns a dict from the index of each MoE
        block to an `(E,)` float64 array.
        """
        blocks = self._shares[0] if self._shares else {}
        measured = next(iter(blocks.values()), {})
        if modality not in measured:
            raise ValueError(
                "There is a usage of modalities that were measured in a training: "
                f"{list(measured)}. Received: modality={modality!r}."
            )
        return {
            block: np.mean([shares[block][modality] for shares in self._shares], axis=0)
            for block in blocks
        }

    def on_train_begin(self, logs=None):
        self._shares.clear()
        self._steps = 0
        # Fail before training starts.
        if self.model.built:
            self._analyzed()

    def on_epoch_begin(self, epoch, logs=None):
        self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        # With several steps in an execution `batch` is the last of them.
        before, self._steps = self._steps, self._steps + batch + 1 - self._batches
        self._batches = batch + 1
        if self.every and before // self.every != self._steps // self.every:
            self._note_usage(self._analyzed().modalities)

    def on_epoch_end(self, epoch, logs=None):
        routing = self._analyzed()
        if self.every is None:
            self._note_usage(routing.modalities)
        if logs is None:
            return
        for block, statistics in routing.soft.items():
            logs[f"dispatch_sharpness_{block}"] = statistics.dispatch_sharpness
            logs[f"combine_sharpness_{block}"] = statistics.combine_sharpness
        for block, statistics in routing.blocks.items():
            if block not in routing.soft:
                logs[f"dropped_{block}"] = statistics.dropped
                logs[f"imbalance_{block}"] = statistics.imbalance
                if statistics.demand is not None:
                    logs[f"demand_imbalance_{block}"] = statistics.demand_imbalance

    def _analyzed(self):
        return analyze(
            self.model,
            self.data,
            captions=self.captions,
            batch_size=self.batch_size,
            preprocessor=self.preprocessor,
            verbose=0,
        )

    def _note_usage(self, modalities):
        if modalities:
            self._shares.append(
                {
                    block: {m: s.assigned[m] / s.num_tokens[m] for m in s.num_tokens}
                    for block, s in modalities.items()
                }
            )
