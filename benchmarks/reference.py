"""Time of our layers beside those of the papers' own code, which JAX alone can meet.

The released code (https://github.com/google-research/vmoe) need not run on the JAX that
ours runs on, so each of its layers has a process of its own, which waits while ours
runs. Make an environment for it with `jax flax clu ml_collections`, check out that
repository and https://github.com/google-research/vision_transformer, and say where
they are:

    export REFERENCE_PYTHON=reference/bin/python
    export REFERENCE_PATH=vmoe:vision_transformer
    KERAS_BACKEND=jax python benchmarks/run.py --shapes paper --sections reference

Without `REFERENCE_PYTHON` the released code runs in this process, if its packages are
installed here: on an accelerator a call takes less than a message to another process.
Without these variables the section stays empty.
"""

import contextlib
import gc
import json
import os
import pathlib
import subprocess
import sys

import keras
import layers
import report
from timing import row_of_pass, step

NAME = "vmoe"
WORKER = pathlib.Path(__file__).with_name("reference_worker.py")

DIFFERENCE = (
    "`MlpMoeBlock` of the papers' own code, with the JAX that is named with it. Its "
    "soft router multiplies in bfloat16 where tokens go to slots and come back. Of "
    "token choice it has two ways to the experts: one-hot weights (einsum) and indices."
)

# As `MlpMoeBlock` takes them: the routers of `layers.ROUTERS`.
_SOFT = "vmoe.projects.soft_moe.router.SoftRouter"
_TOKENS = {
    "name": "NoisyTopExpertsPerItemRouter",
    "num_selected_experts": 1,
    "noise_std": 1.0,
}
_PRIORITY = {"capacity_factor": 1.05, "batch_priority": True}
_EXPERTS = {"name": "NoisyTopItemsPerExpertRouter", "noise_std": 0.0}
# By layer and by the name that a rival has in the results.
RIVALS = {
    "soft_128x1": {NAME: (128, {"name": _SOFT, "num_slots": 1})},
    "soft_32x6": {NAME: (32, {"name": _SOFT, "num_slots": 6})},
    "token_choice": {
        f"{NAME}, {dispatcher}": (
            32,
            {**_TOKENS, "dispatcher": {"name": dispatcher, **_PRIORITY}},
        )
        for dispatcher in ("einsum", "indices")
    },
    "expert_choice": {
        NAME: (
            32,
            {**_EXPERTS, "dispatcher": {"name": "einsum", "capacity_factor": 1.0}},
        )
    },
}


def _python():
    """The Python with the released code, `None` for this one."""
    return os.environ.get("REFERENCE_PYTHON")


def _path():
    """Where the released code is, `None` where there is none."""
    return os.environ.get("REFERENCE_PATH")


class Worker:
    """A layer of the released code in a process of its own; a call is a run.

    Args:
        **arguments: what `reference_worker.layer_step` takes.
    """

    def __init__(self, **arguments):
        self.process = subprocess.Popen(
            [_python(), str(WORKER), json.dumps(arguments)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def __call__(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self):
        if not self.process.stdout.readline():
            self.close()
            raise RuntimeError(
                "The process with the released code has ended; what it printed stands "
                "above. It needs the packages and checkouts that the docstring of "
                "`benchmarks/reference.py` names. Received: "
                f"REFERENCE_PYTHON={_python()!r}, REFERENCE_PATH={_path()!r}."
            )

    def close(self):
        self.process.communicate()


def is_there():
    """Whether there is released code to be met, on the one backend that it has."""
    return bool(_path()) and keras.backend.backend() == "jax"


def described():
    """As `rivals.described`, empty where there is no released code."""
    if not is_there():
        return {}
    program = (
        "import jax, flax; print(jax.__version__, flax.__version__, sep=', flax ')"
    )
    command = [_python() or sys.executable, "-c", program]
    versions = subprocess.check_output(command, env=_environment(), text=True).strip()
    return {NAME: {"version": f"(jax {versions})", "differs": DIFFERENCE}}


def _environment():
    return {**os.environ, "PYTHONPATH": _path() or "", "PYTHONWARNINGS": "ignore"}


def _worker_here(**arguments):
    """The same in this process."""
    sys.path.extend(p for p in _path().split(os.pathsep) if p not in sys.path)
    from reference_worker import layer_step

    return layer_step(**arguments)


def _steps(stack, name, shapes, backward):
    """Calls of the released layers that a layer of ours meets, by rival."""
    steps = {}
    for rival in RIVALS[name]:
        arguments = _arguments(rival, name, shapes, backward)
        if _python():
            worker = Worker(**arguments)
            steps[rival] = stack.enter_context(contextlib.closing(worker))
        else:
            steps[rival] = _worker_here(**arguments)
    return steps


def _arguments(rival, name, shapes, backward):
    num_experts, router = RIVALS[name][rival]
    soft = router["name"] == _SOFT
    return {
        **shapes._asdict(),
        "backward": backward,
        "num_experts": num_experts,
        "group_size": shapes.tokens * (1 if soft else layers.GROUP_IMAGES),
        "router": router,
    }


def measure_all(options):
    """Rows of all contests."""
    shapes, patience = layers.SHAPES[options.shapes], report.patience(options)
    for name in RIVALS if is_there() else ():
        ours = layers.moe_layer(layers.ROUTERS[name](), shapes, "auto")
        for backward in (False, True):
            with contextlib.ExitStack() as stack:
                steps = {"layer": step(ours, layers.inputs_of(shapes), backward)}
                steps |= _steps(stack, name, shapes, backward)
                yield row_of_pass(name, steps, backward, patience)
        # The experts of the next layer need the room.
        del ours
        gc.collect()
