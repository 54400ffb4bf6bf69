"""Programs in processes of their own, which need not import the libraries first.

They are forked from one process that has imported them and has computed nothing.
Importing takes longer than most of the programs.
"""

import multiprocessing
import os
import pathlib
import runpy
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["keras_softmoe", "keras_softmoe.models", "matplotlib.pyplot", "tensorflow"]
)


class Program:
    """A program that runs, on the backend of this process.

    Args:
        program: path of a file, or str, the name of a module.
        *arguments: what it finds in `sys.argv`, as strings.
        folder: path, its working directory.
        environment: dict of str, variables to set. Not those that are read when the
            libraries are imported.
        strict: bool, whether warnings to users are errors.
    """

    def __init__(
        self, program, *arguments, folder=ROOT, environment=None, strict=False
    ):
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._output = pathlib.Path(file.name)
        call = (program, list(map(str, arguments)), folder, environment or {}, strict)
        self._process = FORKS.Process(target=_run, args=(self._output, *call))
        self._process.start()

    def wait(self):
        """The exit code (negative: the signal that ended it) and all output, a str."""
        self._process.join()
        output = self._output.read_text(encoding="utf-8")
        self._output.unlink()
        return self._process.exitcode, output


def _run(output, program, arguments, folder, environment, strict):
    file = os.open(output, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.chdir(folder)
    os.environ.update(environment)
    if strict:
        warnings.simplefilter("error", UserWarning)
        # The one of Keras that `pyproject.toml` lets pass, too
        keras_int64 = "Explicitly requested dtype int64 requested in ShapeDtypeStruct"
        warnings.filterwarnings("ignore", keras_int64, UserWarning)
    sys.argv[1:] = arguments
    if isinstance(program, str):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(program), run_name="__main__")
