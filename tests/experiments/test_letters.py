"""The study on letters: data, models, trainings that go on, answers of made-up rows."""

import dataclasses
import itertools

import numpy as np
import pytest
from keras.ops import convert_to_numpy

from experiments.letters import __main__ as program, answers, routers
from experiments.letters.bank import NEW_FONTS, SPLITS, load_bank, make_bank
from experiments.letters.measures import TEST_SEED, accuracy
from experiments.letters.models import MODELS, SMOKE, STUDY, build, count
from experiments.letters.pictures import BLOCK, IMAGE_SIZE, PLACEMENTS, Letters
from experiments.letters.trainings import gather, names_of, training, weights_file
from experiments.lib.runs import finish, write_json
from experiments.pages import letters as page
from tests.support.close import assert_near


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    directory = tmp_path_factory.mktemp("letters")
    made = load_bank(directory, SMOKE.candidates)
    read = load_bank(directory, SMOKE.candidates)
    assert all(np.array_equal(*pair) for pair in zip(made, read, strict=True))
    return made


# === Data ===


def test_classes_differ_by_sight():
    # Of signs that look alike the first is kept: Greek and Cyrillic letters, a capital
    # that is its small letter, enlarged. There is no ink in a space.
    found = make_bank("AΑАCcСс BВΒ⠿█")
    assert found.characters == "ACB"


