"""Two processes of PyTorch share the experts of models, as one process trains them.

From Keras 3.16 on, see the file `skips.py`.
"""

import json
import re
import socket

import numpy as np
import pytest

from tests.support import tiny_distributed as tiny
from tests.support.close import assert_near
from tests.support.processes import Program


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one process found, then each of two."""
    results = tmp_path_factory.mktemp("torch")
    for count in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        programs = [
            Program(
                "tests.support.two_torch_processes",
                *(results, port, count, index),
                strict=True,
            )
            for index in range(count)
        ]
        codes, outputs = zip(*(program.wait() for program in programs), strict=True)
        assert not any(codes), "\n".join(outputs)
    return [
        json.loads((results / f"results_{name}.json").read_text(encoding="utf-8"))
        for name in ("0_of_1", "0_of_2", "1_of_2")
    ]


@pytest.mark.parametrize("kind", tiny.ROUTERS)
@pytest.mark.parametrize("told", ["losses", "evaluated", "predictions"])
def test_a_router_trains_as_in_one_process(kind, told, found):
    alone, *shared = (each["training"][kind][told] for each in found)
    for each in shared:
        assert_near(each, alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["arrays", "other_layers"])
def test_arrays_and_other_experts(name, found):
    alone, *shared = (each[name] for each in found)
    for each in shared:
        np.testing.assert_allclose(each, alone, rtol=2e-6)


def test_backups_and_presets(found):
    for told in (each["files"] for each in found):
        # Of two epochs the second was interrupted.
        np.testing.assert_allclose(told["resumed"], told["expected"][1:], rtol=2e-6)
        assert told["loaded"] == 0.0


def test_a_process_holds_half_of_the_experts(found):
    for held in (each["placement"]["held"] for each in found[1:]):
        experts = {path: part for path, part in held.items() if part[2]}
        # Kernels and biases of two banks, and two moments of each
        assert len(experts) == 12
        for shape, of_process, _ in experts.values():
            assert [2 * of_process[0], *of_process[1:]] == shape
        assert all(part[0] == part[1] for p, part in held.items() if p not in experts)


@pytest.mark.parametrize(
    "name, words",
    [
        ("mesh", "on JAX only.*mesh_shape="),
        ("devices", r"Accepted: \['cpu:0', 'cpu:1'\].*Received: devices=\['cpu:0'\]"),
        ("experts", "Received: num_experts=3"),
        ("seeds", "set_random_seed"),
        ("replicas", "DistributedDataParallel"),
        ("generator", r"Received: x=generator.*auto_shard_dataset=False"),
        # This one is of Keras.
        ("own model", r"tf\.data\.Dataset.*auto_shard_dataset = False"),
    ],
)
def test_what_is_refused(name, words, found):
    for told in found[1:]:
        assert re.search(words, told["placement"]["errors"][name])
