"""Tables of presets, their cards, and the gallery, from the catalogue and JSON."""

import re

import numpy as np

from experiments.lib.cards import (
    CARD,
    read_runs,
    spread,
    with_front_matter,
    without_front_matter,
)
from experiments.lib.comparisons import difference
from experiments.pages.results import points
from keras_softmoe import catalogue

NAMES = """\
A name tells family, size, patch, placement of the experts (the second half of the
blocks, if nothing else is said), experts, experts per token (`k1`) or slots per expert
(`2s`), and image size. `small` is 512 wide with 8 blocks in the `vmoe` and `limoe`
families and 384 wide with 12 blocks in all others. In `limoe` models every second block
has experts (12 of 32 in `huge`). GFLOP are per image, of `limoe` models per pair of
image and caption; `ksm.evaluation.cost(name)` counts them, also at another
`image_shape` or `capacity_factor`."""


def tables():
    """Dict from the titles of tables to their text: those of the README."""
    return {
        "released weights": released_table(_of("convertible")),
        "weights trained here": trained_here_table(_of("trained", "_icons")),
    }


def on_the_site():
    """Dict from the titles of tables to their text: those of the site alone."""
    on_icons = _of("trained", "_icons")
    return {
        "presets of icons": icons_table(on_icons),
        "presets of icons and names": names_table(on_icons),
        "presets of letters": letters_table(_of("trained", "_letters")),
        "convertible presets": convertible_table(_of("convertible")),
        "architectures": architecture_table(_of("architecture")),
        "gallery": gallery(),
    }


def _of(kind, ending=""):
    """Dict from names to metadata, with the runs of presets that are trained here."""
    found = {}
    for name in catalogue.names_of_kind(kind):
        if name.endswith(ending):
            height, width = catalogue.describe(name).image_size
            images = f"{height} × {width}"
            metadata = catalogue.read_metadata(name)
            found[name] = {**metadata, "images": images, "runs": read_runs(name)}
    return found


def released_table(convertible):
    """Presets whose weights are downloaded, with the accuracy that was published."""
    rows = ["| preset | images | parameters | published |", "|---|---|---|---|"]
    for name, metadata in convertible.items():
        accuracy = metadata.get("accuracy", {}).get("ImageNet, validation images")
        published = f"ImageNet: {100 * accuracy:.1f} %" if accuracy else ""
        cells = [f"`{name}`", metadata["images"], _parameters(metadata), published]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def trained_here_table(on_icons):
    """Presets of icons that come with the package, with one measured figure each."""
    rows = ["| preset | images | parameters | measured |", "|---|---|---|---|"]
    for name, metadata in on_icons.items():
        run = metadata["runs"][0]
        if "found_by_word" in run:
            text = f"finds an icon by a word: {_percent(_found(run, '1'))} of words"
        else:
            text = f"unseen styles, 1,229 concepts: {_percent(run['new_styles'])}"
        about = [f"[`{name}`](presets/{name})", metadata["images"]]
        rows.append(f"| {' | '.join([*about, _parameters(metadata), text])} |")
    return "\n".join(rows) + "\n"


def icons_table(on_icons):
    """What the presets of icons are worth on styles and concepts never seen."""
    rows = [
        "| preset | parameters | unseen styles | unseen concepts, 1 icon | 5 icons |",
        "|---" * 5 + "|",
    ]
    for name, metadata in on_icons.items():
        run = metadata["runs"][0]
        if "new_styles" in run:
            few_shot = map(spread, run["new_concepts"]["model"].values())
            pixels = map(spread, run["new_concepts"]["raw pixels"].values())
            cells = [f"[`{name}`](#{name})", _parameters(metadata)]
            cells += [_percent(run["new_styles"]), *few_shot]
            rows.append(f"| {' | '.join(cells)} |")
    rows.append(f"| {' | '.join(['raw pixels', '', '', *pixels])} |")
    return "\n".join(rows) + "\n"


def names_table(on_icons):
    """How often a word finds one of its icons among 1,000 in styles never seen."""
    rows = [
        "| preset | parameters | in the first place | in the first ten |",
        "|---" * 4 + "|",
    ]
    chance = {}
    for name, metadata in on_icons.items():
        run = metadata["runs"][0]
        if "found_by_word" in run:
            chance = run["found_by_word"]["chance"]
            cells = [f"[`{name}`](#{name})", _parameters(metadata)]
            cells += [_percent(_found(run, places)) for places in chance]
            rows.append(f"| {' | '.join(cells)} |")
    rows.append(f"| {' | '.join(['chance', '', *map(_percent, chance.values())])} |")
    return "\n".join(rows) + "\n"


