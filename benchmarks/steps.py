"""Training steps of presets on an accelerator, beside the least time they can take.

FLOP are those of `evaluation.cost`, three times (a forward pass, and twice that in the
backward pass). Bytes are those of `distribution.plan`: weights are read forward and
backward, their gradients written and read, weights and moments updated; activations are
written once and read once. Each, over the peak of the device by its data sheet, is the
least time of a step.

    KERAS_BACKEND=jax python benchmarks/steps.py --images 8 32 128 --json FILE
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

PRESET = "soft_moe_small_patch16_128e_224"
DTYPE = "mixed_bfloat16"


class Device(NamedTuple):
    """Peaks of a device for dense bfloat16: FLOP/s, bytes/s of memory, bytes."""

    flops: float
    bandwidth: float
    memory: float


DEVICES = {
    "H100": Device(989e12, 3.35e12, 80e9),
    "H200": Device(989e12, 4.8e12, 141e9),
}


def bounds(preset, images, device):
    """Milliseconds that a step takes at least by what bounds it, and the planned GB."""
    gflop = ksm.evaluation.cost(preset).gflop_per_image
    plan = ksm.distribution.plan(
        preset, 1, device.memory, batch_size=images, dtype=DTYPE
    )
    (mesh,) = plan.meshes
    # Weights three times (forward, backward, update) and once more written; gradients
    # and moments written and read
    weights = 4 * mesh.weights + 2 * mesh.gradients + 2 * mesh.moments
    return {
        "bounds_ms": {
            "products": 1e3 * 3e9 * gflop * images / device.flops,
            "weights": 1e3 * weights / device.bandwidth,
            "activations": 1e3 * 2 * mesh.activations / device.bandwidth,
        },
        "planned_gb": mesh.total / 1e9,
    }


def measure(preset, images, rounds=10):
    """Time steps of `fit` with AdamW on the accelerator at hand.

    Args:
        preset: str, name of a preset.
        images: sequence of int, images of a step, in rising order: the peak of memory
            is that of the process.
        rounds: int, steps of which the median is taken.

    Yields:
        dicts with `images`, `ms`, `first_call_s`, `peak_gb`, and `bounds` if the device
        is a known one.
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
    name = accelerator(keras.backend.backend()) or ""
    for count in images:
        batch = rng.uniform(-1, 1, (count, *backbone.image_shape)).astype("float32")
        labels = rng.integers(1000, size=count).astype("int32")
        step = fit_step(model, *map(keras.ops.convert_to_tensor, (batch, labels)))
        first_call, seconds = contest({"step": step}, Patience(rounds, seconds=60))
        row = {
            "images": count,
            "ms": 1e3 * statistics.median(seconds["step"]),
            "first_call_s": first_call["step"],
            "peak_gb": (device_peak() or 0) / 1e9,
        }
        for known, device in DEVICES.items():
            if known in name:
                row |= bounds(preset, count, device)
        yield row


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=(8, 32, 128))
    parser.add_argument("--json", metavar="FILE", help="write what was timed there")
    options = parser.parse_args(arguments)
    rows = []
    for row in measure(PRESET, sorted(options.images)):
        print(row, flush=True)
        rows.append(row)
    if options.json:
        report.write_json(options.json, {"machine": report.machine(), "rows": rows})


if __name__ == "__main__":
    main()
