"""Identity routing of tokens in a random order: the control of what positions tell."""

import keras
from keras import ops

from keras_softmoe.ops import SlotRouting
from keras_softmoe.ops.assignment import check_num_tokens
from keras_softmoe.routers import Decision, Router


@keras.saving.register_keras_serializable(package="router_study")
class PermutedIdentityRouter(Router):
    """Sends the tokens to the experts in turn, in an order drawn anew at each call.

    As `ksm.routers.IdentityRouter`, every expert takes as many tokens, and no token is
    looked at. But experts cannot become experts for a position.

    Args:
        num_experts: int, number of experts. Must divide the tokens of a group.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.
    """

    def __init__(self, num_experts, **kwargs):
        super().__init__(num_experts, **kwargs)
        self.seed_generator = keras.random.SeedGenerator()

    def capacity(self, num_tokens, training=False):
        check_num_tokens(num_tokens, self.num_experts)
        return num_tokens // self.num_experts

    def call(self, tokens, valid=None, training=False):
        if valid is not None:
            raise ValueError("Tokens in a random order cannot be padded.")
        num_groups, num_tokens = ops.shape(tokens)[0], tokens.shape[1]
        places = keras.random.uniform(
            (num_groups, num_tokens), seed=self.seed_generator
        )
        token = ops.reshape(
            ops.argsort(places, axis=1),
            (-1, self.num_experts, self.capacity(num_tokens)),
        )
        filled = ops.ones_like(token, dtype="bool")
        return Decision(SlotRouting(token, filled, ops.cast(filled, tokens.dtype)), {})
