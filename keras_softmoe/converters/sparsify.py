"""KerasHub's language models with experts, computing only the chosen ones."""

import functools
import sys
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
from keras_softmoe.ops.kernels import affine, softmax
from keras_softmoe.ops.routing import choice_routing, combine, dispatch

# === Gated MLPs of the experts ===


def _gated(activation, units):
    # As in KerasHub, activations are computed in float32.
    gate, up = ops.split(units, 2, axis=-1)
    return up * ops.cast(activation(ops.cast(gate, "float32")), units.dtype)


def _gated_by_silu(units):
    return _gated(ops.silu, units)


def _gated_by_silu_in_own_dtype(units):
    gate, up = ops.split(units, 2, axis=-1)
    return up * ops.silu(gate)


def _gated_by_gelu(units):
    return _gated(functools.partial(ops.gelu, approximate=True), units)


def _gated_in_turns(units):
    """GPT-OSS: a unit of the gate, then what it multiplies, both limited."""
    gate, up = ops.clip(units[..., ::2], -1e9, 7.0), units[..., 1::2]
    return (ops.clip(up, -7.0, 7.0) + 1) * (gate * ops.sigmoid(gate * 1.702))


def _first(x, *weights, multiply, biased):
    """Return the units of the gates and those that they multiply, side by side."""
    products = [weights] if biased else [(kernel,) for kernel in weights]
    units = [multiply(x, *product) for product in products]
    return units[0] if len(units) == 1 else ops.concatenate(units, axis=-1)


def _last(units, *weights, multiply, activate):
    return multiply(activate(units), *weights)


@functools.cache
def _stages(activate, biased):
    """Return the same functions for all layers, see `map_experts`."""
    return (
        functools.partial(_first, multiply=affine, biased=biased),
        functools.partial(_last, multiply=affine, activate=activate),
    )


# === Families of KerasHub ===


class _Family(NamedTuple):
    """Names in the block of a family.

    `first` and `last` are the kernels of the experts, and their biases. `router` and
    `bank` are layers of the block, `shared` are the shared expert and its gate. `k` is
    the attribute with the number of chosen experts.
    """

    first: tuple
    last: tuple
    activate: object
    router: str = "_sparse_feedforward_gate_dense"
    bank: str = "expert_bank"
    coefficient: str = "router_aux_loss_coefficient"
    shared: tuple = ()
    k: str = "top_k"


_GATE, _OUTPUT = "_expert_feedforward_gate_dense", "_expert_feedforward_output_dense"
_UP = "_expert_feedforward_intermediate_dense"

# By the names of the classes of their blocks
_FAMILIES = {
    "Qwen3SparseMoeBlock": _Family((_GATE,), (_OUTPUT,), _gated_by_silu_in_own_dtype),
    "QwenSparseMoeBlock": _Family(
        (_GATE,),
        (_OUTPUT,),
        _gated_by_silu_in_own_dtype,
        shared=("shared_expert_dense", "shared_expert_gate_dense"),
    ),
    "MixtralSparseMoeBlock": _Family(
        (_GATE, _UP), (_OUTPUT,), _gated_by_silu, coefficient="router_aux_loss_coef"
    ),
    "Qwen3_5MoeSparseMoeBlock": _Family(
        (_GATE,),
        (_OUTPUT,),
        _gated_by_silu,
        router="_router_gate",
        shared=("shared_expert", "_shared_expert_gate"),
    ),
    "GptOssSparseMoeBlock": _Family(
        ("gate_up_proj", "gate_up_proj_bias"),
        ("down_proj", "down_proj_bias"),
        _gated_in_turns,
        router="router",
        bank="experts",
    ),
    # The router of Gemma 4 is beside its experts.
    "Gemma4TextDecoderBlock": _Family(
        ("gate_proj", "up_proj"),
        ("down_proj",),
        _gated_by_gelu,
        router="moe_router",
        bank="moe_expert_bank",
        k="num_experts_per_token",
    ),
}


