"""Guides as pages: their text and code, with the output and the figures of a real run.

Guides are Python files in the format of Keras' guides: strings between the code are
Markdown. `record` runs one from its first line to its last and keeps the output and the
figures of each part of the code in `guides/recorded.json`, as a notebook does. `pages`
puts text, code and records together, and refuses a record of other code.
"""

import ast
import base64
import hashlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keras_softmoe.files import atomic_file

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "guides"
RECORDED = GUIDES / "recorded.json"
COLORS = 128
FIGURE_WIDTH = 900
DEMO = "The main job"
COLAB = "https://colab.research.google.com/github"

# Backends of the records; PyTorch where a guide leaves the choice.
BACKENDS = {"placing_experts": "jax"}
# The packages whose versions are told.
PACKAGES = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}


def names():
    """Names of all guides, as in the table that follows them."""
    return sorted(path.stem for path in GUIDES.glob("*.py"))


def cells(name):
    """The guide cut into parts: pairs of `"text"` or `"code"` and the source."""
    source = (GUIDES / f"{name}.py").read_text(encoding="utf-8")
    lines, parts, code = source.splitlines(), [], []
    end = 0
    for node in ast.parse(source).body:
        if not _is_text(node):
            continue
        code = "\n".join(lines[end : node.lineno - 1]).strip("\n")
        parts += [("code", code)] if _runs(code) else []
        parts.append(("text", node.value.value.strip()))
        end = node.end_lineno
    code = "\n".join(lines[end:]).strip("\n")
    return parts + ([("code", code)] if _runs(code) else [])


def title(name):
    """Title and description of a guide."""
    head = cells(name)[0][1]
    found = dict(re.findall(r"^(\w[\w ]*): (.*)$", head, flags=re.MULTILINE))
    if "Title" not in found:
        return DEMO, head.splitlines()[0]
    return found["Title"], found["Description"]


def record(name, short=False):
    """Run a guide, as long as it is or as the tests run it, and keep what it shows."""
    backend = BACKENDS.get(name, "torch")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder).resolve()
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(GUIDES / f"{name}.py"), str(folder)],
            cwd=folder,
            env=_environment(backend, folder, short),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"The guide {name} fails:\n{done.stderr[-4000:]}")
        seconds = time.perf_counter() - started
        outputs = done.stdout.split("\x1e")
        code = [source for kind, source in cells(name) if kind == "code"]
        records = [
            _record(source, output, folder)
            for source, output in zip(code, outputs, strict=True)
        ]
    versions = {
        package: importlib.metadata.version(package)
        for package in ("keras", "keras-hub", PACKAGES[backend])
    }
    about = {
        "versions": versions,
        "seconds": round(seconds),
        "short": short,
        "cells": records,
    }
    found = _read() | {name: about}
    # Of guides that are gone nothing stays.
    text = json.dumps({n: found[n] for n in names() if n in found}, indent=1)
    with atomic_file(RECORDED) as file:
        file.write_text(text + "\n", "utf-8")


def links(name, repository=None, branch="gh-pages"):
    """A line of Markdown with links to a guide's notebook and program.

    Args:
        name: str, of a guide.
        repository: str, address of the public repository, if there is one. Colab opens
            the notebook from the site that was published there.
        branch: str, of the repository, that holds the site.
    """
    there = f"[Notebook]({name}.ipynb) · [Source]({name}.py)"
    found = re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)/?", repository or "")
    if not found:
        return f"{there} · In Colab: *File*, *Upload notebook*"
    address = f"{COLAB}/{found[1]}/blob/{branch}/guides/{name}.ipynb"
    return f"[View in Colab]({address}) · {there}"


def page(name, repository=None, branch="gh-pages"):
    """The page of a guide, Markdown; the arguments are those of `links`."""
    recorded = recorded_run(name)
    parts = cells(name)
    heading, description = title(name)
    versions = ", ".join(f"{k} {v}" for k, v in recorded["versions"].items())
    length = " in its short form" if recorded["short"] else ""
    texts = [
        f"# {heading}",
        f"{description}",
        links(name, repository, branch),
        f"The program is `guides/{name}.py`. Its output here is that of a run{length} "
        f"on one processor core: {recorded['seconds']:,} seconds, {versions}.",
    ]
    outputs, figures = enumerate(recorded["cells"]), 0
    is_guide = heading != DEMO
    texts += [parts[0][1].removeprefix(description).strip()] * (not is_guide)
    for kind, source in parts[1:]:
        if kind == "text":
            texts.append(source)
            continue
        source = re.sub(r"^# ruff: noqa.*\n*", "", source)
        texts += [f"```python\n{source}\n```"] if source else []
        number, cell = next(outputs)
        texts += [f"```text\n{cell['output']}\n```"] if cell["output"] else []
        for i in range(len(cell["figures"])):
            figures += 1
            path = f"figures/{name}_{number}_{i}.png"
            texts.append(f"![{heading}, figure {figures}]({path})")
    return "\n\n".join(texts) + "\n"


