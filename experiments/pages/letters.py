"""Tables of the study on letters, from its results."""

from pathlib import Path
from statistics import mean

from experiments.letters import answers, presets
from experiments.lib.cards import read_runs
from experiments.lib.comparisons import difference
from experiments.lib.runs import read_json

RESULTS = Path(answers.__file__).with_name("results.json")


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
    for letter, (primary, _) in answers.outcomes(read_json(RESULTS)).items():
        question = answers.QUESTIONS[letter]
        lines.append(_row([f"**({letter})**", f"**{question.text}**", *[""] * 4]))
        effects = {effect.title: effect for effect in question.primary}
        for d in primary:
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
    accuracy = {
        key: [run["letters"]["accuracy"] for run in read_runs(preset.name)]
        for key, preset in presets.PRESETS.items()
    }
    for key, values in accuracy.items():
        pairs = zip(values, accuracy["dense"], strict=True)
        gains = difference(key, [a - b for a, b in pairs])
        over_dense = answers.with_unit(answers.gain(key, "dense"), gains)
        cells = [
            presets.PRESETS[key].title,
            f"{100 * mean(values):.1f}",
            "" if key == "dense" else over_dense,
            f"{len(values)}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def effect_of(results, effect):
    """An effect with its interval and unit, str."""
    (found,) = answers.measured(results, effect)
    return answers.with_unit(effect, found)


def _row(cells):
    return f"| {' | '.join(cells)} |"
