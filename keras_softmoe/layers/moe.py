"""The mixture-of-experts layer: router, dispatch, experts, combine."""

import math
from collections.abc import Sequence

import keras
from keras import ops

from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.layer_cost import LayerCost, MixtureCost
from keras_softmoe.layers.experts import MLP, Experts
from keras_softmoe.layers.moe_arguments import (
    check_experts,
    check_group_count,
    check_router,
    check_settings,
)
from keras_softmoe.layers.slots import (
    images_as_tokens,
    map_shape,
    slots_of_images,
    warn_of_split_groups,
)
from keras_softmoe.layers.template import serialized_template
from keras_softmoe.layers.template_experts import TemplateExperts
from keras_softmoe.layers.tokens import (
    as_sequence,
    check_masks,
    check_tokens_shape,
    each,
    group,
    join,
    join_masks,
    joined_shape,
    layout,
    masks_like,
    sequence_shapes,
    shapes_of,
    split,
    ungroup,
)
from keras_softmoe.ops import (
    ChoiceRouting,
    SlotRouting,
    combine,
    dispatch,
    to_dense,
)
from keras_softmoe.ops.kernels import reshape
from keras_softmoe.ops.routing import to_slots
from keras_softmoe.ops.selection import zero_padding
from keras_softmoe.routers import Router
from keras_softmoe.sharding.constraints import is_distributed
from keras_softmoe.types import DType


