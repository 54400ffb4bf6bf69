"""Tables and text of the experiment, from its results alone."""

import statistics

from experiments.lib.comparisons import Claim, corrected, paired
from experiments.upcycling.plans import DENSE

METRICS = {
    "upstream_accuracy": "upstream accuracy",
    "1-shot": "1-shot accuracy on digits",
    "5-shot": "5-shot accuracy on digits",
    "10-shot": "10-shot accuracy on digits",
}
_SOURCE = "Sparse Upcycling, section 4"
_CLUSTERED = "Cluster-aware Upcycling, abstract"
# Claim, its source, and what is to be ahead of what.
_CLAIMS = (
    ("Upcycling to token choice pays", _SOURCE, [("copies", DENSE)]),
    (
        "Upcycling to token choice pays in larger groups",
        "ours",
        [("copies_groups", DENSE), ("clusters_groups", DENSE)],
    ),
    ("Noise on the copies helps", "ours", [("noise", "copies")]),
    ("Clusters are a better start than copies", _CLUSTERED, [("clusters", "copies")]),
    (
        "Upcycling to token choice from clusters pays",
        _CLUSTERED,
        [("clusters", DENSE), ("clusters_gated", DENSE)],
    ),
    ("Upcycling to Soft MoE from clusters pays", "ours", [("soft", DENSE)]),
    # Why, or why not
    ("Dropped tokens are what is lost", "ours", [("copies_room", "copies")]),
    (
        "With more slots, and more compute, upcycling to token choice pays",
        "ours",
        [("copies_room", DENSE), ("noise_four", DENSE)],
    ),
)
_NONE = "–"


def value(cell, metric):
    """One number of a cell, `None` if it has none."""
    if cell["diverged"]:
        return None
    if metric.endswith("-shot"):
        return cell["few_shot"].get(metric.removesuffix("-shot"))
    found = cell[metric]
    if isinstance(found, list):
        # Of each block
        return statistics.fmean(found)
    return found


def claims(results):
    """What is claimed of upcycling, with the differences within each seed.

    Args:
        results: dict, what `gather` returns.

    Returns:
        list of `Claim`.
    """
    titles = {name: known["title"] for name, known in results["variants"].items()}
    runs = {
        titles[name]: [{"seed": seed, **cell} for seed, cell in cells.items()]
        for name, cells in results["cells"].items()
    }
    found = []
    for text, source, names in _CLAIMS:
        pairs = [(titles[better], titles[worse]) for better, worse in names]
        by_metric = {m: paired(runs, pairs, value, m) for m in METRICS}
        found.append(Claim(text, source, by_metric))
    return corrected(found)


