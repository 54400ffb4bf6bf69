"""Experts in KerasHub's own DINOv2 with real weights: difference, time and memory.

    python -m experiments.real_weights.any_model

KerasHub reads the folder of `dinov2` with the package safetensors (`pip install
safetensors`). The features of four crops of two photographs are compared.
"""

import argparse
import resource
import time
from pathlib import Path

import keras
import keras_hub
import numpy as np

import keras_softmoe as ksm
from experiments.lib.runs import processor, write_json
from experiments.real_weights import dinov2

BLOCKS = (7, 9, 11)
SEEDS = range(10)


def measured(folder):
    """What `add_experts` takes and keeps, a dict.

    Args:
        folder: path, see `dinov2.convert`.
    """
    images = dinov2.photographs(crops=2)
    dense = keras_hub.models.DINOV2Backbone.from_preset(
        str(folder), image_shape=images.shape[1:]
    )
    router = ksm.routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=2, capacity_factor=None, normalize_gates=True
    )
    # Before any image is predicted, which takes more memory than this
    before, started = _peak(), time.process_time()
    model = ksm.converters.add_experts(dense, BLOCKS, router)
    seconds, after = time.process_time() - started, _peak()
    theirs = dense.predict({"images": images}, verbose=0)
    differences = []
    for seed in SEEDS:
        keras.utils.set_random_seed(seed)
        changed = ksm.converters.add_experts(dense, BLOCKS, router)
        changed = changed.predict({"images": images}, verbose=0)
        differences.append(np.abs(changed - theirs))
    ours = ksm.converters.dense_model(folder, images.shape[1:], head=False)
    ours = ours.predict(images, verbose=0)["sequence_output"]
    return {
        "machine": {"backend": keras.backend.backend(), "processor": processor()},
        "parameters": [dense.count_params(), model.count_params()],
        "weight_bytes": [4 * dense.count_params(), 4 * model.count_params()],
        # For each draw of the routers' kernels
        "differences": [float(found.max()) for found in differences],
        "class_differences": [float(found[:, 0].max()) for found in differences],
        "largest_feature": float(np.abs(theirs).max()),
        "converted_difference": float(np.abs(ours - theirs).max()),
        "processor_seconds": seconds,
        "peak_bytes": [before, after],
    }


def _peak():
    """The most memory that this process has had, bytes (Linux counts in KiB)."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default="build/dinov2_small")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("any_model.json")
    )
    options = parser.parse_args(arguments)
    found = measured(options.weights)
    write_json(options.output, found)
    print(found)


if __name__ == "__main__":
    main()
