"""The base class of all routers, and their result."""

import functools
import warnings
from typing import Any, ClassVar, NamedTuple

import keras
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_whole_numbers, quote, received
from keras_softmoe.keras_adapter.layers import Layer, is_in_training_mode
from keras_softmoe.ops import ChoiceRouting, DenseRouting, SlotRouting, combine
from keras_softmoe.ops.kernels import as_mask, as_tensor
from keras_softmoe.ops.numbers import positions
from keras_softmoe.ops.selection import zero_padding
from keras_softmoe.routers.recording import is_recording, note
from keras_softmoe.sharding.constraints import check_placement, is_distributed
from keras_softmoe.types import Tensor


class Decision(NamedTuple):
    """The routing of groups of tokens, with tensors that describe it.

    Attributes:
        routing: `SlotRouting`, `ChoiceRouting` or `DenseRouting`.
        summary: dict of tensors. `"auxiliary_loss"` `(G,)` is the weighted sum of the
            balancing losses, zeros if there are none. Routers that learn have
            `"logits"`; sparse ones also `"probabilities"` and `"selection"`
            `(G, S, E)`, the scores that choose the slots, and for groups with padding
            `"capacity"` `(G,)`, the slots of an expert for their real tokens. Only if a
            router is called directly or in a scope of `routers.record`: `"valid"`
            `(G, S)` bool, `False` for padding; and for sparse routings `"load"`
            `(G, E)`, the number of tokens of each expert, and `"dropped"` `(G, S)`
            bool, the tokens without an expert (except padding).

    Examples:
        >>> router = ksm.routers.SoftmaxExpertChoiceRouter(num_experts=4)
        >>> decision = router(np.random.normal(size=(2, 16, 32)))
        >>> decision.summary["load"].shape
        (2, 4)
    """

    routing: Any
    summary: dict


