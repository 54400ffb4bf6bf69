"""What a model costs, from its configuration: nothing is built or loaded."""

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import keras

from keras_softmoe import presets
from keras_softmoe.routers import IdentityRouter, Router, SoftRouter
from keras_softmoe.routers.sparse import SparseRouter
from keras_softmoe.routers.token_choice import TokenChoiceRouter

BACKBONE = "keras_softmoe>ViTMoEBackbone"

# What `ViTMoEBackbone` takes, and its defaults, which a preset may leave out. Asking
# the class would import KerasHub and TensorFlow; a test compares the two.
REQUIRED = (
    "image_shape",
    "patch_size",
    "num_layers",
    "num_heads",
    "hidden_dim",
    "mlp_dim",
)
DEFAULTS = {
    "moe_layers": (),
    "router": None,
    "pooling": "token",
    "position_embedding": "learned",
    "use_qk_norm": False,
    "representation_dim": None,
    "dropout_rate": 0.0,
    "group_images": 1,
    "dispatcher": "auto",
    "equal_experts": False,
    "expert_dropout_rate": 0.0,
    "dispatch_dtype": None,
    "dtype": None,
    "name": None,
    "trainable": True,
}

# Routers compute in float32 whatever the policy.
_ROUTER_BYTES = 4
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Cost(NamedTuple):
    """What a model costs.

    Attributes:
        parameters: int, the numbers in its weights.
        gflop_per_image: float, the operations in the matrix products that predict one
            image, in units of 1e9. A multiply-add counts as two.
        weight_bytes: int, the bytes of its weights under its dtype policy.
    """

    parameters: int
    gflop_per_image: float
    weight_bytes: int


def cost(model, num_classes=None, **changes):
    """Count the parameters, operations and bytes of a model without building it.

    Everything follows from the configuration, so the largest preset takes as little
    time and memory as the smallest.

    The operations are those of the matrix products of one prediction: the patch
    embedding; queries, keys and values, their two products and the output of
    attention; MLPs; experts, over all their slots whether filled or not; the logits of
    routers; the dispatch and combine products of soft routers; attention pooling,
    pre-logits and head. Left out are sums and elementwise functions: biases,
    normalizations, softmax, GELU, transport plans and the search for seats. A sparse
    router's `"gather"` dispatch moves rows and so costs nothing, its `"einsum"`
    dispatch is two products with one-hot matrices, which count. Groups of images are
    full ones; a group without a size (`group_images=None`) is counted as one image.

    Args:
        model: the name or directory of a preset (its backbone is counted), a
            `ViTMoEBackbone`, a `ViTMoEImageClassifier` (with its head), or a dict of
            arguments of `ViTMoEBackbone`. Of a live model only the configuration is
            looked at: LoRA matrices, for example, are not seen.
        num_classes: int or `None`, classes of the head that is counted with the
            backbone. A classifier's own, otherwise no head, if `None`.
        **changes: arguments of the backbone to change and settings of its routers, as
            in `from_preset`.

    Returns:
        `Cost`.

    Raises:
        ValueError: if the preset is unknown or damaged, or the model, its router, its
            dtype or an argument is of a kind that cannot be counted.

    Source: Soft MoE, section 2.3. Of its table 9 the parameters are met within 0.15 %
    or the table's rounding, the operations within 0.6 %; the parameters of V-MoE table
    8 within 0.1 %.

    Example:

    >>> ksm.evaluation.cost("soft_moe_huge_patch14_256e_224", num_classes=29593)
    Cost(parameters=54177079209, gflop_per_image=341..., weight_bytes=216708316836)
    >>> name = "vmoe_base_patch16_every2_32e_224"
    >>> ksm.evaluation.cost(name, capacity_factor=0.5).gflop_per_image
    35.1...
    """
    config, classes, head_dtype = _configuration(model)
    num_classes = classes if num_classes is None else num_classes
    settings = {
        name: changes.pop(name)
        for name in TokenChoiceRouter.live_settings
        if name in changes
    }
    a = _arguments({**config, **changes}, settings)
    total = _backbone(a)
    weight_bytes = _bytes(a.dtype) * total.weights + _ROUTER_BYTES * total.in_router
    if num_classes is not None:
        _check_num_classes(num_classes)
        head = _dense(a.representation_dim or a.hidden_dim, num_classes)
        total += head
        dtype = a.dtype if head_dtype is None else head_dtype
        weight_bytes += _bytes(dtype) * head.weights
    return Cost(total.weights + total.in_router, 2e-9 * total.products, weight_bytes)