def table(results):
    """Markdown: what each variant costs, keeps of the dense model, and achieves."""
    head = ["model", "parameters", "MFLOP", "features differ by", "accuracy kept"]
    head += ["upstream", "with room", "1-shot", "5-shot", "10-shot", "dropped"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    starts = list(results["starts"].items())
    seeds = set(map(str, results["plan"]["scale"]["seeds"]))
    starts = [cell for seed, cell in starts if seed in seeds]
    rows.append(_row("Dense start", results["variants"][DENSE], starts))
    for name, known in results["variants"].items():
        cells = list(results["cells"].get(name, {}).values())
        rows.append(_row(known["title"], known, cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def curves_table(results):
    """Markdown: accuracy after each epoch of the continuation, mean over seeds."""
    rows = []
    for name, known in results["variants"].items():
        cells = results["cells"].get(name, {}).values()
        curves = [c["curve"] for c in cells if not c["diverged"]]
        if curves:
            accuracies = [[p["accuracy"] for p in curve] for curve in curves]
            means = map(statistics.fmean, zip(*accuracies, strict=True))
            rows.append([known["title"], *(f"{100 * mean:.1f}" for mean in means)])
    if not rows:
        return "Nothing is finished."
    epochs = [f"epoch {epoch}" for epoch in range(1, len(rows[0]))]
    rows = [["model", *epochs], ["---", *["---:"] * len(epochs)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def starts_table(results):
    """Markdown: what ways into a Soft MoE keep of the dense model, without training."""
    head = ["router starts from", "features differ by", "accuracy kept"]
    rows = [head, ["---", "---:", "---:"]]
    for title, by_seed in results["soft_starts"].items():
        cells = list(by_seed.values())
        found = (percent(cells, m) for m in ("feature_difference", "upstream_accuracy"))
        rows.append([title, *found])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def rates_table(results):
    """Markdown: upstream accuracy with each learning rate, of its own seed."""
    rates = list(results["rates"][DENSE])
    rows = [["model", *rates], ["---", *["---:"] * len(rates)]]
    for name, by_rate in results["rates"].items():
        found = [list(by_seed.values()) for by_seed in by_rate.values()]
        if any(found):
            cells = (percent(cells, "upstream_accuracy") for cells in found)
            rows.append([results["variants"][name]["title"], *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def report(results):
    """The whole experiment as text, Markdown."""
    plan, scale = results["plan"], results["plan"]["scale"]
    continued = plan["epochs"] * scale["steps_per_epoch"] * scale["batch_size"]
    started = scale["epochs"] * scale["steps_per_epoch"] * scale["batch_size"]
    hours = sum(t["seconds"] for t in results["times"]["cells"].values()) / 3600
    cells = len(results["times"]["cells"])
    setup = (
        f"{cells} trainings on {results['times']['machine']['backend']}; the processes "
        f"that finished them ran for {hours:.1f} hours in sum.\n\n"
        f"A dense ViT ({scale['num_layers']} blocks, {scale['hidden_dim']} wide, "
        f"patches of {scale['patch_size']} pixels in images of {scale['image_size']}) "
        f"learns glyphs from {started:,} images. From its weights each model sees the "
        f"same {continued:,} further ones: the learning rate rises to "
        f"{plan['learning_rate']:g} in {plan['warmup_steps']} steps and falls to 0 "
        "along a cosine, with fresh moments of the optimizer, for all of them. The "
        f"peak is the best of {', '.join(results['rates'][DENSE])} for the dense model,"
        " with a seed of which there is no other result. Mixtures have "
        f"{scale['num_experts']} experts in every "
        "second block and as many slots as tokens, so that a step costs what a dense "
        "one costs but for the router; batch priority decides who is turned away. "
        f"Clusters and positions are found with {plan['num_images']} images. This is "
        "not the protocol of Sparse Upcycling, which goes on at the rate and with the "
        "optimizer's state of the dense training.\n\n"
        "Accuracies in percent, mean ± standard deviation over seeds. Features differ "
        "by, accuracy kept: before any training, of the pooled features and upstream. "
        "With room: where no expert turns a token away. Dropped: tokens that no expert "
        "takes, mean over blocks."
    )
    parts = [f"# Upcycling, `{scale['name']}`", setup, table(results)]
    parts += ["## While training", curves_table(results)]
    parts += ["## Ways into a Soft MoE, before training", starts_table(results)]
    parts += ["## Learning rates", rates_table(results)]
    return "\n\n".join(parts) + "\n"


def _row(title, known, cells):
    before = [cell["before"] for cell in cells if "before" in cell]
    diverged = sum(cell["diverged"] for cell in cells)
    return [
        title + (f" ({diverged} diverged)" if diverged else ""),
        f"{known['parameters']:,}",
        f"{1e3 * known['gflop_per_image']:.2f}",
        percent(before, "feature_difference"),
        percent(before, "upstream_accuracy"),
        *(
            percent(cells, metric)
            for metric in ("upstream_accuracy", "accuracy_with_room")
        ),
        *(percent(cells, f"{shots}-shot") for shots in (1, 5, 10)),
        percent(cells, "dropped"),
    ]


def percent(cells, metric):
    """Mean ± standard deviation of a metric over cells, in percent, str."""
    found = [value(cell, metric) for cell in cells]
    found = [100 * number for number in found if number is not None]
    if not found:
        return _NONE
    spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.1f}{spread}"
