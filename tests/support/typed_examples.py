"""Writes the examples of all public names as one module, for a type checker.

python -m tests.support.typed_examples build/examples.py
"""

import doctest
import pathlib
import sys
import textwrap

import keras_softmoe as ksm
from tests.support import docstrings

HEAD = """\"\"\"Examples of the public names: written by typed_examples.py.\"\"\"

import keras
import numpy as np

import keras_softmoe as ksm

"""


def source():
    """A function for each public name, in which its module's set-up comes first."""
    parse = doctest.DocTestParser().get_examples
    set_ups = {
        module: parse(getattr(ksm, module).__doc__) for module in docstrings.MODULES
    }
    functions = []
    for name, texts in docstrings.examples().items():
        code = set_ups[name.split(".")[0]] + [
            example for text in texts.values() for example in parse(text)
        ]
        body = textwrap.indent("".join(example.source for example in code), "    ")
        functions.append(f"def {name.replace('.', '_')}():\n{body}")
    return HEAD + "\n\n".join(functions)


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(source(), encoding="utf-8")
