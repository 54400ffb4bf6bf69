"""The Transformer encoder block, dense or with a mixture of experts."""

import keras

from keras_softmoe.layers.attention import Attention, layer_norm
from keras_softmoe.layers.feedforward import MLP
from keras_softmoe.layers.modalities import add, check_tokens_shape, each
from keras_softmoe.layers.moe import MoE


@keras.saving.register_keras_serializable(package="keras_softmoe")
class EncoderBlock(keras.layers.Layer):
    """Pre-norm Transformer block: attention, then an MLP or a mixture of experts.

    Args:
        num_heads: int, number of attention heads.
        mlp_dim: int, hidden width of the MLP or of each expert.
        router: `None` for a dense block, or a router from `keras_softmoe.routers` (a
            template, see `MoE`).
        use_qk_norm: bool, whether queries and keys are normalized.
        dropout_rate: float, dropout after attention and after the MLP or experts.
        group_images: int or `None`, see `MoE`.
        dispatcher: see `MoE`.
        equal_experts: bool, see `MoE`.
        expert_dropout_rate: float, see `MoE`.
        remat_experts: bool, see `MoE`.
        dispatch_dtype: see `MoE`.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Call arguments:
        inputs: `(B, S, D)` float tensor; or a dict from modalities (`"image"`,
            `"text"`) to such tensors. Attention and a dense MLP see each of them
            apart; experts are given all of them together.
        return_decision: bool, whether to return the router's `Decision` as well
            (`None` for a dense block).

    Returns: `(B, S, D)` tensor (or a dict like the input), or that and the `Decision`.

    Raises:
        ValueError: if `num_heads` does not divide the width, or the input has not
            rank 3.

    Source: V-MoE, section 2.1 and figure 1; several modalities: LIMoE, section 2.

    Example:

    >>> router = ksm.routers.SoftRouter(num_experts=16)
    >>> block = ksm.layers.EncoderBlock(num_heads=4, mlp_dim=128, router=router)
    >>> block(np.random.normal(size=(2, 16, 32))).shape
    (2, 16, 32)
    """

    def __init__(
        self,
        num_heads,
        mlp_dim,
        router=None,
        use_qk_norm=False,
        dropout_rate=0.0,
        group_images=1,
        dispatcher="auto",
        equal_experts=False,
        expert_dropout_rate=0.0,
        remat_experts=False,
        dispatch_dtype=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.use_qk_norm = use_qk_norm
        self.dropout_rate = dropout_rate
        self.group_images = group_images
        self.dispatcher = dispatcher
        self.equal_experts = equal_experts
        self.expert_dropout_rate = expert_dropout_rate
        self.remat_experts = remat_experts
        self.dispatch_dtype = dispatch_dtype
        dtype = self.dtype_policy
        self.attention_norm = layer_norm(dtype, "attention_norm")
        self.attention = Attention(
            num_heads, use_qk_norm=use_qk_norm, dtype=dtype, name="attention"
        )
        self.mlp_norm = layer_norm(dtype, "mlp_norm")
        self.mlp = self.moe = None
        if router is None:
            self.mlp = MLP(mlp_dim, dtype=dtype, name="mlp")
        else:
            self.moe = MoE(
                router,
                mlp_dim,
                group_images=group_images,
                dispatcher=dispatcher,
                equal_experts=equal_experts,
                expert_dropout_rate=expert_dropout_rate,
                remat_experts=remat_experts,
                dispatch_dtype=dispatch_dtype,
                dtype=dtype,
                name="moe",
            )
        if dropout_rate:
            self.dropout = keras.layers.Dropout(
                dropout_rate, dtype=dtype, name="dropout"
            )

    def build(self, inputs_shape):
        check_tokens_shape(inputs_shape)
        # Modalities differ in the number of tokens, which only the experts look at.
        is_dict = isinstance(inputs_shape, dict)
        shape = next(iter(inputs_shape.values())) if is_dict else inputs_shape
        self.attention_norm.build(shape)
        self.attention.build(shape, shape)
        self.mlp_norm.build(shape)
        if self.moe is None:
            self.mlp.build(shape)
        else:
            self.moe.build(inputs_shape)
        if self.dropout_rate:
            self.dropout.build(shape)

    def call(self, inputs, training=None, return_decision=False):
        x = add(inputs, each(lambda x: self._attend(x, training), inputs))
        tokens = each(self.mlp_norm, x)
        decision = None
        if self.moe is None:
            outputs = each(self.mlp, tokens)
        elif return_decision:
            outputs, decision = self.moe(
                tokens, training=training, return_decision=True
            )
        else:
            outputs = self.moe(tokens, training=training)
        outputs = add(x, each(lambda x: self._drop(x, training), outputs))
        return (outputs, decision) if return_decision else outputs

    def _attend(self, x, training):
        tokens = self.attention_norm(x)
        return self._drop(self.attention(tokens, tokens), training)

    def _drop(self, x, training):
        return self.dropout(x, training=training) if self.dropout_rate else x

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        router = self.moe and keras.saving.serialize_keras_object(self.moe.router)
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "router": router,
            "use_qk_norm": self.use_qk_norm,
            "dropout_rate": self.dropout_rate,
            "group_images": self.group_images,
            "dispatcher": self.dispatcher,
            "equal_experts": self.equal_experts,
            "expert_dropout_rate": self.expert_dropout_rate,
            "remat_experts": self.remat_experts,
            "dispatch_dtype": self.dispatch_dtype,
        }

    @classmethod
    def from_config(cls, config):
        router = keras.saving.deserialize_keras_object(config["router"])
        return cls(**{**config, "router": router})
