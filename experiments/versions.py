"""The table of tested releases, from the logs of `make newest`, `oldest` and `nightly`.

    python -m experiments.versions newest build/jax.log build/torch.log

keeps in `versions.json` what these logs say: the releases, which `tests/conftest.py`
prints, and how many tests passed and failed. The table of `docs/versions.md` follows.
"""

import json
import re
import sys
from pathlib import Path

from keras_softmoe.files import atomic_file

KEPT = Path(__file__).with_name("versions.json")
PAGE = KEPT.parents[1] / "docs" / "versions.md"
# Targets of the Makefile, in the order of the table
TARGETS = ("newest", "nightly", "oldest")
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
KERAS = ("keras", "keras-hub")
COUNTS = {"passed": "passed", "failed": "failed", "error": "failed"}


def read(text):
    """What a log says of its run: a dict of texts and of numbers of tests.

    Raises:
        ValueError: if the log has no line of releases or no closing line.
    """
    head = re.search(r"^releases: (.+)$", text, re.MULTILINE)
    end = re.findall(r"^=* ?(\d+ \w+.*) in [\d.]+s", text, re.MULTILINE)
    if not (head and end):
        raise ValueError(
            "A log must be of a run of pytest that ended, without `-q`: it has a line "
            f"`releases: ...` and a closing line. Received: text={text[-300:]!r}"
        )
    found = dict(part.split(" ") for part in head[1].split(", "))
    counts = {"passed": 0, "failed": 0}
    for number, word in re.findall(r"(\d+) (passed|failed|error)", end[-1]):
        counts[COUNTS[word]] += int(number)
    # pytest says where it looks for tests if it was given none.
    some = {} if re.search("^testpaths: ", text, re.MULTILINE) else {"only": "core"}
    return {**found, **some, **counts}


def keep(target, texts, file=KEPT):
    """Put what logs say in the place of earlier runs of that target.

    Args:
        target: str, one of `TARGETS`.
        texts: list of str, logs.
        file: path of the JSON.
    """
    rows = {_key(row): row for row in json.loads(file.read_text(encoding="utf-8"))}
    for text in texts:
        row = {"target": target, **read(text)}
        rows[_key(row)] = row
    rows = [rows[key] for key in sorted(rows)]
    with atomic_file(file) as new:
        new.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _key(row):
    minor = tuple(map(int, row["python"].split(".")[:2]))
    return TARGETS.index(row["target"]), *(-n for n in minor), row["backend"]


def table(file=KEPT):
    """The table: a row for each target and Python, a column for each backend."""
    titles = ["command", "Python", "Keras", "KerasHub", "NumPy", *BACKENDS.values()]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    runs = {}
    for row in json.loads(file.read_text(encoding="utf-8")):
        runs.setdefault(_key(row)[:-1], {})[row["backend"]] = row
    for by_backend in runs.values():
        rows = [*by_backend.values()]
        cells = [f"`make {rows[0]['target']}`", _versions(rows, "python")]
        cells += [_versions(rows, name, f"{name}-nightly") for name in KERAS]
        cells += [_versions(rows, "numpy")]
        cells += [_result(by_backend.get(backend), backend) for backend in BACKENDS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_page(page=PAGE, file=KEPT):
    """Put the table into its page, so that the next run finds one of today.

    (`experiments.pages` does too, but imports more than environments here have.)
    """
    text = filled(page.read_text(encoding="utf-8"), {"versions": table(file)})
    with atomic_file(page) as new:
        new.write_text(text, encoding="utf-8")


def filled(text, found):
    """The text with the tables of these titles in their places.

    Raises:
        ValueError: if a place has a title of no table, or no end.
    """

    def fill(match):
        if match[1] not in found:
            raise ValueError(f"There are {sorted(found)}. Received: title={match[1]!r}")
        return (
            f"<!-- {match[1]}: begin -->\n\n{found[match[1]]}\n<!-- {match[1]}: end -->"
        )

    marked = r"<!-- ([^>]*?): begin -->\n.*?<!-- \1: end -->"
    if len(re.findall("<!-- [^>]*: (?:begin|end) -->", text)) != 2 * len(
        re.findall(marked, text, flags=re.DOTALL)
    ):
        raise ValueError("A place for a table lacks its beginning or its end.")
    return re.sub(marked, fill, text, flags=re.DOTALL)


def _versions(rows, *names):
    found = (row[name] for row in rows for name in names if name in row)
    return ", ".join(dict.fromkeys(found))


def _result(row, backend):
    if row is None:
        return "not run"
    failed = f", **{row['failed']} failed**" if row["failed"] else ""
    tests = f" ({row['only']})" if "only" in row else ""
    return f"{row[backend]}: {row['passed']} passed{failed}{tests}"


if __name__ == "__main__":
    keep(sys.argv[1], [Path(path).read_text(encoding="utf-8") for path in sys.argv[2:]])
    write_page()
