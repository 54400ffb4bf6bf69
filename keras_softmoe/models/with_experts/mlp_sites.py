"""MLPs in any Keras model, which experts can replace."""

import fnmatch
from typing import NamedTuple

import keras

from keras_softmoe import routers as kinds
from keras_softmoe.checks import quote
from keras_softmoe.keras_adapter.surgery import attributes_of, sublayer, sublayers
from keras_softmoe.layers import MoE, SoftMoE
from keras_softmoe.routers.assignment import ExpertChoice, TokenChoice

_FEEDFORWARD = ("feedforward_intermediate_dense", "feedforward_output_dense")
_DENSE = ("dense_1", "activation", "dense_2")

# Blocks of KerasHub by the names of their classes and base classes: the parts that make
# up the MLP, applied one after the other.
_FAMILIES = {
    "ViTEncoderBlock": ("mlp",),
    # The second dense layer is in the layer that adds the residual.
    "DeiTEncoderBlock": ("mlp", "output_layer/dense"),
    "DINOV2Layer": ("mlp",),
    "DINOV3Layer": ("mlp",),
    "SigLIPEncoderLayer": ("mlp",),
    "CLIPEncoderLayer": _DENSE,
    "MetaCLIP2EncoderLayer": _DENSE,
    "SwinTransformerBlock": ("mlp",),
    # MiT, the encoder of SegFormer
    "HierarchicalTransformerEncoder": ("mlp",),
    "VideoPrismEncoderBlock": ("mlp",),
    # ViTDet, the image encoder of SAM
    "WindowedTransformerEncoder": ("mlp_block",),
    "TransformerEncoder": _FEEDFORWARD,
    "DisentangledAttentionEncoder": _FEEDFORWARD,
    # Of maps, in the detector D-FINE
    "DFineEncoderLayer": ("fc1", "activation_fn_layer", "fc2"),
    # GPT-2, OPT, BART and others
    "TransformerDecoder": _FEEDFORWARD,
}

# Decoders with gated MLPs in their own code: the gate, what it multiplies, the output.
_FFW = tuple(f"feedforward_{name}_dense" for name in ("gate", "intermediate", "output"))
_GATED = {
    "LlamaTransformerDecoder": _FFW,
    "QwenTransformerDecoder": _FFW,
    "Qwen3TransformerDecoder": _FFW,
    "MistralTransformerDecoder": _FFW,
    "GemmaDecoderBlock": ("gating_ffw", "gating_ffw_2", "ffw_linear"),
}
_FAMILIES |= _GATED

_DENSE_LAYERS = keras.layers.Dense | keras.layers.EinsumDense

GATED = (
    "Gated MLPs whose dense layers are parts of a block are supported in the decoders "
    "of Llama, Gemma, Qwen, Qwen3 and Mistral, and not supported yet in others."
)


class Site(NamedTuple):
    """An MLP in a model.

    `paths` are the names of its `parts`, applied one after the other, `parents` the
    layers that have them. `is_causal`: it is in a block whose tokens see no later ones.
    `gate` is the name of the activation of the first part, whose result is multiplied
    by that of the second, if a decoder does so; else `None`.
    """

    paths: tuple
    parts: tuple
    parents: tuple
    is_causal: bool
    gate: str | None = None


def find_sites(model, rule=None):
    """Return the list of the sites of a model, in the order of its layers."""
    if rule is not None:
        _check_rule(rule)
    layers = [("", model, None), *sublayers(model)]
    places = {id(layer): (path, parent) for path, layer, parent in layers}
    found, taken = [], set()
    for path, layer, parent in layers:
        # Parts of a site are no sites of their own.
        if id(layer) in taken or id(parent) in taken:
            taken.add(id(layer))
            continue
        for parts in _matches(path, layer, rule):
            if not any(id(part) in taken for part in parts):
                taken.update(map(id, parts))
                found.append(_site(parts, places))
        if isinstance(layer, MoE | SoftMoE):
            taken.add(id(layer))
    if not found:
        _refuse_without_sites(model, rule, layers)
    return found


def _site(parts, places):
    """Return the site of some parts; `places` has the path and parent of each layer."""
    paths, parents = zip(*(places[id(part)] for part in parts), strict=True)
    layer, is_causal = parts[0], False
    while layer is not None and not is_causal:
        is_causal, layer = _is_causal(layer), places[id(layer)][1]
    gate = None
    if len(parts) == 3 and parts == _gated_parts(parents[0]):
        # Gemma has it in its code.
        activation = getattr(parents[0], "activation", None)
        gate = keras.activations.serialize(activation) if activation else "gelu_tanh"
    return Site(paths, parts, parents, is_causal, gate)


