"""Sparse upcycling: a dense model becomes a mixture of experts."""

import re
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe import checks
from keras_softmoe.architecture import Mixture
from keras_softmoe.converters import upcycling_starts
from keras_softmoe.converters.dense_model import Source, dense_model
from keras_softmoe.models.backbone import MoEBackbone
from keras_softmoe.models.vit import ViTMoEBackbone
from keras_softmoe.models.vmoe_params import named_variables
from keras_softmoe.routers import Router

_STARTS = ("copies", "shared", "clusters", "positions")
_FROM_IMAGES = ("clusters", "positions")


def upcycle(
    dense: Source,
    moe_layers: tuple,
    router: Router | Sequence[Router],
    start: str = "copies",
    split: int = 1,
    images: ArrayLike | None = None,
    noise_std: float = 0.0,
    energy: float = 0.99,
    confidence: float = 0.9,
    seed: int = 0,
    **moe_settings,
) -> keras.Model:
    """Convert a dense model into a mixture of experts initialized from its weights.

    Each expert of a block begins as a copy of the block's MLP; all other weights are
    copied. The outputs stay the same with `start="shared"`, with `IdentityRouter`, with
    token choice of `capacity_factor=None, normalize_gates=True`, and with expert choice
    of `capacity_factor=num_experts`.

    Args:
        dense: a `ViTMoEBackbone` without experts, or an image classifier or segmenter
            on one, which is not changed. Or another source of `dense_model`.
        moe_layers: tuple of int, the blocks (counted from 0) that get experts.
        router: a router, a template; or a list with one for each of those blocks.
        start: `"copies"`; `"shared"`, the MLP as a shared expert and others with output
            zero; `"clusters"`, routers and low-rank experts from clusters of the MLP's
            inputs; `"positions"`, slots of a soft router from positions of tokens.
        split: int, the fine-grained experts into which an MLP is divided, for
            `"copies"` and `"shared"`. It divides the MLP's width and `num_experts`.
        images: `(B, height, width, channels)` array of some hundred images, for the
            last two starts: pixels from 0 to 255 for a classifier.
        noise_std: float, normal noise on the kernels of the experts, in units of the
            standard deviation of each kernel.
        energy: float in (0, 1], for `"clusters"`: the share of the squares of its
            outputs that a low-rank kernel keeps.
        confidence: float under 1, for the last two starts: the mean probability of a
            token's first choice, which sets the scale of the router's weights.
        seed: int, of noise and clusters.
        **moe_settings: other arguments of `layers.MoE`.

    Source: Komatsuzaki et al. 2023 (Sparse Upcycling), section 3; clusters: Chu et al.
    2026 (arXiv 2604.13508), abstract; `split`: He et al. 2024 (arXiv 2410.07524).

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(
        ...     4, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
        ... )
        >>> sparse = ksm.converters.upcycle(classifier, (1, 3), router)
    """
    accepted = [name for name in Mixture.names() if name != "shared_mlp_dim"]
    checks.check_names("`upcycle`", moe_settings, accepted)
    if not isinstance(getattr(dense, "backbone", dense), MoEBackbone):
        dense = dense_model(dense)
    backbone = getattr(dense, "backbone", dense)
    if backbone.moe_layers:
        raise ValueError(
            "Only a dense model can be upcycled. Received: a model with experts in the "
            f"blocks {tuple(backbone.moe_layers)}."
        )
    _check(backbone, router, start, images, noise_std, energy, confidence, seed)
    _check_split(split, backbone.mlp_dim, router, start)
    if start in _FROM_IMAGES:
        images = upcycling_starts.prepare_images(dense, backbone, images)
    config = {
        # Groups of a dense model are no choice: its class has others with a router.
        **{n: x for n, x in backbone.get_config().items() if n not in accepted},
        "moe_layers": tuple(moe_layers),
        "router": router,
        **moe_settings,
        "shared_mlp_dim": backbone.mlp_dim if start == "shared" else None,
        "expert_mlp_dim": backbone.mlp_dim // split if split > 1 else None,
    }
    sparse = mixture = type(backbone).from_config(config)
    if backbone is not dense:
        sparse = type(dense).from_config({**dense.get_config(), "backbone": mixture})
    _copy(dense, sparse, split, start)
    if split > 1 and start == "copies":
        for layer in mixture.moe_layers:
            # The parts of a copy have equal router weights.
            router = mixture.blocks[layer].moe.router
            first = np.arange(router.num_experts) // split * split
            router.kernel.assign(ops.convert_to_numpy(router.kernel)[:, first])
    if start in _FROM_IMAGES:
        layers = mixture.moe_layers
        tokens_of = upcycling_starts.tokens_for_mlps(backbone, layers, images)
        for layer, tokens in tokens_of.items():
            moe, mlp = mixture.blocks[layer].moe, backbone.blocks[layer].mlp
            rng = np.random.default_rng((seed, layer))
            if start == "clusters":
                found = moe, mlp, tokens, energy, confidence, rng
                upcycling_starts.start_from_clusters(*found)
            else:
                upcycling_starts.start_from_positions(moe, tokens, confidence)
    if noise_std:
        rng = np.random.default_rng(seed)
        for name, variable in named_variables(sparse, with_routers=False).items():
            if "/Moe/Mlp/" in name and name.endswith("kernel"):
                kernel = ops.convert_to_numpy(variable).astype("float32")
                std = noise_std * kernel.std(axis=(1, 2), keepdims=True)
                noise = rng.standard_normal(kernel.shape, "float32")
                variable.assign(kernel + std * noise)
    return sparse


