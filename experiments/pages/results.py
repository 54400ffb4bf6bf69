"""Tables of experiments and of fidelity, from JSON."""

from pathlib import Path
from statistics import mean

from experiments import segmentation, small_data
from experiments.icons import answers, study
from experiments.lib.comparisons import difference
from experiments.lib.runs import read_json
from experiments.real_weights.tables import report

EXPERIMENTS = Path(__file__).resolve().parents[1]
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}

# Files of reference numbers, by the beginning of their names.
NUMBERS = {
    "a": "soft router",
    "b": "token choice",
    "bc": "layers of sparse routers, ties",
    "c": "expert choice",
    "d_kl": "Sinkhorn's routers and plans",
    "d_ks": "sparsity-constrained routers and plans",
    "d_sp": "the same without the constraint",
    "e": "whole models, with gradients",
    "f": "two towers, with gradients",
    "i": "capacities",
    "k": "converted checkpoints",
    "l": "optimizers and training steps",
}


def tables():
    """Dict from the titles of tables to their text."""
    on_icons = study.read_results("small")
    of_characters = {
        "8,000 steps": study.read_results("characters"),
        "16,000 steps": study.read_results("characters_longer"),
    }
    return {
        "icons": answers.questions_table(on_icons) + "\n",
        "models of icons": answers.models_table(on_icons) + "\n",
        "characters": answers.lengths_table(of_characters) + "\n",
        "fidelity": fidelity_table(),
        "textiles": report(read_json(EXPERIMENTS / "real_weights/results.json")) + "\n",
        "upcycled as published": published_table(),
        "small data": small_data.table(
            read_json(small_data.OUTPUT, ["results"])["results"]
        )
        + "\n",
        "segmentation": segmentation.table(
            read_json(segmentation.OUTPUT, ["results"])["results"]
        )
        + "\n",
    }


def fidelity_table():
    """How far from the released code, by kind of reference numbers and backend."""
    found = read_json(EXPERIMENTS / "fidelity.json", BACKENDS)
    versions = [f"{BACKENDS[name]} {f['version']}" for name, f in found.items()]
    rows = [
        f"Measured with {', '.join(versions)}, in float32.\n",
        f"| numbers of | arrays | exact | {' | '.join(BACKENDS.values())} |",
        "|---" * (3 + len(found)) + "|",
    ]
    for prefix, title in NUMBERS.items():
        of_kind = [
            [e for file, e in f["files"].items() if file.startswith(f"{prefix}_")]
            for f in found.values()
        ]
        counts = [
            str(max(sum(entry[key] for entry in chosen) for chosen in of_kind))
            for key in ("arrays", "exact")
        ]
        largest = [f"{max(e['largest'] for e in chosen):.1e}" for chosen in of_kind]
        rows.append(f"| {' | '.join([title, *counts, *largest])} |")
    return "\n".join(rows) + "\n"


def published_table():
    """Models that go on from a dense one by the protocol of Sparse Upcycling."""
    found = read_json(EXPERIMENTS / "letters/upcycling.json")
    lines = [
        "| model | parameters | GFLOP of the training | accuracy before | in the end "
        "| over dense |",
        "|---" * 6 + "|",
    ]

    def accuracy(runs):
        return [100 * run["accuracy"] for run in runs]

    dense = accuracy(found["runs"]["dense"].values())
    for name, known in found["models"].items():
        runs = found["runs"][name].values()
        gains = [a - b for a, b in zip(accuracy(runs), dense, strict=True)]
        cells = [
            known["title"],
            f"{known['parameters']:,}",
            f"{known['training_gflop']:,.0f}",
            f"{mean(accuracy(run['before'] for run in runs)):.1f}",
            f"{mean(accuracy(runs)):.1f}",
            points(difference(name, gains)) if name != "dense" else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def points(d):
    """Mean and half of the interval of a difference in points, str."""
    return f"{d.mean:+.1f} ± {d.margin:.1f}"
