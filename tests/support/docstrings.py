"""The examples in docstrings, in the order in which the reference shows them.

An example goes on from those above it on its page: that of a method from its class's,
that of a class or function from what the docstring of its module sets up.

python -m tests.support.docstrings build/examples.py   all of them as one module, for
                                                       a type checker
"""

import doctest
import inspect
import pathlib
import re
import sys
import textwrap

import keras
import numpy as np

import keras_softmoe as ksm

MODULES = [name for name in ksm.__all__ if name != "__version__"]
AT_HAND = {"ksm": ksm, "np": np, "keras": keras}


def public_names():
    """Dict from `module.name` to each public class and function."""
    names = {}
    for module in MODULES:
        for name, value in inspect.getmembers(getattr(ksm, module)):
            is_ours = getattr(value, "__module__", "").startswith("keras_softmoe")
            if not name.startswith("_") and is_ours and callable(value):
                names[f"{module}.{name}"] = value
    return names


def examples():
    """Dict from each public name to the docstrings with examples that belong to it.

    Those of a class's public methods come after its own. What several classes inherit
    belongs to the first of them.
    """
    taken = set()
    found = {}
    for name, value in public_names().items():
        texts = {name: value.__doc__}
        if inspect.isclass(value):
            texts.update(_docstrings_of_methods(value))
        found[name] = {
            part: text
            for part, text in texts.items()
            if text and ">>>" in text and text not in taken
        }
        taken.update(found[name].values())
    return found


def _docstrings_of_methods(cls):
    ours = [base for base in cls.__mro__ if base.__module__.startswith("keras_softmoe")]
    names = dict.fromkeys(name for base in ours for name in vars(base))
    found = {}
    for name in names:
        if not name.startswith("_"):
            method = inspect.getattr_static(cls, name)
            method = getattr(method, "__func__", getattr(method, "fget", method))
            if inspect.isfunction(method):
                found[name] = method.__doc__
    return found


class _Checker(doctest.OutputChecker):
    """What an example states, it gives; one that states nothing is only executed.

    Stated are the shapes of JAX, which are tuples.
    """

    def check_output(self, want, got, optionflags):
        got = re.sub(r"(?:torch\.Size|TensorShape)\(\[(.*?)\]\)", _as_tuple, got)
        return not want or super().check_output(want, got, optionflags)


def _as_tuple(match):
    comma = "," if match[1] and "," not in match[1] else ""
    return f"({match[1]}{comma})"


def execute(name, text, namespace):
    """Run the example of a docstring in a namespace, and fail as it does."""
    example = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    example.globs = namespace
    report = []
    runner = doctest.DocTestRunner(
        _Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    result = runner.run(example, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)
    return result.attempted


HEAD = """\"\"\"Examples of the public names: written by docstrings.py.\"\"\"

import keras
import numpy as np

import keras_softmoe as ksm

"""


def source():
    """A function for each public name, in which its module's set-up comes first."""
    parse = doctest.DocTestParser().get_examples
    set_ups = {module: parse(getattr(ksm, module).__doc__) for module in MODULES}
    functions = []
    for name, texts in examples().items():
        code = set_ups[name.split(".")[0]] + [
            example for text in texts.values() for example in parse(text)
        ]
        body = textwrap.indent("".join(example.source for example in code), "    ")
        functions.append(f"def {name.replace('.', '_')}():\n{body}")
    return HEAD + "\n\n".join(functions)


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(source(), encoding="utf-8")
