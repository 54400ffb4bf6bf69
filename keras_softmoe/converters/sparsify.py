"""KerasHub's language models with experts, computing only the chosen ones."""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import keras
import keras_hub
from keras import ops

from keras_softmoe.checks import quote
from keras_softmoe.keras_adapter import surgery
from keras_softmoe.keras_adapter.layers import without_values
from keras_softmoe.keras_adapter.runs import is_traced_for_xla
from keras_softmoe.models.with_experts.copies import task_with
from keras_softmoe.ops.grouped import grouped_affine, map_experts
from keras_softmoe.ops.kernels import affine, as_tensor, gelu, softmax
from keras_softmoe.ops.routing import choice_routing, combine, dispatch

# === Families of KerasHub ===


def _gated(units, activation=ops.silu):
    # As in most of KerasHub, activations are computed in float32.
    gate, up = ops.split(units, 2, axis=-1)
    return up * ops.cast(activation(ops.cast(gate, "float32")), units.dtype)


_gated_by_gelu = functools.partial(_gated, activation=gelu)


def _gated_in_turns(units):
    # GPT-OSS: a unit of the gate, then what it multiplies, both limited
    gate, up = ops.clip(units[..., ::2], -1e9, 7.0), units[..., 1::2]
    return (ops.clip(up, -7.0, 7.0) + 1) * (gate * ops.sigmoid(gate * 1.702))


_GATE, _OUTPUT = "_expert_feedforward_gate_dense", "_expert_feedforward_output_dense"


class _Family(NamedTuple):
    """Names in the block of a family.

    `first` and `last` are the kernels of the experts, and their biases. `router` and
    `bank` are layers of the block, `shared` are the shared expert and its gate, and
    `coefficient` is that of the balancing loss. `k` is the number of chosen experts.
    `is_beside`: the bank gets the weights of all experts from its block.
    """

    first: tuple = (_GATE,)
    last: tuple = (_OUTPUT,)
    activate: Callable = _gated
    router: str = "_sparse_feedforward_gate_dense"
    bank: str = "expert_bank"
    coefficient: str | None = "router_aux_loss_coefficient"
    shared: tuple = ()
    k: str = "top_k"
    is_beside: bool = False


# By the names of the classes of their blocks
_FAMILIES = {
    "Qwen3SparseMoeBlock": _Family(),
    "QwenSparseMoeBlock": _Family(
        shared=("shared_expert_dense", "shared_expert_gate_dense")
    ),
    "Qwen3_5MoeSparseMoeBlock": _Family(
        router="_router_gate", shared=("shared_expert", "_shared_expert_gate")
    ),
    "MixtralSparseMoeBlock": _Family(
        first=(_GATE, "_expert_feedforward_intermediate_dense"),
        coefficient="router_aux_loss_coef",
    ),
    "GptOssSparseMoeBlock": _Family(
        first=("gate_up_proj", "gate_up_proj_bias"),
        last=("down_proj", "down_proj_bias"),
        activate=_gated_in_turns,
        router="router",
        bank="experts",
        coefficient=None,
    ),
    "Gemma4TextDecoderBlock": _Family(
        first=("gate_proj", "up_proj"),
        last=("down_proj",),
        activate=_gated_by_gelu,
        router="moe_router",
        bank="moe_expert_bank",
        k="num_experts_per_token",
        is_beside=True,
    ),
}

# === Experts and blocks that compute what was chosen ===


def _first(x, *weights, multiply, biased):
    """Return the units of the gates and those that they multiply, side by side."""
    products = [weights] if biased else [(kernel,) for kernel in weights]
    units = [multiply(x, *product) for product in products]
    return units[0] if len(units) == 1 else ops.concatenate(units, axis=-1)


def _last(units, *weights, multiply, activate):
    return multiply(activate(units), *weights)


def _stages(family, multiply):
    """Return the functions of the two products of an expert."""
    biased = len(family.last) == 2
    return (
        functools.partial(_first, multiply=multiply, biased=biased),
        functools.partial(_last, multiply=multiply, activate=family.activate),
    )


