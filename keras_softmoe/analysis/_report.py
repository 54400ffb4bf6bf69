"""Everything that can be shown of the routing of a model, on one page."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe import drawing
from keras_softmoe.analysis._information import InformationReducer
from keras_softmoe.analysis._inputs import backbone_of, prepared, tokens_choose
from keras_softmoe.analysis._load import LoadReducer
from keras_softmoe.analysis._page import Page
from keras_softmoe.analysis._plot_expert_patches import PatchReducer
from keras_softmoe.analysis._plot_statistics import plot_expert_load
from keras_softmoe.analysis._report_images import (
    add_pictures,
    add_specialization,
    sparse_ends,
)
from keras_softmoe.analysis._report_sections import add_modalities, add_soft
from keras_softmoe.analysis._soft_statistics import SoftReducer
from keras_softmoe.analysis._statistics import RoutingReducer
from keras_softmoe.analysis._streaming import all_routers, observe
from keras_softmoe.evaluation import cost
from keras_softmoe.files import check_file
from keras_softmoe.routers import SoftRouter
from keras_softmoe.types import Texts

# In the configuration of a router, but no settings of how it routes.
_NO_SETTINGS = ("name", "trainable", "num_experts")
# What models of Keras' own classes are called.
_KINDS = {"Functional": "this model", "Sequential": "this model"}


def routing_report(
    model: keras.Model,
    images: ArrayLike,
    path: str | os.PathLike,
    captions: Texts | None = None,
    labels: ArrayLike | None = None,
    class_names: Sequence | None = None,
    num_pictures: int = 4,
    title: str | None = None,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> Path:
    """Write a page that shows how a model routes: one HTML file that needs no network.

    It has what applies to the model. Any router: its settings, the load of the experts,
    dropped tokens. Images in a backbone or classifier of this library: the experts of
    patches, what slots look at (soft routers) or the patches that experts take (sparse
    ones), the choices of sparse routers, how much position and class tell about the
    expert, experts by position and by class. Soft routers, in a user's model too: what
    tokens give and slots take, how alike slots are. A LIMoE: load, confidence,
    priorities and paths of images and text, and for each expert the tokens that its
    router is most certain of. Of a dense model the page says that it routes nothing.
    Beside numbers stands what an even use of experts or tokens would give.

    Args:
        model: `ViTMoEBackbone`, `LIMoEBackbone`, a task that has one of them, or any
            built `keras.Model` with `layers.MoE` or `layers.SoftMoE`.
        images: `(N, height, width, channels)` array, as the model or its preprocessor
            takes it. For a user's model any data that `analysis.observe` takes.
        path: str or path of the file. Its directory is made. What is there is replaced
            when the page is complete.
        captions: for a LIMoE `N` str or `(N, sequence_length)` ints, routed together
            with the images.
        labels: optional `(N,)` int array, classes of the images. A `ViTMoEBackbone` or
            its task is shown class by class then.
        class_names: optional sequence of str, names of the classes, as in
            `analysis.plot_experts_by_class`.
        num_pictures: int, how many of the images are shown patch by patch. With 0 no
            patches are shown.
        title: str, heading of the page. If `None`, "How ... routes", with the name of
            the model if it was given one, else with its class.
        batch_size: int, images routed at a time.
        preprocessor: as in `analysis.routing_statistics`. By default a task's own.
        verbose: 0 for silence, 1 for a progress bar for each pass over the images, 2
            for one line.

    Returns:
        `pathlib.Path` of the file, of 5 MB at most.

    Raises:
        ValueError: if the model is not built, or the images, captions or labels are not
            ones that it takes.

    Source: the figures of V-MoE, appendices D and E; Soft MoE, section 3.6 and
    appendices H and I; LIMoE, appendices E, F and G.

    Examples:
        >>> ksm.analysis.routing_report(
        ...     sparse,
        ...     images,
        ...     "report.html",
        ...     labels=labels,
        ...     class_names=ksm.datasets.sample("glyphs").class_names,
        ... )
    """
    drawing.import_matplotlib()
    # Where that cannot be, the error comes before the work.
    check_file(path)
    backbone, preprocessor = backbone_of(model, preprocessor)
    routers = all_routers(backbone)
    name = _given_name(model) or _KINDS.get(type(model).__name__, type(model).__name__)
    page = Page(f"How {name} routes" if title is None else title)
    run = {"batch_size": batch_size, "preprocessor": preprocessor, "verbose": verbose}
    _add_model(page, model, backbone)
    if not routers:
        page.section("Routing", "The model is dense: it has no routers and no experts.")
        return page.write(path)
    _add_routers(page, routers)
    if _is_limoe(backbone):
        if all(map(tokens_choose, routers.values())):
            add_modalities(page, backbone, images, captions, num_pictures, run)
            return page.write(path)
        images = _pairs(backbone, images, captions, preprocessor)
        run["preprocessor"] = None
    reducers = {"load": LoadReducer()}
    if hasattr(backbone, "patch_grid") and not _is_limoe(backbone):
        reducers["routing"] = RoutingReducer(backbone, labels)
        reducers["information"] = InformationReducer(backbone, labels)
        if num_pictures:
            reducers |= {n: PatchReducer(backbone, n) for n in sparse_ends(backbone)}
    if any(isinstance(router, SoftRouter) for router in routers.values()):
        reducers["soft"] = SoftReducer(backbone)
    results = observe(backbone, images, list(reducers.values()), **run)
    found = dict(zip(reducers, results, strict=True))
    _add_load(page, found["load"])
    if "routing" in found:
        if num_pictures:
            patches = [found[layer] for layer in sparse_ends(backbone)]
            add_pictures(page, backbone, images[:num_pictures], preprocessor, patches)
        add_specialization(
            page, backbone, found["routing"], found["information"], class_names
        )
    if "soft" in found:
        add_soft(page, found["soft"], routers, backbone)
    return page.write(path)


# === Models ===


def _given_name(model):
    """The name of a model, "" if Keras made it up: `vi_t_mo_e_backbone_1`."""
    made_up = re.sub(r"_|\d", "", model.name) == type(model).__name__.lower()
    return "" if made_up else model.name


def _is_limoe(backbone):
    return hasattr(backbone, "sequence_length") and hasattr(backbone, "patch_grid")


def _pairs(backbone, images, captions, preprocessor):
    """Images and captions as the backbone takes them."""
    if captions is None:
        raise ValueError(
            "The tokens of this model do not choose experts, so images are routed "
            "together with text only. Pass as many captions as images. Received: "
            "captions=None."
        )
    convert = getattr(preprocessor, "convert", None)
    if np.asarray(captions).dtype.kind not in "iu":
        captions = preprocessor.tokenize(captions)
    return {"images": prepared(backbone, images, convert), "token_ids": captions}


# === Sections ===


def _add_model(page, model, backbone):
    rows = [
        ["model", " ".join([type(model).__name__, _given_name(model)]).rstrip()],
        ["parameters", f"{model.count_params():,}"],
    ]
    try:
        gflop = cost(model).gflop_per_image
        rows.append(["GFLOP for an image (or a pair)", f"{gflop:.3g}"])
    except ValueError:
        # A model of another kind, or one that was quantized.
        pass
    if hasattr(backbone, "patch_grid"):
        grid = " × ".join(map(str, backbone.patch_grid))
        rows.append(["patches of an image", grid])
    rows.append(["Keras", f"{keras.version()}, {keras.backend.backend()}"])
    page.section("Model")
    page.table(["", ""], rows)


def _add_routers(page, routers):
    page.section("Routers")
    # Equal routers in one row.
    rows = {}
    for layer, router in routers.items():
        settings = _settings(router.get_config())
        row = type(router).__name__, router.num_experts, settings
        rows.setdefault(row, []).append(drawing.block_title(layer))
    page.table(
        ["block", "router", "experts", "settings"],
        [[", ".join(blocks), *row] for row, blocks in rows.items()],
    )


def _settings(config):
    return ", ".join(
        f"{name}={_setting(value)}"
        for name, value in config.items()
        if name not in _NO_SETTINGS and value not in (None, False)
    )


def _setting(value):
    """A value in a configuration; of something serialized its class and settings."""
    if isinstance(value, dict) and "class_name" in value:
        return f"{value['class_name']}({_settings(value['config'])})"
    if isinstance(value, list | tuple):
        return " + ".join(str(_setting(x)) for x in value)
    return f"{value:.4g}" if isinstance(value, float) else value


def _add_load(page, loads):
    page.section(
        "Load",
        "How much each expert has to do. A token is dropped if no expert takes it; it "
        "then passes the block unchanged.",
    )
    page.table(
        ["block", "tokens", "dropped", "busiest expert, in even shares (even 1×)"],
        [
            [
                drawing.block_title(layer),
                f"{block.num_tokens:,}",
                f"{100 * block.dropped:.3g}%",
                f"{block.imbalance:.2f}×",
            ]
            for layer, block in loads.items()
        ],
    )
    page.figure(
        plot_expert_load(loads),
        "Tokens that each expert takes, in even shares (dashed line). Of routers that "
        "mix tokens, the sum of its combine weights.",
    )
