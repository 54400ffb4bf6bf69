"""What a program found on eight virtual devices, for all tests that judge it."""

import json
import os
import pathlib
import tempfile

import pytest

from tests.skips import BACKEND, only_on
from tests.support.processes import Program

# Compiling takes longer than what is compiled. The Makefile knows one flag more, which
# some releases of JAX refuse.
QUICK = os.environ.get(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
)

jax_only = only_on("jax", because="distribution")


def start(program, *arguments, flags=""):
    """Start a program of `tests/support` in a process of its own."""
    return Program(
        f"tests.support.{program}",
        *arguments,
        environment={"XLA_FLAGS": f"{QUICK} {flags}"},
        strict=True,
    )


# Compiling for eight devices is long: these in every suite, the others in the long one.
EVERYDAY = (
    "training states expert_bytes presets own_model outside accepted refused "
    "split_groups"
).split()
LONG = (
    "compiled_steps pairs adafactor adapters dense_part experts_of_any_layer "
    "built_by_data"
).split()

FOUND = pytest.StashKey()


class Checks:
    """Checks of `eight_devices`, in a process beside the tests that come before theirs.

    Args:
        names: list of str.
    """

    def __init__(self, names):
        self._folder = tempfile.TemporaryDirectory()
        compiled = pathlib.Path(self._folder.name, "compiled")
        flags = (
            f"--xla_force_host_platform_device_count=8 --xla_dump_to={compiled} "
            "--xla_dump_hlo_module_re=.*train_step.*"
        )
        arguments = (self._folder.name, compiled, *names)
        self._program = start("eight_devices", *arguments, flags=flags)

    def found(self):
        """Dict from the name of each check to what it found."""
        code, output = self._program.wait()
        assert code == 0, output
        file = pathlib.Path(self._folder.name, "results.json")
        return json.loads(file.read_text(encoding="utf-8"))


def pytest_collection_finish(session):
    """Begin the checks that the selected tests need."""
    used = {name for item in session.items for name in item.fixturenames}
    names = [*EVERYDAY * ("found" in used), *LONG * ("found_more" in used)]
    if names and BACKEND == "jax" and not session.config.option.collectonly:
        session.config.stash[FOUND] = Checks(names)


@pytest.fixture(scope="session")
def all_found(pytestconfig):
    return pytestconfig.stash[FOUND].found()


@pytest.fixture
def found(all_found):
    """Dict with what each check of `EVERYDAY` found."""
    return all_found


@pytest.fixture
def found_more(all_found):
    """Dict with what each check of `LONG` found; tests of them are in `skips.LONG`."""
    return all_found
