"""The Python code on the pages of the documentation.

The blocks of a page share their names, from the first to the last. Comments that a
reader does not see tell the exceptions:

    <!-- not run: needs 64 GB -->          the next block is not executed
    <!-- set-up: x = np.zeros((2, 16, 32)) -->   executed before the next block; may
                                                 have several lines
    <!-- backend: jax -->                  the backend of the whole page
"""

import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
_PARTS = re.compile(
    r"<!-- not run: (?P<reason>.*?) -->"
    r"|<!-- set-up:(?P<set_up>.*?)-->"
    r"|^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_BACKEND = re.compile(r"<!-- backend: (\w+) -->")


def pages():
    """Dict from the path of each page that has Python code to its text."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return {name: text for name, text in texts.items() if "```python" in text}


def backend_of(text):
    """Backend that a page asks for, or `None`."""
    match = _BACKEND.search(text)
    return match and match[1]


def blocks(text):
    """Lists of the code to run, padded to its lines on the page, and of reasons why
    other blocks are not run.
    """
    code, reasons, reason = [], [], None
    for part in _PARTS.finditer(text):
        if part["reason"]:
            reason = part["reason"]
        elif part["set_up"]:
            code.append(textwrap.dedent(part["set_up"]).strip())
        elif reason:
            reasons.append(reason)
            reason = None
        else:
            line = text.count("\n", 0, part.start("code"))
            code.append("\n" * line + textwrap.dedent(part["code"]))
    return code, reasons