def _check(backbone, router, start, images, noise_std, energy, confidence, seed):
    checks.check_choice("start", start, _STARTS)
    checks.check_numbers(least=0, noise_std=noise_std)
    checks.check_whole_numbers(0, seed=seed)
    if start not in _FROM_IMAGES:
        if images is not None:
            raise ValueError(
                f"Copies need no images. Received: start={start!r} with images."
            )
        return
    if not isinstance(backbone, ViTMoEBackbone):
        raise ValueError(
            "Only a model of images alone can start from them. Received: "
            f"start={start!r} for a `{type(backbone).__name__}`."
        )
    checks.check_numbers(over=0, most=1, energy=energy)
    for template in router if isinstance(router, list | tuple) else [router]:
        upcycling_starts.check_start(start, template, images, confidence)


def _check_split(split, mlp_dim, router, start):
    """Raise unless MLPs can be divided into this number of experts."""
    checks.check_whole_numbers(1, split=split)
    if split == 1:
        return
    if start in _FROM_IMAGES:
        raise ValueError(
            "Parts of an MLP have no tokens of their own to start from. Received: "
            f"split={split} with start={start!r}."
        )
    if mlp_dim % split:
        raise ValueError(
            "The parts of an MLP must have the same number of hidden units. Received: "
            f"split={split} of {mlp_dim} units."
        )
    for template in router if isinstance(router, list | tuple) else [router]:
        num_experts = getattr(template, "num_experts", split)
        if num_experts % split:
            raise ValueError(
                "Each part of an MLP must have the same number of experts. Received: "
                f"split={split} with num_experts={num_experts}."
            )
        has_kernel = getattr(template, "num_directions", 0) == num_experts
        if start == "copies" and (not has_kernel or template.mixes_tokens):
            raise ValueError(
                "The parts of an MLP belong together, so tokens have to choose them "
                f"together, by token or expert choice. Received: split={split} with a "
                f'`{type(template).__name__}`. Another way is `start="shared"`.'
            )


def _copy(dense, sparse, split, start):
    """Copy all weights to the new model, an MLP's to each of its experts."""
    sources = named_variables(dense)
    for name, variable in named_variables(sparse, with_routers=False).items():
        source = sources[re.sub("/Moe/(Mlp|Shared)/", "/Mlp/", name)]
        # A copy, because on JAX two models that share memory delete it for each other.
        value = np.array(ops.convert_to_numpy(source))
        if "/Moe/Mlp/" in name:
            value = _of_experts(value, variable.shape, split, "/Dense_0/" in name)
            if start == "shared" and "/Dense_1/" in name:
                value = np.zeros_like(value)
        variable.assign(np.broadcast_to(value, variable.shape))


def _of_experts(value, shape, split, is_first):
    """Return a weight of an MLP for its experts, `(E, ...)` or `(1, ...)`.

    `value` is a `(D, H)` kernel or a bias, `shape` that of the weight of all experts.
    """
    is_bias = value.ndim == 1
    # (D, H), or (1, H)
    value = value.reshape(-1, value.shape[-1])
    if is_first:
        parts = np.split(value, split, axis=1)
    elif is_bias:
        # Once in the mean of the parts
        parts = [value]
    else:
        # Their sum is the MLP, and gates make a mean of them.
        parts = np.split(value * split, split, axis=0)
    copies = shape[0] // len(parts) if len(parts) > 1 else 1
    return np.tile(np.stack(parts), (copies, 1, 1))
