"""Tables of the pages on evidence, upcycling and the study, from JSON."""

from pathlib import Path
from statistics import mean

from experiments import claims, controls, preset_claims
from experiments.lib.comparisons import difference
from experiments.lib.runs import read_json
from experiments.pages import results
from experiments.router_study.claims import HEADLINE
from experiments.upcycling import tables as upcycling

EXPERIMENTS = Path(__file__).resolve().parents[1]
ANYWHERE = EXPERIMENTS / "router_study" / "anywhere.json"
PUBLISHED = EXPERIMENTS / "letters" / "upcycling.json"
UPCYCLED = EXPERIMENTS / "upcycling" / "small" / "results.json"

_SOFT, _TOKEN, _ = (text for text, _ in HEADLINE)
_LAST = " with experts in the last half of the blocks is better"
# For each table: the beginning of the section, the claim, the metric, and what its
# differences are called here, or `None` for what they are called there.
SHOWN = {
    "routers of a trained model": (
        ("Presets", "Learned routers are better than random ones", "upstream", None),
        ("Presets", "The last routers matter more than the first", "upstream", None),
        (
            "Presets",
            "With few slots, batch priority keeps more accuracy than the order of "
            "patches",
            "upstream",
            "batch priority - order of patches, ",
        ),
    ),
    "mixtures and dense models": (
        ("Presets", _TOKEN, "center", "V-MoE - dense, glyphs that fill the image"),
        ("Presets", _TOKEN, "anywhere", "V-MoE - dense, glyphs anywhere"),
        (
            "Presets",
            "With random routers token choice is below the dense model of the same "
            "FLOP",
            "upstream",
            "**the control**: dense - V-MoE with random routers, both kinds of glyphs",
        ),
        ("Presets", _SOFT, "center", "Soft MoE - dense, glyphs that fill the image"),
        ("Presets", _SOFT, "anywhere", "Soft MoE - dense, glyphs anywhere"),
        ("Routers", _SOFT, "upstream_accuracy", "study: Soft MoE - dense"),
        (
            "Routers",
            _SOFT.replace(" is better", _LAST),
            "upstream_accuracy",
            "study: the same, experts in the last half of the blocks",
        ),
        ("Routers", _TOKEN, "upstream_accuracy", "study: V-MoE - dense"),
        (
            "Routers",
            _TOKEN.replace(" is better", _LAST),
            "upstream_accuracy",
            "study: the same, experts in the last half of the blocks",
        ),
    ),
    "more experts": (
        (
            "Routers",
            "The more experts, the more tokens are dropped",
            "dropped",
            "dropped tokens: ",
        ),
        (
            "Routers",
            "One slot per expert is best at a given number of slots",
            "upstream_accuracy",
            "accuracy: ",
        ),
    ),
    "LIMoE in short": (
        (
            "LIMoE",
            "Small groups do harm",
            "zero_shot_new_of_64",
            "zero-shot accuracy, groups of 32 pairs - of one pair",
        ),
        (
            "LIMoE",
            "LIMoE is better than its dense twin of the same FLOP",
            "zero_shot_new_of_64",
            "zero-shot accuracy, LIMoE - dense",
        ),
    ),
    "upcycling in short": (
        (
            "Upcycling",
            "Upcycling to token choice pays",
            "upstream_accuracy",
            None,
        ),
        (
            "Upcycling",
            "Upcycling to Soft MoE from clusters pays",
            "upstream_accuracy",
            None,
        ),
        (
            "Upcycling",
            "With more slots, and more compute, upcycling to token choice pays",
            "upstream_accuracy",
            None,
        ),
    ),
}


def tables():
    """Dict from the titles of tables to their text."""
    found = {title: shown_table(rows) for title, rows in SHOWN.items()}
    return found | {
        "what stands": what_stands(),
        "random routers": random_table(),
        "what routers see": controls_table(),
        "glyphs anywhere": anywhere_table(),
        "upcycled": upcycled_table(),
        "upcycled as published": published_table(),
    }


