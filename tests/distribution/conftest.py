"""What a program found on eight virtual devices, for all tests that judge it."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

# Compiling takes longer than what is compiled.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)

jax_only = pytest.mark.skipif(
    keras.backend.backend() != "jax",
    reason="Keras distributes models on JAX only; test_backends tests what others say",
)


def start(program, *arguments, flags=""):
    """Start a program of this directory in a process of its own."""
    environment = {**os.environ, "XLA_FLAGS": f"{QUICK} {flags}"}
    command = [sys.executable, "-W", "error::UserWarning"]
    command += ["-m", f"tests.distribution.{program}", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
    process = start("eight_devices", results, compiled, flags=flags)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return json.loads((results / "results.json").read_text(encoding="utf-8"))
