"""Learned tokens before the patches: class token and registers."""

from collections.abc import Sequence

import keras
from keras import ops

from keras_softmoe import costs
from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.costs import LayerCost
from keras_softmoe.keras_adapter import Layer


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ClassToken(Layer):
    """Prepend a learned token to the others.

    Maps `(B, S, D)` to `(B, S + 1, D)`.

    Source: Dosovitskiy et al. 2021, section 3.1.

    Examples:
        >>> ksm.layers.ClassToken()(np.zeros((2, 16, 32))).shape
        (2, 17, 32)
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    def build(self, tokens_shape):
        self.class_token = self.add_weight(
            shape=(1, 1, tokens_shape[-1]), initializer="zeros", name="class_token"
        )

    def call(self, tokens):
        token = ops.cast(self.class_token, tokens.dtype)
        # Broadcast without the batch size, which may be unknown.
        token = token + ops.zeros_like(tokens[:, :1])
        return ops.concatenate([token, tokens], axis=1)

    def compute_output_shape(self, tokens_shape):
        batch, num_tokens, width = tokens_shape
        return (batch, num_tokens + 1, width)

    def cost(self, tokens_shape: Sequence[int], training: bool = False) -> LayerCost:
        return costs.LayerCost(weights=tokens_shape[-1])


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Registers(Layer):
    """Insert learned tokens that belong to no patch before the patches.

    For registers and DeiT's distillation token. They have no position embeddings: one
    that is the same for all images is part of the token.

    Args:
        num_registers: int, number `R` of tokens.
        has_class_token: bool, whether the first token is a class token, which remains
            the first.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps `(B, S, D)` to `(B, S + R, D)`.

    Raises:
        ValueError: if `num_registers` is not a positive integer.

    Source: Darcet et al. 2024 (Vision Transformers need registers), section 2.2; for
    the distillation token, Touvron et al. 2021 (DeiT), section 4.

    Examples:
        >>> ksm.layers.Registers(4)(np.zeros((2, 16, 32))).shape
        (2, 20, 32)
    """

    def __init__(self, num_registers: int, has_class_token: bool = False, **kwargs):
        check_whole_numbers(1, num_registers=num_registers)
        super().__init__(**kwargs)
        self.num_registers = int(num_registers)
        self.has_class_token = has_class_token

    def build(self, tokens_shape):
        self.registers = self.add_weight(
            shape=(1, self.num_registers, tokens_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="registers",
        )

    def call(self, tokens):
        first = int(self.has_class_token)
        registers = ops.cast(self.registers, tokens.dtype)
        # Broadcast without the batch size, which may be unknown.
        registers = registers + ops.zeros_like(tokens[:, :1])
        parts = [tokens[:, :first], registers, tokens[:, first:]]
        return ops.concatenate(parts[1 - first :], axis=1)

    def compute_output_shape(self, tokens_shape):
        batch, num_tokens, width = tokens_shape
        return (batch, num_tokens + self.num_registers, width)

    def cost(self, tokens_shape: Sequence[int], training: bool = False) -> LayerCost:
        return costs.LayerCost(weights=self.num_registers * tokens_shape[-1])

    def get_config(self):
        return {
            **super().get_config(),
            "num_registers": self.num_registers,
            "has_class_token": self.has_class_token,
        }
