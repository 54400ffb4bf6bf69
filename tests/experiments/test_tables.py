"""Tables, text and figures of made-up results."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import router_study as study
from experiments.router_study import __main__ as command_line
from experiments.router_study.tables import seeds_of
from keras_softmoe import evaluation
from tests.support import made_up_study

COMMITTED = Path(study.__file__).parent / "small"


def accuracy(name, seed):
    return 0.5 + 0.01 * seed


@pytest.fixture
def results():
    return made_up_study.results(study.SMALL, accuracy)


def cells_of(text):
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def test_a_row(results):
    rows = cells_of(study.table(results))
    assert list(rows)[0] == "Dense ViT" and len(rows) == 13
    row = rows["Sinkhorn token choice, K = 2"]
    router = study.configurations(study.SMALL)["routers"]["sinkhorn_token_choice_k2"]
    cost = evaluation.cost(
        {
            "image_shape": (16, 16, 3),
            "patch_size": 4,
            "num_layers": 4,
            "num_heads": 4,
            "hidden_dim": 64,
            "mlp_dim": 128,
            "moe_layers": (1, 3),
            "router": router.router,
            "group_images": 8,
            "pooling": "gap",
            "position_embedding": "sincos2d",
        },
        num_classes=179,
    )
    assert row == {
        "model": "Sinkhorn token choice, K = 2",
        "parameters": f"{cost.parameters:,}",
        "MFLOP": f"{1e3 * cost.gflop_per_image:,.1f}",
        "step": "1.50",
        "upstream": "51.0 ± 1.0",
        "1-shot": "5.1 ± 0.1",
        "5-shot": "25.5 ± 0.5",
        "10-shot": "40.8 ± 0.8",
        "fine-tuned": "90.0 ± 0.0",
        "dropped": "25.0",
        "imbalance": "2.00",
        "position": "50.0",
        "class": "10.0",
        "sharpness": "–",
    }
    for column in ("dropped", "imbalance", "position", "class", "sharpness"):
        assert rows["Dense ViT"][column] == "–"
    assert rows["Soft MoE, 1 slot each"]["sharpness"] == "3.00"
    # Six seeds, 0.50 to 0.55.
    headline = cells_of(study.table(results, "headline"))
    assert headline["Dense ViT"]["upstream"] == "52.5 ± 1.9"
    # One of its own.
    rates = cells_of(study.table(results, "learning_rate"))
    assert rates["Dense ViT, learning rate 0.001"]["upstream"] == "150.0"


def test_what_is_not_there_yet(results):
    del results["times"]["steps"]["soft_2s"]
    for key in ("parameters", "gflop_per_image", "training_gflop"):
        del results["configurations"]["soft_2s"][key]
    results["cells"]["softmax_token_choice_k2"] = {}
    results["cells"]["soft_1s"]["1"] = {"diverged": True, "curve": []}
    rows = cells_of(study.table(results))
    row = rows["Soft MoE, 2 slots each"]
    assert {row[name] for name in ("parameters", "MFLOP", "step")} == {"–"}
    assert "Softmax token choice, K = 2" not in rows and len(rows) == 12
    assert rows["Soft MoE, 1 slot each (1 diverged)"]["upstream"] == "51.0 ± 1.4"


def test_report(results):
    text = study.report(results)
    for study_name in results["studies"]:
        assert study.table(results, study_name) in text
    # The claims are compared with all others, on the site's appendix.
    assert "\n- **" not in text
    models = sum(map(len, results["cells"].values()))
    assert (
        f"{models} trainings, seeds 0, 1, 2, 3, 4, 5, 100, 101, 102; the processes"
        in text
    )
    assert f" {models}.0 hours" in text
    assert (
        "the best of 0.001, 0.002, 0.004, 0.008, 0.016 for one model of each kind"
        in text
    )
    assert "512,000 images" in text


def test_seeds_that_are_not_there_are_not_counted(results):
    for cells in results["cells"].values():
        for seed in set(cells) - {"0"}:
            del cells[seed]
    assert "trainings, seeds 0; " in study.report(results)


def test_report_of_a_part():
    """At a scale whose rates were chosen with one seed, of three models."""

    def accuracy(name, seed):
        names = ("dense", "soft_1s_at2-3", "identity_at2-3")
        return 0.5 + 0.01 * seed if name in names else None

    studies = ("headline", "fixed")
    text = study.report(made_up_study.results(study.ANYWHERE, accuracy, studies))
    assert "one model of each kind, with seed 100, of which no other result" in text
    assert "0.004 (dense), 0.002 (soft); routing" in text
    assert "anywhere in the image, among 2 pieces of others" in text
    _, headline, fixed = text.split("\n| model")
    assert headline.count("\n|") == 3 and fixed.count("\n|") == 4


def test_claims_in_words():
    def dispatch_matters(name, seed):
        return 0.5 + name.startswith("soft_uniform") * (0.02 + 0.001 * seed)

    results = made_up_study.results(study.SMALL, dispatch_matters, ("fixed",))
    lines = study.claims_table(results).splitlines()
    (place,) = (i for i, line in enumerate(lines) if "Dispatch mixing" in line)
    # 0.0577 points, 4.303 times
    assert lines[place + 1].strip() == (
        "- upstream accuracy: appears, after the correction too. "
        "soft / uniform - uniform / soft: +2.10 ± 0.25 (3 seeds)."
    )
    # Two metrics each, of dropping one.
    assert sum("not run" in line for line in lines) == 2 * 20 + 1


def test_results_are_made_of_the_json_alone(results, tmp_path):
    command_line.write_results(results, tmp_path / "one")
    names = ["10_shot.png", "README.md", "curves.png", "results.json"]
    names += ["transfer.png", "upstream_accuracy.png"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    kept = json.loads((tmp_path / "one" / "results.json").read_text())
    assert kept == results
    command_line.write_results(kept, tmp_path / "two")
    for name in names:
        first, second = (tmp_path / part / name for part in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
    text = (tmp_path / "one" / "README.md").read_text()
    assert all(f"({name})" in text for name in names if name.endswith("png"))


@pytest.fixture
def no_pictures(monkeypatch):
    """Figures have tests of their own, and take seconds."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: Path(file).touch())