def _gated_parts(block):
    """Return the dense layers of the gated MLP of a decoder, `None` without one."""
    for cls in type(block).__mro__:
        if cls.__name__ in _GATED and is_of_keras_hub(block):
            return tuple(sublayer(block, name) for name in _GATED[cls.__name__])
    return None


def places_of(model, sites):
    """Return the indices of the parts of sites among the layers, lists of int.

    Unlike names, they are the same in a copy of the model.
    """
    indices = {id(x): index for index, (_, x, _) in enumerate(sublayers(model))}
    return [[indices[id(part)] for part in site.parts] for site in sites]


def sites_at(model, places):
    """Return the sites with the indices that `places_of` returns."""
    layers = list(sublayers(model))
    above = {id(layer): (path, parent) for path, layer, parent in layers}
    above[id(model)] = ("", None)
    chosen = (tuple(layers[index][1] for index in indices) for indices in places)
    return [_site(parts, above) for parts in chosen]


def _matches(path, layer, rule):
    """Return the list of the sites that begin at a layer, each a tuple of its parts."""
    if callable(rule):
        return [(layer,)] if path and rule(layer) else []
    if rule is None:
        if not is_of_keras_hub(layer):
            return []
        names = {cls.__name__ for cls in type(layer).__mro__}
        chains = [chain for name, chain in _FAMILIES.items() if name in names][:1]
    else:
        chains = []
        for entry in rule:
            chain = (entry,) if isinstance(entry, str) else tuple(entry)
            folder = min((name.rpartition("/")[0] for name in chain), key=len)
            patterns = (folder, f"*/{folder}")
            if not folder or any(fnmatch.fnmatchcase(path, p) for p in patterns):
                chains.append([n[len(folder) :].lstrip("/") for n in chain])
    found = []
    for chain in chains:
        parts = []
        for name in chain:
            part = layer
            for step in name.split("/"):
                part = None if part is None else sublayer(part, step)
            parts.append(part)
        if None not in parts:
            gated = _gated_parts(layer) if len(parts) == 3 else None
            # In the order of their use, whatever that of a user
            is_gated = gated and {*map(id, gated)} == {*map(id, parts)}
            found.append(gated if is_gated else tuple(parts))
    return found


def is_of_keras_hub(layer):
    """Return whether a class is of KerasHub, or a `LayerOfModel` with such a base."""
    classes = (cls.__module__ for cls in type(layer).__mro__)
    others = (module for module in classes if not module.startswith("keras_softmoe."))
    return next(others).startswith("keras_hub.")


def _is_causal(layer):
    if getattr(layer, "use_causal_mask", False) is True:
        return True
    if isinstance(layer, keras.Model):
        return False
    return any("Decoder" in cls.__name__ for cls in type(layer).__mro__)


def _check_rule(rule):
    """Raise unless a rule has one of the forms of `sites` in `add_experts`."""
    if callable(rule):
        return
    chains = rule if isinstance(rule, list | tuple) else [()]
    chains = [[x] if isinstance(x, str) else x for x in chains]
    for chain in chains:
        is_chain = isinstance(chain, list | tuple) and len(chain) > 0
        if not is_chain or not all(isinstance(x, str) and x for x in chain):
            raise ValueError(
                "`sites` is a predicate, or a list of names of layers, where several "
                f"in a tuple are one MLP. Received: sites={quote(rule)}."
            )


def _refuse_without_sites(model, rule, layers):
    """Raise an error with the layers that might be meant."""
    paths = {id(layer): path for path, layer, _ in layers}
    candidates = {}
    for path, layer, parent in layers:
        if not isinstance(layer, _DENSE_LAYERS):
            continue
        kind = f"`{type(parent).__name__}` ({paths[id(parent)] or 'the model'})"
        name = path.rpartition("/")[2]
        candidates.setdefault(kind, []).append(name)
        # A block has other parts than dense layers, and no experts.
        parts = [x for _, x, above in layers if above is parent and x.weights]
        is_mlp = all(isinstance(x, _DENSE_LAYERS) for x in parts)
        is_ours = "moe" in type(parent).__name__.lower()
        if "gat" in name and not is_mlp and not is_ours:
            raise ValueError(
                f"{GATED} Received: a `{type(model).__name__}` with {name!r} in a "
                f"`{type(parent).__name__}`."
            )
    names = "; ".join(
        f"{kind} with {', '.join(dict.fromkeys(dense))}"
        for kind, dense in list(candidates.items())[:12]
    )
    note = ""
    if any(_is_causal(layer) for _, layer, _ in layers):
        note = " Its blocks are causal decoders: routers must not look at later tokens."
    asked = "" if rule is None else f" and sites={quote(rule)}"
    held = attributes_of(model).values()
    held = {id(x): x for x in held if isinstance(x, keras.Model)}
    inside = " and ".join(f"a `{type(x).__name__}`" for x in held.values())
    asked += f" with {inside} inside" if inside else ""
    raise ValueError(
        "No MLP was found that experts could replace. Name its layers in `sites`, "
        "several in a tuple if a block spreads its MLP over them. "
        f"Received: a `{type(model).__name__}`{asked}.{note} Layers with dense layers: "
        f"{names or 'none'}."
    )


