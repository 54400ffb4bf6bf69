"""Places in any Keras model where experts may stand: its MLPs."""

import fnmatch
from typing import NamedTuple

import keras

from keras_softmoe.checks import quote
from keras_softmoe.keras_adapter.surgery import sublayer, sublayers
from keras_softmoe.layers import MoE, SoftMoE
from keras_softmoe.models.backbone import MoEBackbone
from keras_softmoe.routers import (
    IdentityRouter,
    Router,
    SparseTransportExpertChoiceRouter,
)
from keras_softmoe.routers.policies import ExpertChoice, TokenChoice

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
    # GPT-2, OPT, BART and others
    "TransformerDecoder": _FEEDFORWARD,
}

_DENSE_LAYERS = keras.layers.Dense | keras.layers.EinsumDense

GATED = (
    "Gated MLPs whose dense layers are parts of a block, as in the decoders of Llama "
    "and Gemma, are not supported yet, however they are named. Take a family that "
    "`add_experts` lists, a model whose gated MLPs are layers of their own, or build "
    "one with `layers.MoE(router, mlp_dim=..., gated=True)`."
)


class Site(NamedTuple):
    """An MLP in a model.

    Attributes:
        paths: tuple of str, the names of its parts below the model.
        parts: tuple of layers, applied one after the other.
        parents: tuple of layers, each with the part of that index.
        is_causal: bool, whether it is in a block whose tokens see no later ones.
    """

    paths: tuple
    parts: tuple
    parents: tuple
    is_causal: bool


def find_sites(model, rule=None):
    """Return the list of the sites of a model, in the order of its layers.

    Args:
        model: built `keras.Model`.
        rule: as `sites` in `add_experts`.

    Raises:
        ValueError: if there are none, with the layers that might be meant.
    """
    _check_rule(rule)
    layers = [("", model, None), *sublayers(model)]
    places = {id(layer): (path, parent) for path, layer, parent in layers}
    found, taken = [], set()
    for path, layer, _ in layers:
        # A part of a site is no site of its own.
        if id(layer) in taken:
            taken |= {id(part) for _, part, _ in sublayers(layer)}
            continue
        if isinstance(layer, MoE | SoftMoE):
            taken |= {id(part) for _, part, _ in sublayers(layer)}
        for parts in _matches(path, layer, rule):
            if any(id(part) in taken for part in parts):
                continue
            taken |= {id(part) for part in parts}
            found.append(_site(parts, places))
    if not found:
        _refuse_without_sites(model, rule, layers)
    return found


def _site(parts, places):
    """Return the site of some parts; `places` has the path and parent of each layer."""
    paths, parents = zip(*(places[id(part)] for part in parts), strict=True)
    is_causal = any(_is_causal(layer) for layer in _above(parts[0], places))
    return Site(paths, parts, parents, is_causal)


def places_of(model, sites):
    """Return the places of the parts of sites among the layers, lists of int.

    In a model that is made from the configuration of another one they are the same,
    which names are not.
    """
    indices = {id(x): index for index, (_, x, _) in enumerate(sublayers(model))}
    return [[indices[id(part)] for part in site.parts] for site in sites]


def sites_at(model, places):
    """Return the sites with the places that `places_of` returns."""
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
        names = {cls.__name__ for cls in type(layer).__mro__}
        chains = [chain for name, chain in _FAMILIES.items() if name in names]
        if not is_of_keras_hub(layer):
            return []
        return [parts for parts in (_parts(layer, c) for c in chains[:1]) if parts]
    found = []
    for entry in rule:
        chain = (entry,) if isinstance(entry, str) else tuple(entry)
        folders = {name.rpartition("/")[0] for name in chain}
        folder = min(folders, key=len)
        if folder and not _is_path(path, folder):
            continue
        names = [name[len(folder) :].lstrip("/") for name in chain]
        parts = _parts(layer, names)
        if parts:
            found.append(parts)
    return found


def is_of_keras_hub(layer):
    """Return whether a class is of KerasHub, or a `LayerOfModel` with such a base."""
    classes = (cls.__module__ for cls in type(layer).__mro__)
    others = (module for module in classes if not module.startswith("keras_softmoe."))
    return next(others).startswith("keras_hub.")


