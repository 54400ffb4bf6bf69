"""Write the tables of presets into README.md, from the catalogue.

    python -m experiments.readme_tables          # the tables
    python -m experiments.readme_tables --count  # first count each architecture anew

The second also writes `keras_softmoe/catalogue/counts.json`, where the catalogue has
parameters and GFLOP of its architectures: what `evaluation.cost` counts.
"""

import json
import sys
from pathlib import Path

import numpy as np

from keras_softmoe import catalogue, evaluation
from keras_softmoe.files import replaced_file

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COUNTS = ROOT / "keras_softmoe" / "catalogue" / "counts.json"
LOSSES = Path(__file__).with_name("limoe") / "losses.json"
NAMES = """\
A name tells family, size, patch, placement of the experts (the second half of the
blocks, if nothing else is said), experts, experts per token (`k1`) or slots per expert
(`2s`), and image size. `small` is 512 wide with 8 blocks in the `vmoe` and `limoe`
families and 384 wide with 12 blocks in all others. In `limoe` models every second block
has experts (12 of 32 in `huge`). GFLOP are per image, of `limoe` models per pair of
image and caption; `ksm.evaluation.cost(name)` counts them, also at another
`image_shape` or `capacity_factor`."""


def main():
    if sys.argv[1:] == ["--count"]:
        with replaced_file(COUNTS) as file:
            file.write_text(counts(), encoding="utf-8")
    text = with_tables(README.read_text(encoding="utf-8"))
    with replaced_file(README) as file:
        file.write_text(text, encoding="utf-8")


def counts():
    """Text of `counts.json`, one architecture a line."""
    rows = []
    for name in sorted(catalogue.architectures()):
        cost = evaluation.cost(name)
        row = [cost.parameters, round(cost.gflop_per_image, 4)]
        rows.append(f"    {json.dumps(name)}: {json.dumps(row)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def with_tables(text):
    """The README's text with its tables made anew."""
    found = {name: catalogue.read_metadata(name) for name in catalogue.names()}
    tables = {
        "trained presets": trained_table(
            {name: m for name, m in found.items() if "metrics" in m}
        ),
        "contrastive presets": contrastive_table(
            {name: m for name, m in found.items() if "runs" in m}
        ),
        "losses on routing": losses_table(),
        "convertible presets": convertible_table(
            {name: m for name, m in found.items() if m["kind"] == "convertible"}
        ),
        "architectures": architecture_table(
            {name: m for name, m in found.items() if m["kind"] == "architecture"}
        ),
    }
    for title, table in tables.items():
        begin, end = f"<!-- {title}: begin -->\n", f"<!-- {title}: end -->"
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end)[1]
    return text


def trained_table(found):
    rows = [
        "| preset | parameters | glyphs | 1 shot | 5 shots | 10 shots | fine-tuned |",
        "|---|---|---|---|---|---|---|",
    ]
    pixels = {}
    for name, metadata in found.items():
        metrics = metadata["metrics"]
        pixels = metrics["few_shot"]["raw pixels"]
        cells = [
            f"[`{name}`](presets/{name})",
            f"{metadata['parameter_count'] / 1e6:.2f} M",
            f"{metrics['upstream_accuracy']:.3f}",
            *map(spread, metrics["few_shot"]["model"].values()),
            spread(metrics["fine_tuned"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    cells = ["raw pixels", "", "", *map(spread, pixels.values()), ""]
    rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def contrastive_table(found):
    columns = {
        "new, of 64": "zero_shot_new_of_64",
        "new, of 16": "zero_shot_new_of_16",
        "seen, of 64": "zero_shot_seen_of_64",
        "image → caption": "image_to_text_recall_at_1",
        "caption → image": "text_to_image_recall_at_1",
    }
    rows = [
        f"| preset | parameters | {' | '.join(columns)} |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for name, metadata in found.items():
        cells = [
            f"[`{name}`](presets/{name})",
            f"{metadata['parameter_count'] / 1e6:.2f} M",
            *(spread([run[c] for run in metadata["runs"]]) for c in columns.values()),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def losses_table():
    """What losses on routing do, from short runs (`experiments/limoe_sweeps.py`)."""
    runs = json.loads(LOSSES.read_text(encoding="utf-8"))
    rows = [
        "| losses | seeds | new, of 64 | image → caption | caption → image "
        "| text experts | text dropped |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted({run["variant"] for run in runs}, key=lambda n: ("=" in n, n)):
        chosen = [run for run in runs if run["variant"] == name]
        cells = [
            name,
            str(len(chosen)),
            spread([run["zero_shot_new_of_64"] for run in chosen]),
            spread([run["image_to_text_recall_at_1"] for run in chosen]),
            spread([run["text_to_image_recall_at_1"] for run in chosen]),
            spread([np.mean(run["text_experts"]) for run in chosen], digits=1),
            spread([run["text_dropped"] for run in chosen]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def convertible_table(found):
    rows = [
        "| preset | parameters | published accuracy on ImageNet |",
        "|---|---|---|",
    ]
    for name, metadata in found.items():
        accuracy = metadata["accuracy"].get("ImageNet, validation images")
        cells = [
            f"[`{name}`](presets/{name})",
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
        rows = ["| preset | parameters | GFLOP | in the paper |", "|---|---|---|---|"]
        for name, metadata in groups[group].items():
            row = metadata.get("published", {}).get("row", metadata["source"])
            rows.append(
                f"| `{name}` | {metadata['parameter_count'] / 1e6:,.0f} M "
                f"| {metadata['gflop_per_image']:,.1f} | {row} |"
            )
        summary = f"<summary>{group}: {len(groups[group])} presets</summary>"
        parts += [f"<details>\n{summary}", "\n".join(rows), "</details>"]
    return "\n\n".join(parts) + "\n"


def spread(values, digits=3):
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


if __name__ == "__main__":
    main()
