"""Learned scale and bias of similarities in a contrastive loss."""

import math
from collections.abc import Sequence

import keras
from keras import ops

from keras_softmoe.checks import check_numbers
from keras_softmoe.costs import LayerCost
from keras_softmoe.keras_adapter import Layer


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ContrastiveScale(Layer):
    """Learned scale (inverse temperature) and optional bias of similarities.

    Both are scalars, repeated for each row so that they can be outputs of a model.

    Args:
        scale: float, initial scale. Its logarithm is the trained weight.
        bias: float or `None`, initial bias; `None` for none.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Maps `(B, D)` embeddings, of which only `B` matters, to a dict of `"logit_scale"`
    `(B,)` and, with a bias, `"logit_bias"` `(B,)`.

    Raises:
        ValueError: if the scale is not positive.

    Source: LIMoE, appendix A (scale); Zhai et al. 2023 (SigLIP), section 3.2 (bias).

    Examples:
        >>> ksm.layers.ContrastiveScale(scale=10.0)(np.eye(2, dtype="float32"))
    """

    def __init__(self, scale: float = 10.0, bias: float | None = None, **kwargs):
        check_numbers(over=0, scale=scale)
        if bias is not None:
            check_numbers(bias=bias)
        # Half precision would round its logarithm.
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.scale = scale
        self.bias = bias

    def build(self, embeddings_shape):
        self.log_scale = self.add_weight(
            shape=(),
            initializer=keras.initializers.Constant(math.log(self.scale)),
            name="log_scale",
        )
        if self.bias is not None:
            self.logit_bias = self.add_weight(
                shape=(),
                initializer=keras.initializers.Constant(self.bias),
                name="logit_bias",
            )

    def call(self, embeddings):
        zeros = ops.zeros_like(embeddings[:, 0])
        outputs = {"logit_scale": zeros + ops.exp(self.log_scale)}
        if self.bias is not None:
            outputs["logit_bias"] = zeros + self.logit_bias
        return outputs

    def compute_output_shape(self, embeddings_shape):
        names = ("logit_scale", "logit_bias")[: 1 + (self.bias is not None)]
        return {name: (embeddings_shape[0],) for name in names}

    def cost(
        self, embeddings_shape: Sequence[int], training: bool = False
    ) -> LayerCost:
        return LayerCost(float32_weights=1 + (self.bias is not None))

    def get_config(self):
        config = super().get_config()
        del config["dtype"]
        return {**config, "scale": self.scale, "bias": self.bias}