def check_routers(router, blocks):
    """Return a dict from blocks to (templates of) their routers."""
    is_list = isinstance(router, list | tuple)
    routers = list(router) if is_list else [router] * len(blocks)
    for one in routers:
        if not isinstance(one, kinds.Router):
            raise ValueError(
                "`router` must be a router from `keras_softmoe.routers`, or a list of "
                f"them. Received: router={quote(one)}."
            )
        if one.knows_modalities:
            raise ValueError(
                "A router of two modalities belongs to a `LIMoEBackbone`. Received: "
                f"router={quote(one)}. Use `SoftmaxTokenChoiceRouter`, for example."
            )
    if len(routers) != len(blocks):
        raise ValueError(
            "Pass one router, or a list with one for each of the blocks. Received: "
            f"{len(routers)} routers for blocks={blocks}."
        )
    return dict(zip(blocks, routers, strict=True))


def check_blocks(blocks, sites):
    """Return `blocks` as an ascending tuple of indices of sites."""
    blocks = tuple(blocks) if isinstance(blocks, list | tuple | range) else (blocks,)
    wrong = [b for b in blocks if isinstance(b, bool) or not isinstance(b, int)]
    wrong += [b for b in blocks if b not in wrong and not 0 <= b < len(sites)]
    if wrong or not blocks or len(set(blocks)) < len(blocks):
        raise ValueError(
            f"`blocks` counts the MLPs of the model from 0 to {len(sites) - 1}, each "
            f"at most once. Received: blocks={quote(blocks)}. There are: "
            f"{', '.join(site.paths[0] for site in sites[:24])}"
            f"{', ...' * (len(sites) > 24)}."
        )
    return tuple(sorted(blocks))


def check_causal(router, site, by_image):
    """Raise if routing in a causal block depends on later tokens."""
    if by_image:
        raise ValueError(
            f"The block of {site.paths[0]!r} is causal, and routing by image uses the "
            "mean of all tokens, later ones included. Received: by_image=True."
        )
    if looks_ahead(router):
        raise ValueError(
            f"The block of {site.paths[0]!r} is causal: its result for a token must "
            "not depend on later ones, as that of a `SoftmaxTokenChoiceRouter` with "
            "`capacity_factor=None` does not. Received: a "
            f"`{type(router).__name__}`, which does with its settings."
        )


def looks_ahead(router):
    """Return whether the decision of a router for a token depends on later tokens."""
    if isinstance(router, kinds.IdentityRouter):
        return False
    assignment = getattr(router, "assignment", None)
    is_token_choice = isinstance(assignment, TokenChoice)
    if not is_token_choice or router.scores.compares_tokens:
        return True
    if assignment.keep_fraction < 1:
        return True
    # A slot for each token, as in dropless routing
    capacities = [router.capacity(4096, training) for training in (False, True)]
    # A limited expert takes all first choices before any second one.
    in_order = assignment.choices == 1 and router.priority == "position"
    return not (min(capacities) >= 4096 or in_order)


def keeps_outputs(router):
    """Return whether equal experts have the outputs of one MLP, for any tokens.

    They do if each token keeps all its choices, with gates that sum to one.
    """
    if isinstance(router, kinds.IdentityRouter):
        return True
    assignment = getattr(router, "assignment", None)
    if type(assignment) not in (TokenChoice, ExpertChoice) or router.knows_modalities:
        return False
    has_room = router.capacity(4096) >= 4096
    # Of all experts together. A sparse plan is found by steps of a solver.
    is_one = getattr(router.scores, "score", "softmax") == "softmax"
    is_plan = isinstance(router, kinds.SparseTransportExpertChoiceRouter)
    is_one &= router.scores.combine == "softmax" or not is_plan
    if isinstance(assignment, ExpertChoice):
        return has_room and is_one
    is_one &= assignment.choices == router.num_experts
    is_one |= assignment.normalize_gates
    return has_room and is_one and assignment.keep_fraction == 1
