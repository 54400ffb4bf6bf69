"""Counts what is in a model's weights and what its matrix products multiply."""

from dataclasses import dataclass

from keras_softmoe.routers import IdentityRouter, LIMoERouter, SoftRouter
from keras_softmoe.routers.sparse import SparseRouter


@dataclass(frozen=True)
class Tally:
    """Numbers in the weights, and multiply-adds for an image (or a pair).

    Attributes:
        weights: int, in the dtype of the model.
        in_float32: int, in float32 under any policy.
        products: float.
    """

    weights: int = 0
    in_float32: int = 0
    products: float = 0

    def __add__(self, other):
        return Tally(
            self.weights + other.weights,
            self.in_float32 + other.in_float32,
            self.products + other.products,
        )

    def __mul__(self, times):
        return Tally(
            self.weights * times, self.in_float32 * times, self.products * times
        )


# === Models, from their arguments ===


def vit(a):
    """A `ViTMoEBackbone`."""
    has_class_token = a.pooling == "token"
    num_tokens = a.num_patches + has_class_token
    total = _patch_embedding(a)
    if has_class_token:
        total += Tally(a.hidden_dim)
    if a.position_embedding == "learned":
        total += Tally(num_tokens * a.hidden_dim)
    total += encoder(a, num_tokens)
    if a.pooling == "map":
        total += _attention_pooling(a, num_tokens)
    if a.representation_dim is not None:
        total += dense(a.hidden_dim, a.representation_dim)
    return total


def limoe(a):
    """A `LIMoEBackbone`, for a pair of image and caption."""
    tokens_of = a.num_patches, a.sequence_length
    total = _patch_embedding(a)
    # Looked up, not multiplied
    total += Tally(a.vocabulary_size * a.hidden_dim)
    total += Tally(sum(tokens_of) * a.hidden_dim)
    total += encoder(a, *tokens_of)
    poolings = a.image_pooling, a.text_pooling
    for pooling, num_tokens in zip(poolings, tokens_of, strict=True):
        if pooling == "map":
            total += _attention_pooling(a, num_tokens)
        projection = a.hidden_dim * a.embedding_dim
        total += Tally(projection, products=projection)
    # Scale, and bias if there is one
    return total + Tally(in_float32=1 + (a.logit_bias is not None))


# === Layers ===


def dense(inputs, outputs, times=1):
    """A dense layer with bias, applied to some vectors."""
    return Tally((inputs + 1) * outputs, products=times * inputs * outputs)


def _patch_embedding(a):
    return dense(a.patch_numbers, a.hidden_dim, times=a.num_patches)


def encoder(a, *tokens_of):
    """Blocks and the last norm, for modalities of so many tokens each.

    They share all weights; their tokens meet in mixtures of experts only.
    """
    norm = Tally(2 * a.hidden_dim)
    num_tokens = sum(tokens_of)
    attention, *others = (_attention(a, n, n) for n in tokens_of)
    attention += Tally(products=sum(other.products for other in others))
    total = (attention + norm * 2) * a.num_layers
    total += _mlp(a, times=num_tokens) * (a.num_layers - len(a.routers))
    for router in a.routers:
        total += _moe(a, router, num_tokens)
    return total + norm


def _attention(a, num_queries, num_tokens):
    width = a.hidden_dim
    query_and_output = dense(width, width, num_queries) * 2
    key_and_value = dense(width, width, num_tokens) * 2
    inner = Tally(products=2 * num_queries * num_tokens * width)
    norms = Tally(2 * (width // a.num_heads) if a.use_qk_norm else 0)
    return query_and_output + key_and_value + inner + norms


def _attention_pooling(a, num_tokens):
    probe, norm = Tally(a.hidden_dim), Tally(2 * a.hidden_dim)
    return probe + _attention(a, 1, num_tokens) + norm + _mlp(a)


def _mlp(a, times=1):
    inner = dense(a.hidden_dim, a.mlp_dim, times)
    return inner + dense(a.mlp_dim, a.hidden_dim, times)


def _moe(a, router, num_tokens):
    """A MoE layer: its products for a group of images, divided among them."""
    group_images = a.group_images or 1
    group_tokens = group_images * num_tokens
    slots, router_weights, logits, is_soft = _router(router, a.hidden_dim, group_tokens)
    # The rule of `layers.MoE`.
    multiplies = is_soft or a.dispatcher == "einsum"
    multiplies = multiplies or (a.dispatcher == "auto" and group_tokens < 64)
    mixing = 2 * slots if multiplies else 0
    products = slots * _mlp(a).products
    products += group_tokens * a.hidden_dim * (logits + mixing)
    experts = router.num_experts * _mlp(a).weights
    return Tally(experts, router_weights, products / group_images)


def _router(router, width, group_tokens):
    """Slots of all experts, weights, logits per token, and whether it mixes tokens."""
    num_experts = router.num_experts
    if isinstance(router, SoftRouter):
        slots = num_experts * router.slots_per_expert
        learns = "soft" in (router.dispatch, router.combine)
        logits = slots if learns else 0
        return slots, width * logits + (learns and router.normalize), logits, True
    if isinstance(router, SparseRouter):
        slots = num_experts * router.capacity(group_tokens)
        logits = num_experts
        if isinstance(router, LIMoERouter):
            # Pruned experts are still predicted. Of two kernels both are applied to
            # all tokens.
            logits = router.num_predicted_experts * (1 + router.per_modality)
        return slots, width * logits, logits, False
    if isinstance(router, IdentityRouter):
        return group_tokens, 0, 0, False
    raise ValueError(
        "The slots of this router are not known. `cost` counts the routers of "
        "`keras_softmoe.routers` and what is derived from `SoftRouter`, "
        "`IdentityRouter` or one of the token or expert choice routers. Received: "
        f"router={router!r}."
    )
