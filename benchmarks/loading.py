"""Peak memory of processes that load a large preset spread over eight devices.

A process holds the pieces of its own devices, so with one process that is the whole
model and with two it is half of the experts. Beyond that it may hold one full variable
at a time. Each figure is the peak of resident memory of a process that has just
started, less what it was before the model was built.

    python benchmarks/loading.py --preset soft_moe_small_patch16_128e_224
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

DEVICES = 8


def peak_memory():
    """Largest resident memory of this process so far, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def save(name, directory):
    """Save an architecture of the catalogue with random weights."""
    import keras_softmoe as ksm

    backbone = ksm.models.ViTMoEBackbone.from_preset(name, load_weights=False)
    backbone.save_to_preset(directory)


def load(directory, address, count, index):
    """Load the preset in one of several processes, and print what that took."""
    import jax
    import keras

    import keras_softmoe as ksm

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        keras.distribution.initialize(address, count, index)
    keras.distribution.set_distribution(ksm.distribution.expert_parallel())
    # What the libraries need is not the model's.
    tiny = ksm.models.ViTMoEBackbone.from_preset("soft_moe_tiny_patch4_16e_32_glyphs")
    del tiny
    before = peak_memory()
    backbone = ksm.models.ViTMoEBackbone.from_preset(directory)
    after = peak_memory()
    arrays = [v.value for v in backbone.variables]
    mine = sum(s.data.nbytes for array in arrays for s in array.addressable_shards)
    figures = {
        "model": sum(array.nbytes for array in arrays),
        "pieces": mine,
        "largest variable": max(array.nbytes for array in arrays),
        "before": before,
        "peak": after - before,
    }
    print("figures:" + json.dumps(figures))


def run(*arguments, devices=DEVICES):
    """Start this program again, in a process of its own."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        env={**os.environ, "KERAS_BACKEND": "jax", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(directory, count):
    """Figures of each of some processes that load a preset together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        run("--load", directory, address, count, index, devices=DEVICES // count)
        for index in range(count)
    ]
    figures = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError("A process that loads has failed, see above.")
        (line,) = (x for x in output.splitlines() if x.startswith("figures:"))
        figures.append(json.loads(line.removeprefix("figures:")))
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="soft_moe_small_patch16_128e_224")
    parser.add_argument("--save", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.save:
        return save(*arguments.save)
    if arguments.load:
        directory, address, count, index = arguments.load
        return load(directory, address, int(count), int(index))
    with tempfile.TemporaryDirectory() as folder:
        directory = os.path.join(folder, "preset")
        if run("--save", arguments.preset, directory, devices=1).wait():
            raise RuntimeError("The preset could not be made, see above.")
        print(f"{arguments.preset} on {DEVICES} devices, in MB")
        columns = ("model", "pieces", "largest variable", "before", "peak")
        print("processes", *columns, sep="  ")
        for count in (1, 2):
            for figures in measure(directory, count):
                cells = (f"{figures[c] / 1e6:{len(c)},.0f}" for c in columns)
                print(f"{count:9}", *cells, sep="  ")
    return None


if __name__ == "__main__":
    main()