@keras.saving.register_keras_serializable(package="keras_softmoe")
class MoE(Layer):
    """Mixture of expert MLPs with any router, in place of a Transformer's MLP.

    Images are divided into groups, the router decides for each group, tokens are
    dispatched to the experts' slots, and the experts' outputs are combined. The output
    of a token without an expert is zero, so a residual block passes it unchanged.

    Args:
        router: a router from `keras_softmoe.routers`. It is a template: the layer
            creates a copy from its configuration.
        mlp_dim: int, hidden width of experts that are MLPs; or `None` with `expert`.
        group_images: int, images whose tokens are routed together. If the batch is not
            a multiple of it, empty images fill the last group; they take no slot.
            `None`: the whole batch is one group, and its size must be fixed.
        dispatcher: how tokens are dispatched to the slots of a sparse router.
            `"gather"` copies rows, `"einsum"` multiplies with one-hot weights (for
            experts sharded over devices), `"auto"` is the one measured to be faster:
            `"gather"`, except for groups of under 64 tokens. (Dispatch and combine took
            0.8 to 1.7 times as long with einsum as with gather at 64 tokens, 2 to 6
            times at 512 and 3 to 8 times at 1,024, on three backends.) Soft routers
            always use a product, as they mix all tokens. A dropless router
            (`capacity_factor=None`) has no slots: rows are sorted by expert. With
            `"einsum"` they are multiplied with one-hot weights instead. Experts in int8
            or float8, and programs of XLA on TensorFlow, cannot sort rows: there each
            expert gets a slot for each token.
        equal_experts: bool, whether all experts start with the same weights.
        expert_dropout_rate: float, dropout inside the experts.
        remat_experts: bool, whether the experts' hidden activations are recomputed in
            the backward pass instead of kept, see `Experts`.
        dispatch_dtype: `None` or `"bfloat16"`: the dtype to which tokens are rounded
            before dispatch, and the experts' outputs before combine. The released V-MoE
            and Soft MoE code rounds to bfloat16 even where the rest is float32.
        activation: activation of experts that are MLPs, as in `MLP`.
        expert: `keras.layers.Layer`, a template: each expert is a copy of it with its
            own weights. See `TemplateExperts` for what it may be. It has its own
            settings; LoRA, int8 and rows without slots are for MLPs alone.
        gated: bool, whether experts that are MLPs are gated, as in `MLP`.
        shared_mlp_dim: int or `None`. Hidden width of an MLP (the shared expert, with
            `activation` and `gated`) that computes every token, and whose outputs are
            added to those of the others.
        by_image: bool, whether whole images are routed instead of tokens: the router
            gets the mean of each image's tokens, `(G, group_images, D)`, and an expert
            computes all tokens of an image. A template then gets the map, in the shape
            of the input: `(N, H, W, D)` for `(B, H, W, D)`, so that an expert may be a
            convolution. Images whose tokens are all masked take no slot.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Call arguments:
        - `inputs`: `(B, S, D)` float tensor, or `(B, ..., D)` with several axes of
          tokens (a feature map, a video), flattened to one sequence for the router; or
          a dict from modalities (`"image"`, `"text"`) to such tensors, which are routed
          together: `S` is then the sum of their tokens, with modalities in alphabetical
          order.
        - `mask`: optional bool tensor of the shape of the inputs without `D`, or a dict
          of them; `False` for padding. A layer that computes a mask
          (`keras.layers.Embedding(mask_zero=True)`) passes it by itself. Masked tokens
          take no slot, get zeros, and count in no loss and no statistic. The others are
          routed as in a sequence without them; capacity follows from their number.

    Returns:
        tensor like the input, or a dict. `routers.record` collects the decisions of the
        router for the `ceil(B / group_images)` groups of `group_images * S` tokens; of
        `group_images` images, each in the place of a token, if routed `by_image`.

    Raises:
        ValueError: if an argument is not among the accepted values, or the input has
            no axis of tokens.

    Source: V-MoE, section 2.2; Soft MoE, section 2.1; router study, section 2; several
    modalities: LIMoE, section 2; shared experts: Fei et al. 2024 (DiT-MoE, arXiv
    2407.11633), section 3; by image: Daxberger et al. 2023 (Mobile V-MoE, arXiv
    2309.04354), section 2.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(num_experts=8, priority="max")
        >>> layer = ksm.layers.MoE(router, mlp_dim=128, group_images=4)
        >>> layer(np.random.normal(size=(6, 16, 32))).shape
        (6, 16, 32)
        >>> # Whole images to experts that are convolutions, and an MLP for all tokens
        >>> convolution = keras.layers.Conv2D(32, 3, padding="same")
        >>> layer = ksm.layers.MoE(
        ...     router,
        ...     expert=convolution,
        ...     group_images=8,
        ...     by_image=True,
        ...     shared_mlp_dim=64,
        ... )
        >>> layer(np.random.normal(size=(8, 4, 4, 32))).shape
        (8, 4, 4, 32)
    """

    def __init__(
        self,
        router: Router,
        mlp_dim: int | None = None,
        group_images: int = 1,
        dispatcher: str = "auto",
        equal_experts: bool = False,
        expert_dropout_rate: float = 0.0,
        remat_experts: bool = False,
        dispatch_dtype: DType = None,
        activation: str = "gelu_tanh",
        expert: keras.layers.Layer | None = None,
        gated: bool = False,
        shared_mlp_dim: int | None = None,
        by_image: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_router(router, by_image)
        check_experts(
            mlp_dim,
            expert,
            activation,
            gated,
            shared_mlp_dim,
            expert_dropout_rate=expert_dropout_rate,
            remat_experts=remat_experts,
        )
        self.check_settings(
            group_images,
            dispatcher,
            equal_experts,
            expert_dropout_rate,
            remat_experts,
            dispatch_dtype,
            shared_mlp_dim,
        )
        self.router = router.clone(name="router")
        self.mlp_dim = mlp_dim
        self.group_images = group_images
        self.dispatcher = dispatcher
        self.equal_experts = equal_experts
        self.expert_dropout_rate = expert_dropout_rate
        self.remat_experts = remat_experts
        self.dispatch_dtype = dispatch_dtype
        self.activation = activation
        self.gated = gated
        self.shared_mlp_dim = shared_mlp_dim
        self.by_image = by_image
        known = {
            "equal_experts": equal_experts,
            "dtype": self.dtype_policy,
            "name": "experts",
        }
        if expert is not None:
            self.experts = TemplateExperts(router.num_experts, expert, **known)
        else:
            self.experts = Experts(
                router.num_experts,
                mlp_dim,
                dropout_rate=expert_dropout_rate,
                remat=remat_experts,
                activation=activation,
                gated=gated,
                **known,
            )
        self.shared_mlp = None
        if shared_mlp_dim is not None:
            self.shared_mlp = MLP(
                shared_mlp_dim,
                activation,
                gated,
                dtype=self.dtype_policy,
                name="shared_mlp",
            )
        self.supports_masking = True

    def build(self, inputs_shape):
        check_tokens_shape(inputs_shape, any_rank=True)
        _, num_tokens, width = joined_shape(sequence_shapes(inputs_shape))
        self._map_shape = map_shape(inputs_shape)
        # What is routed of one image, for `check_group_images`
        self.num_tokens = num_tokens = 1 if self.by_image else num_tokens
        group_tokens = self.group_images and self.group_images * num_tokens
        self._check_placement()
        one = self._map_shape if self.by_image else (width,)
        slots_shape = (None, self.router.num_experts, None, *one)
        if self.expert is not None:
            # A template may be refused: before there are any weights
            self.experts.build(slots_shape)
        self.router.build((None, group_tokens, width))
        if self.expert is None:
            self.experts.build((*slots_shape[:3], width))
        if self.shared_mlp is not None:
            self.shared_mlp.build((None, None, width))

    @property
    def expert(self) -> keras.layers.Layer | None:
        """The template of the experts, `None` for MLPs."""
        return getattr(self.experts, "expert", None)

    def check_group_images(
        self, group_images: int, router: Router | None = None
    ) -> None:
        """Raise unless groups of `group_images` images can be routed.

        Args:
            group_images: the new value of `group_images`.
            router: the router with its new settings. Defaults to the layer's router.

        Raises:
            ValueError: if it is neither a positive integer nor `None`, or the router
                cannot route groups of that many tokens.
        """
        check_group_count(group_images)
        if self.built and group_images is not None:
            (router or self.router).check_group(group_images * self.num_tokens)

    def _check_placement(self):
        router = self.router
        if is_distributed() and router.num_rows(1) is not None:
            factor = router.num_experts / router.choices_per_token
            raise ValueError(
                "Dropless routing cannot be sharded: devices need equally many rows of "
                "each group. Received: capacity_factor=None under a distribution. "
                f"`capacity_factor={factor:g}` keeps every token too: each expert then "
                "has a slot for each token."
            )

    def call(self, inputs, mask=None, training=None):
        self._check_placement()
        check_tokens_shape(shapes_of(inputs), any_rank=True)
        check_masks(mask, inputs)
        sequences = as_sequence(inputs)
        x = join(sequences)
        if mask is not None:
            mask = join_masks(each(self._mask_sequence, mask), sequences)
            x = zero_padding(x, mask)
        keys, vectors, valid = x, x, mask
        if self.by_image:
            keys, vectors, valid = images_as_tokens(x, mask)
        tokens, valid, counts = group(
            keys, valid, self.group_images, self.router.num_experts
        )
        warn_of_split_groups(self, x.shape[0], tokens.shape[0])
        known = {}
        if self.router.knows_modalities:
            known["modalities"] = layout(sequences)
        if self.router.knows_num_tokens and counts is not None:
            known["num_tokens"] = counts
        decision = self.router(
            tokens, valid=valid, training=training, summarize=False, **known
        )
        routing = decision.routing
        num_tokens = tokens.shape[1]
        if isinstance(routing, SlotRouting) and self._multiplies(num_tokens):
            routing = to_dense(routing, num_tokens)
        sorted_rows = {}
        if isinstance(routing, ChoiceRouting):
            if self.dispatcher == "einsum":
                routing = to_dense(routing, num_tokens)
            elif self.experts.takes_rows():
                sorted_rows = {"count": routing.count}
            else:
                routing = SlotRouting(*to_slots(routing, num_tokens))
        sharded, known = is_distributed(), {"training": training, **sorted_rows}
        if self.by_image:
            tokens, _, _ = group(
                vectors, None, self.group_images, self.router.num_experts
            )
        slots = dispatch(self._rounded(tokens), routing, sharded)
        if self.by_image:
            slots = slots_of_images(self.experts, slots, self._map_shape, **known)
        else:
            slots = self.experts(slots, **known)
        outputs = combine(self._rounded(slots), routing, num_tokens, sharded)
        outputs = ungroup(outputs, vectors, self.group_images)
        if self.by_image:
            outputs = zero_padding(reshape(outputs, ops.shape(x)), mask)
        if self.shared_mlp is not None:
            outputs = outputs + zero_padding(self.shared_mlp(x), mask)
        outputs = split(outputs, sequences)
        return keras.tree.map_structure(
            lambda y, like: reshape(y, (-1, *like.shape[1:])), outputs, inputs
        )

    def _mask_sequence(self, mask):
        if mask is None or len(mask.shape) == 2:
            return mask
        return reshape(mask, (-1, math.prod(mask.shape[1:])))

    def _multiplies(self, num_tokens):
        if self.dispatcher == "auto":
            return num_tokens < 64
        return self.dispatcher == "einsum"

    def _rounded(self, x):
        if self.dispatch_dtype is None:
            return x
        if keras.backend.backend() == "jax":
            # XLA may remove two casts in a row and keep the excess precision.
            from jax import lax

            return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return ops.cast(ops.cast(x, self.dispatch_dtype), x.dtype)

    def compute_mask(self, inputs, previous_mask=None):
        return masks_like(inputs, previous_mask)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def cost(self, inputs_shape: Sequence[int], training: bool = False) -> LayerCost:
        batch, num_tokens, width = joined_shape(sequence_shapes(inputs_shape))
        group_images = self.group_images or batch
        shared = LayerCost()
        if self.shared_mlp is not None:
            shared = self.shared_mlp.cost((batch * num_tokens, width))
        # Numbers in a slot
        slot_width, slot_shape = width, (width,)
        if self.by_image:
            slot_width, slot_shape = num_tokens * width, map_shape(inputs_shape)
            num_tokens = 1
        num_groups, group_tokens = -(-batch // group_images), group_images * num_tokens
        num_experts = self.router.num_experts
        capacity = self.router.capacity(group_tokens, training)
        slots, all_tokens = num_experts * capacity, num_groups * group_tokens
        rows = self.router.num_rows(group_tokens, training)
        if self.dispatcher == "einsum":
            rows = None
        slots = slots if rows is None else rows
        router = self.router.cost((num_groups, group_tokens, width), training)
        experts = self.experts.cost((num_groups * slots, *slot_shape))
        multiplies = rows is None and self._multiplies(group_tokens)
        mixing = self.router.mixes_tokens or multiplies
        # A soft router keeps its float32 weights and counts them. One-hot weights, and
        # copies in half precision, are made here.
        is_half = self.compute_dtype != "float32"
        copies = mixing and (is_half or not self.router.mixes_tokens)
        mixture = MixtureCost(
            name=self.name,
            num_experts=num_experts,
            expert_weights=experts.weights,
            slot_weights=router.slot_weights,
            slots=num_groups * slots,
            slot_width=slot_width,
        )
        return (
            router
            + experts
            + shared
            + LayerCost(
                products=mixing * all_tokens * slot_width * 2 * slots,
                kept=copies * 2 * all_tokens * slots,
                # The router's float32 copy of tokens in half precision
                kept_float32=is_half * all_tokens * width,
                mixtures=(mixture,),
            )
        )

    def get_config(self):
        router = keras.saving.serialize_keras_object(self.router)
        # It is built for the group size of the configuration, which may differ now.
        router.pop("build_config", None)
        expert = None if self.expert is None else serialized_template(self.expert)
        return {
            **super().get_config(),
            "router": router,
            "mlp_dim": self.mlp_dim,
            "expert": expert,
            "activation": self.activation,
            "group_images": self.group_images,
            "dispatcher": self.dispatcher,
            "equal_experts": self.equal_experts,
            "expert_dropout_rate": self.expert_dropout_rate,
            "remat_experts": self.remat_experts,
            "dispatch_dtype": self.dispatch_dtype,
            "gated": self.gated,
            "shared_mlp_dim": self.shared_mlp_dim,
            "by_image": self.by_image,
        }

    # For settings of a model, without a layer
    check_settings = staticmethod(check_settings)

    @classmethod
    def from_config(cls, config):
        parts = {name: config.get(name) for name in ("router", "expert")}
        revived = keras.saving.deserialize_keras_object(parts)
        return cls(**{**config, **revived})
