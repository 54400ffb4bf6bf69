"""Write the tables of presets into README.md, from the presets' own metadata.

python presets/write_tables.py
"""

import json
from pathlib import Path

import numpy as np

PRESETS = Path(__file__).resolve().parent
README = PRESETS.parent / "README.md"
NAMES = """\
A name tells family, size, patch, placement of the experts (the second half of the
blocks, if nothing else is said), experts, experts per token (`k1`) or slots per expert
(`2s`), and image size. `small` is 512 wide with 8 blocks in the `vmoe` and `limoe`
families and 384 wide with 12 blocks in all others. In `limoe` models every second block
has experts (12 of 32 in `huge`). GFLOP are per image, of `limoe` models per pair of
image and caption; `ksm.evaluation.cost(name)` counts them, also at another
`image_shape` or `capacity_factor`."""


def main():
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text):
    """The README's text with its tables made anew."""
    found = {
        file.parent.name: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(PRESETS.glob("*/metadata.json"))
    }
    tables = {
        "trained presets": trained_table(
            {name: m for name, m in found.items() if m["kind"] == "trained"}
        ),
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


def spread(values):
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


if __name__ == "__main__":
    main()
