"""Tables of results on the pages, from JSON."""

import functools
import json
import math
from pathlib import Path
from statistics import mean

from experiments import claims
from experiments.lib.comparisons import difference
from experiments.pages import letters
from experiments.real_weights.tables import report as real_weights
from experiments.router_study.claims import value

EXPERIMENTS = Path(__file__).resolve().parents[1]
STUDY = EXPERIMENTS / "router_study"
FIDELITY = EXPERIMENTS / "fidelity"
REAL_WEIGHTS = EXPERIMENTS / "real_weights" / "results.json"
BENCHMARKS = EXPERIMENTS.parent / "benchmarks" / "results"
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
PLANS = ("d_kl", "d_ks", "d_sp")


def tables():
    """Dict from the titles of tables to their text."""
    return {
        "figures": figures(),
        "speed in short": speed_table(),
        "routers measured": routers_table(),
        "layers measured": layers_table(),
        "fidelity": fidelity_table(),
        "textiles": textiles_table(),
    }


def figures():
    """What is exact, how fast it is and what routing brought, for the README."""
    arrays, largest, of_plans = _fidelity_in_sum()
    papers, packages, libraries, layers, *twin = _times().values()
    predicting, training, few = twin
    lines = [
        f"**Exact.** {arrays:,} arrays of the released code's results: masks and "
        f"indices equal, other numbers within {_up(largest)}, those of iterated plans "
        f"within {_up(of_plans)}, on {' and '.join(BACKENDS[n] for n in _fidelity())} "
        "([fidelity](docs/results/fidelity.md)).",
        "**About as fast as other code.** Least and largest median ratio of times, two "
        f"processors and all backends: our layers take {papers} of the time of the "
        f"papers' own code (JAX) and {packages} of that of two packages for PyTorch, a "
        f"dense ViT {libraries} of that of KerasHub's and `transformers`'. Experts "
        f"cost time: a layer with any router takes {layers} of that of a dense MLP, a "
        f"Soft MoE S/16 of 128 experts {predicting} of its dense twin's to predict, "
        f"{training} for a training step with 32 images and {few} for one with 8 "
        "([speed](docs/results/speed.md); [on a GPU](docs/results/gpu.md) JAX is the "
        "faster backend for small models).",
        f"**What routing brought.** {letters.routing_brought()} "
        "([evidence](docs/results/evidence.md)).",
    ]
    return "".join(f"- {line}\n" for line in lines)


def speed_table():
    """Our times over those of others, least to largest, of all that was measured."""
    rows = ["| ours | over that of | ratio of times |", "|---|---|---|"]
    rows += [f"| {' | '.join(row)} | {span} |" for row, span in _times().items()]
    text = "On two processors and all backends, least to largest; under 1 is faster.\n"
    return "\n".join([text, *rows]) + "\n"


def _times():
    """Dict from what is timed and against what to the least and largest ratio."""
    packages = ("soft-moe-pytorch", "soft-mixture-of-experts")
    libraries = ("keras-hub", "transformers")
    model, twin = "Soft MoE S/16 of 128 experts", "its dense twin"
    found = {
        ("layers", "the papers' own code (JAX)"): _ratios("reference"),
        ("layers", "two packages for PyTorch"): _ratios("layers", rivals=packages),
        ("dense ViT S/16", "KerasHub, `transformers`"): _ratios(
            "models", rivals=libraries
        ),
        ("layers with any router", "a dense MLP"): _ratios("layers", rivals=("dense",)),
        (f"{model}, predicting", twin): _ratios("models", "soft_moe", "forward"),
        (f"{model}, a training step with 32 images", twin): _ratios(
            "models", "soft_moe_whole_batch"
        ),
        (f"{model}, the same with 8", twin): _ratios("models", "soft_moe", "fit"),
    }
    return {title: f"{min(r):.2f} to {max(r):.2f}" for title, r in found.items()}


def routers_table():
    """What each router costs in the study, with as many slots as tokens."""
    results = _read(STUDY / "small" / "results.json")
    routers = results["studies"]["routers"]
    gains = _gains(results, routers, "upstream_accuracy")
    rows = [
        "| model | seeds | step / dense | upstream, points | dropped |",
        "|---|---|---|---|---|",
    ]
    for name in routers:
        known, cells = results["configurations"][name], results["cells"][name]
        if (known["slots_per_token"] or 1) > 1:
            continue
        step = results["times"]["steps"].get(name, {}).get("ratio")
        row = [
            known["title"],
            str(len(cells)),
            f"{step:.2f}" if step else "–",
            points(difference(name, gains[name])) if name in gains else "0",
            _mean_of(cells, "dropped", 100, "{:.0f} %"),
        ]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows) + "\n"


# Rows of the benchmark of layers.
TIMED = {
    "soft_128x1": "`SoftRouter`, 128 experts, 1 slot",
    "soft_32x6": "`SoftRouter`, 32 experts, 6 slots",
    "token_choice": '`SoftmaxTokenChoiceRouter`, `priority="max"`',
    "biased_token_choice": "... with `bias_update_rate=0.001`",
    "whole_images": "... of whole images, 4 experts",
    "expert_choice": "`SoftmaxExpertChoiceRouter`",
    "sinkhorn_expert_choice": "`SinkhornExpertChoiceRouter`",
    "sparse_transport": "`SparseTransportExpertChoiceRouter`",
    "expert_race": "`ExpertRaceRouter`",
}


