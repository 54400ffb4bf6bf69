"""What benchmarks have in common: the machine, lines and JSON."""

import argparse
import json
import os
import pathlib
import platform

import keras
from accelerator import accelerator
from timing import Patience

from keras_softmoe.files import atomic_file


def at_least_one(text):
    """The text as an int of at least 1, for `argparse`."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {count}.")
    return count


def patience(options):
    """The `Patience` that was asked for."""
    return Patience(options.rounds, options.seconds)


def heading(options):
    """What results depend on, besides the code."""
    return {
        "machine": machine(),
        "shapes": options.shapes,
        "patience": patience(options)._asdict(),
        "jit_compile": options.jit_compile,
    }


def shown(rows):
    """The rows as a list; each is printed as soon as it is there."""
    kept = []
    for row in rows:
        print(line(row), flush=True)
        kept.append(row)
    return kept


def line(row):
    """A row as a line of text."""
    if "peak_mb" in row:
        return "{name:<24} {weights_mb:8.0f} MB weights {peak_mb:8.0f} MB peak".format(
            **row
        )
    ours = row["ours"]
    ratios = [
        "/ {} {median:.2f} ({min:.2f} to {max:.2f})".format(rival, **ratio)
        for rival, ratio in row["ratios"].items()
    ]
    return "{:<24} {:<16} {:>9.2f} ms  first {:6.2f} s  {}".format(
        row["name"],
        row["pass"],
        row["ms"][ours],
        row["first_call_s"][ours],
        "  ".join(ratios),
    )


def machine():
    """What the numbers depend on: processor, device, backend, versions, dtype."""
    backend = keras.backend.backend()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": cores or os.cpu_count(),
        "memory_gb": _memory_gb(),
        "device": str(keras.ops.zeros(()).device),
        "accelerator": accelerator(backend),
        "backend": f"{backend} {__import__(backend).__version__}",
        "keras": keras.__version__,
        "dtype": keras.config.dtype_policy().name,
    }


def _processor():
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text(encoding="utf-8").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gb():
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)


def write_json(path, content):
    """Write a file that no reader ever finds half written."""
    with atomic_file(path) as new, open(new, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