class _SparseBank:
    """Mixin of the experts of a block, which also takes rows sorted by expert.

    With these, its input is a tuple of `(N, D)` rows and the `(E,)` rows of each
    expert. `family` and `k` are attributes.
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
        biased = any("bias" in name for name in self.family.first)
        weights = tuple(
            tuple(
                ops.cast(ops.convert_to_tensor(getattr(self, name)), rows.dtype)
                for name in names
            )
            for names in (self.family.first, self.family.last)
        )
        if biased:
            # (E, H) -> (E, 1, H)
            weights = tuple((kernel, bias[:, None]) for kernel, bias in weights)
        multiply = functools.partial(grouped_affine, count=count)
        size = len(weights[0])

        def all_at_once(rows, *weights):
            units = _first(rows, *weights[:size], multiply=multiply, biased=biased)
            activate = self.family.activate
            return _last(units, *weights[size:], multiply=multiply, activate=activate)

        stages = _stages(self.family.activate, biased)
        return map_experts(all_at_once, stages, rows, weights, count)


class _SparseBlock:
    """Mixin of a block of Qwen or Mixtral which computes the chosen experts only."""

    def call(self, hidden_states, attention_mask=None, training=None):
        # XLA on TensorFlow must know the number of rows of each expert.
        if is_traced_for_xla() or (
            training and getattr(self, "router_jitter_noise", 0)
        ):
            return super().call(hidden_states, attention_mask, training)
        family = self.family
        x = ops.reshape(hidden_states, (-1, hidden_states.shape[-1]))
        logits = getattr(self, family.router)(x)
        scores = softmax(logits)
        best, chosen = ops.top_k(scores, self.top_k)
        if getattr(self, "norm_top_k_prob", True):
            scores = scores / ops.sum(best, axis=-1, keepdims=True)
        bank = getattr(self, family.bank)
        outputs = _mixture(lambda *rows: bank(rows), x, scores, chosen)
        if family.shared:
            expert, gate = (getattr(self, name) for name in family.shared)
            outputs = outputs + expert(x) * ops.sigmoid(gate(x))
        if training:
            loss = self.balancing_loss(
                logits, self.num_experts, self.top_k, attention_mask
            )
            self.add_loss(getattr(self, family.coefficient) * loss)
        return ops.reshape(outputs, ops.shape(hidden_states)), logits


class _SparseGptOssBlock:
    """Mixin of a block of GPT-OSS, as above."""

    def call(self, hidden_states):
        if is_traced_for_xla():
            return super().call(hidden_states)
        x = ops.reshape(hidden_states, (-1, hidden_states.shape[-1]))
        scores = self.router(x)
        chosen = ops.top_k(scores, self.top_k)[1]
        outputs = _mixture(lambda *rows: self.experts(rows), x, scores, chosen)
        return ops.reshape(outputs, ops.shape(hidden_states)), scores


def _mixture(experts, x, scores, chosen):
    """Return the sums of the outputs of chosen experts, weighted by their scores.

    Args:
        experts: callable from rows sorted by expert and their numbers to outputs.
        x: `(T, D)` tensor.
        scores: `(T, E)` tensor.
        chosen: `(T, K)` int tensor.
    """
    routing = choice_routing(scores[None], chosen[None])
    outputs = experts(dispatch(x[None], routing), routing.count)
    return combine(outputs, routing, ops.shape(x)[0])[0]


@functools.cache
def _sparse(source, mixin, family):
    """Return the subclass of a class of KerasHub, of the same name, with a mixin."""
    # Losses differ in how they read masks.
    module = sys.modules[source.__module__]
    loss = getattr(module, "compute_load_balancing_loss", None)
    members = {"family": family, "balancing_loss": loss and staticmethod(loss)}
    members |= {"__module__": source.__module__, "__doc__": source.__doc__}
    return type(source.__name__, (mixin, source), members)


def sparsify(model: keras.Model) -> keras.Model:
    """Let a language model of KerasHub compute only the experts that tokens choose.

    KerasHub computes every expert for every token, and then drops most of the results.
    The outputs, gradients and balancing losses of the model that is returned are the
    same up to rounding, for `top_k / num_experts` of the experts' products.

    It has the class, the names and the very weights of the model that is passed in:
    nothing is copied, training one trains both, and `save_weights`, `save_to_preset`
    and `save` write files of KerasHub. So a file is loaded by KerasHub, and `sparsify`
    called again. LoRA is for attention, and `quantize` leaves the experts in floats, as
    in KerasHub. Where XLA compiles on TensorFlow (`jit_compile=True`), every expert is
    computed, as XLA must know the number of rows of each.

    Families: Mixtral, Qwen-MoE, Qwen3-MoE, Qwen3.5-MoE, GPT-OSS and Gemma 4.

    Args:
        model: `keras_hub.models.Backbone` of one of these families, or a task on one,
            such as a `CausalLM`. A task must be compiled again if it was by hand.

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
            f"Qwen3.5-MoE, GPT-OSS and Gemma 4. Received: a `{type(model).__name__}` without any of "
            "these. `ksm.converters.add_experts` puts experts into a dense model."
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
    router = getattr(block, family.router)
    bank.k = getattr(block if hasattr(block, family.k) else router, family.k)
    bank.__class__ = _sparse(type(bank), _SparseBank, family)
    if family.bank == "experts":
        block.__class__ = _sparse(type(block), _SparseGptOssBlock, family)
    elif family.bank == "expert_bank":
        block.__class__ = _sparse(type(block), _SparseBlock, family)
    # Keras then compiles without XLA by default.
    bank.supports_jit = keras.backend.backend() != "tensorflow"
