"""Sparse upcycling: a dense model becomes a mixture of experts."""

import re
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.architecture import Mixture
from keras_softmoe.checks import (
    check_choice,
    check_names,
    check_numbers,
    check_whole_numbers,
)
from keras_softmoe.converters.dense_model import Source, dense_model
from keras_softmoe.converters.upcycling_starts import (
    check_start,
    prepare_images,
    start_from_clusters,
    start_from_positions,
    tokens_for_mlps,
)
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

    Each expert of a block in `moe_layers` begins as a copy of that block's MLP, and all
    other weights are copied. `start` sets the initial routers, and whether the experts
    differ:

    - `"copies"`: the experts are equal, the routers new, with random weights.
    - `"shared"`: the MLP is kept as a shared expert, which computes every token
      (`shared_mlp_dim` of `layers.MoE`). The others are copies whose output kernel and
      bias are zero, and the routers new.
    - `"clusters"`: the inputs of the dense MLP for some images are clustered, with as
      many clusters as experts (for a soft router: slots). The centroids become the
      router's weights, so that each expert gets the tokens of its cluster. Both kernels
      of an expert are replaced by those of lowest rank that keep a share `energy` of
      the squares of their outputs for the tokens of the cluster.
    - `"positions"`, for soft routers only: each slot takes the token of one position
      and returns its output there, as far as the tokens reveal their positions. With
      fewer slots than tokens, neighbours share one.

    With `split=m` experts are fine-grained: the hidden units of the MLP are divided
    among `m` experts, of `mlp_dim / m` units each, and there are `num_experts / m`
    copies of these. The `m` parts of a copy have equal router weights, so that tokens
    choose them together, and output kernels times `m`: their mean is the MLP.

    From `"shared"` the new model has the outputs of the dense one at first, with any
    router. Otherwise the router decides it, if all experts of a block are equal
    (`"copies"` without noise, or `energy=1`):

    - `IdentityRouter`: yes, exactly. Every token visits one expert, with weight 1.
    - Token choice: yes, if the gates of a token sum to one and no choice is dropped.
      They do with `normalize_gates=True`, or if every token chooses all experts. To
      drop nothing takes `capacity_factor=None` (or `num_experts /
      num_selected_experts`, room for every token at every expert). With other gates a
      token gets its MLP's output times the sum of its gates, with less room possibly
      nothing. From clusters the gate of one choice is near `confidence` without that;
      from random weights it is small. With `split=m`, `num_selected_experts` must be a
      multiple of `m`.
    - Expert choice: only with `capacity_factor=num_experts`, where every expert takes
      all tokens. Otherwise tokens are taken by different numbers of experts, and a
      token that none takes gets zeros.
    - Soft routing: never exactly. An expert sees averages of tokens, and the MLP of an
      average is not the average of MLPs: its GELU is not linear. With random weights
      every slot is about the mean of the image. From clusters (with `energy=1`) a slot
      is the mean of similar tokens, from positions nearly a single token. Which is
      closer depends on the model: try both.

    Otherwise, some training restores the quality.

    Args:
        dense: a `ViTMoEBackbone` without experts, or an image classifier on one, which
            is not changed. Or another source of `dense_model`: a preset name of this
            library or of KerasHub, a model of KerasHub, a file, a directory or a
            handle.
        moe_layers: tuple of int, the blocks (counted from 0) that get experts.
        router: a router from `keras_softmoe.routers`, a template; or a list of them,
            one for each of those blocks.
        start: `"copies"`, `"shared"`, `"clusters"` or `"positions"`.
        split: int, the experts into which an MLP is divided. It must divide the MLP's
            width and the number of experts. For `"copies"` and `"shared"`.
        images: `(B, height, width, channels)` array of some hundred images, for the
            last two: pixels from 0 to 255 for a classifier, which prepares them, and
            as the backbone takes them for a backbone. The tokens of all of them are
            kept in memory, `4 * B * S * D` bytes for each block.
        noise_std: float, standard deviation of normal noise on the kernels of the
            experts, in units of that of each kernel itself. 0 adds none.
        energy: float in (0, 1], for `"clusters"`. With 1 the experts stay copies.
        confidence: float under 1, for the last two: the mean, over the tokens, of the
            probability of their first choice (of a soft router the largest combine
            weight), to which the router's weights are scaled. A higher confidence makes
            the router's gradient smaller.
        seed: int, of noise and clusters. (Random weights follow
            `keras.utils.set_random_seed`.)
        **moe_settings: other arguments of `layers.MoE`: `group_images`, `dispatcher`,
            `expert_dropout_rate`, ... Those that are not given have its defaults.

    Returns:
        A model of the same class.

    Raises:
        ValueError: if `dense` has experts already, `moe_layers` and `router` do not fit
            it, images are missing, too few or not needed, the router does not support
            the start, or another argument is not among the accepted values.

    Source: Komatsuzaki et al. 2023 (Sparse Upcycling), section 3; for clusters Chu et
    al. 2026 (Cluster-aware Upcycling, arXiv 2604.13508), whose steps were taken from
    its abstract and from summaries of it. Differences from those: the decomposition is
    computed without whitening the tokens by a Cholesky factor and back, from the
    singular vectors of the kernel's outputs, which gives the same kernel (see
    `truncated_kernel`) also where the tokens of a cluster span less than the width; the
    centroids are scaled to a `confidence` instead of to length one; and
    its loss, the distillation from a running average of the model with all experts in
    use, is a matter of training and left out. Equal router weights for the parts of a
    copy: He et al. 2024 (arXiv 2410.07524), "virtual groups". Positions and the shared
    start are ours.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(
        ...     4, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
        ... )
        >>> sparse = ksm.converters.upcycle(
        ...     classifier, moe_layers=(1, 3), router=router
        ... )
        >>> images, *_ = ksm.datasets.sample("glyphs", 8)
        >>> clustered = ksm.converters.upcycle(
        ...     classifier, (1, 3), router, start="clusters", images=images
        ... )
    """
    accepted = {n: x for n, x in Mixture.names().items() if n != "shared_mlp_dim"}
    check_names("`upcycle`", moe_settings, accepted)
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
        images = prepare_images(dense, backbone, images)
    config = {
        **backbone.get_config(),
        "moe_layers": tuple(moe_layers),
        "router": router,
        **{**accepted, **moe_settings},
        "shared_mlp_dim": backbone.mlp_dim if start == "shared" else None,
        "expert_mlp_dim": backbone.mlp_dim // split if split > 1 else None,
    }
    sparse = mixture = type(backbone).from_config(config)
    if backbone is not dense:
        sparse = type(dense).from_config({**dense.get_config(), "backbone": mixture})
    _copy(dense, sparse, split, with_output=start != "shared")
    if split > 1 and start == "copies":
        for layer in mixture.moe_layers:
            _tie_parts(mixture.blocks[layer].moe.router, split)
    if start in _FROM_IMAGES:
        tokens_of = tokens_for_mlps(backbone, mixture.moe_layers, images)
        for layer, tokens in tokens_of.items():
            moe, mlp = mixture.blocks[layer].moe, backbone.blocks[layer].mlp
            if start == "clusters":
                rng = np.random.default_rng((seed, layer))
                start_from_clusters(moe, mlp, tokens, energy, confidence, rng)
            else:
                start_from_positions(moe, tokens, confidence)
    if noise_std:
        _add_noise(sparse, noise_std, seed)
    return sparse


def _check(backbone, router, start, images, noise_std, energy, confidence, seed):
    check_choice("start", start, _STARTS)
    check_numbers(least=0, noise_std=noise_std)
    check_whole_numbers(0, seed=seed)
    if start not in _FROM_IMAGES:
        if images is not None:
            raise ValueError(
                f"Copies need no images. Received: start={start!r} with images. Leave "
                'them out, or take `start="clusters"` or `start="positions"`.'
            )
        return
    if not isinstance(backbone, ViTMoEBackbone):
        raise ValueError(
            "Only a model that takes images alone can start from them. Received: "
            f'start={start!r} for a `{type(backbone).__name__}`. Take `start="copies"`.'
        )
    check_numbers(over=0, energy=energy)
    if energy > 1:
        raise ValueError(
            "`energy` is the share that is kept, 1 for all of it. Received: "
            f"energy={energy!r}."
        )
    for template in router if isinstance(router, list | tuple) else [router]:
        check_start(start, template, images, confidence)


def _check_split(split, mlp_dim, router, start):
    """Raise unless MLPs can be divided into so many experts, before any work."""
    check_whole_numbers(1, split=split)
    if split == 1:
        return
    if start in _FROM_IMAGES:
        raise ValueError(
            "Parts of an MLP have no tokens of their own to start from. Received: "
            f'split={split} with start={start!r}. Take `start="copies"` or "shared".'
        )
    if mlp_dim % split:
        raise ValueError(
            "The parts of an MLP have equally many hidden units. Received: "
            f"split={split} of {mlp_dim} units. Take a divisor of {mlp_dim}."
        )
    for template in router if isinstance(router, list | tuple) else [router]:
        num_experts = getattr(template, "num_experts", split)
        if num_experts % split:
            raise ValueError(
                "There are equally many experts of each part of an MLP. Received: "
                f"split={split} with num_experts={num_experts}. Take a multiple of "
                f"{split} experts."
            )
        has_kernel = getattr(template, "num_directions", 0) == num_experts
        if start == "copies" and (not has_kernel or template.mixes_tokens):
            raise ValueError(
                "The parts of an MLP belong together, so tokens have to choose them "
                f"together. Received: split={split} with a "
                f"`{type(template).__name__}`, which compares no tokens with experts. "
                'Take token or expert choice, or `start="shared"`.'
            )


def _copy(dense, sparse, split, with_output):
    """Give the new model the weights of the old one, each expert those of its MLP.

    Args:
        dense: the old model.
        sparse: the new model.
        split: int, see `upcycle`.
        with_output: bool, `False` for output layers of experts that are zero.
    """
    sources = named_variables(dense)
    for name, variable in named_variables(sparse, with_routers=False).items():
        source = sources[re.sub("/Moe/(Mlp|Shared)/", "/Mlp/", name)]
        # A copy, because on JAX two models that share memory delete it for each other.
        value = np.array(ops.convert_to_numpy(source))
        if "/Moe/Mlp/" in name:
            value = _of_experts(value, variable.shape, split, "/Dense_0/" in name)
            if not with_output and "/Dense_1/" in name:
                value = np.zeros_like(value)
        variable.assign(np.broadcast_to(value, variable.shape))


def _of_experts(value, shape, split, is_first):
    """Return a weight of an MLP for its experts, `(E, ...)` or `(1, ...)`.

    Args:
        value: `(D, H)` kernel or `(H,)` bias of the first layer, or of the second one.
        shape: tuple of int, of the weight of all experts.
        split: int, see `upcycle`.
        is_first: bool.
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


def _tie_parts(router, split):
    """Give the parts of a copy the router weights of the first of them."""
    kernel = ops.convert_to_numpy(router.kernel)
    first = np.arange(router.num_experts) // split * split
    router.kernel.assign(kernel[:, first])


def _add_noise(sparse, noise_std, seed):
    """Add normal noise to the kernels of all experts, relative to their spread."""
    rng = np.random.default_rng(seed)
    for name, variable in named_variables(sparse, with_routers=False).items():
        if "/Moe/Mlp/" in name and name.endswith("kernel"):
            kernel = ops.convert_to_numpy(variable).astype("float32")
            std = noise_std * kernel.std(axis=(1, 2), keepdims=True)
            noise = rng.standard_normal(kernel.shape, "float32")
            variable.assign(kernel + std * noise)
