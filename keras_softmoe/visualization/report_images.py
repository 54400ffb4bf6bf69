"""The part of a routing report that shows images and their patches."""

from keras_softmoe.evaluation.load import ExpertLoad
from keras_softmoe.routers import IdentityRouter, SoftRouter
from keras_softmoe.visualization.routing import plot_experts, plot_slots
from keras_softmoe.visualization.specialization import (
    plot_experts_by_class,
    plot_experts_by_position,
)
from keras_softmoe.visualization.statistics import (
    plot_choice_weights,
    plot_experts_per_image,
)


def loads_of(backbone, statistics):
    """`ExpertLoad` of each block, from its `RoutingStatistics`."""
    loads = {}
    for layer, block in statistics.items():
        num_images = len(block.experts_per_image)
        num_groups = -(-num_images // (backbone.group_images or num_images))
        num_tokens = num_images * len(block.weight_by_position)
        load = block.load * num_images
        loads[layer] = ExpertLoad(num_groups, num_tokens, load, block.dropped)
    return loads


def add_pictures(page, backbone, images, preprocessor):
    """Show some images, patch by patch, at the first and the last MoE block."""
    layers = dict.fromkeys((backbone.moe_layers[0], backbone.moe_layers[-1]))
    page.section("Images")
    for layer in layers:
        page.figure(
            plot_experts(backbone, images, layer, preprocessor=preprocessor),
            f"The expert that each patch listens to most, block {layer}. Hatched "
            "patches are dropped. The bars count patches.",
        )
    for layer in layers:
        page.figure(
            plot_slots(backbone, images, layer, preprocessor=preprocessor),
            f"What some slots take in, block {layer}: patches that the slot gives more "
            "than an even share of its weight. The slots that differ most are shown.",
        )


def add_specialization(page, backbone, statistics, class_names):
    """Show what experts are for, and how routers that choose distribute weight."""
    routers = backbone.routers
    sparse = [
        layer
        for layer, router in routers.items()
        if not isinstance(router, SoftRouter | IdentityRouter)
    ]
    if sparse:
        page.section("Choices")
        page.figure(
            plot_choice_weights(statistics, sparse),
            "The largest weights that the router gives to the experts of a token. Near "
            "1/E all experts are alike to it, near 1 it is sure.",
        )
        page.figure(
            plot_experts_per_image(statistics, sparse),
            "How many experts work on an image, over all its tokens.",
        )
    page.section("Specialization")
    page.figure(
        plot_experts_by_position(statistics, patch_grid=backbone.patch_grid),
        "Where in the images each expert works: mean weight of its output, patch by "
        "patch. Experts that choose by position come first.",
    )
    if any(block.weight_by_class is not None for block in statistics.values()):
        page.figure(
            plot_experts_by_class(statistics, class_names),
            "How much each expert works on the images of each class. Stairs that lead "
            "down are experts with classes of their own.",
        )
