"""What a program found on eight virtual devices, for all tests that judge it."""

import json

import pytest

from tests.skips import only_on
from tests.support.processes import Program

# Compiling takes longer than what is compiled.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
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


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """Dict with what each check of `eight_devices` found."""
    results = tmp_path_factory.mktemp("eight_devices")
    compiled = results / "compiled"
    flags = (
        f"--xla_force_host_platform_device_count=8 --xla_dump_to={compiled} "
        "--xla_dump_hlo_module_re=.*train_step.*"
    )
    code, output = start("eight_devices", results, compiled, flags=flags).wait()
    assert code == 0, output
    return json.loads((results / "results.json").read_text(encoding="utf-8"))
