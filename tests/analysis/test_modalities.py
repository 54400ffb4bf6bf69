"""Statistics by modality and by word, against a count of the tokens one by one."""

import math

import numpy as np
import pytest

from keras_softmoe import analysis, routers
from keras_softmoe.analysis.modalities import ModalityStatistics, _words
from tests.support import pairs, tiny, tiny_limoe
from tests.support.close import assert_near

SCARCE = {"capacity_factor": 0.75}
ROUTERS = {
    "one_choice": pairs.SCARCE,
    "two_choices": routers.LIMoERouter(4, num_selected_experts=2, **SCARCE),
    "text_first": routers.LIMoERouter(4, priority="text_first", **SCARCE),
    # Selection scores that are no probabilities, and tokens that do not choose.
    "sinkhorn": routers.SinkhornTokenChoiceRouter(4, keep_fraction=0.8, **SCARCE),
}


@pytest.fixture(scope="module")
def backbone():
    return pairs.limoe()


@pytest.fixture(autouse=True)
def few_bins(monkeypatch):
    """Several places of a queue in a bin, also where queues are short."""
    monkeypatch.setattr("keras_softmoe.analysis.modalities._BINS_OF_EVEN_QUEUE", 1)


def statistics_of(backbone, images, token_ids, **kwargs):
    routing = analysis.analyze(
        backbone, images, captions=token_ids, verbose=0, **kwargs
    )
    return routing.modalities


def choices_of(token, router):
    order = np.argsort(-token.selection, kind="stable")
    return order[: router.num_selected_experts].tolist()


def queues(tokens, router):
    """Dict from group and expert to tokens in the order in which they are assigned."""

    def rank(token):
        scores = np.sort(token.selection)[::-1][: router.num_selected_experts]
        return {
            "sum": -scores.sum(),
            "text_first": token.modality != "text",
            "position": token.place,
        }[router.priority]

    waiting = {}
    for token in tokens:
        for k, expert in enumerate(choices_of(token, router)):
            queue = waiting.setdefault((token.group, expert), [])
            queue.append((k, rank(token), token.place, token))
    return {key: [entry[-1] for entry in sorted(q)] for key, q in waiting.items()}


