"""KerasHub's mixture of experts beside `ksm.converters.sparsify` of it.

    KERAS_BACKEND=jax OMP_NUM_THREADS=2 python benchmarks/mixtures.py

Qwen3-MoE of two blocks, 32 experts, 4 of them for a token. Both models take turns, so
the ratios hold on a busy machine too; `CPU` is the ratio of the times of the processor.
A second line has the memory that one `predict` of each adds to a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
import time

import keras
import keras_hub
import memory
import numpy as np

import keras_softmoe as ksm

BATCH, LENGTH = 4, 128


def models():
    """Return KerasHub's model and the sparse one with its weights."""
    dense = keras_hub.models.Qwen3MoeBackbone(
        vocabulary_size=500,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_dim=256,
        intermediate_dim=512,
        moe_intermediate_dim=256,
        num_experts=32,
        top_k=4,
        norm_top_k_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coefficient=0.01,
        sliding_window_size=None,
        mlp_only_layers=[],
    )
    return {"KerasHub": dense, "sparse": ksm.converters.sparsify(dense)}


def batch(length=LENGTH):
    """Return token ids without padding."""
    ids = np.random.default_rng(0).integers(0, 500, (BATCH, length))
    return {"token_ids": ids, "padding_mask": np.ones((BATCH, length), "int32")}


def added_memory(name):
    """Return MiB that `predict` adds to the most that this process has held."""
    model = models()[name]
    # Compilers and allocators settle in a first call.
    model.predict_on_batch(batch())
    memory.forget_peak()
    before = memory.peak_memory()
    model.predict_on_batch(batch())
    return (memory.peak_memory() - before) / 2**20


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="calls of each")
    parser.add_argument("--memory", help="measure the memory of one of the models")
    options = parser.parse_args(arguments)
    if options.memory:
        print(f"{added_memory(options.memory):.0f}")
        return
    both, x = models(), batch()
    outputs = [model.predict_on_batch(x) for model in both.values()]
    clocks = time.perf_counter, time.process_time
    rounds = []
    for _ in range(options.rounds):
        row = []
        for model in both.values():
            start = [clock() for clock in clocks]
            model.predict_on_batch(x)
            row += [clock() - t for clock, t in zip(clocks, start, strict=True)]
        rounds.append(row)
    dense, dense_cpu, sparse, sparse_cpu = zip(*rounds, strict=True)
    ratios, of_cpu = (
        [one / two for one, two in zip(*pair, strict=True)]
        for pair in ((dense, sparse), (dense_cpu, sparse_cpu))
    )
    print(
        f"{keras.backend.backend()}, predict of {BATCH * LENGTH} tokens: "
        f"{1e3 * min(dense):.0f} and {1e3 * min(sparse):.0f} ms at best, ratio "
        f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}), "
        f"CPU {statistics.median(of_cpu):.1f}; difference "
        f"{np.abs(outputs[0] - outputs[1]).max():.1e}"
    )
    command = [sys.executable, __file__, "--memory"]
    for name in both:
        run = subprocess.run([*command, name], capture_output=True, text=True)
        print(f"memory of {name}: {run.stdout.strip()} MiB")


if __name__ == "__main__":
    main()