# === Counting ===


@dataclass(frozen=True)
class _Tally:
    """Numbers in the weights, those of routers apart, and multiply-adds per image."""

    weights: int = 0
    in_router: int = 0
    products: float = 0

    def __add__(self, other):
        return _Tally(
            self.weights + other.weights,
            self.in_router + other.in_router,
            self.products + other.products,
        )

    def __mul__(self, times):
        return _Tally(
            self.weights * times, self.in_router * times, self.products * times
        )


def _backbone(a):
    has_class_token = a.pooling == "token"
    num_patches = a.rows * a.columns
    num_tokens = num_patches + has_class_token
    norm = _Tally(2 * a.hidden_dim)
    total = _dense(a.patch_numbers, a.hidden_dim, times=num_patches)
    if has_class_token:
        total += _Tally(a.hidden_dim)
    if a.position_embedding == "learned":
        total += _Tally(num_tokens * a.hidden_dim)
    total += (_attention(a, num_tokens, num_tokens) + norm * 2) * a.num_layers
    total += _mlp(a, times=num_tokens) * (a.num_layers - len(a.routers))
    for router in a.routers:
        total += _moe(a, router, num_tokens)
    total += norm
    if a.pooling == "map":
        probe = _Tally(a.hidden_dim)
        total += probe + _attention(a, 1, num_tokens) + norm + _mlp(a)
    if a.representation_dim is not None:
        total += _dense(a.hidden_dim, a.representation_dim)
    return total


def _dense(inputs, outputs, times=1):
    return _Tally((inputs + 1) * outputs, products=times * inputs * outputs)


