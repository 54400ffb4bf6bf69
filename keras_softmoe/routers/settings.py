"""Settings that all sparse routers share, and those that may change later."""

from collections.abc import Sequence
from typing import TypedDict

from keras_softmoe.routers._losses import RoutingLoss
from keras_softmoe.routers._modalities import Modalities
from keras_softmoe.routers._policies import Capacity, TokenChoice, mutable_settings


class SparseSettings(TypedDict, total=False):
    """Keyword arguments that all sparse routers share.

    Attributes:
        losses: sequence of `RoutingLoss`es, which are added up with their weights in
            training. `None` for those of the router's paper. A frozen router
            (`trainable=False`) adds none, see `Router`.
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        random_logits: bool, whether the logits are normal noise instead; `"permuted"`:
            each token's own, in random order, so that probabilities and gates stay as
            large as they are. Shows what routing at random does to a trained model
            (V-MoE, appendix E.1).
        name: str, as in `keras.layers.Layer`.
        trainable: bool, as in `keras.layers.Layer`.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(
        ...     8, capacity_factor=1.5, eval_capacity_factor=4.0, rounding="ceil"
        ... )
        >>> router.capacity(64, training=True), router.capacity(64)
        (12, 32)
    """

    losses: Sequence[RoutingLoss] | None
    eval_capacity_factor: float | None
    rounding: str
    multiple_of: int | None
    random_logits: bool | str
    name: str | None
    trainable: bool


# Names of the settings of all routers that may change after a router was made.
MUTABLE_SETTINGS = (
    *mutable_settings([Capacity]),
    "random_logits",
    *mutable_settings([TokenChoice]),
    *mutable_settings([Modalities]),
)
