"""The page of a `Routing`: the model in words, tables and all figures."""

import math
import re
from typing import NamedTuple

import keras

from keras_softmoe import drawing
from keras_softmoe.analysis.figures import FIGURES
from keras_softmoe.analysis.page import Page
from keras_softmoe.analysis.streaming import backbone_of, routers_of
from keras_softmoe.evaluation import cost
from keras_softmoe.files import check_file

_SHARE = 0.9
# In the configuration of a router, but no settings of how it routes.
_NO_SETTINGS = ("name", "trainable", "num_experts")
# Names for models of Keras' own classes.
_KINDS = {"Functional": "this model", "Sequential": "this model"}


def write_report(routing, path, title, class_names):
    """Write the page of `Routing.save`, with the same arguments."""
    drawing.import_matplotlib()
    # Where that cannot be, the error comes before the work.
    check_file(path)
    page = Page(f"How {routing.model.name} routes" if title is None else title)
    page.section("Model")
    page.table(["", ""], routing.model.facts)
    page.section("Routers")
    page.table(["block", "router", "experts", "settings"], routing.model.routers)
    options = {"by_class": {"class_names": class_names}}
    for part, (heading, text, tables) in _PARTS.items():
        blocks = getattr(routing, part)
        if not blocks:
            continue
        page.section(heading, text)
        for table in tables:
            header, rows = table(blocks)
            if rows:
                page.table(header, rows)
        for name in routing.figures:
            if FIGURES[name].part == part:
                _add_figure(page, routing, name, options.get(name, {}))
    return page.write(path)


def _add_figure(page, routing, name, options):
    """Show a figure; one of a single block for the first and the last block."""
    row = FIGURES[name]
    if not row.is_of_one_block:
        page.figure(routing.plot(name, **options), row.caption)
        if name == "concentration":
            page.figure(routing.plot(name, weights="combine"), row.caption)
        return
    found = [b for b, maps in getattr(routing, row.part).items() if row.applies(maps)]
    for block in dict.fromkeys((found[0], found[-1])):
        pictures = range(len(routing.maps[block].images)) if name == "pair" else (None,)
        for index in pictures:
            shown = {} if index is None else {"index": index}
            figure = routing.plot(name, [block], **options, **shown)
            page.figure(figure, f"{drawing.block_title(block)}: {row.caption}")


# === The model ===


class ModelCard(NamedTuple):
    """A model and the settings of its routers, in words.

    Attributes:
        name: str, the name of the model if it was given one, else its class.
        facts: list of pairs of str: its parameters, its cost, ...
        routers: list of tuples of str and int: blocks, class of the router, number of
            experts, settings.
    """

    name: str
    facts: list
    routers: list


def card_of(model):
    """Return the `ModelCard` of a model."""
    backbone, _ = backbone_of(model)
    kind, name = type(model).__name__, _given_name(model)
    facts = [
        ("model", f"{kind} {name}".rstrip()),
        ("parameters", f"{model.count_params():,}"),
    ]
    try:
        gflop = cost(model).gflop_per_image
        facts.append(("GFLOP for an image (or a pair)", f"{gflop:.3g}"))
    except ValueError:
        # A model of another kind, or one that was quantized.
        pass
    if hasattr(backbone, "patch_grid"):
        grid = " × ".join(map(str, backbone.patch_grid))
        facts.append(("patches of an image", grid))
    facts.append(("Keras", f"{keras.version()}, {keras.backend.backend()}"))
    # Equal routers in one row.
    rows = {}
    for block, router in routers_of(backbone).items():
        settings = _settings(router.get_config())
        row = type(router).__name__, router.num_experts, settings
        rows.setdefault(row, []).append(drawing.block_title(block))
    routers = [(", ".join(blocks), *row) for row, blocks in rows.items()]
    return ModelCard(name or _KINDS.get(kind, kind), facts, routers)


def _given_name(model):
    """Return the name of a model, "" if Keras made it up: `vi_t_mo_e_backbone_1`."""
    made_up = re.sub(r"_|\d", "", model.name) == type(model).__name__.lower()
    return "" if made_up else model.name


def _settings(config):
    return ", ".join(
        f"{name}={_setting(value)}"
        for name, value in config.items()
        if name not in _NO_SETTINGS and value not in (None, False)
    )


def _setting(value):
    """Write a value in a configuration; of an object its class and settings."""
    if isinstance(value, dict) and "class_name" in value:
        return f"{value['class_name']}({_settings(value['config'])})"
    if isinstance(value, list | tuple):
        return " + ".join(str(_setting(x)) for x in value)
    return f"{value:.4g}" if isinstance(value, float) else value


# === Tables ===


def _load(blocks):
    header = [
        "block",
        "tokens",
        "dropped",
        "busiest expert, in even shares (even 1×)",
        "most wanted expert (even 1×)",
        "experts used",
    ]
    return header, [
        [drawing.block_title(name), *_load_cells(block)]
        for name, block in blocks.items()
    ]


