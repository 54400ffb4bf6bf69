"""The sections of a routing report about images in a `ViTMoEBackbone`."""

import math

from keras_softmoe import drawing
from keras_softmoe.analysis import _plot_expert_patches as plot_expert_patches
from keras_softmoe.analysis import _plot_heat_maps as plot_heat_maps
from keras_softmoe.analysis import _plot_images as plot_images
from keras_softmoe.analysis import _plot_statistics as plot_statistics
from keras_softmoe.routers import IdentityRouter, SoftRouter


def sparse_ends(backbone):
    """The first and the last MoE block if their routers choose, not mix."""
    return [layer for layer in _ends(backbone) if _chooses(backbone.routers[layer])]


def add_pictures(page, backbone, images, preprocessor, patches):
    """Show some images, patch by patch, at the first and the last MoE block.

    Args:
        page: `Page`.
        backbone: `ViTMoEBackbone`.
        images: `(B, height, width, channels)` array, a few images.
        preprocessor: as in `analysis.routing_maps`.
        patches: sequence of `ExpertPatches`.
    """
    layers = _ends(backbone)
    page.section("Images")
    for layer in layers:
        page.figure(
            plot_images.plot_experts(
                backbone, images, layer, preprocessor=preprocessor
            ),
            f"The expert that each patch listens to most, block {layer}: the paler a "
            "patch, the more alike it listens to all. Hatched patches are dropped. The "
            "bars count patches, in full colour those whose main expert has at least "
            "twice an even share of their weight; on the dashed line all experts would "
            "have equally many.",
        )
    for layer in layers:
        # The slot of a sparse router holds one token at most: most pictures are empty.
        if backbone.routers[layer].mixes_tokens:
            page.figure(
                plot_images.plot_slots(
                    backbone, images, layer, preprocessor=preprocessor
                ),
                f"What some slots look at (orange: more than an even share of the "
                f"slot's weight) and what they ignore (blue: less), block {layer}. "
                "Maps without colour are slots that take in the mean of all patches. "
                "The slots that differ most are shown.",
            )
    for found in patches:
        page.figure(
            plot_expert_patches.draw_expert_patches(found),
            f"The patches that the busiest experts of block {found.layer} take with "
            "the largest weights (below each), one of an image at most, and what is "
            "around them (light blue outside the image).",
        )


def add_specialization(page, backbone, statistics, information, class_names):
    """Show what experts are for, and how routers that choose distribute weight.

    Args:
        page: `Page`.
        backbone: `ViTMoEBackbone`.
        statistics: what `analysis.routing_statistics` returns.
        information: what `analysis.expert_information` returns.
        class_names: as in `analysis.plot_experts_by_class`.
    """
    sparse = [layer for layer, x in backbone.routers.items() if _chooses(x)]
    if sparse:
        page.section("Choices")
        page.figure(
            plot_statistics.plot_choice_weights(statistics, sparse),
            "The largest weights that the router gives to the experts of a token. Near "
            "1/E all experts are alike to it, near 1 it is sure.",
        )
        page.figure(
            plot_statistics.plot_experts_per_image(statistics, sparse),
            "How many experts work on an image, over all its tokens.",
        )
    page.section(
        "Specialization",
        "How much of the choice of an expert (its entropy) is explained by the place "
        "of the token in the image, and by the class of the image beyond what labels "
        "in random order explain. An expert that is told by the place alone does not "
        "look at the token.",
    )
    with_labels = any(x.label is not None for x in information.values())
    header = ["block", "entropy of the expert", "explained by position"]
    page.table(
        header + ["explained by class"] * with_labels,
        [
            _information_row(layer, block, len(statistics[layer].load))
            for layer, block in information.items()
        ],
    )
    page.figure(
        plot_heat_maps.plot_experts_by_position(
            statistics, patch_grid=backbone.patch_grid
        ),
        "Where in the images each expert works: mean weight of its output, patch by "
        "patch. Experts that choose by position come first. The white line on the "
        "scale is the weight that each would have everywhere if all were alike.",
    )
    if any(block.weight_by_class is not None for block in statistics.values()):
        page.figure(
            plot_heat_maps.plot_experts_by_class(statistics, class_names),
            "How much each expert works on the images of each class. Stairs that lead "
            "down are experts with classes of their own.",
        )


def _ends(backbone):
    """The first and the last MoE block, once if they are the same."""
    return list(dict.fromkeys((backbone.moe_layers[0], backbone.moe_layers[-1])))


def _chooses(router):
    return not isinstance(router, SoftRouter | IdentityRouter)


def _information_row(layer, block, num_experts):
    shares = [block.position_share, block.label_share]
    return [
        drawing.block_title(layer),
        f"{block.entropy:.2f} bits (even {math.log2(num_experts):.3g})",
        *(f"{100 * share:.1f}%" for share in shares if share is not None),
    ]
