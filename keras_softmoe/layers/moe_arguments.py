"""Checks of the arguments of `MoE`."""

from keras_softmoe.checks import (
    at_most,
    check_bools,
    check_choice,
    check_numbers,
    check_whole_numbers,
    is_whole_number,
    quote,
)
from keras_softmoe.layers.template import check_template
from keras_softmoe.routers import Router

DISPATCHERS = ("auto", "gather", "einsum")


def check_router(router):
    """Raise unless a router is one."""
    if not isinstance(router, Router):
        raise ValueError(
            "`router` must be a router from `keras_softmoe.routers`, for example "
            f"`SoftRouter(num_experts=8)`. Received: router={quote(router)}."
        )


def check_group_count(group_images):
    """Raise unless a number of images in a group is accepted."""
    is_count = is_whole_number(group_images, 1, "group_images")
    if not (is_count or group_images is None):
        raise ValueError(
            "A group consists of at least one image. `group_images` must be a "
            f"positive integer{at_most('group_images')}, or `None` for the whole "
            f"batch: pass one of these. Received: "
            f"group_images={quote(group_images)}."
        )


def check_settings(
    group_images: int | None,
    dispatcher: str,
    equal_experts: bool,
    expert_dropout_rate: float,
    remat_experts: bool,
    dispatch_dtype: str | None,
    shared_mlp_dim: int | None = None,
) -> None:
    """Raise unless settings of all mixtures of experts of a model are accepted."""
    check_group_count(group_images)
    check_choice("dispatcher", dispatcher, DISPATCHERS)
    check_bools(equal_experts=equal_experts, remat_experts=remat_experts)
    check_numbers(least=0, under=1, expert_dropout_rate=expert_dropout_rate)
    check_choice("dispatch_dtype", dispatch_dtype, (None, "bfloat16"))
    if shared_mlp_dim is not None and not is_whole_number(shared_mlp_dim, 1, "mlp_dim"):
        raise ValueError(
            f"`shared_mlp_dim` must be a positive integer{at_most('mlp_dim')}, the "
            "hidden width of an expert for every token, or `None` for no such expert. "
            f"Received: shared_mlp_dim={quote(shared_mlp_dim)}."
        )


def check_experts(mlp_dim, expert, activation, gated, shared_mlp_dim, **of_mlps):
    """Raise unless the arguments describe MLPs, or experts of a template.

    Args:
        mlp_dim: int or `None`.
        expert: layer or `None`.
        activation: str.
        gated: bool.
        shared_mlp_dim: int or `None`.
        **of_mlps: settings of experts that are MLPs.
    """
    check_bools(gated=gated)
    if mlp_dim is None and expert is None:
        raise ValueError(
            "`mlp_dim` must be the hidden width of experts that are MLPs, or `expert` "
            "a layer that they copy. Received: mlp_dim=None. Pass one of the two."
        )
    if mlp_dim is not None and expert is not None:
        raise ValueError(
            "Experts are MLPs of a hidden width, `mlp_dim`, or copies of a layer, "
            f"`expert`. Received: mlp_dim={quote(mlp_dim)}, expert={quote(expert)}. "
            "Pass one of the two."
        )
    if expert is None:
        check_whole_numbers(1, mlp_dim=mlp_dim)
        return
    check_template(expert)
    if shared_mlp_dim is None:
        is_default = activation == "gelu_tanh"
        of_mlps |= {"gated": gated, "activation": None if is_default else activation}
    given = [f"{name}={value!r}" for name, value in of_mlps.items() if value]
    if given:
        raise ValueError(
            "These are settings of experts that are MLPs. Received: "
            f"{', '.join(given)} with an expert. Make them settings of that layer."
        )
