"""Tables in Markdown from the files that `run.py` writes.

    python benchmarks/tables.py --output FILE --page FILE   # as `make bench` does

Every number comes from the files; nothing is measured here.
"""

import argparse
import json
import pathlib
from typing import NamedTuple

from targets import TARGETS

RESULTS = pathlib.Path(__file__).parent / "results"

# What lies between them on the page is written here.
BEGIN = "<!-- speed: written by benchmarks/tables.py -->"
END = "<!-- end of speed -->"

BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}


class Results(NamedTuple):
    """A file of results, as a column of the tables."""

    title: str
    backend: str
    content: dict

    def rows(self, section):
        return self.content["sections"].get(section, [])

    def row(self, section, name, kind):
        """The row of that name and pass, `None` if there is none."""
        for row in self.rows(section):
            if (row["name"], row["pass"]) == (name, kind):
                return row
        return None


def read(files):
    """`Results` of each of the files."""
    results = []
    for file in files:
        content = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        machine = content["machine"]
        backend = machine["backend"].split()[0]
        parts = [BACKENDS[backend], machine["accelerator"]]
        if machine["dtype"] != "float32":
            parts.append(machine["dtype"])
        if content["shapes"] != "paper":
            parts.append(f"shapes: {content['shapes']}")
        title = ", ".join(part for part in parts if part)
        results.append(Results(title, backend, content))
    return results


def markdown(results):
    """All tables, one below the other."""
    parts = [
        "# Results of the benchmarks",
        "Made by `make bench`. A ratio is our time divided by a rival's in the same "
        "round of turns, so under 1 is faster: the median over the rounds, and the "
        "least and the largest of three rounds or more in parentheses.",
        "## Targets",
        "**Bold** misses the target as printed; *products* beside it is what our "
        "matrix products alone take of the rival's time. Targets are for the sizes of "
        "the paper.",
        targets_table(results),
        "## Everything that was timed",
        "Milliseconds of ours (median), and the ratio.",
        *(times_table(results, section) for section in sections_with_times(results)),
        "## First calls",
        "Seconds of the first call, which traces and compiles: ours, and a rival's. "
        "Each happens once, so these ratios have no spread.",
        first_calls_table(results, "models"),
        "## Memory",
        "Peak of a training step of `fit` with plain gradient descent, above what a "
        "process holds before there is a model. Models of four blocks, the last two "
        "with experts.",
        memory_table(results),
        "## What rivals compute differently",
        differences(results),
        "## Conditions",
        "\n".join(conditions(result) for result in results),
    ]
    return "\n\n".join(parts) + "\n"