def _is_path(path, pattern):
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(
        path, f"*/{pattern}"
    )


def _parts(layer, names):
    """Return the parts of a layer with these names (or paths), `None` if one misses."""
    parts = []
    for name in names:
        part = layer
        for step in name.split("/"):
            part = None if part is None else sublayer(part, step)
        parts.append(part)
    return None if None in parts else tuple(parts)


def _above(layer, places):
    """Yield a layer, and those that contain it."""
    while layer is not None:
        yield layer
        layer = places[id(layer)][1]


def _is_causal(layer):
    if getattr(layer, "use_causal_mask", False) is True:
        return True
    if isinstance(layer, keras.Model):
        return False
    return any("Decoder" in cls.__name__ for cls in type(layer).__mro__)


def _check_rule(rule):
    """Raise unless a rule has one of the forms of `sites` in `add_experts`."""
    if rule is None or callable(rule):
        return
    chains = rule if isinstance(rule, list | tuple) else [()]
    chains = [[x] if isinstance(x, str) else x for x in chains]
    for chain in chains:
        is_chain = isinstance(chain, list | tuple) and len(chain) > 0
        if not is_chain or not all(isinstance(x, str) and x for x in chain):
            raise ValueError(
                "`sites` is a predicate, or a list of names of layers, where several "
                f"in a tuple are one MLP. Received: sites={quote(rule)}. Pass, for "
                'example, `["mlp"]` or `[("dense_1", "dense_2")]`.'
            )


def _refuse_without_sites(model, rule, layers):
    candidates = {}
    for path, layer, parent in layers:
        if isinstance(layer, _DENSE_LAYERS):
            kind = f"`{type(parent).__name__}` ({_path_of(layers, parent)})"
            name = path.rpartition("/")[2]
            candidates.setdefault(kind, []).append(name)
            if "gat" in name and _is_block(parent, layers):
                raise ValueError(
                    f"{GATED} Received: a `{type(model).__name__}` with {name!r} in a "
                    f"`{type(parent).__name__}`."
                )
    names = "; ".join(
        f"{kind} with {', '.join(dict.fromkeys(dense))}"
        for kind, dense in list(candidates.items())[:12]
    )
    causal = any(_is_causal(layer) for _, layer, _ in layers)
    note = (
        " Its blocks are causal decoders: a router that looks at later tokens would "
        "not fit them." * causal
    )
    asked = "" if rule is None else f" and sites={quote(rule)}"
    raise ValueError(
        f"No MLP was found that experts could replace. Received: a "
        f"`{type(model).__name__}`{asked}.{note} Name the layers to replace: `sites` "
        "takes names (several in a tuple, if a block spreads its MLP over them) or a "
        f"predicate. Layers with dense layers: {names or 'none'}."
    )


def _is_block(layer, layers):
    """Return whether a layer has other parts than dense layers, and no experts."""
    parts = [x for _, x, parent in layers if parent is layer and x.weights]
    has_experts = "moe" in type(layer).__name__.lower()
    return not has_experts and not all(isinstance(x, _DENSE_LAYERS) for x in parts)


def _path_of(layers, parent):
    """Return the path of a layer, "the model" for the model itself."""
    return next((path for path, x, _ in layers if x is parent), "") or "the model"


# === Checks ===


def check_model(model):
    """Raise unless a model of somebody else can be copied and searched."""
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a `keras.Model`, for example a backbone of KerasHub. "
            f"Received: model={quote(model)}. A layer can be put into one: "
            "`keras.Model(inputs, layer(inputs))`."
        )
    backbone = getattr(model, "backbone", model)
    if isinstance(backbone, MoEBackbone) or hasattr(model, "text_backbone"):
        raise ValueError(
            f"A `{type(model).__name__}` is a model of this library. Received: "
            f"model={quote(model)}. Take `ksm.converters.upcycle`."
        )
    if not model.built:
        raise ValueError(
            "A model that is not built has no layers to replace. Received: a "
            f"`{type(model).__name__}` with built=False. Call it once on data."
        )


