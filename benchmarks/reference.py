"""Time of our layers beside those of the papers' own code, which JAX alone can meet.

The released code (https://github.com/google-research/vmoe) need not run on the JAX that
ours runs on, so each of its layers has a process of its own, which waits while ours
runs. Make an environment for it with `jax flax clu ml_collections`, check out that
repository and https://github.com/google-research/vision_transformer, and say where
they are:

    export REFERENCE_PYTHON=reference/bin/python
    export REFERENCE_PATH=vmoe:vision_transformer
    KERAS_BACKEND=jax python benchmarks/reference.py --shapes paper

With these variables `run.py`, and so `make bench`, measures them too.
"""

import contextlib
import gc
import json
import os
import pathlib
import subprocess

import keras
import layers
import report
from timing import row_of_pass, step

NAME = "vmoe"
WORKER = pathlib.Path(__file__).with_name("reference_worker.py")

DIFFERENCE = (
    "`MlpMoeBlock` of the papers' own code, in a process of its own with the JAX that "
    "it needs. Its soft router multiplies in bfloat16 where tokens go to slots and "
    "come back. Of token choice it has two ways to the experts: one-hot weights "
    "(einsum) and indices."
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


class Worker:
    """A layer of the released code in a process of its own; a call is a run.

    Args:
        **arguments: what `reference_worker.layer_step` takes.
    """

    def __init__(self, **arguments):
        self.process = subprocess.Popen(
            [os.environ["REFERENCE_PYTHON"], str(WORKER), json.dumps(arguments)],
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
                f"`benchmarks/reference.py` names. Received: REFERENCE_PYTHON="
                f"{os.environ['REFERENCE_PYTHON']!r}, REFERENCE_PATH="
                f"{os.environ.get('REFERENCE_PATH')!r}."
            )

    def close(self):
        self.process.communicate()


def is_there():
    """Whether there is released code to be met, on the one backend that it has."""
    has_python = bool(os.environ.get("REFERENCE_PYTHON"))
    return has_python and keras.backend.backend() == "jax"


def described():
    """As `rivals.described`, empty where there is no released code."""
    if not is_there():
        return {}
    program = (
        "import jax, flax; print(jax.__version__, flax.__version__, sep=', flax ')"
    )
    command = [os.environ["REFERENCE_PYTHON"], "-c", program]
    versions = subprocess.check_output(command, env=_environment(), text=True).strip()
    return {NAME: {"version": f"(jax {versions})", "differs": DIFFERENCE}}


def _environment():
    path = os.environ.get("REFERENCE_PATH", "")
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def _worker(rival, name, shapes, backward):
    num_experts, router = RIVALS[name][rival]
    soft = router["name"] == _SOFT
    return Worker(
        images=shapes.images,
        tokens=shapes.tokens,
        width=shapes.width,
        backward=backward,
        mlp_dim=shapes.mlp_dim,
        num_experts=num_experts,
        group_size=shapes.tokens * (1 if soft else layers.GROUP_IMAGES),
        router=router,
    )


def measure_all(options):
    """Rows of all contests, for `report.run_alone`."""
    shapes, patience = layers.SHAPES[options.shapes], report.patience(options)
    for name, rivals in RIVALS.items() if is_there() else ():
        ours = layers.moe_layer(layers.ROUTERS[name](), shapes, "auto")
        for backward in (False, True):
            with contextlib.ExitStack() as stack:
                steps = {"layer": step(ours, layers.inputs_of(shapes), backward)}
                for rival in rivals:
                    worker = _worker(rival, name, shapes, backward)
                    steps[rival] = stack.enter_context(contextlib.closing(worker))
                yield row_of_pass(name, steps, backward, patience)
        # The experts of the next layer need the room.
        del ours
        gc.collect()


def main(arguments=None):
    """Command line: see `--help`."""
    parser = report.command_line(__doc__, layers.SHAPES)
    options = parser.parse_args(arguments)
    if not is_there():
        parser.error(
            "set REFERENCE_PYTHON, and KERAS_BACKEND to jax: see the docstring of "
            "benchmarks/reference.py."
        )
    report.run_alone("reference", options, measure_all)


if __name__ == "__main__":
    main()