def _load_cells(block):
    wanted = block.demand_imbalance
    return [
        f"{block.num_tokens:,}",
        f"{100 * block.dropped:.3g}%",
        f"{block.imbalance:.2f}×",
        "" if wanted is None else f"{wanted:.2f}×",
        f"{block.experts_used} of {len(block.load)}",
    ]


def text_of(routing):
    """Return the tables of load and of soft weights as text, a line for each block."""
    header = ["block", "tokens", "dropped", "load", "demand", "experts used"]
    rows = [[name, *_load_cells(b)] for name, b in routing.blocks.items()]
    parts = [f"Routing of {routing.model.name}", _aligned(header, rows)]
    parts.append("load, demand: largest over mean, with and without limits of capacity")
    if routing.soft:
        header = ["block", "dispatch sharpness", "combine sharpness"]
        rows = [
            [name, f"{s.dispatch_sharpness:.2f}×", f"{s.combine_sharpness:.2f}×"]
            for name, s in routing.soft.items()
        ]
        parts.append(_aligned(header, rows))
    return "\n".join(parts)


def _aligned(header, rows):
    rows = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)).rstrip() for row in rows)


def _information(blocks):
    known = {n: b for n, b in blocks.items() if b.information is not None}
    header = ["block", "entropy of the expert", "explained by position"]
    if any(block.information.label is not None for block in known.values()):
        header.append("explained by class")
    return header, [
        [drawing.block_title(name), *_information_cells(block)]
        for name, block in known.items()
    ]


def _information_cells(block):
    found = block.information
    shares = [found.position_share, found.label_share]
    return [
        f"{found.entropy:.2f} bits (even {math.log2(len(block.load)):.3g})",
        *(f"{100 * share:.1f}%" for share in shares if share is not None),
    ]


def _soft(blocks):
    header = [
        "block",
        "largest dispatch weight",
        "dispatch sharpness (even 1×)",
        "tokens for 90% of a slot",
        "largest combine weight",
        "combine sharpness (even 1×)",
        "slots for 90% of a token",
        "most and least important expert (even 1×)",
    ]
    return header, [
        [drawing.block_title(name), *_soft_cells(block)]
        for name, block in blocks.items()
    ]


def _soft_cells(block):
    contribution = block.expert_contribution
    return [
        *_concentrated(block.dispatch_peak, block.dispatch_sharpness, block.dispatch),
        *_concentrated(block.combine_peak, block.combine_sharpness, block.combine),
        f"{contribution.argmax()} and {contribution.argmin()}, "
        f"{contribution.max() / contribution[contribution > 0].min():.3g}× apart",
    ]


def _concentrated(peak, sharpness, concentration):
    """Write the largest weight and the number for 90%, beside an even average's."""
    count = len(concentration.mean)
    return [
        f"{100 * peak:.3g}% (even {100 / count:.3g}%)",
        f"{sharpness:.2f}×",
        f"{concentration.needed(_SHARE)} of {count} (even {_even_count(count)})",
    ]


def _modalities(blocks):
    header = ["block", "modality", "tokens", "dropped", "experts that serve 90%"]
    return header, [
        [
            drawing.block_title(name),
            modality,
            f"{block.num_tokens[modality]:,}",
            f"{100 * block.dropped[modality]:.3g}%",
            f"{needed} of {len(block.padding)} "
            f"(even {_even_count(len(block.padding))})",
        ]
        for name, block in blocks.items()
        for modality, needed in block.experts_needed(_SHARE).items()
    ]


def _even_count(count):
    """Return the number of so many that hold 90% where all hold the same."""
    return math.ceil(round(_SHARE * count, 6))


# Part of `Routing` -> heading, text and tables of its section.
_PARTS = {
    "blocks": (
        "Load and specialization",
        "How much each expert has to do. A token is dropped if no expert takes it; it "
        "then passes the block unchanged. Of images also how much of the choice of an "
        "expert (its entropy) is explained by the place of the token in the image, and "
        "by the class of the image beyond labels in random order: an expert that "
        "follows from the place alone does not look at the token.",
        (_load, _information),
    ),
    "soft": (
        "Weights of tokens and slots",
        "A slot takes in an average of all tokens (dispatch weights), and a token gets "
        "back an average of all slots' outputs (combine weights). In the table, the "
        "largest weights are means and the numbers for 90% medians; behind them those "
        "of an even average. Sharpness is the largest weight in even shares: at 1× "
        "every slot is the mean of all tokens, or every token gets the mean of all "
        "slots, and the layer does not route.",
        (_soft,),
    ),
    "modalities": (
        "Images and text",
        "Tokens of images and of text choose among the same experts. A token is "
        "dropped if none of the experts that it chose has a free slot.",
        (_modalities,),
    ),
    "maps": (
        "Pictures",
        "Some inputs, patch by patch, at the first and the last block with experts.",
        (),
    ),
}
