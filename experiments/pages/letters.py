"""Tables and sentences of the study on letters, from its results."""

from pathlib import Path
from statistics import mean

from experiments.letters import answers, presets
from experiments.lib.cards import read_runs
from experiments.lib.comparisons import difference
from experiments.lib.runs import read_json

RESULTS = Path(answers.__file__).with_name("results.json")
MIXTURES = {"Soft MoE": "soft", "V-MoE": "vmoe", "expert choice": "expert"}


def tables():
    """Dict from the titles of tables to their text."""
    return {
        "letters": answers_table(),
        "models of letters": models_table(),
        "longer trainings of letters": longer_table(),
        "after the answers": answers.afterwards(read_json(RESULTS)) + "\n",
    }


def answers_table():
    """The primary outcomes, below the questions."""
    lines = [
        "| | difference | 95 % | seeds | p, corrected | answer |",
        "|---" * 6 + "|",
    ]
    for claim in answers.claims(read_json(RESULTS)):
        heads = [f"**({claim.source})**", f"**{claim.text}**"]
        lines.append(_row([*heads, "", "", "", ""]))
        effects = {e.title: e for e in answers.QUESTIONS[claim.source].primary}
        for d in claim.differences[answers.PRIMARY]:
            cells = [
                "",
                d.name,
                answers.with_unit(effects[d.name], d),
                f"{d.seeds}",
                f"{d.adjusted_p:.2g}",
                answers.answer(effects[d.name], d),
            ]
            lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def models_table():
    """What the models cost and achieve, letters anywhere in the picture."""
    found = read_json(RESULTS)
    lines = [
        "| model | parameters | FLOP | step | accuracy, % | over dense | seeds |",
        "|---" * 7 + "|",
    ]
    dense = found["models"]["anywhere_dense"]
    for name, runs in found["runs"].items():
        placement, _, key = name.partition("_")
        if placement != "anywhere":
            continue
        known = found["models"][name]
        step = found.get("steps", {}).get(name)
        cells = [
            known["title"],
            f"{known['parameters']:,}",
            f"{known['training_gflop'] / dense['training_gflop']:.2f}",
            f"{step:.2f}" if step else "",
            f"{100 * mean(run['accuracy'] for run in runs):.1f}",
            "" if key == "dense" else effect_of(found, answers.gain(key, "dense")),
            f"{len(runs)}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def longer_table():
    """The models of the presets, four times as long, over the dense one."""
    lines = ["| model | accuracy, % | over dense | seeds |", "|---" * 4 + "|"]
    for key, values in longer_accuracy().items():
        cells = [
            presets.PRESETS[key].title,
            f"{100 * mean(values):.1f}",
            "" if key == "dense" else longer_gain(key),
            f"{len(values)}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def longer_accuracy():
    """Dict from keys of presets to the accuracies of their trainings."""
    return {
        key: [run["letters"]["accuracy"] for run in read_runs(preset.name)]
        for key, preset in presets.PRESETS.items()
    }


def longer_gain(key):
    """What a preset has over the dense one, with its interval and unit, str."""
    accuracy = longer_accuracy()
    pairs = zip(accuracy[key], accuracy["dense"], strict=True)
    found = difference(key, [a - b for a, b in pairs])
    return answers.with_unit(answers.gain(key, "dense"), found)


def routing_brought():
    """What the study says about routing, in some sentences, str."""
    found = read_json(RESULTS)
    family = answers.claims(found)[1].differences[answers.PRIMARY]
    stand = sum(d.adjusted_p < 0.05 for d in family)

    def gain(left, right):
        return effect_of(found, answers.gain(left, right)).removesuffix(" points")

    over_dense, longer = (
        " and ".join(
            ", ".join(
                f"{title} {gain_of(key)}" for title, key in MIXTURES.items()
            ).rsplit(", ", 1)
        )
        for gain_of in (
            lambda key: gain(key, "dense"),
            lambda key: longer_gain(key).removesuffix(" points"),
        )
    )
    return (
        "Little, in small models. 2,600 letters and signs, questions written before "
        "the trainings, six seeds, points of accuracy (95 %) at the same FLOP and "
        f"steps. Over the dense model: {over_dense}; {stand or 'none'} of the "
        f"{len(family)} stands after the correction. The V-MoE over one with random "
        f"routing: {gain('vmoe', 'random')}. What learns faster is ahead there: "
        f"experts of fixed positions by {gain('position', 'dense')}, and the dense "
        f"model by {gain('longer', 'dense')} (three seeds) with the quarter more steps "
        "for which the mixtures take time. After four times as many steps no gain "
        "shows: "
        f"{longer} (three seeds)"
    )


def effect_of(results, effect):
    """An effect with its interval and unit, str."""
    (found,) = answers.measured(results, effect)
    return answers.with_unit(effect, found)


def _row(cells):
    return f"| {' | '.join(cells)} |"