def layers_table():
    """Time of layers with each router over that of a dense MLP, by backend."""
    files = {name: _read(BENCHMARKS / f"{name}.json") for name in BACKENDS}
    passes = ("forward", "forward+backward")
    heads = ["router", *(f"{BACKENDS[name]}, {p}" for name in files for p in passes)]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row, title in TIMED.items():
        found = {
            (name, timed["pass"]): f"{timed['ratios']['dense']['median']:.2f}"
            for name, content in files.items()
            for timed in content["sections"]["layers"]
            if timed["name"] == row
        }
        cells = [found.get((name, p), "–") for name in files for p in passes]
        rows.append(f"| {' | '.join([title, *cells])} |")
    return "\n".join(rows) + "\n"


def fidelity_table():
    """How far from the released code, by kind of reference numbers and backend."""
    found = _fidelity()
    titles = [BACKENDS[name] for name in found]
    versions = [f"{BACKENDS[name]} {f['version']}" for name, f in found.items()]
    rows = [
        f"Measured with {', '.join(versions)}, in float32.\n",
        f"| numbers of | arrays | exact | {' | '.join(titles)} |",
        "|---" * (3 + len(found)) + "|",
    ]
    for prefix, title in NUMBERS.items():
        here = [_of_kind(f["files"], prefix) for f in found.values()]
        arrays, exact = (str(max(e[key] for e in here)) for key in ("arrays", "exact"))
        cells = [f"{entry['largest']:.1e}" for entry in here]
        rows.append(f"| {' | '.join([title, arrays, exact, *cells])} |")
    return "\n".join(rows) + "\n"


def textiles_table():
    """What DINOv2 achieves on textiles, dense and with experts."""
    if not REAL_WEIGHTS.exists():
        return "Not run yet.\n"
    return real_weights(_read(REAL_WEIGHTS)) + "\n"


def _fidelity():
    """What was recorded, by backend."""
    files = {name: FIDELITY / f"{name}.json" for name in BACKENDS}
    return {name: _read(file) for name, file in files.items() if file.exists()}


def _of_kind(files, prefix):
    """Sums and the largest deviation over the files whose name begins like that."""
    chosen = [e for file, e in files.items() if file.startswith(f"{prefix}_")]
    return {
        "arrays": sum(entry["arrays"] for entry in chosen),
        "exact": sum(entry["exact"] for entry in chosen),
        "largest": max((entry["largest"] for entry in chosen), default=0.0),
    }


@functools.cache
def sections():
    """What is asked of each experiment, see `claims.sections`."""
    return claims.sections()


def differences(text, metric, section=""):
    """The differences of a claim, in points.

    Args:
        text: str, the claim.
        metric: str.
        section: str, the beginning of the title of its section.
    """
    (claim,) = (
        claim
        for found in sections()
        if found.title.startswith(section)
        for claim in found.claims
        if claim.text == text
    )
    return [in_points(d) for d in claim.differences[metric]]


def in_points(d):
    """The same difference in percentage points."""
    return d._replace(mean=100 * d.mean, error=100 * d.error)


def points(d):
    """Mean and half of the interval of a difference in points, str."""
    return f"{d.mean:+.1f} ± {d.margin:.1f}"


def _gains(results, models, metric):
    """Dict from models to what they have over the dense one, in points, by seed."""
    found = {}
    for name in models:
        for seed in results["cells"][name] if name != "dense" else ():
            pair = [value(results, n, seed, metric) for n in (name, "dense")]
            if None not in pair:
                found.setdefault(name, []).append(100 * (pair[0] - pair[1]))
    return found


def _ratios(section, name=None, kind=None, rivals=None):
    """Medians of our time over a rival's, of all that was measured, a list.

    Args:
        section: str, of the files of the benchmarks.
        name: optional str, the only row.
        kind: optional str, the only pass.
        rivals: optional sequence of str.
    """
    # Accelerators have a page of their own.
    files = [_read(file) for file in sorted(BENCHMARKS.rglob("*.json"))]
    return [
        ratio["median"]
        for content in files
        if not content["machine"].get("accelerator")
        for row in content["sections"].get(section, ())
        for rival, ratio in row["ratios"].items()
        if name in (None, row["name"])
        and kind in (None, row["pass"])
        and (rivals is None or rival in rivals)
    ]


def _up(number):
    """One digit, never rounded down."""
    exponent = math.floor(math.log10(number))
    digit = math.ceil(round(number / 10**exponent, 6))
    return f"{digit * 10.0**exponent:.0e}"


def _fidelity_in_sum():
    """Number of arrays, and the largest deviations without and with plans."""
    entries = {
        prefix: [_of_kind(f["files"], prefix) for f in _fidelity().values()]
        for prefix in NUMBERS
    }
    arrays = sum(max(e["arrays"] for e in group) for group in entries.values())
    largest = {p: max(e["largest"] for e in group) for p, group in entries.items()}
    rest = max(value for prefix, value in largest.items() if prefix not in PLANS)
    return arrays, rest, max(largest.values())


def _mean_of(cells, key, factor, form):
    # One value for each block.
    values = [mean(cell[key]) for cell in cells.values() if cell.get(key) is not None]
    return form.format(factor * mean(values)) if values else "–"


def _read(file):
    return json.loads(file.read_text(encoding="utf-8"))