class Router(Layer):
    """Base class of all routers.

    A subclass implements `call(tokens, valid=None, training=False) -> Decision`, where
    `tokens` is `(G, S, D)` and `valid` an optional `(G, S)` bool tensor, `False` for
    padding. Padding must take no slot: set `filled` to `False` there, or the weights of
    a `DenseRouting` to zero. `get_config` returns the arguments of the constructor,
    from which each layer clones its router. For `distribution.plan` implement
    `capacity`, and set `mixes_tokens = True` if the routing is a `DenseRouting`.

    Routers compute in float32 under any dtype policy: a rounding error can change the
    choice of an expert. A frozen router (`trainable=False`) adds no balancing loss,
    which would only move the tokens.

    Args:
        num_experts: int, number of experts.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Raises:
        ValueError: if `num_experts` is not a positive integer, or not a multiple of the
            devices over which experts are sharded.

    Examples:
        >>> class FirstTokensRouter(ksm.routers.Router):
        ...     # The first expert gets the first tokens, and so on.
        ...     def call(self, tokens, valid=None, training=False):
        ...         slots = tokens.shape[1] // self.num_experts
        ...         token = keras.ops.arange(slots * self.num_experts, dtype="int32")
        ...         token = keras.ops.reshape(token, (1, self.num_experts, slots))
        ...         token = keras.ops.repeat(token, tokens.shape[0], axis=0)
        ...         filled = keras.ops.ones_like(token, dtype="bool")
        ...         gate = keras.ops.cast(filled, "float32")
        ...         routing = ksm.ops.SlotRouting(token, filled, gate)
        ...         return ksm.routers.Decision(routing, {})
        >>> layer = ksm.layers.MoE(FirstTokensRouter(num_experts=4), mlp_dim=64)
        >>> layer(np.random.normal(size=(2, 18, 32))).shape
        (2, 18, 32)
    """

    # Whether a slot holds a mixture of tokens (`DenseRouting`) instead of one
    mixes_tokens = False
    # Whether a token chooses experts whatever the other tokens of its group are
    chooses_alone = False
    # Number of directions for `set_directions`; 0 if there are no such weights
    num_directions = 0
    # Whether tokens are L2-normalized before the product with the directions
    normalizes_tokens = False
    # Arguments of the constructor that may change later
    mutable_settings = ()
    # Whether `call` also needs `modalities`, see `LIMoERouter`. `MoE` passes them.
    knows_modalities = False
    # Whether `call` also accepts `num_tokens`, `(G,)` ints: the tokens of each group
    # by which slots are counted. `MoE` passes it if tokens are masked, so that a masked
    # sequence is routed like a shorter one. (Images that fill up a batch are padding as
    # well, but do not change the number of slots.)
    knows_num_tokens = False
    # Without a capacity: whether experts have a slot for each token, as on several
    # devices, so that shapes are fixed
    pads_rows = False
    # Whether a call in training may differ from one outside of it
    differs_in_training = False
    # Arguments of the constructor that `get_config` serializes, as they were given
    _objects: ClassVar[dict] = {}

    def __init__(self, num_experts: int, **kwargs):
        check_whole_numbers(1, num_experts=num_experts)
        check_placement("check_divides_experts", num_experts)
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        self.num_experts = num_experts
        # Masks are passed as `valid`, and slots have none.
        self.supports_masking = True

    def __call__(self, tokens, valid=None, training=None, *, summarize=True, **kwargs):
        """Route tokens.

        Args:
            tokens: `(G, S, D)` float tensor.
            valid: optional `(G, S)` bool tensor, `False` for padding.
            training: bool or `None`, as in `keras.layers.Layer`.
            summarize: bool, whether the summary is complete. `False` is for layers,
                which have replaced padding by zeros.
            **kwargs: other arguments of `call`.

        Returns:
            `Decision`.
        """
        shape = getattr(tokens, "shape", None)
        if shape is not None and len(shape) != 3:
            raise ValueError(
                "A router needs tokens of shape (groups, tokens, width); for one "
                f"example, pass `tokens[None]`. {received(shape=tuple(shape))}"
            )
        if training is not None:
            kwargs["training"] = training
        elif is_in_training_mode(self) and self.differs_in_training:
            _warn_of_mode()
        is_symbolic = isinstance(tokens, keras.KerasTensor)
        if summarize and not is_symbolic:
            # Layers have done so. A NaN in padding would enter all gradients.
            tokens = as_tensor(tokens)
            if valid is not None:
                valid = as_mask(valid)
                tokens = zero_padding(tokens, valid)
        decision = super().__call__(tokens, valid=valid, **kwargs)
        if not isinstance(decision, Decision):
            raise ValueError(
                "The `call` of a router must return a `routers.Decision(routing, "
                "summary)`; the summary may be empty. Received: a "
                f"`{type(decision).__name__}` from `{type(self).__name__}`."
            )
        # Loads and dropped tokens cost time: only for a reader of the summary
        if not is_symbolic and (summarize or is_recording()):
            decision = self.complete(decision, tokens, valid, **kwargs)
            note(self, decision)
        return decision

    # Found by a call: the output is a `Decision`.
    compute_output_shape = keras.layers.Layer.compute_output_shape

    def compute_output_spec(self, tokens, *args, **kwargs):
        # For a call in a functional model, whose summary is complete
        routing, summary = super().compute_output_spec(tokens, *args, **kwargs)
        num_groups, num_tokens, _ = tokens.shape
        found = {
            "valid": keras.KerasTensor((num_groups, num_tokens), "bool"),
            "auxiliary_loss": keras.KerasTensor((num_groups,), "float32"),
        }
        if not isinstance(routing, DenseRouting):
            experts = routing.count if isinstance(routing, ChoiceRouting) else None
            num_experts = (routing.token[0] if experts is None else experts).shape[0]
            load = keras.KerasTensor((num_groups, num_experts), "float32")
            dropped = keras.KerasTensor((num_groups, num_tokens), "bool")
            found |= {"load": load, "dropped": dropped}
        return Decision(routing, {**found, **summary})

    def call(self, tokens, valid=None, training=False):
        raise TypeError(
            f"`{type(self).__name__}` is abstract: it does not implement `call`."
        )

    def compute_mask(self, tokens, previous_mask=None):
        return None

    def capacity(self, num_tokens: int, training: bool = False) -> int:
        """Return the slots of an expert for a group of `num_tokens` tokens."""
        raise ValueError(
            f"`{type(self).__name__}` must implement `capacity(num_tokens, "
            "training=False)`, the number of slots of an expert."
        )

    def num_rows(self, num_tokens: int, training: bool = False) -> int | None:
        """Return the rows of all experts for a group; `None` if there are slots."""
        return None

    def check_group(self, num_tokens: int) -> None:
        """Raise if a group of `num_tokens` tokens cannot be routed."""

    def complete(
        self, decision: Decision, tokens: Tensor, valid: Tensor, **kwargs
    ) -> Decision:
        """Return a decision of `call` with a complete summary, see `Decision`."""
        routing, summary = decision
        num_groups, num_tokens = ops.shape(tokens)[0], tokens.shape[1]
        if valid is None:
            valid = ops.ones((num_groups, num_tokens), "bool")
        found = {"valid": valid}
        if isinstance(routing, SlotRouting):
            filled = ops.cast(routing.filled, "float32")
            # Ones in all filled slots, combined: the slots of each token, (G, S)
            slots_of_token = combine(
                filled[..., None],
                routing._replace(gate=filled),
                num_tokens,
                sharded=is_distributed(),
            )[..., 0]
            dropped = (slots_of_token == 0.0) & valid
            found |= {"load": ops.sum(filled, axis=-1), "dropped": dropped}
        elif isinstance(routing, ChoiceRouting):
            experts = positions(routing.count.shape[0], routing.expert)
            # Which choice of which token is for which expert, (G, S, K, E). There are
            # no slots to overflow: only tokens that `keep_fraction` skips are dropped.
            taken = routing.expert[..., None] == experts
            taken = ops.cast(taken & routing.kept[..., None], "float32")
            dropped = ~ops.any(routing.kept, axis=-1) & valid
            found |= {"load": ops.sum(taken, axis=(1, 2)), "dropped": dropped}
        if "auxiliary_loss" not in summary:
            zeros = ops.zeros_like(tokens[:, 0, 0])
            found["auxiliary_loss"] = ops.cast(zeros, "float32")
        return Decision(routing, {**found, **summary})

    def set_directions(self, directions: ArrayLike) -> None:
        """Set the weights, so that logits are products of tokens and directions.

        Args:
            directions: `(num_directions, D)` array of equal lengths: one row for each
                expert, or for each slot of a soft router, expert by expert.

        Raises:
            ValueError: if the router has no such weights.
        """
        raise ValueError(
            f"`{type(self).__name__}` has no weights for directions. "
            f"Received: directions of shape {directions.shape}."
        )

    def clone(self, name: str) -> "Router":
        """Return a new router with the same configuration and its own weights."""
        config = {**self.get_config(), **self._objects, "name": name}
        try:
            return type(self).from_config(config)
        except TypeError as error:
            raise ValueError(
                f"The constructor of `{type(self).__name__}` must accept all that its "
                "`get_config` returns, `name` and `trainable` as `**kwargs`. Received: "
                f"{quote(sorted(config))}."
            ) from error

    def with_settings(self, **settings) -> "Router":
        """Return a new router with changed settings and its own weights."""
        unknown = [name for name in settings if name not in self.mutable_settings]
        if unknown:
            accepted = ", ".join(self.mutable_settings)
            raise ValueError(
                f"`{type(self).__name__}` has no such setting to change. "
                f"Accepted: {accepted or 'none'}. Received: {', '.join(unknown)}."
            )
        # Not `from_config`, which turns every error into a TypeError
        return type(self)(**{**self.get_config(), **self._objects, **settings})

    def update(self, **settings) -> None:
        """Change mutable settings, or none if one is refused.

        Compiled functions keep the old settings. The models of this library compile
        again, see `ViTMoEBackbone.set_routing`; for your own model, call `compile`.

        Args:
            **settings: names from `mutable_settings` and their new values.

        Raises:
            ValueError: if a setting is not mutable, or a value is not accepted.
        """
        # A router made from all settings checks them together.
        changed = self.with_settings(**settings)
        for name in settings:
            setattr(self, name, getattr(changed, name))

    def get_config(self):
        # Without the dtype, which is always float32: to serialize it, Keras would
        # import TensorFlow for every layer that clones its router.
        return {
            "name": self.name,
            "trainable": self.trainable,
            "num_experts": self.num_experts,
            **{name: getattr(self, name) for name in self.config_arguments},
        }


@functools.cache
def _warn_of_mode():
    """Say once that Keras does not read the mode of a PyTorch module."""
    warnings.warn(
        "Keras does not read the mode of a PyTorch module: after `train()`, a router "
        "called without `training` predicts, without noise and balancing losses. To "
        "train, call the layer or model with `training=True` and add "
        "`sum(layer.losses)` to the loss; to predict, call `eval()` first.",
        stacklevel=3,
    )
