"""Peak memory of a training step of a Soft MoE, beside that of its dense twin.

The Soft MoE is trained twice: as it is, and with `remat_experts`, which computes the
hidden activations of experts again in the backward pass.

Each model is built and trained in a process of its own. A first step of `fit` compiles;
the figure is the peak during the second one, less what the process held before the
model was built. On an accelerator it is the peak of the device's memory, as the backend
counts it, from the start of the process. The models have four blocks, the last two with
experts: weights and activations grow with the number of blocks alike.
"""

import argparse
import concurrent.futures
import functools
import gc
import json
import os
import pathlib
import subprocess
import sys

import keras
import models
import report
from timing import fit_step

import keras_softmoe as ksm

# From a name to what makes the backbone.
VARIANTS = {
    "dense_twin": models.backbone,
    "soft_moe": models.soft_moe,
    "soft_moe_remat": functools.partial(models.soft_moe, remat_experts=True),
}

# Loads what training needs: a dense block and one with experts.
_WARM_UP = models.SHAPES["small"]._replace(num_layers=2)


def figures(name, shapes):
    """Train a model in this process, and say what that took, in MB."""
    # What the libraries need is not the model's.
    _train(VARIANTS[name](_WARM_UP), _WARM_UP)
    gc.collect()
    forget_peak()
    before = peak_memory()
    backbone = VARIANTS[name](shapes)
    peak = _train(backbone, shapes) - before
    on_device = device_peak()
    return {
        "images": shapes.images,
        "weights_mb": ksm.evaluation.cost(backbone).weight_bytes / 1e6,
        "peak_mb": (on_device or peak) / 1e6,
        "on_device": on_device is not None,
    }


def _train(backbone, shapes):
    """Run two steps of `fit` and return the peak of resident memory in the second."""
    images, labels = models.data(shapes)
    model = models.classifier(backbone.output["pooled_output"])
    run = fit_step(model, images, labels)
    run()
    gc.collect()
    forget_peak()
    run()
    return peak_memory()


def peak_memory():
    """Largest resident memory of this process so far, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def forget_peak():
    """Let the peak of resident memory start over from what is resident now."""
    # Linux, see proc(5).
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def device_peak():
    """Peak of the accelerator's memory in bytes, `None` on a processor."""
    backend = keras.backend.backend()
    if report.accelerator(backend) is None:
        return None
    if backend == "torch":
        import torch

        return torch.cuda.max_memory_allocated()
    if backend == "jax":
        import jax

        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def measure_all(options):
    """Rows of all variants, each from a process of its own."""
    first, *others = VARIANTS
    row = _measure_apart(first, options)
    yield row
    # This process must leave an accelerator alone, so it learns of one from the first.
    # Where there is none, nothing that two processes do changes the other's memory.
    with concurrent.futures.ThreadPoolExecutor(1 if row["on_device"] else 2) as pool:
        yield from pool.map(lambda name: _measure_apart(name, options), others)


def _measure_apart(name, options):
    process = subprocess.run(
        [sys.executable, __file__, "--variant", name]
        + ["--shapes", options.shapes, "--dtype", options.dtype],
        # JAX would take most of a device for itself before it needs any.
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"Training {name} has failed, see above.")
    return {"name": name, "pass": "fit", **json.loads(process.stdout)}


def main():
    """Train one variant in this process, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("variant", "shapes", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    keras.config.set_dtype_policy(options.dtype)
    shapes = models.SHAPES[options.shapes]._replace(num_layers=4)
    print(json.dumps(figures(options.variant, shapes)))


if __name__ == "__main__":
    main()
