"""Write the tables of presets into README.md, from the presets' own metadata.

python presets/write_tables.py
"""

import json
from pathlib import Path

import numpy as np

PRESETS = Path(__file__).resolve().parent
README = PRESETS.parent / "README.md"


def main():
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text):
    """The README's text with both tables made anew."""
    found = {
        file.parent.name: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(PRESETS.glob("*/metadata.json"))
    }
    tables = {
        "trained presets": trained_table(
            {name: m for name, m in found.items() if m["kind"] == "trained"}
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


def architecture_table(found):
    rows = ["| preset | parameters | what |", "|---|---|---|"]
    for name, metadata in found.items():
        rows.append(
            f"| `{name}` | {metadata['parameter_count'] / 1e6:,.0f} M "
            f"| {metadata['description']} |"
        )
    return "\n".join(rows) + "\n"


def spread(values):
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


if __name__ == "__main__":
    main()
