"""Tables and text of a study, from its results alone."""

import statistics

from experiments.lib.comparisons import in_words
from experiments.router_study.claims import claims, value
from experiments.router_study.configurations import FAMILIES, STUDIES

_NONE = "–"
METRICS = {
    "upstream_accuracy": "upstream accuracy",
    "5-shot": "5-shot accuracy",
    "dropped": "dropped tokens",
}
_NAMED = {"keras": "Keras ", "python": "Python "}


def table(results, study="routers"):
    """The models of a study with what they cost and what they achieve.

    Args:
        results: dict, what `run_study` returns, or read from its JSON.
        study: str, one of the studies in it.

    Returns:
        str, a Markdown table. Accuracies in percent are means over the seeds with the
        standard deviation; a step is timed against the dense model's; dropped tokens,
        imbalance (the fullest expert over the mean), position and class (how much of
        the expert's entropy each explains) and sharpness (the largest dispatch weight
        of a slot, in even shares) are means over blocks and seeds. How many seeds
        diverged is said beside the model.

    Raises:
        ValueError: if there is no such study in the results.

    Example:

    >>> print(table(results, "placement"))
    """
    if study not in results["studies"]:
        raise ValueError(
            f"The results are of the studies {list(results['studies'])}. "
            f"Received: study={study!r}."
        )
    shots = results["scale"]["shots"]
    head = ["model", "parameters", "MFLOP", "step", "upstream"]
    head += [f"{count}-shot" for count in shots]
    head += ["fine-tuned", "dropped", "imbalance", "position", "class", "sharpness"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    seeds = seeds_of(results, study)
    names = results["studies"][study]
    trained = [name for name in names if results["cells"].get(name)]
    rows += [_row(results, name, seeds) for name in trained or names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def claims_table(results):
    """What the papers claim, and what the results say about it.

    Args:
        results: dict, as for `table`.

    Returns:
        str, Markdown: for each claim the verdict under each metric, and the differences
        in percentage points with their t-intervals. *After the correction too* means
        Holm's, for all differences of these results.

    Example:

    >>> print(claims_table(results))
    """
    return in_words(claims(results), METRICS)


def report(results):
    """The whole study as text: what was done, and tables.

    Args:
        results: dict, as for `table`.

    Returns:
        str, Markdown.

    Example:

    >>> pathlib.Path("study.md").write_text(report(results))
    """
    parts = [f"# The router study, `{results['scale']['name']}`", _setup(results)]
    for study, names in results["studies"].items():
        if names:
            parts += [f"## {STUDIES[study]}", table(results, study)]
    return "\n\n".join(parts) + "\n"


def _row(results, name, seeds):
    known = results["configurations"][name]
    cells = results["cells"].get(name, {})
    cells = {seed: cell for seed, cell in cells.items() if seed in seeds}
    diverged = sum(cell["diverged"] for cell in cells.values())
    title = known["title"] + (f" ({diverged} diverged)" if diverged else "")
    shots = [f"{count}-shot" for count in results["scale"]["shots"]]
    metrics = ["upstream_accuracy", *shots, "fine_tuned_accuracy"]
    times = results["times"]["steps"].get(name)
    return [
        title,
        f"{known['parameters']:,}" if "parameters" in known else _NONE,
        f"{1e3 * known['gflop_per_image']:,.1f}" if "parameters" in known else _NONE,
        f"{times['ratio']:.2f}" if times else _NONE,
        *(_percent(numbers(results, name, metric, seeds)) for metric in metrics),
        _percent(numbers(results, name, "dropped", seeds), spread=False),
        _plain(numbers(results, name, "imbalance", seeds)),
        _percent(numbers(results, name, "position_share", seeds), spread=False),
        _percent(numbers(results, name, "label_share", seeds), spread=False),
        _plain(numbers(results, name, "sharpness", seeds)),
    ]


def seeds_of(results, study):
    """Seeds of the models of a study, strings."""
    scale = results["scale"]
    seeds = {
        "learning_rate": scale["rate_seeds"][:1],
        "close_rates": scale["rate_seeds"],
        "headline": scale["seeds"] + scale["more_seeds"],
    }
    return list(map(str, seeds.get(study, scale["seeds"])))


def numbers(results, name, metric, seeds):
    """One number of all seeds in which there is one, a list of floats."""
    found = [value(results, name, seed, metric) for seed in seeds]
    return [number for number in found if number is not None]


def _percent(found, spread=True):
    if not found:
        return _NONE
    text = f"{100 * statistics.fmean(found):.1f}"
    if spread and len(found) > 1:
        text += f" ± {100 * statistics.stdev(found):.1f}"
    return text


def _plain(found):
    return f"{statistics.fmean(found):.2f}" if found else _NONE


def _setup(results):
    scale, times = results["scale"], results["times"]
    seconds = sum(
        cell["seconds"] for cells in times["cells"].values() for cell in cells.values()
    )
    count = sum(len(cells) for cells in results["cells"].values())
    data = (
        scale["tfds"] or "synthetic letters and signs (`experiments.synthetic.glyphs`)"
    )
    if scale["placement"] == "anywhere":
        data += f" anywhere in the image, among {scale['distractors']} pieces of others"
    images = scale["epochs"] * scale["steps_per_epoch"] * scale["batch_size"]
    machine = times["machine"] or {"backend": "no machine yet"}
    machine = ", ".join(_NAMED.get(n, "") + text for n, text in machine.items())
    tried = ", ".join(f"{rate:g}" for rate in scale["learning_rates"])
    tried += f" for one model of each kind, with seed {scale['rate_seeds'][0]}"
    if scale["close_rates"]:
        tried += (
            f" and where that does not decide with {len(scale['rate_seeds'])} seeds"
        )
    kinds = {
        FAMILIES[results["configurations"][name]["family"]].kind
        for name, cells in results["cells"].items()
        if cells
    }
    rates = ", ".join(
        f"{rate:g} ({kind})"
        for kind, rate in scale["rates"].items()
        if kind in kinds or not kinds
    )
    layers, dim, mlp_dim = (scale[n] for n in ("num_layers", "hidden_dim", "mlp_dim"))
    return (
        f"{count} trainings, seeds {', '.join(finished_seeds(results))}; the "
        f"processes that finished them ran for {seconds / 3600:.1f} hours in sum "
        f"({machine}; time before an interruption is not counted).\n\n"
        f"All are a ViT of {layers} blocks, {dim} wide, MLPs and experts {mlp_dim} "
        f"wide, patches of {scale['patch_size']} pixels in images of "
        f"{scale['image_size']}; where nothing else is said every second block has "
        f"{scale['num_experts']} experts and sparse routers route "
        f"{scale['group_images']} images together. Each saw the same {images:,} "
        f"images, or the said share, of {data}, in batches of {scale['batch_size']}. "
        "One set of hyperparameters serves all but for the peak learning rate, the "
        f"best of {tried}, of which no other result is: {rates}; routing that is fixed "
        "in part or whole has that of Soft MoE. The "
        "scale of Soft MoE starts at the root of the width where nothing else is said; "
        "noise and losses of the routers are those of the papers. Digits: "
        "scikit-learn's handwritten ones, "
        f"never seen upstream, {scale['draws']} draws. MFLOP: of predicting one image. "
        "Step: time of a training step over the dense model's, measured in turn. "
        "Accuracies in percent, mean ± standard deviation over seeds. Position "
        "and class: the share of the entropy of a token's expert that its place, and "
        "the class of its image, explain. Sharpness: the largest dispatch weight of a "
        "slot in even shares; at 1 a slot is the mean of the image."
    )


def finished_seeds(results):
    """Seeds of which something is finished, sorted, as strings."""
    found = {seed for cells in results["cells"].values() for seed in cells}
    return sorted(found, key=int)
