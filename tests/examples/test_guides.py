"""Every guide, and the demo, runs from its first line to its last.

Each guide runs on one backend, mostly PyTorch, which compiles nothing: what it calls is
tested on all three, and a guide costs as much as dozens of those tests. The demo, the
main job, runs on each.
"""

import os
import pathlib

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


def check_demo(lines, folder):
    assert "Done in" in lines[-1]
    picture = folder / "build" / f"routing_{BACKEND}.png"
    assert any(str(picture) in line for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")


def check_exporting(lines, folder):
    assert lines[-1].startswith("refused: Random routing cannot be exported")
    (measured,) = (line for line in lines if line.startswith("onnx "))
    assert float(measured.split()[-1]) < 1e-4


def check_adapting(lines, folder):
    (merged,) = (line for line in lines if line.startswith("largest difference"))
    assert "merging 24 layers" in merged and float(merged.split()[-1]) < 1e-3
    sizes = [float(x.split()[-2]) for x in lines if x.startswith("weights in")]
    assert sizes[0] > 3 * sizes[1] > 4 * sizes[2]
    assert [line[:20].strip() for line in lines[-5:]] == [
        "frozen probe",
        "LoRA, rank 4",
        "full fine-tuning",
        "LoRA, then int8",
        "LoRA, then int4",
    ]
    trained = [int(line.split()[-2].replace(",", "")) for line in lines[-5:]]
    assert 100 * trained[0] < 10 * trained[1] + 1 < trained[2] and trained[4] == 0


def check_few_shot_probing(lines, folder):
    assert "expert choice against raw pixels at 2 shots:" in lines[-1]


def check_fit_on_a_small_dataset(lines, folder):
    assert "a network with SoftMoE: accuracy" in lines[-1]
    assert any(line.startswith("one more epoch, mixed by KerasCV") for line in lines)
    (loaded,) = (line for line in lines if line.startswith("largest difference"))
    assert float(loaded.split(":")[1]) < 1e-5


def check_switching_backends(lines, folder):
    assert "torch against jax: largest difference of a logit" in lines[-1]
    compared = [line for line in lines if "largest difference of a logit" in line]
    assert len(compared) == 2
    for line in compared:
        assert float(line.split("logit ")[1].split(",")[0]) < 1e-4
        assert line.endswith("same class for 100% of the images")


def check_released_vmoe_checkpoints(lines, folder):
    assert "fine-tuned: loss" in lines[-1]
    assert sum("gs://vmoe_checkpoints/" in line for line in lines) == 5
    assert sum(line.startswith("refused:") for line in lines) == 1
    (loaded,) = (line for line in lines if line.startswith("largest difference"))
    assert float(loaded.split(":")[1]) < 1e-5


def check_real_weights(lines, folder):
    changes = {
        line.split(":")[0]: float(line.split()[-1])
        for line in lines
        if "by up to" in line
    }
    assert changes["KerasHub and ours"] < 1e-4 and changes["V-MoE"] < 1e-4
    assert changes["Soft MoE"] > 1e-3
    assert "activation: gelu, epsilon: 1e-06" in lines
    assert "at 48 x 48: 6 x 6 patches" in lines
    names = [line.split(":")[0] for line in lines if ": accuracy " in line]
    assert names == ["dense", "V-MoE", "Soft MoE"]


def check_upcycling(lines, folder):
    assert "from ViT to V-MoE: logits change by up to" in lines[-1]
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
    new, clusters, positions = (
        float(line.split()[-3]) for line in lines if line.startswith("soft, ")
    )
    assert max(clusters, positions) < new


def check_vmoe_at_low_capacity(lines, folder):
    assert lines[-1].startswith("priority") and "MFLOP per image" in lines[-1]
    for name in ("accuracy_against_capacity", "discarded_patches", "pareto_front"):
        picture = folder / "build" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def check_limoe_zero_shot(lines, folder):
    assert float(lines[-1].split(":")[1]) < 1e-5
    assert sum("recall@1 " in line for line in lines) == 2
    (of_64,) = (line for line in lines if line.startswith("new combinations, of 64"))
    # Of few scenes; chance is one in 64.
    assert float(of_64.split()[5]) > 4 / 64


def check_limoe_routing(lines, folder):
    assert lines[-1].startswith("block 3: 4 experts hold")
    pictures = list((folder / "build").glob("limoe_*.png"))
    assert len(pictures) == 9
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    # Nothing is lost where nothing is pruned.
    accuracies = [line.split("accuracy ")[1] for line in lines if "accuracy" in line]
    assert len(accuracies) == 5 and accuracies[0] == accuracies[3] == accuracies[4]


def check_inside_soft_moe(lines, folder):
    assert lines[-1].startswith("report: build/soft_report.html")
    pictures = list((folder / "build").glob("soft_*.png"))
    assert len(pictures) == 9
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    report = (folder / "build" / "soft_report.html").read_text(encoding="utf-8")
    assert report.count("<img ") == 13
    # Slots of one expert are aligned, those of different ones are not.
    cosines = [line for line in lines if "mean cosine within experts" in line]
    assert len(cosines) == 3
    for line in cosines:
        within, between = (float(part.split()[-1]) for part in line.split(","))
        assert within > 0.3 > 0.2 > between
    assert sum("largest dispatch weight" in line for line in lines) == 6


def check_placing_experts(lines, folder):
    assert sum(line.startswith("128 devices of 80 GB") for line in lines) == 4
    needed = [line for line in lines if " GB moved in a step" in line]
    assert [line.split(":")[0] for line in needed] == ["13 B", "27 B", "54 B", "15 B"]
    (weights,) = (line for line in lines if line.startswith("weights on a device"))
    assert len({word for word in weights.split() if word[0].isdigit()}) == 1
    (refused,) = (line for line in lines if line.startswith("refused:"))
    assert "block_1/moe/expert/output_dense/kernel" in refused
    # A kernel and its two moments, two of 16 experts on each of eight devices
    pieces = [line for line in lines if line.endswith("8 pieces of (2, 96, 48)")]
    assert len(pieces) == 3
    elsewhere = [line for line in lines if "largest difference of a logit" in line]
    assert elsewhere[-1] == lines[-1] and len(elsewhere) == 2
    assert all(float(line.split()[-1]) < 1e-5 for line in elsewhere)


def check_data_parallel(lines, folder):
    assert lines[-1].startswith("largest difference of 4 losses:")
    assert float(lines[-1].split()[-1]) < 1e-5


def check_experts_in_any_model(lines, folder):
    changes = [float(line.split()[-1]) for line in lines if "difference" in line]
    # Experts, two files, a model of one's own
    assert len(changes) == 4 and max(changes) < 1e-5
    assert sum("training: accuracy" in line for line in lines) == 3
    assert "'vi_t_backbone': experts in 2 of 4 MLPs (blocks 1, 3)." in lines


def check_back_to_dense(lines, folder):
    (difference,) = (line for line in lines if line.startswith("difference: "))
    assert 0 < float(difference.split()[-1]) < 2
    names = [line.split(":")[0] for line in lines if ": accuracy " in line]
    assert len(names) == 4 and "distilled from random weights" in names


# Guide -> how to check what it printed and wrote, and where it runs.
CHECKS = {
    "adapting.py": (check_adapting, ("torch",)),
    "back_to_dense.py": (check_back_to_dense, ("torch",)),
    "data_parallel.py": (check_data_parallel, ("tensorflow", "torch")),
    "demo.py": (check_demo, ("jax",)),
    "experts_in_any_model.py": (check_experts_in_any_model, ("torch",)),
    "exporting.py": (check_exporting, ("torch",)),
    "few_shot_probing.py": (check_few_shot_probing, ("torch",)),
    "fit_on_a_small_dataset.py": (check_fit_on_a_small_dataset, ("torch",)),
    "inside_soft_moe.py": (check_inside_soft_moe, ("torch",)),
    "limoe_routing.py": (check_limoe_routing, ("torch",)),
    "limoe_zero_shot.py": (check_limoe_zero_shot, ("torch",)),
    "placing_experts.py": (check_placing_experts, ("jax",)),
    "real_weights.py": (check_real_weights, ("torch",)),
    "released_vmoe_checkpoints.py": (check_released_vmoe_checkpoints, ("torch",)),
    "switching_backends.py": (check_switching_backends, ("torch",)),
    "upcycling.py": (check_upcycling, ("torch",)),
    "vmoe_at_low_capacity.py": (check_vmoe_at_low_capacity, ("torch",)),
}
HERE = [guide for guide, (_, backends) in CHECKS.items() if BACKEND in backends]


def test_every_guide_runs_somewhere():
    assert {path.name for path in GUIDES.glob("*.py")} == set(CHECKS)
    assert all(backends for _, backends in CHECKS.values())


@pytest.mark.parametrize("guide", HERE)
def test_guide(guide, tmp_path):
    check, _ = CHECKS[guide]
    check(run(guide, tmp_path).splitlines(), tmp_path)
