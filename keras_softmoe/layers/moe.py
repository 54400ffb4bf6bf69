"""The mixture-of-experts layer: router, dispatch, experts, combine."""

import math

import keras
from keras import ops

from keras_softmoe import checks
from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.layers import groups
from keras_softmoe.layers.experts import Experts
from keras_softmoe.layers.mlp import MLP
from keras_softmoe.layers.template import check_template
from keras_softmoe.layers.template_experts import TemplateExperts
from keras_softmoe.ops import ChoiceRouting, SlotRouting, combine, dispatch, to_dense
from keras_softmoe.ops.kernels import reshape
from keras_softmoe.ops.routing import to_slots
from keras_softmoe.ops.selection import zero_padding
from keras_softmoe.routers import Router
from keras_softmoe.sharding.constraints import is_distributed
from keras_softmoe.types import DType

DISPATCHERS = ("auto", "gather", "einsum")


@keras.saving.register_keras_serializable(package="keras_softmoe")
class MoE(Layer):
    """Mixture of experts with any router, in place of a Transformer's MLP.

    The router decides for each group of images, tokens are dispatched to the experts'
    slots, and the outputs are combined. The output of a token without an expert is
    zero, so a residual block passes it unchanged.

    Args:
        router: a router from `keras_softmoe.routers`, from whose configuration the
            layer creates its own.
        mlp_dim: int, hidden width of experts that are MLPs; `None` with `expert`.
        group_images: int, images whose tokens are routed together; empty images fill
            the last group. `None` for the whole batch, whose size must be fixed.
        dispatcher: `"gather"` copies rows to the slots of a sparse router, `"einsum"`
            multiplies with one-hot weights (for experts sharded over devices), `"auto"`
            is `"einsum"` for groups of under 64 tokens. Of a dropless router
            (`capacity_factor=None`) rows are sorted by expert where experts support it.
        equal_experts: bool, whether all experts start with the same weights.
        expert_dropout_rate: float, dropout inside the experts.
        remat_experts: bool, whether hidden activations are recomputed in the backward
            pass, see `Experts`.
        dispatch_dtype: `None` or `"bfloat16"`, to which tokens are rounded before
            dispatch and outputs before combine, as in the released code.
        activation, gated: as in `MLP`, of experts that are MLPs.
        expert: `keras.layers.Layer`, of which each expert is a copy, see
            `TemplateExperts`.
        shared_mlp_dim: int or `None`. Hidden width of an MLP (the shared expert) that
            computes every token, and whose outputs are added.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Call arguments:
        - `inputs`: `(B, S, D)` float tensor, `(B, ..., D)` with several axes of tokens,
            or `(B, D)` whose rows are tokens, in groups of `group_images` rows. Sizes
            but `D` may be unknown beforehand; graphs of TensorFlow then need a router
            that is soft or has no capacity.
        - `mask`: optional bool tensor of that shape without `D`; `False` for padding.
          The other tokens are routed as if masked ones were absent; those get zeros.
        - `modalities`: for a `LIMoERouter`, pairs of a modality and its number of
          tokens, in their order, as in `(("image", 64), ("text", 16))`.

    Returns:
        tensor like the input.

    Raises:
        ValueError: if an argument is not among the accepted values, or the input has no
            axis of tokens.

    Source: V-MoE, section 2.2; Soft MoE, section 2.1; router study, section 2; shared
    experts: Fei et al. 2024 (DiT-MoE, arXiv 2407.11633), section 3.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(num_experts=8, priority="max")
        >>> layer = ksm.layers.MoE(router, mlp_dim=128, group_images=4)
        >>> layer(np.random.normal(size=(6, 16, 32))).shape
        (6, 16, 32)
    """

    # Whether the router decides for images, as in `ImageMoE`
    routes_images = False

    config_arguments = (
        *("mlp_dim", "activation", "group_images", "dispatcher", "equal_experts"),
        *("expert_dropout_rate", "remat_experts", "dispatch_dtype", "gated"),
        "shared_mlp_dim",
    )
    layer_arguments = ("router", "expert")

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
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not isinstance(router, Router):
            raise ValueError(
                "`router` must be a router from `keras_softmoe.routers`. "
                + checks.received(router=router)
            )
        checks.check_bools(gated=gated)
        if (mlp_dim is None) == (expert is None):
            given = {} if expert is None else {"expert": expert}
            raise ValueError(
                "Either `mlp_dim` must be the hidden width of experts that are MLPs, "
                "or `expert` a layer that they copy. Pass one of the two. "
                + checks.received(mlp_dim=mlp_dim, **given)
            )
        if expert is None:
            checks.check_whole_numbers(1, mlp_dim=mlp_dim)
        else:
            check_template(expert)
            given = {
                "expert_dropout_rate": expert_dropout_rate,
                "remat_experts": remat_experts,
            }
            if shared_mlp_dim is None:
                # Otherwise they are settings of the shared expert, which is an MLP.
                other = None if activation == "gelu_tanh" else activation
                given |= {"gated": gated, "activation": other}
            wrong = {name: value for name, value in given.items() if value}
            if wrong:
                raise ValueError(
                    "These are settings of experts that are MLPs, not of an `expert`. "
                    + checks.received(**wrong)
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
        # A copy, so that one router can be given to several layers
        self.router = router.clone(name="router")
        self.keep_arguments(locals())
        of_experts = {
            "equal_experts": equal_experts,
            "dtype": self.dtype_policy,
            "name": "experts",
        }
        if expert is not None:
            self.experts = TemplateExperts(router.num_experts, expert, **of_experts)
        else:
            self.experts = Experts(
                router.num_experts,
                mlp_dim,
                dropout_rate=expert_dropout_rate,
                remat=remat_experts,
                activation=activation,
                gated=gated,
                **of_experts,
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
        groups.check_tokens_shape(inputs_shape, any_rank=True)
        # How many tokens of one image are routed, for `check_group_images`
        is_row = len(inputs_shape) == 2 and self.group_images == 1
        if is_row and not self.router.num_rows(1):
            raise ValueError(
                "Tokens have a shape (batch, ..., width). Received: shape="
                f"{tuple(inputs_shape)}, with 2 axes, and group_images=1: each row "
                "alone. Pass the number of rows that are routed together to `MoE` as "
                "`group_images`; for one example, pass `tokens[None]`."
            )
        of_image = () if self.routes_images else inputs_shape[1:-1]
        self.num_tokens = None if None in of_image else math.prod(of_image)
        group_tokens = None
        if self.group_images and self.num_tokens:
            group_tokens = self.group_images * self.num_tokens
        if is_distributed():
            self._check_placement()
        width, num_experts = inputs_shape[-1], self.router.num_experts
        is_template = isinstance(self.experts, TemplateExperts)
        if is_template:
            # First: a template may be refused, and no weights should exist by then.
            one = inputs_shape[1:] if self.routes_images else (width,)
            self.experts.build((None, num_experts, None, *one))
        self.router.build((None, group_tokens, width))
        if not is_template:
            self.experts.build((None, num_experts, None, width))
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
        _check_group_count(group_images)
        if self.built and group_images is not None and self.num_tokens:
            (router or self.router).check_group(group_images * self.num_tokens)

    def _check_placement(self):
        router = self.router
        if router.num_rows(1, True):
            # Predictions have a slot for each token instead, `E / K` times the compute.
            raise ValueError(
                "Training without a capacity cannot be sharded: devices need equally "
                "many rows of each group. Received: capacity_factor=None under a "
                "distribution. "
                f"`capacity_factor={router.num_experts / router.num_rows(1, True):g}` "
                "keeps every token, too."
            )

    def images_of_group(self, training: bool = False) -> int | None:
        """Return the images that a call routes together, `None` for the whole batch."""
        router = self.router
        is_alone = not training and router.chooses_alone and router.num_rows(1)
        # No image then depends on others: empty images would only fill a group.
        return 1 if is_alone else self.group_images

    def _check_groups(self, batch, num_groups):
        """Check a call under a distribution, which may not be that of `build`."""
        self._check_placement()
        groups.warn_of_split_groups(self, batch, num_groups)

    def call(self, inputs, mask=None, training=None, modalities=()):
        sharded, group_images = is_distributed(), self.group_images
        if group_images != 1:
            group_images = self.images_of_group(training)
        # 1. Sequences: (B, ..., D) -> (B, S, D), with zeros for padding
        x, mask = groups.as_sequence(inputs, mask)
        # 2. Groups of images that compete for slots: (B, S, D) -> (G, S, D)
        tokens, valid, counts = groups.group(
            x, mask, group_images, self.router.num_experts
        )
        if sharded:
            self._check_groups(x.shape[0], tokens.shape[0])
        # 3. Route: which tokens fill which slots, and with which gates
        routing, rows = self._route(tokens, valid, counts, training, modalities)
        # 4. Dispatch: (G, S, D) -> (G, E, C, D), or (N, D) rows sorted by expert
        if self.dispatch_dtype:
            tokens = self._rounded(tokens)
        slots = dispatch(tokens, routing, sharded)
        # 5. Experts: each computes its own slots
        slots = self.experts(slots, training=training, **rows)
        # 6. Combine: (G, E, C, D) -> (G, S, D), the sums of outputs times gates
        if self.dispatch_dtype:
            slots = self._rounded(slots)
        num_tokens = tokens.shape[1] or ops.shape(tokens)[1]
        outputs = combine(slots, routing, num_tokens, sharded)
        # 7. Images again: (G, S, D) -> (B, S, D), without those that filled a group
        if group_images != 1:
            outputs = groups.ungroup(outputs, x)
        # 8. The shared expert computes every token.
        if self.shared_mlp is not None:
            outputs = outputs + zero_padding(self.shared_mlp(x), mask)
        return reshape(outputs, (-1, *ops.shape(inputs)[1:]))

    def _route(self, tokens, valid, counts, training, modalities=()):
        """Return the routing for the dispatcher, and arguments of the experts.

        The arguments are the numbers of rows of each expert, if rows are sorted.
        """
        router, num_tokens = self.router, tokens.shape[1]
        if num_tokens is None:
            num_tokens = self._open_length(tokens, training)
        known = {}
        if router.knows_modalities:
            known["modalities"] = modalities
        if counts is not None and router.knows_num_tokens:
            known["num_tokens"] = counts
        # Padding is zero already, and only a recording reads the summary.
        routing = router(
            tokens, valid=valid, training=training, summarize=False, **known
        ).routing
        if isinstance(routing, SlotRouting):
            # One-hot products are faster than copies in groups of few tokens.
            if self.dispatcher == "einsum" or (
                self.dispatcher == "auto" and num_tokens < 64
            ):
                routing = to_dense(routing, num_tokens)
        elif isinstance(routing, ChoiceRouting):
            if self.dispatcher == "einsum":
                routing = to_dense(routing, num_tokens)
            elif self.experts.takes_rows() and not router.pads_rows:
                return routing, {"count": routing.count}
            else:
                # A slot for each token in every expert
                routing = to_slots(routing, num_tokens)
        return routing, {}

    def _open_length(self, tokens, training):
        """Return the tokens of a group, which a graph of TensorFlow does not know."""
        router = self.router
        if not (router.mixes_tokens or router.num_rows(1, bool(training))):
            raise ValueError(
                f"`{type(router).__name__}` needs a known number of tokens on "
                "TensorFlow, which compiles one program for all lengths. Received: "
                f"tokens of shape {tokens.shape}. Give `keras.Input` all sizes, pad "
                "sequences and mask them, set `capacity_factor=None`, or call "
                "`compile(run_eagerly=True)`."
            )
        return ops.shape(tokens)[1]

    def _rounded(self, x):
        if keras.backend.backend() == "jax":
            # XLA may remove two casts in a row and keep the excess precision.
            from jax import lax

            return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return ops.cast(ops.cast(x, self.dispatch_dtype), x.dtype)

    @staticmethod
    def check_settings(
        group_images: int | None,
        dispatcher: str,
        equal_experts: bool,
        expert_dropout_rate: float,
        remat_experts: bool,
        dispatch_dtype: str | None,
        shared_mlp_dim: int | None = None,
    ) -> None:
        """Raise unless settings of all mixtures of a model are accepted."""
        _check_group_count(group_images)
        checks.check_choice("dispatcher", dispatcher, DISPATCHERS)
        checks.check_bools(equal_experts=equal_experts, remat_experts=remat_experts)
        checks.check_numbers(least=0, under=1, expert_dropout_rate=expert_dropout_rate)
        checks.check_choice("dispatch_dtype", dispatch_dtype, (None, "bfloat16"))
        is_size = checks.is_whole_number(shared_mlp_dim, 1, "mlp_dim")
        if shared_mlp_dim is not None and not is_size:
            raise ValueError(
                "`shared_mlp_dim` must be a positive integer"
                f"{checks.at_most('mlp_dim')}, or `None` for no shared expert. "
                + checks.received(shared_mlp_dim=shared_mlp_dim)
            )


def _check_group_count(group_images):
    is_count = checks.is_whole_number(group_images, 1, "group_images")
    if not (is_count or group_images is None):
        is_name = isinstance(group_images, str)
        raise ValueError(
            "A group consists of at least one image: `group_images` must be a positive "
            f"integer{checks.at_most('group_images')}, or `None` for the whole batch. "
            + "A new `ViTMoEBackbone` also takes 'auto'. " * is_name
            + checks.received(group_images=group_images)
        )