def recorded_run(name):
    """The record of a guide: versions, seconds, and what each part of the code showed.

    Raises:
        ValueError: if the code of the guide has changed since.
    """
    recorded = _read()[name]
    digests = [_digest(source) for kind, source in cells(name) if kind == "code"]
    if digests != [cell["code"] for cell in recorded["cells"]]:
        raise ValueError(
            f"The record of a guide is of other code than the guide '{name}': run "
            f"`python -m experiments.pages --guides {name}`."
        )
    return recorded


def _read():
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def figures():
    """Dict from paths below `docs` to the recorded figures of all guides, PNG files."""
    return {
        f"guides/figures/{name}_{number}_{i}.png": base64.b64decode(figure)
        for name in names()
        for number, cell in enumerate(recorded_run(name)["cells"])
        for i, figure in enumerate(cell["figures"])
    }


def pages(repository=None, branch="gh-pages"):
    """Dict from paths below `docs` to texts; the arguments are those of `links`."""
    rows = ["| guide | what it shows |", "|---|---|"]
    for name in names():
        heading, description = title(name)
        rows.append(f"| [{heading}]({name}.md) | {description} |")
    index = (
        "# Guides\n\nPrograms from their first line to their last, with the output of "
        "a run. Each is a file of `guides/`, which the tests run too, and a notebook. "
        "Where a page "
        "says *short form*, the run took the few images and steps of the tests: its "
        "numbers show what is printed, not how good a model is.\n\n"
        + "\n".join(rows)
        + "\n"
    )
    texts = {f"guides/{n}.md": page(n, repository, branch) for n in names()}
    return {"guides/index.md": index} | texts


def _is_text(node):
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _runs(code):
    return bool(ast.parse(code).body)


def _digest(code):
    """Of what the code does: neither its comments nor its form count."""
    return hashlib.sha256(repr(_form(ast.parse(code))).encode()).hexdigest()[:12]


def _form(node):
    """A syntax tree as tuples, the same in all versions of Python."""
    if isinstance(node, list):
        return [_form(child) for child in node]
    if not isinstance(node, ast.AST):
        return node
    # Later versions have more fields, which are empty for older code.
    fields = [(n, x) for n, x in ast.iter_fields(node) if x is not None and x != []]
    return type(node).__name__, [(name, _form(value)) for name, value in fields]


def _environment(backend, folder, short):
    variables = {
        "KERAS_BACKEND": backend,
        "KERAS_HOME": str(folder / "keras"),
        "KSM_GUIDE_SHORT": "1" if short else "0",
        "MPLBACKEND": "agg",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TMPDIR": str(folder),
    }
    return os.environ | variables


# Runs a guide. Its output has a separator between its parts of code, and where a figure
# is saved its path.
RUN = """
import ast, pathlib, sys
from experiments.pages.guides import _is_text, _runs
from matplotlib.figure import Figure

path, sys.argv = sys.argv[1], [sys.argv[1]]
save = Figure.savefig

def savefig(self, target, *arguments, **options):
    save(self, target, *arguments, **options)
    if isinstance(target, (str, pathlib.Path)):
        print(f"\\x1d{target}\\x1d", flush=True)

Figure.savefig = savefig
source = open(path, encoding="utf-8").read()
lines, end, first = source.splitlines(), 0, True
body = []
for node in ast.parse(source).body:
    if _is_text(node):
        if _runs("\\n".join(lines[end:node.lineno - 1])):
            body.append(ast.parse('print(end="\\x1e", flush=True)').body[0])
        end = node.end_lineno
    else:
        body.append(node)
if not _runs("\\n".join(lines[end:])):
    body.pop()
main = sys.modules["__main__"]
main.__dict__.update(__file__=path)
exec(compile(ast.Module(body, []), path, "exec"), main.__dict__)
"""


def _record(code, output, folder):
    paths = re.findall("\x1d(.*)\x1d\n?", output)
    text = re.sub("\x1d.*\x1d\n?", "", output).replace(f"{folder}/", "")
    figures = []
    for path in paths:
        small = io.BytesIO()
        small_figure(folder / path, small)
        figures.append(base64.b64encode(small.getvalue()).decode("ascii"))
    return {"code": _digest(code), "output": _shown(text), "figures": figures}


def _shown(text):
    """The text as a terminal shows it in the end: progress bars have gone."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    lines = []
    for line in text.split("\n"):
        line = re.sub("\x08+", "\r", line).rstrip("\r").rsplit("\r", 1)[-1]
        bar = re.match(r" *(\d+)/(\d+) ", line)
        if not bar or bar[1] == bar[2]:
            lines.append(line.rstrip())
    return "\n".join(lines).strip("\n")


def small_figure(source, target):
    """Copy a picture, no wider than a page and in few colours.

    Args:
        source: path or open file of the picture.
        target: path or open file of the copy, a PNG.
    """
    from PIL import Image

    with Image.open(source) as image:
        image = image.convert("RGB")
        image.thumbnail((FIGURE_WIDTH, 10 * FIGURE_WIDTH))
        image = image.quantize(COLORS, dither=Image.Dither.NONE)
        image.save(target, format="PNG", optimize=True)
