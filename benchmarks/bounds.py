"""What bounds a training step on accelerators, on paper or beside what is measured.

FLOP are those of `evaluation.cost`, three times (a forward pass, and twice that in the
backward pass). Bytes are those of `distribution.plan`, for the mesh that keeps least on
a device, as they pass through the memory of one device:

- weights: read forward and backward, their gradients written and read; the update reads
  weights and moments and writes them. That is independent of the batch.
- activations: written once, read once.
- sent: what leaves a device over the links.

Each of the three, over the peak of the device, is the least time that a step can take;
the longest names the bound. Peaks are those of the vendors' data sheets for dense
bfloat16; nothing reaches them, so only the order of the three means something. The
images of a device from which FLOP take longer than weights are the `break-even`. Links
are those within a node (NVLink) or a pod; between nodes of GPUs they are slower.

Nothing is built or timed unless that is asked for: then the steps of one device run on
the one at hand, its data lying there already.

    python benchmarks/bounds.py
    KERAS_BACKEND=jax python benchmarks/bounds.py --measure 8 32 128
"""

import argparse
import statistics
from typing import NamedTuple

import keras
import numpy as np
import report
from accelerator import accelerator
from memory import device_peak
from timing import Patience, contest, fit_step

import keras_softmoe as ksm


class Device(NamedTuple):
    """Peaks of one device: FLOP/s, bytes/s of memory and of links, bytes."""

    name: str
    flops: float
    bandwidth: float
    links: float
    memory: float


DEVICES = (
    Device("H100 SXM", 989e12, 3.35e12, 450e9, 80e9),
    Device("H200 SXM", 989e12, 4.8e12, 450e9, 141e9),
    Device("TPU v5p", 459e12, 2.77e12, 600e9, 95e9),
)
# Preset, devices, and images of one device in a step.
STEPS = (
    ("soft_moe_small_patch16_128e_224", 1, (8, 32, 128, 512)),
    ("soft_moe_huge_patch14_256e_224", 256, (1, 8, 16)),
)
DTYPE = "mixed_bfloat16"


def bounds(preset, num_devices, images, device):
    """Seconds that a step takes at least, by what bounds it, and what a device keeps.

    Args:
        preset: str, name of a preset.
        num_devices: int, devices that share experts and batch.
        images: int, images of one device in a step.
        device: `Device`.
    """
    gflop = ksm.evaluation.cost(preset).gflop_per_image
    plan = ksm.distribution.plan(
        preset,
        num_devices,
        device.memory,
        batch_size=images * num_devices,
        dtype=DTYPE,
    )
    mesh = min(plan.meshes, key=lambda mesh: mesh.total)
    # Weights three times (forward, backward, update) and once more written; gradients
    # and moments written and read
    weights = 4 * mesh.weights + 2 * mesh.gradients + 2 * mesh.moments
    seconds = {
        "products": 3e9 * gflop * images / device.flops,
        "weights": weights / device.bandwidth,
        "activations": 2 * mesh.activations / device.bandwidth,
        "links": mesh.sent / device.links,
    }
    return seconds, mesh


def measure(preset, images, rounds=10):
    """Time steps of `fit` with AdamW on the accelerator at hand.

    Args:
        preset: str, name of a preset.
        images: sequence of int, images of a step, in rising order: the peak of memory
            is that of the process.
        rounds: int, steps of which the median is taken.

    Yields:
        dicts with `images`, `ms`, `first_call_s` and `peak_gb`, and what `on_paper`
        says of the device.
    """
    keras.config.set_dtype_policy(DTYPE)
    backbone = ksm.models.ViTMoEBackbone.from_preset(preset, load_weights=False)
    model = ksm.models.ViTMoEImageClassifier(backbone, 1000, preprocessor=None)
    model.compile(
        keras.optimizers.AdamW(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None,
    )
    rng = np.random.default_rng(0)
    for count in images:
        shape = (count, *backbone.image_shape)
        batch = rng.uniform(-1, 1, shape).astype("float32")
        labels = rng.integers(1000, size=count).astype("int32")
        step = fit_step(model, *map(keras.ops.convert_to_tensor, (batch, labels)))
        first_call, seconds = contest({"step": step}, Patience(rounds, seconds=60))
        yield {
            "images": count,
            "ms": 1e3 * statistics.median(seconds["step"]),
            "first_call_s": first_call["step"],
            "peak_gb": (device_peak() or 0) / 1e9,
            **on_paper(preset, count, accelerator(keras.backend.backend())),
        }


def on_paper(preset, images, accelerator):
    """Bounds in ms and memory in GB of a step, nothing if the device is not known."""
    found = {}
    for device in DEVICES:
        if device.name.split()[0] in (accelerator or ""):
            seconds, mesh = bounds(preset, 1, images, device)
            found["bounds_ms"] = {name: 1e3 * s for name, s in seconds.items()}
            found["planned_gb"] = mesh.total / 1e9
    return found


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--measure", type=int, nargs="+", help="images of steps to time here"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was timed there")
    options = parser.parse_args(arguments)
    if options.measure:
        rows = []
        for row in measure(STEPS[0][0], sorted(options.measure)):
            print(row, flush=True)
            rows.append(row)
        if options.json:
            content = {"machine": report.machine(), "rows": rows}
            report.write_json(options.json, content)
    else:
        table()


def table():
    """Print what bounds each step."""
    print("| model | device | images | kept GB | products | memory | links | bound |")
    print("|---|---|---|---|---|---|---|---|")
    for preset, num_devices, batches in STEPS:
        for device in DEVICES:
            for images in batches:
                seconds, mesh = bounds(preset, num_devices, images, device)
                memory = seconds["weights"] + seconds["activations"]
                times = {
                    "products": seconds["products"],
                    "memory": memory,
                    "links": seconds["links"],
                }
                bound = max(times, key=times.get)
                shown = " | ".join(f"{1e3 * s:.2f} ms" for s in times.values())
                if bound == "memory":
                    parts = ("weights", "activations")
                    bound += f" ({max(parts, key=seconds.get)})"
                print(
                    f"| {preset} | {num_devices} x {device.name} | {images} | "
                    f"{mesh.total / 1e9:.1f} | {shown} | {bound} |"
                )
            seconds, _ = bounds(preset, num_devices, 1, device)
            even = seconds["weights"] / seconds["products"]
            print(f"| | | break-even {even:.0f} | | | | | |")


if __name__ == "__main__":
    main()