def shown_table(rows):
    """Differences of some claims: points, seeds, and what is left of them."""
    lines = [
        "| difference | points, 95 % | seeds | after the correction |",
        "|---|---|---|---|",
    ]
    for section, text, metric, name in rows:
        found = results.differences(text, metric, section)
        for d in found:
            title = name or d.name
            if name is not None and len(found) > 1:
                title = name + d.name
            stands = "stands" if d.adjusted_p < 0.05 else "does not stand"
            cells = [title, results.points(d), str(d.seeds), stands]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def what_stands():
    """How many differences are compared, and which claims stand, Markdown."""
    count = len(
        {
            (metric, d.name, d.mean)
            for section in results.sections()
            for claim in section.claims
            for metric, found in claim.differences.items()
            for d in found
        }
    )
    verdicts = {"yes": "appears", "no": "the opposite appears"}
    lines = [
        f"- {section.title}: {claim.text}, by {section.metrics[metric]}: "
        f"{verdicts[claim.verdict(metric)]}."
        for section, claim, metric in claims.survivors(results.sections())
    ]
    head = f"Of {count} differences that were compared, these claims stand after Holm's"
    return "\n".join([f"{head} correction for all of them:\n", *lines]) + "\n"


def random_table():
    """What random routers leave of each V-MoE, and the models without such routers."""
    soft = {
        run["seed"]: run["upstream_accuracy"]
        for run in preset_claims.trainings()["Soft MoE"]
    }
    rows = {
        str(seed): (*found, soft[seed])
        for seed, found in preset_claims.random_and_dense().items()
    }
    rows["mean"] = tuple(map(mean, zip(*rows.values(), strict=True)))
    lines = [
        "| seed | V-MoE | all its routers random | dense | Soft MoE |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {seed} | {' | '.join(f'{value:.3f}' for value in found)} |"
        for seed, found in rows.items()
    ]
    return "\n".join(lines) + "\n"


def controls_table():
    """What is left of a V-MoE when its routers do not see what they route."""
    found = read_json(controls.RESULTS)
    lines = [
        "| | glyphs that fill the image | anywhere |",
        "|---|---|---|",
    ]
    for name, title in controls.TITLES.items():
        of = found["accuracy"][name]
        cells = (f"{of[layout]:.3f}" for layout in ("center", "anywhere"))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    cells = (
        ", ".join(f"{100 * share:.0f} %" for share in found["position_share"][layout])
        for layout in ("center", "anywhere")
    )
    title = "share of the experts' entropy that the place explains, by block"
    lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def anywhere_table():
    """The nine trainings of the study's scale `anywhere`."""
    found = read_json(ANYWHERE)["upstream_accuracy"]
    rates = sorted({float(rate) for by_rate in found.values() for rate in by_rate})
    lines = [
        f"| | {' | '.join(f'{rate:g}' for rate in rates)} |",
        "|---" * (1 + len(rates)) + "|",
    ]
    for name, by_rate in found.items():
        of = {float(rate): value for rate, value in by_rate.items()}
        cells = (f"{of[rate]:.1f}" if rate in of else "" for rate in rates)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def upcycled_table():
    """What models cost and achieve after going on from a dense one."""
    found = read_json(UPCYCLED)
    lines = [
        "| model | MFLOP | accuracy before | after epoch 1 | in the end |",
        "|---|---|---|---|---|",
    ]
    for name, known in found["variants"].items():
        cells = [c for c in found["cells"][name].values() if not c["diverged"]]
        row = [
            known["title"],
            f"{1e3 * known['gflop_per_image']:.1f}",
            upcycling.percent([cell["before"] for cell in cells], "upstream_accuracy"),
            f"{100 * mean(cell['curve'][0]['accuracy'] for cell in cells):.1f}",
            upcycling.percent(cells, "upstream_accuracy"),
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def published_table():
    """Models that go on from a dense one by the protocol of Sparse Upcycling."""
    found = read_json(PUBLISHED)
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
            results.points(difference(name, gains)) if name != "dense" else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
