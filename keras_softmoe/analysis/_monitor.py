"""What routers do while a model is trained."""

from collections import deque
from collections.abc import Callable

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.analysis._by_modality import ModalityReducer
from keras_softmoe.analysis._inputs import backbone_of
from keras_softmoe.analysis._load import LoadReducer
from keras_softmoe.analysis._pairs import Pairs
from keras_softmoe.analysis._soft_statistics import SoftReducer
from keras_softmoe.analysis._streaming import all_routers, observe
from keras_softmoe.routers import SoftRouter
from keras_softmoe.types import Data, Texts


class RoutingMonitor(keras.callbacks.Callback):
    """Callback that adds to the logs of each epoch how a model routes some images.

    For each MoE block, by its name in `analysis.observe`:

    - `dispatch_sharpness_BLOCK` and `combine_sharpness_BLOCK` of a soft router: the
      largest weight of a slot, or of a token, in even shares, the mean over all. At 1
      every slot is the mean of the image: the layer does not route. A scale that
      starts too small for the length of the training stays there, see
      `SoftRouter(initial_scale=...)`.
    - `dropped_BLOCK` and `imbalance_BLOCK` of the others: the share of tokens that no
      expert takes, and the load of the fullest expert over the mean.

    Callbacks after it see them as metrics, the history of `fit` and
    `keras.callbacks.TensorBoard` among them.

    Args:
        data: images, or what else `analysis.observe` takes. A few hundred are enough.
        batch_size: int, inputs of an array at a time.
        preprocessor: as in `analysis.observe`.

    Raises:
        ValueError: at the beginning of the training, if the model has no routers.

    Source: Soft MoE, appendix E (figures 13 and 14).

    Examples:
        >>> monitor = ksm.analysis.RoutingMonitor(images)
        >>> soft.compile("sgd")
        >>> history = soft.fit(images, labels, epochs=2, callbacks=[monitor])
        >>> [name for name in history.history if "sharpness" in name]
    """

    def __init__(
        self, data: Data, batch_size: int = 64, preprocessor: Callable | None = None
    ):
        super().__init__()
        self.data = data
        self.batch_size = batch_size
        self.preprocessor = preprocessor

    def on_train_begin(self, logs=None):
        if self.model.built:
            self._observed()

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs.update(self._observed())

    def _observed(self):
        reducers = [LoadReducer()]
        routers = all_routers(backbone_of(self.model)[0])
        if any(isinstance(router, SoftRouter) for router in routers.values()):
            reducers.append(SoftReducer(self.model))
        load, *soft = observe(
            self.model, self.data, reducers, self.batch_size, self.preprocessor, 0
        )
        found = {}
        for block, statistics in (soft[0] if soft else {}).items():
            found[f"dispatch_sharpness_{block}"] = statistics.dispatch_sharpness
            found[f"combine_sharpness_{block}"] = statistics.combine_sharpness
        for block, statistics in load.items():
            if not soft or block not in soft[0]:
                found[f"dropped_{block}"] = statistics.dropped
                found[f"imbalance_{block}"] = statistics.imbalance
        return found


class UsageMonitor(keras.callbacks.Callback):
    """Callback that averages during training how much each modality uses each expert.

    Every so many steps some pairs are routed with the weights of that time, and the
    share of a modality's tokens that each expert processes is noted. `usage` is the
    mean of the last measurements, by which `models.prune_experts` and
    `evaluation.pruning_curve` choose the experts to keep.

    Args:
        images: `(N, height, width, channels)` array of pairs to route, as the model
            takes them, or `None` for text alone. One batch of the training data is
            enough.
        captions: `N` str, or `(N, sequence_length)` ints, or `None` for images alone.
        every: int, steps of the optimizer between measurements.
        last: int, how many of the last measurements are averaged.
        batch_size: int, pairs routed at a time, rounded up to whole groups.
        preprocessor: as in `analysis.modality_statistics`.

    Raises:
        ValueError: if `every` or `last` is under one; at the beginning of the training,
            as `analysis.modality_statistics`.

    Source: LIMoE, appendix E.4: the last 2,500 steps, measured every 50 steps, on the
    batches of the training itself. Here the pairs are always the same, and they are
    routed as outside of training, without noise.

    Examples:
        >>> monitor = ksm.analysis.UsageMonitor(scenes, captions, every=1)
        >>> limoe.fit(scenes, captions, epochs=1, callbacks=[monitor])
        >>> pruned = ksm.models.prune_experts(
        ...     limoe, monitor.usage("text"), num_experts=4
        ... )
    """

    def __init__(
        self,
        images: ArrayLike | None = None,
        captions: Texts | None = None,
        every: int = 50,
        last: int = 50,
        batch_size: int = 64,
        preprocessor: Callable | None = None,
    ):
        super().__init__()
        if every < 1 or last < 1:
            raise ValueError(
                "Steps between measurements, and measurements to average, are at least "
                f"one. Received: every={every}, last={last}."
            )
        self.images, self.captions = images, captions
        self.every, self.last = every, last
        self.batch_size = batch_size
        self.preprocessor = preprocessor
        self._shares = deque(maxlen=last)

    def usage(self, modality: str | None) -> dict:
        """The mean share of a modality's tokens that each expert processes.

        Args:
            modality: `"image"` or `"text"`.

        Returns:
            dict from the index of each MoE block to an `(E,)` float64 array.

        Raises:
            ValueError: if nothing was measured yet, or not this modality.
        """
        blocks = self._shares[0] if self._shares else {}
        measured = next(iter(blocks.values()), {})
        if modality not in measured:
            raise ValueError(
                "There is a usage of the modalities that were measured, every "
                f"{self.every} steps of a training: {list(measured)}. Received: "
                f"modality={modality!r}."
            )
        return {
            block: np.mean([shares[block][modality] for shares in self._shares], axis=0)
            for block in blocks
        }

    def on_train_begin(self, logs=None):
        self._shares.clear()
        self._steps = 0
        # An error comes before work starts.
        self._pairs()

    def on_epoch_begin(self, epoch, logs=None):
        self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        # With several steps in an execution `batch` is the last of them.
        before, self._steps = self._steps, self._steps + batch + 1 - self._batches
        self._batches = batch + 1
        if before // self.every == self._steps // self.every:
            return
        pairs = self._pairs()
        reducers = [ModalityReducer(pairs)]
        (statistics,) = pairs.observe(reducers, self.batch_size, verbose=0)
        self._shares.append(
            {
                block: {m: s.seated[m] / s.num_tokens[m] for m in s.num_tokens}
                for block, s in statistics.items()
            }
        )

    def _pairs(self):
        return Pairs(self.model, self.images, self.captions, self.preprocessor)
