"""Guides as notebooks, for Jupyter and Colab, with the output of the recorded run.

The site has one beside each guide's page, and its program. None is committed, as it is
a copy of the guide and of its record. To execute them, as short as in the tests:

    python -m experiments.pages.notebooks [NAMES]
"""

import os
import re
import sys
import tempfile
import time

import nbformat
from nbformat import v4

from experiments.pages import guides

# The extras that no guide can do without, and those of single guides.
EXTRAS = {"exporting": ["export"]}
INSTALL = """\
# In Colab, or any new environment: the library, and what this guide uses.
import importlib.util

if importlib.util.find_spec("keras_softmoe") is None:
    %pip install --quiet "keras-softmoe[{extras}]"
"""
# Guides that import `experiments` or `tests`, which no package has.
FROM_CHECKOUT = """\
# This guide uses programs of the repository.
import importlib.util

if importlib.util.find_spec("experiments") is None:
    raise ImportError('In a checkout: pip install -e ".[{extras}]"')
"""


def notebook(name, recorded=True):
    """A guide as a notebook.

    Args:
        name: str, of a guide.
        recorded: bool, whether cells show the output of the recorded run.

    Returns:
        A `nbformat.NotebookNode`. The first cell of code installs; the others, joined,
        are the code of the guide.
    """
    heading, description = guides.title(name)
    parts = guides.cells(name)
    first = parts[0][1] if heading == guides.DEMO else description
    made = [v4.new_markdown_cell(f"# {heading}\n\n{first}")]
    made.append(v4.new_code_cell(_installation(name)))
    records = iter(guides.recorded_run(name)["cells"] if recorded else [])
    for kind, source in parts[1:]:
        if kind == "text":
            made.append(v4.new_markdown_cell(source))
        else:
            made.append(v4.new_code_cell(source, outputs=_outputs(next(records, None))))
    for i, cell in enumerate(made):
        cell["id"] = f"{name}-{i}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel})


def code(notebook):
    """The code of a notebook without the cell that installs, joined."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return "\n\n".join(cells[1:])


def files():
    """Dict from paths below `docs` to bytes: notebooks and programs of all guides."""
    found = {}
    for name in guides.names():
        text = nbformat.writes(notebook(name)) + "\n"
        found[f"guides/{name}.ipynb"] = text.encode()
        found[f"guides/{name}.py"] = (guides.GUIDES / f"{name}.py").read_bytes()
    return found


def execute(name):
    """Run a guide's notebook in a folder of its own; return the seconds it took."""
    from nbclient import NotebookClient

    backend = guides.BACKENDS.get(name, "torch")
    variables = {"KERAS_BACKEND": backend, "KSM_GUIDE_SHORT": "1"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook(name, recorded=False),
            timeout=None,
            resources={"metadata": {"path": folder}},
        )
        started = time.perf_counter()
        client.execute(env=os.environ | variables)
        return time.perf_counter() - started


def main(names):
    """Execute notebooks of guides, all of them unless some are named."""
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    failed = []
    for name in names or guides.names():
        try:
            print(f"{name}: {execute(name):.0f} seconds", flush=True)
        except (CellExecutionError, DeadKernelError) as error:
            failed.append(name)
            print(f"{name}: {error}", flush=True)
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}")


def _installation(name):
    """The first cell: the backend that a guide begins with, and what else it needs."""
    text = "\n".join(source for kind, source in guides.cells(name) if kind == "code")
    backend = re.search(r'"KERAS_BACKEND"(?:\] =|,) "(\w+)"', text)
    extras = [backend[1]] if backend else ["tensorflow", "jax", "torch"]
    extras += ["datasets", "viz", *EXTRAS.get(name, [])]
    own = re.search(r"^\s*from (experiments|tests)\b", text, flags=re.MULTILINE)
    cell = FROM_CHECKOUT if own else INSTALL
    return cell.format(extras=",".join(extras)).strip()


def _outputs(record):
    if record is None:
        return []
    text, figures = record["output"], record["figures"]
    shown = [v4.new_output("stream", name="stdout", text=text + "\n")] if text else []
    return shown + [
        v4.new_output("display_data", data={"image/png": figure}) for figure in figures
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