def test_splits(bank):
    assert bank.num_classes == len(bank.characters) - bank.new.sum() == 15
    rows, labels = zip(*map(bank.rows, SPLITS), strict=True)
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))
    trained = rows[0]
    assert not set(bank.fonts[bank.font[trained]]) & set(NEW_FONTS)
    assert set(bank.fonts[bank.font[rows[1]]]) == set(NEW_FONTS)
    assert not bank.new[bank.label[trained]].any()
    assert bank.new[bank.label[rows[2]]].all()
    for of_split, number in zip(labels, (15, 15, 5), strict=True):
        assert list(np.unique(of_split)) == list(range(number))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pictures_follow_from_seed_and_number(bank, placement):
    letters = Letters(bank, placement)
    first = list(itertools.islice(letters.batches(3, 0), 3))
    again = next(letters.batches(3, 2))
    for one, two in zip(first[2], again, strict=True):
        np.testing.assert_array_equal(one, two)
    shape = (BLOCK, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert again[0].shape == shape and again[0].dtype == np.uint8
    others = [first[0], first[1], next(letters.batches(4, 0)), letters.take(1, 3)]
    for one, two in itertools.combinations([x for x, _ in others], 2):
        assert np.mean(one[:, ::2] != two[:, ::2]) > 0.1
    # A letter is there, and it is not everything.
    assert (again[0].max((1, 2, 3)) > 100).all() and again[0].mean() < 128


# === Models ===


def test_costs():
    costs = {name: count(STUDY, model, 2600) for name, model in MODELS.items()}
    dense = costs["dense"]["training_gflop"]
    ratios = {name: cost["training_gflop"] / dense for name, cost in costs.items()}
    assert ratios["random"] == ratios["vmoe"]
    assert ratios["soft_1"] == ratios["soft_5"] == ratios["soft"]
    assert ratios["longer"] == pytest.approx(STUDY.longer)
    sparse = ("vmoe_5", "vmoe", "expert", "position")
    assert all(1 < ratios[name] < 1.05 for name in sparse)
    # Each slot is a product with each token, twice.
    assert 1.05 < ratios["soft"] < 1.07
    wide = costs["wide"]["parameters"] / costs["vmoe"]["parameters"]
    assert wide == pytest.approx(1, abs=0.02) and ratios["wide"] > 3


def test_one_expert_is_the_dense_model():
    router = MODELS["vmoe_5"].router(STUDY)
    config = {**router.get_config(), "num_experts": 1, "losses": []}
    alone = type(router).from_config(config)
    routing = alone(np.random.default_rng(0).normal(size=(2, 8, 4)), training=True)[0]
    gates = convert_to_numpy(routing.gate)
    np.testing.assert_array_equal(gates, np.ones_like(gates))
    assert np.sort(convert_to_numpy(routing.token)[0, 0]).tolist() == list(range(8))


def test_a_token_is_in_the_middle_and_elsewhere(bank):
    ink = {name: Letters(bank, name).take(256, 0)[0] > 100 for name in PLACEMENTS}
    # Along the edges: all of their places are as likely as those in the middle.
    edge = {name: x[:, 0].any((1, 2)).mean() for name, x in ink.items()}
    assert edge["centred"] == 0 < 0.05 < edge["anywhere"]


def test_views():
    tokens = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    images = tokens.reshape(4, 4, 3)
    mean = images.mean(0)
    expected = {
        "position_only": np.broadcast_to(mean, images.shape),
        "content_only": images - mean + mean.mean(0),
        "other_image": images[[3, 0, 1, 2]],
    }
    for name, view in routers.VIEWS.items():
        seen = convert_to_numpy(view(tokens, positions=4)).reshape(images.shape)
        assert_near(seen, expected[name], atol=1e-6, err_msg=name)
    router = routers.ViewRouter(2, capacity_factor=1.0)
    ordinary = convert_to_numpy(router(tokens).summary["logits"])
    router.view = lambda tokens: 2 * tokens
    doubled = convert_to_numpy(router(tokens).summary["logits"])
    np.testing.assert_allclose(doubled, 2 * ordinary, rtol=1e-5)


# === Trainings ===


@pytest.fixture(scope="module")
def finished(bank, tmp_path_factory):
    """Directory and results of trainings with a seed, one of them interrupted."""
    directory = tmp_path_factory.mktemp("trainings")
    letters = {name: Letters(bank, name) for name in PLACEMENTS}
    # At random, so that the state of its generator has to be kept.
    run = training(SMOKE, letters, "anywhere_random", 0)

    def interrupted(epoch):
        if epoch:
            raise KeyboardInterrupt
        return run.draw(epoch)

    with pytest.raises(KeyboardInterrupt):
        finish(dataclasses.replace(run, draw=interrupted), directory)
    # It was saved after the first epoch.
    assert list((directory / "backup").rglob("*.h5"))
    names = ["anywhere_random", "anywhere_vmoe", "anywhere_soft_5"]
    program.train(SMOKE, letters, names, [0], directory)
    return directory, letters, gather(SMOKE, directory, bank.num_classes)


def test_an_interrupted_training_goes_on(finished, tmp_path):
    _, letters, results = finished
    run = training(SMOKE, letters, "anywhere_random", 0)
    whole = finish(run, tmp_path)["results"]
    assert len(whole["curve"]) == SMOKE.epochs
    (row,) = results["runs"]["anywhere_random"]
    assert row == {"seed": 0, **whole}


def test_weights_are_kept(finished):
    directory, letters, results = finished
    bank = letters["anywhere"].bank
    classifier = build(SMOKE, MODELS["vmoe"], bank.num_classes)
    classifier.load_weights(weights_file(directory, "anywhere_vmoe_seed0"))
    (row,) = results["runs"]["anywhere_vmoe"]
    pictures = letters["anywhere"].take(SMOKE.test_images, TEST_SEED)
    assert accuracy(classifier, *pictures) == row["accuracy"]


def test_results(finished):
    _, _, results = finished
    (soft,) = results["runs"]["anywhere_soft_5"]
    (vmoe,) = results["runs"]["anywhere_vmoe"]
    assert set(soft["few_shot"]) == {"1", "5"} and "views" not in soft
    assert set(vmoe["views"]) == set(routers.VIEWS)
    assert set(vmoe["slots"]) == {"0.25", "0.5"}
    assert all(0 <= block["dropped"] < 1 for block in vmoe["blocks"].values())
    assert all(abs(b["cosine_within"]) <= 1 for b in soft["blocks"].values())
    assert set(results["models"]) == set(names_of())


def test_waits_while_there_is_a_file(tmp_path, monkeypatch):
    file = tmp_path / "pause"
    file.touch()
    monkeypatch.setattr(program.time, "sleep", lambda seconds: file.unlink())
    program.wait_while_paused(file)
    assert not file.exists()


# === Answers ===


def made_up(seeds=(0, 1, 2, 3, 4, 5)):
    """Results in which V-MoE is 10 points above random, and nothing else differs."""
    rng = np.random.default_rng(0)
    runs = {}
    for name in names_of():
        gain = 0.1 * (name == "anywhere_vmoe")
        runs[name] = []
        for seed in seeds:
            accuracy = 0.6 + gain + 0.003 * rng.standard_normal()
            block = {
                "dropped": 0.1,
                "label_share": 0.2,
                "position_share": 0.3,
                "cosine_within": 0.5,
                "cosine_between": 0.25 + 0.01 * rng.standard_normal(),
            }
            slots = {"max": accuracy - 0.1, "position": accuracy - 0.1}
            runs[name].append(
                {
                    "seed": seed,
                    "accuracy": accuracy,
                    "new_fonts": accuracy - 0.2,
                    "few_shot": {"1": 0.1, "5": 0.2},
                    "blocks": {"1": block, "3": block},
                    "slots": {"0.5": slots, "0.25": slots},
                    "views": dict.fromkeys(routers.VIEWS, accuracy - 0.3),
                }
            )
    models = {
        name: count(STUDY, MODELS[name.partition("_")[2]], 2600) for name in names_of()
    }
    seconds = {name: [60] * len(seeds) for name in runs}
    return {"models": models, "runs": runs, "seconds": seconds}


def test_answers_of_made_up_rows(tmp_path):
    results = made_up()
    found = {claim.source: claim for claim in answers.claims(results)}
    assert list(found) == list("abcdef")
    first = found["a"].differences[answers.PRIMARY][0]
    assert first.mean == pytest.approx(0.1, abs=0.01) and first.seeds == 6
    assert found["a"].survives(answers.PRIMARY)
    assert found["b"].verdict(answers.PRIMARY) == "open"
    # The family is that of all primary outcomes: 12.
    family = [d for claim in found.values() for d in claim.differences[answers.PRIMARY]]
    assert len(family) == 12
    smallest = min(family, key=lambda d: d.p)
    assert smallest.adjusted_p == pytest.approx(12 * smallest.p)
    assert all(np.isnan(d.adjusted_p) or d.adjusted_p >= d.p for d in family)
    assert all(np.isnan(d.adjusted_p) for d in found["a"].differences["secondary"])
    effect, other = answers.QUESTIONS["a"].primary[0], answers.QUESTIONS["b"].primary[0]
    assert answers.answer(effect, first) == "yes"
    assert answers.answer(effect, first._replace(mean=-0.1)) == "no"
    (none,) = found["b"].differences[answers.PRIMARY][:1]
    assert answers.answer(other, none) == "less than a point"
    assert answers.answer(other, none._replace(error=0.1)) == "open"
    answers.write_answers(results, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "**yes**" in text and "**open**" in text and "nan" not in text
    assert (tmp_path / "answers.png").stat().st_size > 10_000


def test_primary_outcomes_are_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    write_json(page.RESULTS, made_up())
    _, _, *rows = page.answers_table().splitlines()
    assert len(rows) == 6 + 12
    assert rows[0].startswith("| **(a)** | **Is learned routing better")
    assert "points" in rows[1]
    _, _, *rows = page.models_table().splitlines()
    assert [row.split(" | ")[-1] for row in rows] == ["6 |"] * len(rows)


def test_answers_of_few_rows(finished):
    _, _, results = finished
    text = answers.report(results)
    # One seed has no interval, and most was not run.
    assert text.count("not run: ") == 4 and "nan" not in text
    rows = [line for line in text.splitlines() if line.startswith("| V-MoE, anywhere")]
    assert len(rows) == 1
    answers.plot_answers(results)


def test_every_number_of_the_answers_is_measured(finished):
    _, _, results = finished
    for question in answers.QUESTIONS.values():
        for effect in (*question.primary, *question.secondary):
            for run, path in (effect.left, effect.right):
                assert run in names_of()
                known = "anywhere_soft_5" if "soft" in run else "anywhere_vmoe"
                # Blocks of the smallest models have other numbers.
                path = [{"3": "1", "1": "0"}.get(key, key) for key in path]
                assert answers.values(results, known, path), (run, path)
