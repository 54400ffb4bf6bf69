"""Every guide, and the demo, runs from its first line to its last."""

import os
import pathlib
import subprocess
import sys

import keras

GUIDES = pathlib.Path(__file__).parents[2] / "guides"

# What the short run of each prints when its work is done.
LAST_WORDS = {
    "demo.py": "Done in",
    "few_shot_probing.py": "expert choice against raw pixels at 2 shots:",
    "fit_on_a_small_dataset.py": "a network with SoftMoE: accuracy",
    "released_vmoe_checkpoints.py": "fine-tuned: loss",
    "switching_backends.py": "torch against jax: largest difference of a logit",
    "upcycling.py": "from ViT to V-MoE: logits change by up to",
}


def run(guide, folder):
    """Standard output of the short run of a guide on the suite's backend."""
    result = subprocess.run(
        [sys.executable, GUIDES / guide],
        cwd=folder,
        env={
            **os.environ,
            "KERAS_BACKEND": keras.backend.backend(),
            "KSM_GUIDE_SHORT": "1",
            "MPLBACKEND": "agg",
            # Few steps: to compile fast is worth more than to run fast.
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
            "--xla_backend_optimization_level=0",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_guide_is_run():
    assert {path.name for path in GUIDES.glob("*.py")} == set(LAST_WORDS)


def test_demo(tmp_path):
    lines = run("demo.py", tmp_path).splitlines()
    assert LAST_WORDS["demo.py"] in lines[-1]
    picture = tmp_path / "build" / f"routing_{keras.backend.backend()}.png"
    assert any(str(picture) in line for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_few_shot_probing(tmp_path):
    lines = run("few_shot_probing.py", tmp_path).splitlines()
    assert LAST_WORDS["few_shot_probing.py"] in lines[-1]


def test_fit_on_a_small_dataset(tmp_path):
    lines = run("fit_on_a_small_dataset.py", tmp_path).splitlines()
    assert LAST_WORDS["fit_on_a_small_dataset.py"] in lines[-1]
    assert any(line.startswith("one more epoch, mixed by KerasCV") for line in lines)
    (loaded,) = (line for line in lines if line.startswith("largest difference"))
    assert float(loaded.split(":")[1]) < 1e-5


def test_switching_backends(tmp_path):
    lines = run("switching_backends.py", tmp_path).splitlines()
    assert LAST_WORDS["switching_backends.py"] in lines[-1]
    compared = [line for line in lines if "largest difference of a logit" in line]
    assert len(compared) == 2
    for line in compared:
        assert float(line.split("logit ")[1].split(",")[0]) < 1e-4
        assert line.endswith("same class for 100% of the images")


def test_released_vmoe_checkpoints(tmp_path):
    lines = run("released_vmoe_checkpoints.py", tmp_path).splitlines()
    assert LAST_WORDS["released_vmoe_checkpoints.py"] in lines[-1]
    assert sum("gs://vmoe_checkpoints/" in line for line in lines) == 5
    assert sum(line.startswith("refused:") for line in lines) == 1
    (loaded,) = (line for line in lines if line.startswith("largest difference"))
    assert float(loaded.split(":")[1]) < 1e-5


def test_upcycling(tmp_path):
    lines = run("upcycling.py", tmp_path).splitlines()
    assert LAST_WORDS["upcycling.py"] in lines[-1]
    (kept,) = (line for line in lines if line.startswith("largest difference"))
    assert float(kept.split(":")[1]) < 1e-4
    changes = {
        line.split(":")[0]: float(line.split()[-1])
        for line in lines
        if "logits change by up to" in line
    }
    same = {"identity", "token choice, all experts", "from ViT to V-MoE"}
    assert same < set(changes) and len(changes) == 6
    for name, change in changes.items():
        assert change < 1e-4 if name in same else change > 1e-2, name