class _SparseBank:
    """Mixin of the experts of a block, which also takes rows sorted by expert.

    With these, its input is a tuple of `(N, D)` rows and the `(E,)` rows of each
    expert. `family`, `stages` and `k` are attributes.
    """

    def call(self, hidden_states, dispatch_weights=None):
        if isinstance(hidden_states, tuple):
            return self._of_rows(*hidden_states)
        if dispatch_weights is None:
            return super().call(hidden_states)
        # Gemma 4: weights of all experts, (T, E), zero for those that are not chosen
        if is_traced_for_xla():
            return super().call(hidden_states, dispatch_weights)
        scale = ops.convert_to_tensor(self.per_expert_scale)
        weights = ops.cast(dispatch_weights, hidden_states.dtype) * scale
        chosen = ops.top_k(dispatch_weights, self.k)[1]
        return _mixture(self._of_rows, hidden_states, weights, chosen)

    def _of_rows(self, rows, count):
        family = self.family
        weights = [
            [ops.cast(as_tensor(getattr(self, name)), rows.dtype) for name in names]
            for names in (family.first, family.last)
        ]
        # Biases: (E, H) -> (E, 1, H)
        weights = tuple(
            tuple(w if len(w.shape) == 3 else w[:, None] for w in of_stage)
            for of_stage in weights
        )
        size = len(family.first)
        first, last = _stages(family, functools.partial(grouped_affine, count=count))

        def all_at_once(rows, *weights):
            return last(first(rows, *weights[:size]), *weights[size:])

        return map_experts(all_at_once, self.stages, rows, weights, count)


class _SparseBlock:
    """Mixin of a block which computes the chosen experts only."""

    def call(self, hidden_states, attention_mask=None, training=None):
        family = self.family
        is_noisy = training and getattr(self, "router_jitter_noise", 0)
        # XLA on TensorFlow must know the number of rows of each expert.
        if is_traced_for_xla() or is_noisy:
            others = (attention_mask, training) if family.coefficient else ()
            return super().call(hidden_states, *others)
        x = ops.reshape(hidden_states, (-1, hidden_states.shape[-1]))
        # Logits; scores of the chosen experts in GPT-OSS
        routed = getattr(self, family.router)(x)
        scores = softmax(routed) if family.coefficient else routed
        best, chosen = ops.top_k(scores, self.top_k)
        if getattr(self, "norm_top_k_prob", True):
            scores = scores / ops.sum(best, axis=-1, keepdims=True)
        bank = getattr(self, family.bank)
        outputs = _mixture(lambda *rows: bank(rows), x, scores, chosen)
        if family.shared:
            expert, gate = (getattr(self, name) for name in family.shared)
            outputs = outputs + expert(x) * ops.sigmoid(gate(x))
        if training:
            sizes = self.num_experts, self.top_k
            loss = self.balancing_loss(routed, *sizes, attention_mask)
            self.add_loss(getattr(self, family.coefficient) * loss)
        return ops.reshape(outputs, ops.shape(hidden_states)), routed


def _mixture(experts, x, scores, chosen):
    """Return the sums of the outputs of chosen experts, weighted by their scores.

    `experts` maps rows sorted by expert and their numbers to outputs, `x` is `(T, D)`,
    `scores` `(T, E)` and `chosen` `(T, K)`.
    """
    routing = choice_routing(scores[None], chosen[None])
    outputs = experts(dispatch(x[None], routing), routing.count)
    return combine(outputs, routing, ops.shape(x)[0])[0]


@functools.cache
def _sparse(source, mixin, family):
    """Return the subclass of a class of KerasHub, of the same name, with a mixin."""
    module = sys.modules[source.__module__]
    # Losses differ in how they read masks.
    loss = getattr(module, "compute_load_balancing_loss", None)
    members = {
        "family": family,
        # The same functions for all layers, see `map_experts`
        "stages": _stages(family, affine),
        "balancing_loss": loss and staticmethod(loss),
        "__module__": source.__module__,
        "__doc__": source.__doc__,
    }
    return type(source.__name__, (mixin, source), members)