def _attention(a, num_queries, num_tokens):
    width = a.hidden_dim
    query_and_output = _dense(width, width, num_queries) * 2
    key_and_value = _dense(width, width, num_tokens) * 2
    inner = _Tally(products=2 * num_queries * num_tokens * width)
    norms = _Tally(2 * (width // a.num_heads) if a.use_qk_norm else 0)
    return query_and_output + key_and_value + inner + norms


def _mlp(a, times=1):
    inner = _dense(a.hidden_dim, a.mlp_dim, times)
    return inner + _dense(a.mlp_dim, a.hidden_dim, times)


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
    return _Tally(experts, router_weights, products / group_images)


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
        return slots, width * num_experts, num_experts, False
    if isinstance(router, IdentityRouter):
        return group_tokens, 0, 0, False
    raise ValueError(
        "The slots of this router are not known. `cost` counts the routers of "
        "`keras_softmoe.routers` and what is derived from `SoftRouter`, "
        "`IdentityRouter` or one of the token or expert choice routers. Received: "
        f"router={router!r}."
    )


# === Configuration ===


def _configuration(model):
    """Arguments of the backbone, classes of the head, dtype of the head."""
    if isinstance(model, Mapping):
        return dict(model), None, None
    if isinstance(model, str | Path):
        return _preset_config(model), None, None
    backbone = getattr(model, "backbone", model)
    names = [keras.saving.get_registered_name(cls) for cls in type(backbone).__mro__]
    num_classes = getattr(model, "num_classes", None)
    if BACKBONE not in names or (backbone is not model and num_classes is None):
        raise ValueError(
            "`cost` counts the name or directory of a preset, a `ViTMoEBackbone`, a "
            "`ViTMoEImageClassifier` or a dict of the backbone's arguments. Received: "
            f"model={model!r}."
        )
    return backbone.get_config(), num_classes, getattr(model, "head_dtype", None)


def _preset_config(preset):
    path = Path(presets.resolve(preset, load_weights=False), presets.CONFIG_FILE)
    if not path.is_file():
        raise ValueError(
            "A preset is counted by name or from a directory on this machine. "
            f"Received: model={str(preset)!r}. Load it, then count the model."
        )
    with presets.explained(path.parent):
        saved = json.loads(path.read_text(encoding="utf-8"))
        name, config = saved["registered_name"], saved["config"]
    if name != BACKBONE:
        raise ValueError(
            f"`cost` counts backbones of the class {BACKBONE!r}. Received: the preset "
            f"{str(preset)!r} of a {name!r}."
        )
    return config


def _arguments(config, settings):
    """The backbone's arguments, complete and checked as far as counting needs."""
    missing = [name for name in REQUIRED if name not in config]
    unknown = sorted(config.keys() - {*REQUIRED, *DEFAULTS})
    if missing or unknown:
        raise ValueError(
            "The arguments of `ViTMoEBackbone` are "
            f"{', '.join(REQUIRED)}, and optionally {', '.join(DEFAULTS)}. Received: "
            + ("no " + ", ".join(missing) if missing else "also " + ", ".join(unknown))
            + "."
        )
    a = SimpleNamespace(**{**DEFAULTS, **config})
    height, width, channels = a.image_shape
    size = a.patch_size
    patch_height, patch_width = (size, size) if isinstance(size, int) else size
    if height % patch_height or width % patch_width:
        raise ValueError(
            "The patch size has to divide height and width of the image. Received: "
            f"image_shape={tuple(a.image_shape)}, patch_size={size}."
        )
    a.rows, a.columns = height // patch_height, width // patch_width
    a.patch_numbers = patch_height * patch_width * channels
    a.routers = _routers(a, settings)
    return a


def _routers(a, settings):
    """One router for each MoE block, with their settings changed."""
    is_list = isinstance(a.router, list | tuple)
    given = a.router if is_list else [a.router] if a.router is not None else []
    routers = [_revived(router) for router in given]
    if not is_list:
        routers *= len(a.moe_layers)
    if len(routers) != len(a.moe_layers) or bool(given) != bool(a.moe_layers):
        raise ValueError(
            "`moe_layers` and `router` go together: give both for mixtures of experts "
            "(one router, or a list of one for each block), neither for a dense model. "
            f"Received: moe_layers={a.moe_layers}, router={a.router!r}."
        )
    if settings and not routers:
        raise ValueError(
            "A dense model has no routers to set. Received: "
            f"{', '.join(settings)}. Leave these settings out."
        )
    return [r.with_settings(**settings) for r in routers] if settings else routers


def _revived(router):
    """A router from its serialized form. It has no weights before it is built."""
    try:
        if not isinstance(router, Router):
            router = keras.saving.deserialize_keras_object(router)
        if isinstance(router, Router):
            return router
        reason = None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        reason = error
    raise ValueError(
        "The router of this configuration cannot be made. It has to be a router of "
        "`keras_softmoe.routers`, or serialized from one; import the module of one of "
        f"your own first. Received: router={router!r}."
    ) from reason


def _bytes(dtype):
    """Bytes of a number in a weight under a dtype or policy, `None` for the global."""
    policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    if is_map or policy.quantization_mode or policy.variable_dtype not in _BYTES:
        raise ValueError(
            "`cost` counts models in one float dtype, before they are quantized. "
            f"Received: dtype={dtype!r}. Sum the sizes of `model.weights` instead."
        )
    return _BYTES[policy.variable_dtype]


def _check_num_classes(num_classes):
    if not isinstance(num_classes, numbers.Integral) or num_classes < 1:
        raise ValueError(
            "`num_classes` must be a positive integer, or `None` for no head. "
            f"Received: num_classes={num_classes!r}."
        )