def check(statistics, tokens, router, following=None):
    modalities = {token.modality for token in tokens}
    assert set(statistics.num_tokens) == modalities
    keep = getattr(router, "keep_fraction", 1.0)
    choosing = tokens
    if keep < 1:
        # The first by position.
        choosing = []
        for group in {token.group for token in tokens}:
            there = [token for token in tokens if token.group == group]
            choosing += there[: round(keep * len(there))]
    waiting = queues(choosing, router)
    for name in modalities:
        mine = [token for token in tokens if token.modality == name]
        assert statistics.num_tokens[name] == len(mine)

        def count(experts_of, tokens=mine):
            chosen = [expert for token in tokens for expert in experts_of(token)]
            return np.bincount(chosen, minlength=4)

        first = count(lambda token: choices_of(token, router)[:1])
        np.testing.assert_array_equal(statistics.routed[name], first)
        chosen = [token for token in choosing if token.modality == name]
        np.testing.assert_array_equal(
            statistics.chosen[name], count(lambda t: choices_of(t, router), chosen)
        )
        assigned = count(lambda token: token.gates)
        np.testing.assert_array_equal(statistics.assigned[name], assigned)
        dropped = np.mean([not token.gates for token in mine])
        np.testing.assert_allclose(statistics.dropped[name], dropped)

        p = np.array([token.probabilities for token in mine], "float64")
        np.testing.assert_allclose(statistics.probability[name], p.mean(0), rtol=1e-5)
        largest = p.max(1)
        np.testing.assert_allclose(
            statistics.confidence_mean[name], largest.mean(), rtol=1e-6
        )
        np.testing.assert_allclose(
            statistics.confidence_std[name], largest.std(), rtol=1e-5
        )
        # By bins of 0.02.
        np.testing.assert_array_equal(
            statistics.confidence_histogram[name],
            np.bincount((largest * 50).astype(int), minlength=50),
        )

        step = statistics.queue_step
        queue = np.zeros_like(statistics.queue[name])
        for (_, expert), line in waiting.items():
            for place, token in enumerate(line):
                queue[expert, place // step] += token.modality == name
        np.testing.assert_array_equal(statistics.queue[name], queue)

        if following is None:
            assert statistics.transitions is None
            continue
        steps = np.zeros((4, 4), int)
        for here, there in zip(tokens, following, strict=True):
            if here.modality == name:
                steps[choices_of(here, router)[0], choices_of(there, router)[0]] += 1
        np.testing.assert_array_equal(statistics.transitions[name], steps)

    padding = [token for token in tokens if token.is_padding]
    expected = np.bincount([e for t in padding for e in t.gates], minlength=4)
    np.testing.assert_array_equal(statistics.padding, expected)


@pytest.mark.parametrize("name", ROUTERS)
def test_counts_of_pairs(name):
    router = ROUTERS[name]
    backbone = pairs.limoe(router)
    images, token_ids = pairs.images(), pairs.token_ids()
    found = statistics_of(backbone, images, token_ids)
    assert list(found) == list(pairs.BLOCKS)
    first, last = pairs.routed_tokens(backbone, images, token_ids).values()
    check(found[0], first, router, following=last)
    check(found[1], last, router)
    for block in found.values():
        assert block.num_groups == 2
        # Of 14 tokens in a group.
        choices = 14 * router.num_selected_experts
        assert block.capacity == round(0.75 * choices / 4)
        assert block.slots == 2 * block.capacity
        assert block.queue_step == choices // 4
    # Else nothing was tested.
    assert any(sum(block.dropped.values()) for block in found.values())
    assert sum(block.padding.sum() for block in found.values())


def test_without_a_capacity():
    router = routers.LIMoERouter(4, eval_capacity_factor="dropless")
    found = statistics_of(pairs.limoe(router), pairs.images(), pairs.token_ids())
    for block in found.values():
        assert not sum(block.dropped.values())
        for name, assigned in block.assigned.items():
            np.testing.assert_array_equal(assigned, block.routed[name])


@pytest.mark.parametrize("modality", ["image", "text"])
def test_counts_of_one_modality(backbone, modality):
    router = pairs.SCARCE
    images = pairs.images() if modality == "image" else None
    token_ids = pairs.token_ids() if modality == "text" else None
    found = statistics_of(backbone, images, token_ids)
    first, last = pairs.routed_tokens(backbone, images, token_ids).values()
    check(found[0], first, router, following=last)
    check(found[1], last, router)
    num_tokens = 2 * pairs.TOKENS_OF[modality]
    # The capacity of one modality alone.
    assert found[0].capacity == num_tokens
    assert found[0].dropped == {modality: 0.0}


def test_batches_add_up(backbone):
    images, token_ids = pairs.images(), pairs.token_ids()
    at_once = statistics_of(backbone, images, token_ids)
    # One pair at a time would leave groups half empty: it becomes two.
    in_batches = statistics_of(backbone, images, token_ids, batch_size=1)
    for block, expected in at_once.items():
        found = in_batches[block]._asdict()
        for name, value in expected._asdict().items():
            if isinstance(value, dict):
                assert found[name].keys() == value.keys()
                for modality, numbers in value.items():
                    assert_near(found[name][modality], numbers, rtol=1e-5, atol=1e-8)
            elif value is not None:
                np.testing.assert_array_equal(found[name], value)


def block(**values):
    fields = dict.fromkeys(ModalityStatistics._fields)
    return ModalityStatistics(**{**fields, **values})


def test_coverage():
    found = block(routed={"text": np.array([5, 0, 90, 5]), "image": np.full(4, 10)})
    np.testing.assert_allclose(found.coverage["text"], [0.9, 0.95, 1.0, 1.0])
    np.testing.assert_allclose(found.coverage["image"], [0.25, 0.5, 0.75, 1.0])
    assert found.experts_needed() == {"text": 1, "image": 4}
    assert found.experts_needed(0.91) == {"text": 2, "image": 4}
    assert found.experts_needed(0.75) == {"text": 1, "image": 3}
    assert found.experts_needed(1) == {"text": 3, "image": 4}
    for share in (0, 1.1):
        with pytest.raises(ValueError, match=f"Received: share={share}"):
            found.experts_needed(share)


def test_entropy():
    found = block(
        probability={"text": np.array([0.5, 0.5, 0.0]), "image": np.full(3, 1 / 3)},
        assigned={"text": np.array([0, 7, 0]), "image": np.zeros(3)},
    )
    assert found.entropy == pytest.approx({"text": math.log(2), "image": math.log(3)})
    assert found.dispatch_entropy["text"] == 0
    # No token was processed.
    assert np.isnan(found.dispatch_entropy["image"])


@pytest.mark.parametrize(
    "images, captions, received",
    [
        (None, None, "neither"),
        (pairs.images()[:0], None, "{'images': 0}"),
        (pairs.images(), ["a"], "{'images': 3, 'captions': 1}"),
        (None, ["a", "b"], "list, preprocessor=None"),
        (None, np.ones((2, 5), int), r"token ids of shape \(2, 5\)"),
        (tiny.pixels(3).astype("uint8"), None, "images of dtype=uint8"),
    ],
)
def test_bad_data_is_named(backbone, images, captions, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        statistics_of(backbone, images, captions)


def test_captions_of_other_models():
    model = tiny.backbone(router=tiny.SPARSE)
    for captions, tagger in ((["a"] * 3, None), (None, str.split)):
        with pytest.raises(ValueError, match="LIMoE.*Received: .*ViTMoEBackbone"):
            analysis.analyze(
                *(model, tiny.images(3)), captions=captions, tagger=tagger, verbose=0
            )


@pytest.mark.parametrize(
    "router", [routers.SoftRouter(4), routers.SoftmaxExpertChoiceRouter(4)]
)
def test_tokens_that_do_not_choose(router):
    found = analysis.analyze(
        *(pairs.limoe(router), pairs.images()), captions=pairs.token_ids(), verbose=0
    )
    assert found.modalities == {}
    assert [block.num_tokens for block in found.blocks.values()] == [21, 21]


TAGS = {"a": "article", "red": "adjective", "circle": "noun", "heart": "noun"}


class Pieces:
    """A vocabulary that cuts words and knows signs."""

    PIECES = ("<pad>", "</s>", "▁red", "▁cir", "cle", ",", "▁", "a")

    def id_to_token(self, index):
        assert isinstance(index, int)
        return self.PIECES[index]


class Preprocessor:
    tokenizer = Pieces()

    def convert(self, images):
        return images


@pytest.mark.parametrize(
    "ids, words, word_of",
    [
        ((2, 3, 4, 0), ["red", "circle"], [0, 1, 1, None]),
        # A sign is a word, and so is what follows it.
        ((3, 5, 4, 1), ["cir", ",", "cle", "</s>"], [0, 1, 2, 3]),
        # A word may begin with a piece that is nothing else.
        ((6, 7, 6, 3, 4), ["a", "circle"], [0, 0, 1, 1, 1]),
        ((4, 6, 5, 6), ["cle", ",", "▁"], [0, 1, 1, 2]),
        ((0, 0), [], [None, None]),
    ],
)
def test_words(ids, words, word_of):
    assert _words(Pieces(), np.array(ids)) == (words, word_of)


def tagger(words):
    """Colours and others; a word that no batch but the first has makes a tag."""
    return ["sign" if word == "," else word[0] for word in words]


# Tag of each token, by hand.
TOKEN_IDS = np.array([[2, 3, 4], [6, 7, 5], [2, 0, 0]], "int32")
TOKEN_TAGS = [["r", "c", "c"], ["a", "a", "sign"], ["r", "padding", "padding"]]


def words_of(model, images, captions, tagger, **kwargs):
    routing = analysis.analyze(
        model, images, captions=captions, tagger=tagger, verbose=0, **kwargs
    )
    return {block: found.words for block, found in routing.modalities.items()}


@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("with_images", [True, False])
def test_counts_of_words(batch_size, with_images):
    backbone = pairs.limoe(vocabulary_size=8)
    images = pairs.images() if with_images else None
    statistics = words_of(
        *(backbone, images, TOKEN_IDS, tagger),
        batch_size=batch_size,
        preprocessor=Preprocessor(),
    )
    tokens = pairs.routed_tokens(backbone, images, TOKEN_IDS)
    assert list(statistics) == list(tokens)
    for block, found in statistics.items():
        assert found.tags == ("r", "c", "a", "sign", "padding")
        np.testing.assert_array_equal(found.num_tokens, [2, 2, 2, 1, 2])
        expected = np.zeros((5, 4), int)
        for token in tokens[block]:
            if token.modality == "text":
                tag = TOKEN_TAGS[token.pair][token.index]
                for expert in token.gates:
                    expected[found.tags.index(tag), expert] += 1
        np.testing.assert_array_equal(found.assigned, expected)
        total = expected.sum(axis=0)
        for expert in range(4):
            share = expected[:, expert] / total[expert] if total[expert] else 0
            np.testing.assert_allclose(found.share[:, expert], share)
    # With images some text is dropped, alone none is.
    assert statistics[0].assigned.sum() == 9 or with_images


def test_captions_of_a_task():
    model = tiny_limoe.task()
    captions = ["a red circle", "a heart"]
    seen = []

    def known(words):
        seen.append(words)
        return [TAGS[word] for word in words]

    statistics = words_of(model, None, captions, known)
    assert seen == [["a", "red", "circle"], ["a", "heart"]]
    token_ids = model.preprocessor.tokenize(captions)
    for found in statistics.values():
        counts = dict(zip(found.tags, found.num_tokens, strict=True))
        assert found.tags[-1] == "padding" and set(counts) == {
            *TAGS.values(),
            "padding",
        }
        assert counts["padding"] == (token_ids == 0).sum()
        assert counts["article"] == 2 and sum(counts.values()) == token_ids.size


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tagger": lambda words: ["x"]}, r"1 tags, \['x'\], for the words \['red"),
        ({"preprocessor": None}, "preprocessor=None"),
        ({"captions": None, "images": pairs.images()}, "captions of type NoneType"),
    ],
)
def test_words_that_cannot_be_tagged(arguments, message):
    arguments = {
        "images": None,
        "captions": TOKEN_IDS,
        "tagger": tagger,
        "preprocessor": Preprocessor(),
        **arguments,
    }
    with pytest.raises(ValueError, match=f"Received: .*{message}"):
        words_of(pairs.limoe(vocabulary_size=8), **arguments)
