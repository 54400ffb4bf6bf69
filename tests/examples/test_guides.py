"""Every guide, and the demo, runs from its first line to its last.

Each guide runs on one backend, mostly PyTorch, which compiles nothing: what it calls is
tested on all three, and a guide costs as much as dozens of those tests.
"""

import os
import pathlib
import re

import keras
import pytest

from tests.support.processes import Program

GUIDES = pathlib.Path(__file__).parents[2] / "guides"
BACKEND = keras.backend.backend()


def run(guide, folder):
    """What the short run of a guide prints on the suite's backend."""
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        "KSM_GUIDE_SHORT": "1",
        "MPLBACKEND": "agg",
        # Few steps: to compile fast is worth more than to run fast.
        "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
    }
    program = Program(GUIDES / guide, folder=folder, environment=environment)
    code, output = program.wait()
    assert code == 0, output
    return output


# Guide -> what it prints, and where it runs.
PRINTED = {
    "adapting.py": ("LoRA, then int8", "torch"),
    "back_to_dense.py": ("distilled from random weights: accuracy", "torch"),
    "data_parallel.py": ("largest difference of 4 losses:", "tensorflow torch"),
    "demo.py": ("Done in", "jax"),
    "experts_in_any_model.py": ("experts in 2 of 4 MLPs (blocks 1, 3).", "torch"),
    "exporting.py": ("refused: Random routing cannot be exported", "torch"),
    "few_shot_probing.py": ("token choice against raw pixels at 2 shots:", "torch"),
    "fit_on_a_small_dataset.py": ("a network with SoftMoE: accuracy", "torch"),
    "inside_soft_moe.py": ("report: build/soft_report.html", "torch"),
    "limoe_routing.py": ("block 3: 4 experts hold", "torch"),
    "limoe_zero_shot.py": ("names of new concepts:", "torch"),
    "placing_experts.py": ("refused:", "jax"),
    "real_weights.py": ("activation: gelu, epsilon: 1e-06", "torch"),
    "released_vmoe_checkpoints.py": ("fine-tuned: loss", "torch"),
    "segmentation.py": ("V-MoE: mean IoU", "torch"),
    "switching_backends.py": ("same class for 100% of the images", "torch"),
    "upcycling.py": ("from ViT to V-MoE: logits change by up to", "torch"),
    "vmoe_at_low_capacity.py": ("MFLOP per image", "torch"),
}
PICTURES = {
    "demo.py": 2,
    "inside_soft_moe.py": 9,
    "limoe_routing.py": 9,
    "segmentation.py": 1,
    "vmoe_at_low_capacity.py": 3,
}
HERE = [guide for guide, (_, backends) in PRINTED.items() if BACKEND in backends]


def test_every_guide_runs_somewhere():
    assert {path.name for path in GUIDES.glob("*.py")} == set(PRINTED)


def check(guide, folder):
    printed = run(guide, folder)
    assert PRINTED[guide][0] in printed
    # Between what is the same by another way: a file, a backend, fewer layers
    for error in re.findall(r"largest difference[^:\n]*: ([-+\d.e]+)", printed):
        assert float(error) < 1e-3, printed
    pictures = list((folder / "build").glob("*.png"))
    assert len(pictures) >= PICTURES.get(guide, 0)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


@pytest.mark.parametrize("guide", [guide for guide in HERE if guide != "demo.py"])
def test_guide(guide, tmp_path):
    check(guide, tmp_path)


if BACKEND == "jax":

    def test_demo(tmp_path):
        """The main job."""
        check("demo.py", tmp_path)
