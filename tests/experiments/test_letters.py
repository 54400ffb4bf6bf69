"""The study on letters: data, models, trainings that go on, answers, presets."""

import dataclasses

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy

import keras_softmoe as ksm
from experiments.letters import __main__ as program, answers, presets, upcycling
from experiments.letters.bank import NEW_FONTS, SPLITS, load_bank
from experiments.letters.models import MODELS, SMOKE, STUDY, VIEWS, ViewRouter, count
from experiments.letters.pictures import PLACEMENTS, Letters
from experiments.letters.trainings import gather, names_of, training
from experiments.lib.cards import read_metadata
from experiments.lib.runs import finish
from tests.support.close import assert_near


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    directory = tmp_path_factory.mktemp("letters")
    made = load_bank(directory, SMOKE.candidates)
    read = load_bank(directory, SMOKE.candidates)
    assert all(np.array_equal(*pair) for pair in zip(made, read, strict=True))
    return made


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


def test_views():
    tokens = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    images = tokens.reshape(4, 4, 3)
    mean = images.mean(0)
    expected = {
        "position_only": np.broadcast_to(mean, images.shape),
        "content_only": images - mean + mean.mean(0),
        "other_image": images[[3, 0, 1, 2]],
    }
    for name, view in VIEWS.items():
        seen = convert_to_numpy(view(tokens, positions=4)).reshape(images.shape)
        assert_near(seen, expected[name], atol=1e-6, err_msg=name)
    router = ViewRouter(2, capacity_factor=1.0)
    ordinary = convert_to_numpy(router(tokens).summary["logits"])
    router.view = lambda tokens: 2 * tokens
    doubled = convert_to_numpy(router(tokens).summary["logits"])
    np.testing.assert_allclose(doubled, 2 * ordinary, rtol=1e-5)


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


def test_results(finished):
    _, _, results = finished
    (soft,) = results["runs"]["anywhere_soft_5"]
    (vmoe,) = results["runs"]["anywhere_vmoe"]
    assert set(soft["few_shot"]) == {"1", "5"} and "views" not in soft
    assert set(vmoe["views"]) == set(VIEWS)
    assert set(vmoe["slots"]) == {"0.25", "0.5"}
    assert all(0 <= block["dropped"] < 1 for block in vmoe["blocks"].values())
    assert all(abs(b["cosine_within"]) <= 1 for b in soft["blocks"].values())
    assert set(results["models"]) == set(names_of())


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
                    "views": dict.fromkeys(VIEWS, accuracy - 0.3),
                }
            )
    models = {
        name: count(STUDY, MODELS[name.partition("_")[2]], 2600) for name in names_of()
    }
    seconds = {name: [60] * len(seeds) for name in runs}
    return {"models": models, "runs": runs, "seconds": seconds}


def test_answers_of_made_up_rows():
    results = made_up()
    found = answers.outcomes(results)
    assert list(found) == list("abcdef")
    first = found["a"][0][0]
    assert first.mean == pytest.approx(0.1, abs=0.01) and first.seeds == 6
    # The family is that of all primary outcomes: 12.
    family = [d for primary, _ in found.values() for d in primary]
    assert len(family) == 12
    smallest = min(family, key=lambda d: d.p)
    assert smallest.adjusted_p == pytest.approx(12 * smallest.p)
    assert all(np.isnan(d.adjusted_p) or d.adjusted_p >= d.p for d in family)
    assert all(np.isnan(d.adjusted_p) for d in found["a"][1])
    effect, other = answers.QUESTIONS["a"].primary[0], answers.QUESTIONS["b"].primary[0]
    assert answers.answer(effect, first) == "yes"
    assert answers.answer(effect, first._replace(mean=-0.1)) == "no"
    none = found["b"][0][0]
    assert answers.answer(other, none) == "less than a point"
    assert answers.answer(other, none._replace(error=0.1)) == "open"
    text = answers.report(results)
    assert "**yes**" in text and "**open**" in text and "nan" not in text
    answers.plot_answers(results)


