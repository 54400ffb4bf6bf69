"""What is read from the results of fine-tuning, Markdown."""

import statistics

from experiments.lib.comparisons import CONFIDENCE, difference
from experiments.real_weights.plan import DENSE
from experiments.real_weights.textile import CLASSES


def report(results):
    """The table of all models, and how to read it.

    Args:
        results: see `experiment` of the program.
    """
    cells, seeds = results["cells"], len(results["plan"]["seeds"])
    seconds = results.get("step_seconds", {})
    titles = [
        *(
            "model",
            "parameters",
            "GFLOP per image",
            "steps",
            "CPU time of a step",
        ),
        *("features change by", "accuracy", "over dense"),
        *(f"of {name}" for name in CLASSES),
        *("dropped", "fullest expert"),
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, known in results["variants"].items():
        by_seed = cells[name]
        found = list(by_seed.values())
        pairs = sorted(by_seed.keys() & cells[DENSE].keys())
        gains = [
            100 * (by_seed[s]["accuracy"] - cells[DENSE][s]["accuracy"]) for s in pairs
        ]
        time = seconds[name] / seconds[DENSE] if name in seconds else None
        row = [
            known["title"],
            f"{known['parameters'] / 1e6:.1f} M",
            f"{known['gflop_per_image']:.2f}",
            str(known["steps"]),
            f"{time:.2f}" if time else "–",
            _percent([cell["before"]["feature_difference"] for cell in found]),
            _interval([100 * cell["accuracy"] for cell in found]),
            "0" if name == DENSE else _interval(gains, sign="+"),
            *(_percent([cell["by_class"][c] for cell in found]) for c in CLASSES),
            _percent([x for cell in found for x in cell.get("dropped") or ()]),
            _mean([x for cell in found for x in cell.get("imbalance") or ()]),
        ]
        lines.append(f"| {' | '.join(row)} |")
    tried = ", ".join(
        f"{100 * found['accuracy']:.1f} at {rate}"
        for rate, found in sorted(results["rates"].items(), key=lambda x: float(x[0]))
    )
    return "\n".join(
        [
            *lines,
            "",
            f"Percent of the {results['pictures']['test']} test images, mean ± half "
            f"of the {100 * CONFIDENCE:g} % t-interval over {seeds} seeds; "
            "differences within each seed. Features change by: before any training. "
            "CPU time of a step: over that of the dense model, in turns in one "
            f"process. The rate {results['learning_rate']:g} was chosen for the dense "
            f"model: validation accuracy {tried}.",
        ]
    )


def _interval(values, sign=""):
    if not values:
        return "–"
    found = difference("", values)
    margin = f" ± {found.margin:.1f}" if found.seeds > 1 else ""
    return f"{found.mean:{sign}.1f}{margin}"


def _percent(shares):
    return f"{100 * statistics.fmean(shares):.1f}" if shares else "–"


def _mean(values):
    return f"{statistics.fmean(values):.2f}" if values else "–"
