"""What routers do while a model is trained."""

import keras

from keras_softmoe.analysis._inputs import backbone_of
from keras_softmoe.analysis._load import LoadReducer
from keras_softmoe.analysis._soft_statistics import SoftReducer
from keras_softmoe.analysis._streaming import all_routers, observe
from keras_softmoe.routers import SoftRouter


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

    Example:

    >>> monitor = ksm.analysis.RoutingMonitor(images[:256])
    >>> history = classifier.fit(images, labels, epochs=3, callbacks=[monitor])
    >>> history.history["dispatch_sharpness_5"]
    [1.3, 1.9, 4.2]
    """

    def __init__(self, data, batch_size=64, preprocessor=None):
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