def test_program(tmp_path):
    work, output = tmp_path / "work", tmp_path / "presets"
    places = ["--work", str(work), "--output", str(output)]
    places += ["--records", str(tmp_path / "trained.json")]
    presets.main(["--scale", "smoke", "--only", "vmoe", *places])
    (name,) = (path.name for path in output.iterdir())
    directory = output / name
    accuracy = read_metadata(directory)["accuracy"]
    assert accuracy["letters, trained fonts"] <= 1
    assert "letters, few-shot, never seen, 5 of a class" in accuracy
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert name in card
    assert all(f"\n| {seed} | 0." in card for seed in SMOKE.seeds)
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(str(directory))
    router = classifier.backbone.router
    assert type(router) is ksm.routers.SoftmaxTokenChoiceRouter
    images, labels = Letters(load_bank(work, SMOKE.candidates), "anywhere").take(
        SMOKE.test_images, 7
    )
    predicted = classifier.predict(images, batch_size=64, verbose=0).argmax(-1)
    assert predicted.shape == labels.shape and np.ptp(labels) > 0


SEED = upcycling.SEEDS[0]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Directory with a trained dense start, the letters, and the file of the start."""
    directory = tmp_path_factory.mktemp("letters")
    letters = Letters(load_bank(directory, SMOKE.candidates), "anywhere")
    file = upcycling.start_file(directory, SEED)
    finish(upcycling.start_run(SMOKE, letters, SEED, file), directory)
    return directory, letters, file


def moments(classifier, kind):
    """Moments by the path of the weight."""
    found = upcycling.moments_of(classifier.optimizer, kind)
    weights = classifier.trainable_variables
    return {w.path: convert_to_numpy(m) for w, m in zip(weights, found, strict=True)}


@pytest.mark.parametrize("name", ["dense", "expert_choice"])
def test_experts_have_the_dense_state(started, name):
    dense = keras.saving.load_model(started[2])
    variant = upcycling.VARIANTS[name]
    model = upcycling.continued(dense, variant, SMOKE)
    assert int(model.optimizer.iterations) == int(dense.optimizer.iterations) == 4
    for kind in ("momentum", "velocity"):
        given, found = moments(dense, kind), moments(model, kind)
        assert any(np.any(x) for x in given.values())
        for path, moment in found.items():
            if "router" in path:
                assert not moment.any()
            elif "experts" in path:
                assert len(moment) == upcycling.NUM_EXPERTS
                assert moment.any() and (moment == moment[:1]).all()
            else:
                np.testing.assert_array_equal(moment, given[path])


def test_without_moments_the_rate_goes_on(started):
    dense = keras.saving.load_model(started[2])
    with_past, without = (
        upcycling.continued(dense, upcycling.VARIANTS[name], SMOKE)
        for name in ("expert_choice", "no_moments")
    )
    assert int(without.optimizer.iterations) == 0
    assert not any(np.any(x) for x in moments(without, "velocity").values())
    rates = [float(m.optimizer.learning_rate) for m in (with_past, without)]
    assert rates[0] == pytest.approx(rates[1]) and rates[0] > 0


def test_gates_of_a_token_sum_to_one():
    router = upcycling.NormalizedExpertChoiceRouter(4, 2.0)
    tokens = np.random.default_rng(0).normal(size=(2, 12, 8)).astype("float32")
    routing = router(tokens).routing
    total = convert_to_numpy(ksm.ops.to_dense(routing, 12).combine).sum((2, 3))
    chosen = convert_to_numpy(ksm.ops.to_dense(routing, 12).dispatch).sum((2, 3)) > 0
    np.testing.assert_allclose(total, chosen, rtol=1e-5)
    assert chosen.any()


def test_upcycling_program(started, capsys):
    directory, *_ = started
    arguments = ["--scale", "smoke", "--seeds", str(SEED), "--work", str(directory)]
    upcycling.main(arguments)
    results = upcycling.read_json(directory / "upcycling.json")
    for name in upcycling.VARIANTS:
        (row,) = results["runs"][name].values()
        assert 0 <= row["accuracy"] <= 1 and "accuracy" in row["before"]
    (start,) = results["starts"].values()
    (dense,) = results["runs"]["dense"].values()
    assert dense["before"]["accuracy"] == start["accuracy"]