def page(text, results):
    """The text of the page with the targets, the memory and the conditions of now."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(
            f"The tables go between the lines {BEGIN!r} and {END!r}, which the file "
            "must have once."
        )
    before, rest = text.split(BEGIN)
    parts = [
        BEGIN,
        targets_table(results),
        memory_table(results),
        "\n".join(conditions(result) for result in results),
        END,
    ]
    return before + "\n\n".join(parts) + rest.split(END)[1]


def table(heads, rows):
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def targets_table(results):
    """What the library wants to reach, and what it does."""
    heads = ["ours", "/ rival", "pass", "target", *(r.title for r in results)]
    rows = []
    for target in TARGETS:
        for kind in target.passes:
            cells = [target_cell(target, kind, result) for result in results]
            if any(cells):
                wanted = wanted_text(target.at_most)
                rival = target.rival or "the fewest"
                rows.append([target.text, rival, kind, wanted, *cells])
    return table(heads, rows)


def wanted_text(at_most):
    """The target, with the backends if it depends on them."""
    if not isinstance(at_most, dict):
        return f"{at_most:.2f}"
    texts = [f"{BACKENDS[b]} {ratio:.2f}" for b, ratio in at_most.items()]
    return ", ".join(texts) or "none"


def target_cell(target, kind, result):
    """The ratio that a target is about, bold if it misses. Empty if not measured."""
    found = []
    for row in result.rows(target.section):
        if target.name in (None, row["name"]) and row["pass"] == kind:
            rivals = row["ratios"] if target.rival is None else [target.rival]
            found += [row["ratios"][name] for name in rivals if name in row["ratios"]]
    if not found:
        return ""
    ratio = max(found, key=lambda ratio: ratio["median"])
    at_most = target.at_most
    if isinstance(at_most, dict):
        at_most = at_most.get(result.backend, float("inf"))
    text = ratio_text(ratio)
    # As it is printed: "no slower" is not missed by what nobody could measure again.
    if round(ratio["median"], 2) <= round(at_most, 2):
        return text
    text = f"**{text}**"
    if "products" in ratio:
        # A layer that multiplies these matrices can hardly do better.
        text += f", products {ratio['products']:.2f}"
    return text


def ratio_text(ratio):
    return "{median:.2f} ({min:.2f} to {max:.2f})".format(**ratio)


def sections_with_times(results):
    """Names of the sections, in the order of the files, without that on memory."""
    names = [name for result in results for name in result.content["sections"]]
    return [name for name in dict.fromkeys(names) if name != "memory"]


def compared(results, section):
    """Triples of name, pass and rival that some file has, in the order of the files."""
    return dict.fromkeys(
        (row["name"], row["pass"], rival)
        for result in results
        for row in result.rows(section)
        for rival in row["ratios"]
    )


def times_table(results, section):
    """Every comparison of a section."""
    rows = []
    for name, kind, rival in compared(results, section):
        cells = []
        for result in results:
            row = result.row(section, name, kind)
            cell = ""
            if row and rival in row["ratios"]:
                ratio = ratio_text(row["ratios"][rival])
                cell = f"{row['ms'][row['ours']]:,.1f} ms, {ratio}"
            cells.append(cell)
        rows.append([name, kind, rival, *cells])
    return table([section, "pass", "rival", *(r.title for r in results)], rows)


def first_calls_table(results, section):
    """Seconds until a first call returns, ours and a rival's."""
    rows = []
    for name, kind, rival in compared(results, section):
        cells = []
        for result in results:
            row = result.row(section, name, kind)
            cell = ""
            if row and rival in row["ratios"]:
                first = row["first_call_s"]
                cell = f"{first[row['ours']]:.1f} / {first[rival]:.1f}"
            cells.append(cell)
        rows.append([name, kind, rival, *cells])
    return table([section, "pass", "rival", *(r.title for r in results)], rows)


def memory_table(results):
    """Weights and peaks; and the peak as a multiple of the first variant's."""
    names = dict.fromkeys(
        r["name"] for result in results for r in result.rows("memory")
    )
    rows = []
    for name in names:
        cells = []
        for result in results:
            row = result.row("memory", name, "fit")
            cell = ""
            if row:
                first = result.rows("memory")[0]
                ratio = row["peak_mb"] / first["peak_mb"]
                cell = f"{row['peak_mb']:,.0f} MB, {ratio:.2f}"
                cell += f" (weights {row['weights_mb']:,.0f} MB)"
            cells.append(cell)
        rows.append([name, *cells])
    heads = ["peak of a training step, / the first", *(r.title for r in results)]
    return table(heads, rows)


def differences(results):
    """What is not the same mathematics, or not the same conditions."""
    texts = {}
    for result in results:
        for name, rival in result.content["rivals"].items():
            texts[name] = rival["differs"]
    return "\n".join(f"- `{name}`: {text}" for name, text in texts.items())


def conditions(result):
    """A line on what a file depends on."""
    content = result.content
    machine = ", ".join(f"{k} {v}" for k, v in content["machine"].items() if v)
    rivals = ", ".join(f"{k} {v['version']}" for k, v in content["rivals"].items())
    xla = "yes" if content["jit_compile"] else "no"
    return (
        f"- {result.title}: {machine}; shapes {content['shapes']}; rivals {rivals}; "
        f"TensorFlow with XLA (but for `fit`, which decides for itself): {xla}."
    )


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", help="files of results; those in `results/` if none"
    )
    parser.add_argument("--output", metavar="FILE", help="write there, do not print")
    parser.add_argument(
        "--page", metavar="FILE", help="renew the table of the targets there"
    )
    options = parser.parse_args(arguments)
    files = options.files or sorted(RESULTS.glob("*.json"))
    if not files:
        parser.error(f"There are no results in {RESULTS}: run `make bench` first.")
    results = read(files)
    if options.page:
        file = pathlib.Path(options.page)
        file.write_text(page(file.read_text("utf-8"), results), encoding="utf-8")
    text = markdown(results)
    if options.output:
        pathlib.Path(options.output).write_text(text, encoding="utf-8")
    elif not options.page:
        print(text, end="")


if __name__ == "__main__":
    main()