def sparsify(model: keras.Model) -> keras.Model:
    """Let a language model of KerasHub compute only the experts that tokens choose.

    KerasHub computes every expert for every token, and then drops most of the results.
    The outputs, gradients and balancing losses of the model that is returned are the
    same up to rounding, for `top_k / num_experts` of the experts' products.

    It has the class, the names and the very weights of the model that is passed in:
    nothing is copied, and training one trains both. Saved files are KerasHub's: load
    them there and call `sparsify` again. `enable_lora` and `quantize` leave the experts
    out, as in KerasHub. Functions that XLA compiles on TensorFlow compute every
    expert.

    Families: Mixtral, Qwen-MoE, Qwen3-MoE, Qwen3.5-MoE, GPT-OSS and Gemma 4.

    Args:
        model: `keras_hub.models.Backbone` of one of these families, or a task on one,
            such as a `CausalLM`. A task that you compiled must be compiled again.

    Returns:
        A model of the same class, which shares its weights and preprocessor. `model`
        computes as before.

    Raises:
        ValueError: if the model is of another kind or family, has no experts, or has
            LoRA factors or was quantized before.

    Source: Gale et al. 2022 (MegaBlocks), section 4, for products of sorted rows.

    Examples:
        >>> mixtral = keras_hub.models.MixtralBackbone(
        ...     vocabulary_size=50,
        ...     num_layers=1,
        ...     num_query_heads=2,
        ...     hidden_dim=16,
        ...     intermediate_dim=32,
        ...     num_key_value_heads=1,
        ...     num_experts=8,
        ...     top_k=2,
        ... )
        >>> sparse = ksm.converters.sparsify(mixtral)
        >>> sparse.weights[1] is mixtral.weights[1]
        True
    """
    if isinstance(model, keras_hub.models.Task):
        return task_with(model, sparsify(model.backbone))
    if not isinstance(model, keras_hub.models.Backbone):
        raise ValueError(
            "`sparsify` takes a backbone or a task of KerasHub. Received: "
            f"model={quote(model)}."
        )
    if not any(_family_of(layer) for _, layer, _ in surgery.sublayers(model)):
        raise ValueError(
            "`sparsify` knows the experts of Mixtral, Qwen-MoE, Qwen3-MoE, "
            f"Qwen3.5-MoE, GPT-OSS and Gemma 4. Received: a `{type(model).__name__}` "
            "without them. `ksm.converters.add_experts` puts experts into a dense one."
        )
    for _, layer, _ in surgery.sublayers(model):
        if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
            raise ValueError(
                "Call `sparsify` first, then `enable_lora` or `quantize`. Received: a "
                f"`{type(model).__name__}` where {layer.path!r} has been changed."
            )
    with without_values():
        sparse = type(model).from_config(model.get_config())
    surgery.share_weights(model, sparse)
    for _, layer, _ in surgery.sublayers(sparse):
        if family := _family_of(layer):
            _make_sparse(layer, family)
    return sparse


def _family_of(layer):
    """Return the `_Family` of a block with experts, `None` for any other layer."""
    names = (cls.__name__ for cls in type(layer).__mro__)
    found = [_FAMILIES[name] for name in names if name in _FAMILIES]
    return found[0] if found and hasattr(layer, found[0].bank) else None


def _make_sparse(block, family):
    """Change the classes of a block and of its bank of experts."""
    bank = getattr(block, family.bank)
    bank.k = getattr(block, family.k)
    # Keras then compiles without XLA.
    bank.supports_jit = keras.backend.backend() != "tensorflow"
    bank.__class__ = _sparse(type(bank), _SparseBank, family)
    if not family.is_beside:
        block.__class__ = _sparse(type(block), _SparseBlock, family)
