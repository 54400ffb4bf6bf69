"""What a guide's own process does."""

import os
import runpy
import sys


def run(guide, folder, output):
    """Run a guide as `python guide` does, in a folder and with all output to a file.

    Args:
        guide: path of the guide.
        folder: path, the working directory.
        output: path of the file that gets what the guide prints.
    """
    os.chdir(folder)
    os.environ["KSM_GUIDE_SHORT"] = "1"
    os.environ["MPLBACKEND"] = "agg"
    # Few steps: to compile fast is worth more than to run fast.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    sys.argv = [str(guide)]
    sys.path.insert(0, str(guide.parent))
    runpy.run_path(str(guide), run_name="__main__")
