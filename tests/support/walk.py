"""Walks: the functions of the library that a call passes, as a profiler sees them."""

import dataclasses
import pathlib
import sys

PACKAGE = pathlib.Path(__file__).parents[2] / "keras_softmoe"


@dataclasses.dataclass(frozen=True)
class Walk:
    """Functions in the order of their first calls, and the number of all calls.

    Comprehensions, lambdas and module bodies are left out.
    """

    functions: tuple
    num_calls: int

    @property
    def num_returns(self):
        """How often a first call goes back to a file that was left before."""
        files = [file for file, _ in self.functions]
        entered = [f for i, f in enumerate(files) if i == 0 or files[i - 1] != f]
        return len(entered) - len(set(files))

    def __str__(self):
        lines = [f"{file}: {name}" for file, name in self.functions]
        return "\n".join(
            [f"{len(lines)} functions, {self.num_returns} returns", *lines]
        )


def walk(function, *args, **kwargs):
    """Call a function and return its `Walk`."""
    found, num_calls, package = {}, 0, str(PACKAGE)

    def profile(frame, event, _):
        nonlocal num_calls
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(package) and code.co_name[0] != "<":
            file = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
            num_calls += 1
            found.setdefault((file, code.co_qualname), None)

    sys.setprofile(profile)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return Walk(tuple(found), num_calls)