def check_routers(router, blocks):
    """Return a dict from blocks to (templates of) their routers."""
    is_list = isinstance(router, list | tuple)
    routers = list(router) if is_list else [router] * len(blocks)
    for one in routers:
        if not isinstance(one, Router):
            raise ValueError(
                "`router` must be a router from `keras_softmoe.routers`, or a list of "
                f"them. Received: router={quote(one)}."
            )
        if one.knows_modalities:
            raise ValueError(
                "A router of two modalities belongs to a `LIMoEBackbone`: here all "
                f"tokens are of one kind. Received: router={quote(one)}. Take "
                "`SoftmaxTokenChoiceRouter`, for example."
            )
    if len(routers) != len(blocks):
        raise ValueError(
            "A list of routers has one for each block with experts. Received: "
            f"{len(routers)} routers for blocks={blocks}. Give as many, or one for all."
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


def check_free(sites):
    """Raise if one of the sites has experts already."""
    for site in sites:
        inside = [x for part in site.parts for _, x, _ in sublayers(part)]
        mixtures = [x for x in (*site.parts, *inside) if isinstance(x, MoE | SoftMoE)]
        if mixtures:
            raise ValueError(
                "Experts stand in the place of an MLP, not of other experts. Received: "
                f"the site {site.paths[0]!r} with {mixtures[0].path!r}. Choose other "
                "blocks."
            )


def check_causal(router, site, by_image):
    """Raise if routing depends on later tokens in a block whose tokens must not.

    Args:
        router: `Router`.
        site: `Site`.
        by_image: bool or `None`, as in `add_experts`.
    """
    if site.is_causal and by_image:
        raise ValueError(
            f"The block of {site.paths[0]!r} is causal, and routing by image takes the "
            "mean of all tokens, later ones included. Received: by_image=True for it. "
            "Route by token (`by_image=False`), or choose other blocks."
        )
    if site.is_causal and looks_ahead(router):
        raise ValueError(
            f"The block of {site.paths[0]!r} is causal: what it computes for a token "
            "must not depend on later ones, or the model could not generate. Received: "
            f"a `{type(router).__name__}`, which does with its settings. Take "
            "`SoftmaxTokenChoiceRouter` with `capacity_factor=None` (room for all "
            "tokens)."
        )


def looks_ahead(router):
    """Return whether the decision of a router for a token depends on later tokens.

    Args:
        router: `Router`. Of classes that are unknown here it is assumed.
    """
    if isinstance(router, IdentityRouter):
        return False
    assignment = getattr(router, "assignment", None)
    is_token_choice = isinstance(assignment, TokenChoice)
    if not is_token_choice or router.scores.compares_tokens:
        return True
    if assignment.keep_fraction < 1:
        return True
    has_room = router.num_rows(1) is not None or all(
        router.capacity(4096, training) >= 4096 for training in (False, True)
    )
    # A limited expert takes all first choices before any second one.
    in_order = assignment.choices == 1 and router.priority == "position"
    return not (has_room or in_order)


def keeps_outputs(router):
    """Return whether equal experts have the outputs of one MLP, for any tokens.

    So it is where each token keeps all its choices, with gates that sum to one.

    Args:
        router: `Router`. Of classes that are unknown here it is denied.
    """
    if isinstance(router, IdentityRouter):
        return True
    assignment = getattr(router, "assignment", None)
    if type(assignment) not in (TokenChoice, ExpertChoice) or router.knows_modalities:
        return False
    has_room = router.num_rows(1) is not None or router.capacity(4096) >= 4096
    # Of all experts together. A sparse plan is found by steps of a solver.
    is_one = getattr(router.scores, "score", "softmax") == "softmax"
    is_one &= router.scores.combine == "softmax" or not isinstance(
        router, SparseTransportExpertChoiceRouter
    )
    if isinstance(assignment, ExpertChoice):
        return has_room and is_one
    is_one &= assignment.choices == router.num_experts
    is_one |= assignment.normalize_gates
    return has_room and is_one and assignment.keep_fraction == 1