def _found(run, places):
    return run["found_by_word"]["found"][places]


def _percent(share):
    return f"{100 * share:.1f} %"


def _parameters(metadata):
    count = metadata["parameter_count"] / 1e6
    return f"{count:,.0f} M" if count >= 5 else f"{count:.2f} M"


def letters_table(found):
    """What the presets of letters are worth, on letters and on digits."""
    columns = (
        "preset",
        "images",
        "parameters",
        "letters",
        "over the dense model",
        "in new fonts",
        "1 shot",
        "5 shots",
        "digits, 1 shot",
        "5 shots",
        "fine-tuned",
    )
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    accuracy = {
        name: [100 * run["letters"]["accuracy"] for run in metadata["runs"]]
        for name, metadata in found.items()
    }
    dense = next(values for name, values in accuracy.items() if name.startswith("vit"))
    for name, metadata in found.items():
        run = metadata["runs"][0]
        letters, digits = run["letters"], run["few_shot"]["model"]
        gains = np.subtract(accuracy[name], dense).tolist()
        cells = [
            f"[`{name}`](#{name})",
            metadata["images"],
            _parameters(metadata),
            f"{letters['accuracy']:.3f}",
            points(difference(name, gains)) if any(gains) else "",
            f"{letters['new_fonts']:.3f}",
            *(f"{letters['few_shot'][shots]:.3f}" for shots in ("1", "5")),
            *(spread(digits[shots]) for shots in ("1", "5")),
            spread(run["fine_tuned"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def convertible_table(found):
    rows = [
        "| preset | images | parameters | published accuracy on ImageNet |",
        "|---|---|---|---|",
    ]
    for name, metadata in found.items():
        accuracy = metadata.get("accuracy", {}).get("ImageNet, validation images")
        cells = [
            f"`{name}`",
            metadata["images"],
            f"{metadata['parameter_count'] / 1e6:,.0f} M",
            f"{100 * accuracy:.1f} %" if accuracy else "not found",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def architecture_table(found):
    """A folded table for each paper, and one for the dense twins of all."""
    groups = {}
    for name, metadata in found.items():
        paper = metadata["source"].split(",")[0]
        group = paper if metadata.get("dense_twin") else "Dense twins"
        groups.setdefault(group, {})[name] = metadata
    parts = [NAMES]
    for group in sorted(groups, key=lambda group: (group == "Dense twins", group)):
        rows = [
            "| preset | images | parameters | GFLOP | in the paper |",
            "|---|---|---|---|---|",
        ]
        for name, metadata in groups[group].items():
            row = metadata.get("published", {}).get("row", metadata["source"])
            rows.append(
                f"| `{name}` | {metadata['images']} "
                f"| {metadata['parameter_count'] / 1e6:,.0f} M "
                f"| {metadata['gflop_per_image']:,.1f} | {row} |"
            )
        summary = f"<summary>{group}: {len(groups[group])} presets</summary>"
        parts += [f'<details markdown="1">\n{summary}', "\n".join(rows), "</details>"]
    return "\n\n".join(parts) + "\n"


# === Cards ===


def cards():
    """Dict from the paths of the cards, below the root, to texts with today's heads."""
    return {
        f"presets/{name}/{CARD}": with_front_matter(
            catalogue.describe(name).path, name, _card(name)
        )
        for name in catalogue.names_of_kind("trained")
    }


def gallery():
    """A section for each preset that was trained here, Markdown."""
    parts = []
    for name in catalogue.names_of_kind("trained"):
        parts.append(f"### {name}")
        if drawn(name):
            parts.append(f"![How {name} routes](images/routing_{name}.png)")
        card = without_front_matter(_card(name))
        parts.append(re.sub(r"^# .*\n", "", card).strip())
    return "\n\n".join(parts) + "\n"


def drawn(name):
    """Whether the gallery has a picture of how a preset routes."""
    return "dense" not in name and not name.startswith("vit_")


def _card(name):
    return (catalogue.describe(name).path / CARD).read_text(encoding="utf-8")
