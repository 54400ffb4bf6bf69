"""What `analyze` finds in models of every kind, and which figures apply."""

import sys

import pytest

from keras_softmoe import analysis, routers
from keras_softmoe.analysis.figures import FIGURES
from tests.support import (
    made_up,
    modality_blocks,
    pairs,
    routing_blocks,
    soft_blocks,
    tiny,
)
from tests.support.reading import legend_names, png

ANY = ["load"]
IMAGES = ["by_position", "by_class"]
SOFT = [
    "token_weights",
    "contributions",
    "tokens_per_slot",
    "concentration",
    "slot_correlation",
]


def test_soft_classifier():
    model = tiny.classifier(moe_layers=(0, 1), router=tiny.SOFT)
    routing = analysis.analyze(
        model, tiny.pixels(3), tiny.labels(3), num_pictures=1, verbose=0
    )
    assert routing.figures == [*ANY, *IMAGES, *SOFT, "experts", "slots"]
    assert list(routing.blocks) == list(routing.soft) == list(routing.maps) == [0, 1]
    assert routing.modalities == {}


def test_sparse_backbone():
    model = tiny.backbone(router=tiny.SPARSE)
    routing = analysis.analyze(model, tiny.images(3), verbose=0)
    choices = ["choice_weights", "experts_per_image"]
    # No labels, no pictures
    assert routing.figures == [*ANY, *choices, "by_position"]
    routing = analysis.analyze(model, tiny.images(3), num_pictures=1, verbose=0)
    assert routing.figures == [*ANY, *choices, "by_position", "experts", "patches"]


def test_identity_chooses_nothing():
    model = tiny.backbone(router=routers.IdentityRouter(4), pooling="gap")
    routing = analysis.analyze(model, tiny.images(2), num_pictures=1, verbose=0)
    assert routing.figures == [*ANY, "by_position", "experts"]


def test_limoe():
    model = pairs.limoe()
    routing = analysis.analyze(
        *(model, pairs.images()), captions=pairs.token_ids(), num_pictures=1, verbose=0
    )
    assert routing.figures == [
        *ANY,
        *("modality_load", "coverage", "confidence", "priorities", "trajectories"),
        *("experts", "examples", "pair"),
    ]
    text = analysis.analyze(
        model, captions=pairs.token_ids(), num_pictures=1, verbose=0
    )
    assert text.figures == [*routing.figures[:6], "examples"]
    one_block = pairs.limoe(moe_layers=(1,))
    routing = analysis.analyze(one_block, pairs.images(), verbose=0)
    assert "trajectories" not in routing.figures


def test_pairs_as_a_dict():
    """As any model takes them: images and text are not told apart."""
    inputs = {"images": tiny.images(2), "token_ids": pairs.token_ids()[:2]}
    model = pairs.limoe()
    routing = analysis.analyze(model, inputs, verbose=0)
    assert routing.modalities == {} and routing.figures == ANY
    with pytest.raises(ValueError, match="num_pictures=1 with LIMoEBackbone"):
        analysis.analyze(model, inputs, num_pictures=1, verbose=0)


BLOCKS = (0, 1, 2, 3, 4, "my_moe")
MADE = {
    "blocks": routing_blocks.make_block,
    "soft": soft_blocks.make_block,
    "modalities": modality_blocks.make_block,
}


def given_to(figure):
    block = MADE[FIGURES[figure].part]()
    return {name: block._replace(block=name) for name in BLOCKS}


def titles(figure):
    return [ax.get_title().split("\n")[0] for ax in figure.axes if ax.get_title()]


@pytest.mark.parametrize(
    "name", ["load", "choice_weights", "experts_per_image", *IMAGES, *SOFT]
)
def test_blocks_are_chosen(name):
    # More than fit side by side, by number and by name.
    given = given_to(name)
    figure = made_up.plot(name, given)
    assert png(figure).startswith(b"\x89PNG")
    names = ["block 0", "block 1", "block 2", "block 3", "block 4", "my_moe"]
    chosen = made_up.plot(name, given, ["my_moe", 2])
    if titles(figure):
        assert titles(figure) == names
        assert titles(chosen) == ["my_moe", "block 2"]
    else:
        found = [x.split(":")[0] for x in legend_names(figure.legends[0])]
        assert found[:6] == names
        found = [x.split(":")[0] for x in legend_names(chosen.legends[0])]
        assert found[:2] == ["my_moe", "block 2"]
    for blocks in ((), [7]):
        with pytest.raises(ValueError, match=r"blocks \[0, 1, .*Received: blocks="):
            made_up.plot(name, given, blocks)


def test_one_block_draws_itself():
    block = routing_blocks.make_block(3)
    assert titles(block.plot("load")) == ["block 3"]
    # Of other statistics, or without the numbers
    for name in ("token_weights", "by_class"):
        with pytest.raises(ValueError, match=f"Unknown `figure`.*figure='{name}'"):
            block._replace(weight_by_class=None).plot(name)
    soft = soft_blocks.make_block("my_moe")
    assert titles(soft.plot("concentration", weights="combine")) == ["my_moe"]


def test_figures_that_do_not_apply():
    routing = made_up.routing(blocks=routing_blocks.statistics())
    with pytest.raises(ValueError, match="Accepted: 'load', .*figure='slots'"):
        routing.plot("slots")
    with pytest.raises(TypeError, match="'by_class' has no such.*mean `class_names`"):
        routing.plot("by_class", class_name="abcd")


def test_pictures_are_of_one_block():
    model = tiny.backbone(moe_layers=(0, 1), router=tiny.SPARSE)
    routing = analysis.analyze(model, tiny.images(1), num_pictures=1, verbose=0)
    assert "block 0" in routing.plot("experts").get_suptitle()
    assert "block 1" in routing.plot("experts", [1]).get_suptitle()
    with pytest.raises(ValueError, match=r"of one block. Received: blocks=\[0, 1\]"):
        routing.plot("experts", [0, 1])


def test_without_matplotlib(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    routing = made_up.routing(blocks=routing_blocks.statistics())
    for draw in (
        lambda: routing.plot("load"),
        lambda: routing.blocks[1].plot("load"),
        lambda: routing.save(tmp_path / "report.html"),
    ):
        with pytest.raises(ImportError, match="extra `viz`"):
            draw()


@pytest.mark.parametrize("settings", [{}, {"router": tiny.SPARSE, "group_images": 2}])
def test_printed_it_is_a_short_table(settings):
    routing = analysis.analyze(tiny.backbone(**settings), tiny.images(4), verbose=0)
    many = routing._replace(
        blocks={i: routing.blocks[1] for i in range(24)},
        soft={i: s for s in routing.soft.values() for i in range(24)},
    )
    text = str(many)
    assert text == repr(many) and len(text) < 3000
    tables = 1 + bool(routing.soft)
    assert len(text.splitlines()) == 2 + tables * (1 + 24)
    assert len({len(line) for line in text.splitlines()[2:26]}) <= 2