def test_the_committed_study(tmp_path, no_pictures):
    """Its text comes from its JSON, and nobody has chosen among its seeds."""
    kept = json.loads((COMMITTED / "results.json").read_text("utf-8"))
    command_line.write_results(kept, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert text == (COMMITTED / "README.md").read_text("utf-8")
    assert kept["scale"] == json.loads(json.dumps(study.SMALL.settings))
    for name, models in kept["studies"].items():
        seeds = seeds_of(kept, name)
        for model in models:
            found = [seed for seed in seeds if seed in kept["cells"][model]]
            # What is not finished yet lacks the last ones.
            assert found == seeds[: len(found)]


def test_learning_rates_are_the_best_of_those_tried():
    kept = json.loads((COMMITTED / "results.json").read_text("utf-8"))
    scale = study.SMALL

    def tried(name, seeds):
        """Dict from kinds of routers to dicts from rates to accuracies."""
        found = {}
        for configuration in study.configurations(scale)[name].values():
            cells = kept["cells"][configuration.name]
            accuracies = [cells[str(seed)]["upstream_accuracy"] for seed in seeds]
            of_family = found.setdefault(configuration.family, {})
            of_family[configuration.learning_rate] = np.mean(accuracies)
        return found

    first = tried("learning_rate", scale.rate_seeds[:1])
    assert {len(rates) for rates in first.values()} == {len(scale.learning_rates)}
    # Those that one seed does not rule out are those that have more.
    for rates in first.values():
        close = {rate for rate in rates if rates[rate] > max(rates.values()) - 0.005}
        assert close <= set(scale.close_rates)
    best = {
        family: max(rates, key=rates.get)
        for family, rates in tried("close_rates", scale.rate_seeds).items()
    }
    assert best == {
        "dense": scale.rates["dense"],
        "softmax_token_choice": scale.rates["token"],
        "softmax_expert_choice": scale.rates["expert"],
        "soft": scale.rates["soft"],
    }


def test_command_line(results, tmp_path, monkeypatch, capsys, no_pictures):
    asked = []

    def run(*arguments):
        asked.append(arguments)
        return results

    monkeypatch.setattr(command_line, "run_study", run)
    options = ["--studies", "routers", "slots", "--seeds", "1", "2"]
    options += ["--models", "dense"]
    command_line.main([*options, "--work", str(tmp_path)])
    assert asked == [(study.SMALL, tmp_path, ["routers", "slots"], [1, 2], ["dense"])]
    assert (tmp_path / "results.json").exists()
    assert study.report(results) in capsys.readouterr().out


def test_figure(results):
    results["times"]["steps"]["soft_2s"]["ratio"] = 2.5
    figure = study.plot_study(results, "5-shot")
    left, right = figure.axes
    assert left.get_ylabel() == "5-shot accuracy on digits"
    for ax in (left, right):
        # A point with its spread for each of 13 models, hollow or in the legend.
        assert len(ax.containers) == 13
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == len(set(names)) == 7
    (soft,) = (
        line
        for line in left.lines
        if len(line.get_xdata()) == 2 and list(line.get_xdata()) == [1.5, 2.5]
    )
    assert list(soft.get_ydata()) == pytest.approx([0.51 / 2] * 2)
    costs = {
        round(c["training_gflop"] / 1e3, 9)
        for name, c in results["configurations"].items()
        if name in results["studies"]["routers"]
    }
    drawn = {round(float(c.lines[0].get_xdata()[0]), 9) for c in right.containers}
    assert drawn == costs


def test_curves(results):
    figure = study.plot_curves(results)
    assert len(figure.axes) == 4
    accuracy, sharpness = figure.axes[:2]
    dense = accuracy.lines[0]
    # 250 steps of 128 images; the mean of six seeds, half and whole.
    assert list(dense.get_xdata()) == [32.0, 64.0]
    assert list(dense.get_ydata()) == pytest.approx([0.525 / 2, 0.525])
    names = [text.get_text() for text in accuracy.get_legend().get_texts()]
    known = results["configurations"]
    assert names == [known[n]["title"] for n in results["studies"]["headline"]]
    # Three soft models, and the line of an even share.
    assert [list(line.get_ydata()) for line in sharpness.lines] == [
        *[[3.0, 3.0]] * 3,
        [1.0, 1.0],
    ]
    with pytest.raises(ValueError, match=r"finished. Received: studies=\['seeds'\]"):
        study.plot_curves(results, ["headline", "seeds"])


def test_transfer(results):
    # In what is made up 5-shot accuracy is half of that upstream.
    found = study.transfer(results)
    assert found.slope == pytest.approx(0.5) and found.correlation == pytest.approx(1)
    of_results = [
        seed
        for name, cells in results["cells"].items()
        for seed in cells
        if int(seed) in study.SMALL.all_seeds
    ]
    assert found.count == len(of_results)
    ax = study.plot_transfer(results).axes[0]
    *dots, line = ax.lines
    assert sum(len(drawn.get_xdata()) for drawn in dots) == found.count
    assert list(line.get_ydata()) == pytest.approx(list(line.get_xdata() / 2))
    # A point more on the new task for every second model: the line is no longer all.
    for cells in list(results["cells"].values())[::2]:
        for cell in cells.values():
            cell["few_shot"]["5"] += 0.01
    found = study.transfer(results)
    assert found.correlation < 0.99 and 0.004 < found.left < 0.006
    results["cells"] = {"soft_2s": results["cells"]["soft_2s"]}
    assert study.transfer(results) is None
    with pytest.raises(ValueError, match="four trainings.*Received: 3 trainings"):
        study.plot_transfer(results)


def test_what_cannot_be_shown(results):
    with pytest.raises(ValueError, match="studies.*Received: study='seeds'"):
        study.table(results, "seeds")
    with pytest.raises(ValueError, match="Metrics are .*metric='2-shot'"):
        study.plot_study(results, "2-shot")
    results["cells"] = {}
    with pytest.raises(ValueError, match="No model of this study is finished"):
        study.plot_study(results)
    del results["studies"]["routers"]
    with pytest.raises(ValueError, match="must be 'routers'.*Received: .*studies="):
        study.plot_study(results)
