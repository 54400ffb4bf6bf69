"""Figures of dropped tokens: patches that no expert takes, and how many there are."""

from collections.abc import Callable, Sequence

import keras
from numpy.typing import ArrayLike

from keras_softmoe import drawing
from keras_softmoe.analysis import _pictures as pictures
from keras_softmoe.analysis._inputs import backbone_of, check_has_routers
from keras_softmoe.analysis._maps import routing_maps
from keras_softmoe.evaluation.sweeps import keep_settings
from keras_softmoe.types import Figure


def plot_discarded_patches(
    model: keras.Model,
    images: ArrayLike,
    capacity_factors: Sequence = (1.0, 0.5, 0.25, 0.1),
    layer: int | None = None,
    priority: str | None = None,
    preprocessor: Callable | None = None,
) -> Figure:
    """Show which patches no expert of a block takes, as the capacity falls.

    One row for each image: the picture, then one copy of it for each capacity, on which
    the discarded patches are hatched grey; below it, their share. The capacity is
    changed in all blocks and put back at the end, also after an error.

    Patches compete with those of the same group: give images of several kinds together
    and, under `group_images > 1`, in the order in which they are to be grouped.

    Args:
        model: `ViTMoEBackbone`, or a task that has one, whose routers have a capacity.
        images: `(B, height, width, channels)` array, a few images, routed as one batch.
        capacity_factors: sequence of floats, the columns from left to right. The
            routers round the slots of an expert as their configuration says.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        priority: whose choices get slots first, see `ops.token_choice`. The model's
            own priority if `None`.
        preprocessor: as in `analysis.routing_maps`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: as `analysis.routing_maps` and `set_routing`, if the routers have
            no capacity, or there are no capacities to show.

    Source: V-MoE, section 4.1 and appendix D (figure 4).

    Examples:
        >>> figure = ksm.analysis.plot_discarded_patches(
        ...     sparse, images[:2], capacity_factors=(1.0, 0.25), priority="max"
        ... )
        >>> figure.savefig("discarded.png")
    """
    drawing.import_matplotlib()
    capacity_factors = tuple(capacity_factors)
    backbone, _ = backbone_of(model)
    _check_has_capacity(backbone)
    if not capacity_factors:
        raise ValueError(
            "`capacity_factors` must have at least one number, for example "
            f"(1.0, 0.5). Received: capacity_factors={capacity_factors}."
        )
    columns = []
    with keep_settings(backbone):
        if priority is not None:
            backbone.set_routing(priority=priority)
        for factor in capacity_factors:
            # Not `capacity_factor`, which a model may have replaced by this one.
            backbone.set_routing(eval_capacity_factor=factor)
            maps = routing_maps(model, images, layer, preprocessor)
            columns.append(maps.dispatch.sum(axis=(-2, -1)) == 0)
        priority = getattr(backbone.routers[maps.layer], "priority", None)
    names = [f"C = {factor:g}" for factor in capacity_factors]
    extra_height = 0.12 * len(maps.images) + 0.7
    figure, axes = pictures.image_rows(maps.images, names, extra_height=extra_height)
    for column, discarded in zip(axes.T, columns, strict=True):
        for ax, image, patches in zip(column, maps.images, discarded, strict=True):
            pictures.draw_picture(ax, image)
            pictures.hatch_patches(ax, image, patches)
            share = f"{patches.mean():.0%} discarded"
            ax.set_xlabel(share, fontsize=7, labelpad=2)
    title = f"Patches that no expert takes\nblock {maps.layer}"
    if priority is not None:
        title += f", priority {drawing.PRIORITY_NAMES.get(priority, priority)}"
    figure.suptitle(title, fontsize=10)
    return figure


def _check_has_capacity(backbone):
    check_has_routers(backbone)
    for layer, router in backbone.routers.items():
        if "eval_capacity_factor" not in router.mutable_settings:
            raise ValueError(
                "Only routers with a capacity discard patches: those in which tokens "
                f"or experts choose. Received: block {layer} with "
                f"{type(router).__name__}."
            )
