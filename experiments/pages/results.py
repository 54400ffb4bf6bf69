"""Tables of results on the pages, from JSON."""

import json
import math
from pathlib import Path
from statistics import mean, stdev

from experiments import preset_claims
from experiments.lib.comparisons import difference
from experiments.real_weights.tables import report as real_weights
from experiments.router_study.claims import claims as claims_of_study
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
# Models of the study's headline, with experts in every second block and the last half.
HEADLINE = {
    "Soft MoE": ("soft_1s", "soft_1s_at2-3"),
    "token choice with batch priority": (
        "softmax_token_choice_k1_bpr",
        "softmax_token_choice_k1_at2-3_bpr",
    ),
}


def tables():
    """Dict from the titles of tables to their text."""
    return {
        "figures": headline_table(),
        "routers measured": routers_table(),
        "fidelity": fidelity_table(),
        "textiles": textiles_table(),
    }


def headline_table():
    """One line each on speed, fidelity, presets and study, for the README."""
    predicting, training = (
        _span(_ratio(backend, *row) for backend in BACKENDS)
        for row in (("soft_moe", "forward"), ("soft_moe_whole_batch", "fit"))
    )
    released = _span(
        ratio["median"]
        for row in _timed("jax", "reference")
        for ratio in row["ratios"].values()
    )
    arrays, largest, of_plans = _fidelity_in_sum()
    upstream, few_shot = map(_headline_gains, ("upstream_accuracy", "5-shot"))
    measured = {
        "speed": "a Soft MoE S/16 of 128 experts takes "
        f"{predicting} of the time of its dense twin to predict, {training} for a "
        "training step with 32 images; on JAX our layers take "
        f"{released} of the time of the papers' own code",
        "fidelity": f"{arrays:,} arrays of the released code's results: masks and "
        f"indices equal, other numbers within {_up(largest)}, those of iterated plans "
        f"within {_up(of_plans)}, on {' and '.join(BACKENDS[n] for n in _fidelity())}",
        "presets": "trained on glyphs that fill the image and on glyphs anywhere in "
        "it, points of accuracy on each over the dense model of the same cost (95 %): "
        f"{_preset_gains()}",
        "study": "small models, points over the dense model of the same cost (95 %) "
        "with experts in every second block and in the last half, of upstream "
        f"accuracy: {upstream}; of 5-shot accuracy on digits: {few_shot}. "
        f"{_after_the_correction()}",
    }
    pages = dict.fromkeys(measured, "docs/results") | {"presets": "docs"}
    lines = ["| | measured | more |", "|---|---|---|"]
    lines += [
        f"| {name} | {text} | [{name}]({pages[name]}/{name}.md) |"
        for name, text in measured.items()
    ]
    return "\n".join(lines) + "\n"


def routers_table():
    """What each router costs and achieves in the study."""
    results = _read(STUDY / "small" / "results.json")
    gains, shots = (
        _gains(results, results["studies"]["routers"], metric)
        for metric in ("upstream_accuracy", "10-shot")
    )
    rows = [
        "From the study, differences to the dense model in points, mean ± standard "
        "deviation over seeds.\n",
        "| model | seeds | step / dense | MFLOP | upstream | 10 shots | dropped "
        "| fullest expert / mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in results["studies"]["routers"]:
        known, cells = results["configurations"][name], results["cells"][name]
        step = results["times"]["steps"].get(name, {}).get("ratio")
        mflop = known.get("gflop_per_image")
        row = [
            known["title"],
            str(len(cells)),
            f"{step:.2f}" if step else "–",
            f"{1e3 * mflop:.1f}" if mflop else "–",
            _points(gains[name]) if name in gains else "0",
            _points(shots[name]) if name in shots else "0",
            _mean_of(cells, "dropped", 100, "{:.0f} %"),
            _mean_of(cells, "imbalance", 1, "{:.2f}"),
        ]
        rows.append(f"| {' | '.join(row)} |")
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


def _preset_gains():
    """What the presets with experts have over the dense one, str."""
    filling, anywhere = map(preset_claims.gains, ("center", "anywhere"))
    return _joined({name: (filling[name], anywhere[name]) for name in filling})


def _headline_gains(metric):
    """What the models of the headline have over the dense one, str."""
    results = _read(STUDY / "small" / "results.json")
    found = {}
    for title, models in HEADLINE.items():
        gains = _gains(results, models, metric)
        found[title] = [difference(name, gains[name]) for name in models]
    return _joined(found)


def _joined(found):
    """Differences in points of several models, each in as many ways, str."""
    texts = []
    for title, differences in found.items():
        listed = " and ".join(f"{d.mean:+.1f} ± {d.margin:.1f}" for d in differences)
        texts.append(f"{title} {listed} ({min(d.seeds for d in differences)} seeds)")
    return ", ".join(texts)


def _after_the_correction():
    """How many claims that a model is more accurate stand after Holm's, str."""
    found = claims_of_study(_read(STUDY / "small" / "results.json"))
    stand = sum(
        claim.verdict(metric) == "yes" and claim.survives(metric)
        for claim in found
        for metric in ("upstream_accuracy", "5-shot")
        if metric in claim.differences
    )
    return (
        "Claims of more accuracy that stand after the correction for all differences "
        f"of the study: {stand or 'none'}"
    )


def _gains(results, models, metric):
    """Dict from models to what they have over the dense one, in points, by seed."""
    found = {}
    for name in models:
        for seed in results["cells"][name] if name != "dense" else ():
            pair = [value(results, n, seed, metric) for n in (name, "dense")]
            if None not in pair:
                found.setdefault(name, []).append(100 * (pair[0] - pair[1]))
    return found


def _timed(backend, section):
    return _read(BENCHMARKS / f"{backend}.json")["sections"][section]


def _ratio(backend, name, kind):
    """Our time over that of the dense twin."""
    rows = _timed(backend, "models")
    row = next(r for r in rows if (r["name"], r["pass"]) == (name, kind))
    return row["ratios"]["dense_twin"]["median"]


def _up(number):
    """One digit, never rounded down."""
    exponent = math.floor(math.log10(number))
    digit = math.ceil(round(number / 10**exponent, 6))
    return f"{digit * 10.0**exponent:.0e}"


def _span(ratios):
    ratios = list(ratios)
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


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


def _points(values):
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):+.1f}{spread}"


def _mean_of(cells, key, factor, form):
    # One value for each block.
    values = [mean(cell[key]) for cell in cells.values() if cell.get(key) is not None]
    return form.format(factor * mean(values)) if values else "–"


def _read(file):
    return json.loads(file.read_text(encoding="utf-8"))
