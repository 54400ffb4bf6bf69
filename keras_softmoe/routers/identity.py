"""The identity router, which assigns tokens to experts in turn."""

import keras
from keras import ops

from keras_softmoe.ops import SlotRouting
from keras_softmoe.ops.assignment import check_num_tokens, identity
from keras_softmoe.ops.kernels import reshape
from keras_softmoe.ops.numbers import INDEX, count_true, positions, where
from keras_softmoe.ops.selection import take_along
from keras_softmoe.routers.router import Decision, Router


@keras.saving.register_keras_serializable(package="keras_softmoe")
class IdentityRouter(Router):
    """Fixed router: the first token goes to the first expert, the second to the second.

    Token `s` is in slot `s // E` of expert `s % E` with gate 1. Nothing is learned: an
    ablation that measures the benefit of routing.

    Args:
        num_experts: int, number of experts. Must divide the tokens of a group.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Returns, when called on `(G, S, D)` tokens: `Decision` with a `SlotRouting` of
    `S / E` slots per expert.

    Raises:
        ValueError: if `num_experts` does not divide the number of tokens of a group.

    Source: Soft MoE, section 3.6 and appendix A ("Identity").

    Examples:
        >>> router = ksm.routers.IdentityRouter(num_experts=4)
        >>> decision = router(np.zeros((1, 8, 16)))
        >>> keras.ops.convert_to_numpy(decision.routing.token)[0]
        array([[0, 4], [1, 5], [2, 6], [3, 7]], dtype=int32)
    """

    def capacity(self, num_tokens: int, training: bool = False) -> int:
        check_num_tokens(num_tokens, self.num_experts)
        return num_tokens // self.num_experts

    def build(self, tokens_shape):
        """Check the number of tokens; there are no weights."""
        if tokens_shape[1] is not None:
            self.check_group(tokens_shape[1])

    def check_group(self, num_tokens: int) -> None:
        check_num_tokens(num_tokens, self.num_experts)

    def call(self, tokens, valid=None, training=False):
        num_groups, num_tokens = ops.shape(tokens)[0], tokens.shape[1]
        token, filled = identity(num_groups, num_tokens, self.num_experts)
        if valid is not None:
            # Real tokens take the slots of a sequence without padding: their positions
            # come first, in their order, (G, S).
            index = positions(num_tokens, valid)
            order = ops.sort(index + num_tokens * ops.cast(~valid, INDEX)) % num_tokens
            filled = token < count_true(valid, axis=-1)[:, None, None]
            place = reshape(token, (num_groups, num_tokens))
            token = reshape(take_along(order, place, axis=1), token.shape)
            token = ops.cast(where(filled, token, 0), "int32")
        routing = SlotRouting(token, filled, ops.cast(filled, tokens.dtype))
        return Decision(routing, {})
