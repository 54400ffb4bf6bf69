"""Scenes of colored shapes: what they show is true, and the same on each machine."""

import functools

import numpy as np
import pytest
from scipy import ndimage

from experiments.synthetic import (
    COLOR_NAMES,
    HELD_OUT_COMBINATIONS,
    SHAPE_COLOR_CLASSES,
    captioned_shapes,
)
from experiments.synthetic.captioned import CaptionedShapes
from experiments.synthetic.scenes import (
    PLACE_NAMES,
    RELATION_NAMES,
    SHAPE_NAMES,
    SIZE_NAMES,
    arrange,
    sample_scenes,
)
from tests.support.caption_reader import is_true, read_caption, scene_of

HELD_OUT = [SHAPE_COLOR_CLASSES.index(name) for name in HELD_OUT_COMBINATIONS]


@functools.cache
def some(combinations="train", image_size=16):
    return captioned_shapes(
        2000, image_size=image_size, combinations=combinations, verbose=0
    )


# === Attributes ===


def test_shapes_types_and_names():
    data = some()
    assert isinstance(data, CaptionedShapes)
    assert data.images.shape == (2000, 16, 16, 3)
    assert data.images.dtype == np.uint8
    assert data.captions.shape == (2000,)
    assert data.captions.dtype.kind == "U"
    for name, attribute in list(data._asdict().items())[2:]:
        assert attribute.shape == (2000,), name
        assert attribute.dtype == np.int32, name
    assert len(SHAPE_COLOR_CLASSES) == len(SHAPE_NAMES) * len(COLOR_NAMES) == 64
    for index, name in enumerate(SHAPE_COLOR_CLASSES):
        shape, color = divmod(index, len(COLOR_NAMES))
        assert name == f"{COLOR_NAMES[color]} {SHAPE_NAMES[shape]}"


def test_every_scene_is_of_one_of_three_kinds():
    data = some()
    lone, pair = data.places >= 0, data.relations >= 0
    group = data.counts > 1
    np.testing.assert_array_equal(lone.astype(int) + pair + group, 1)
    for attribute in (data.second_labels, data.second_sizes):
        np.testing.assert_array_equal(attribute >= 0, pair)
    assert np.all(data.labels[pair] != data.second_labels[pair])
    assert min(lone.sum(), pair.sum(), group.sum()) > 300
    # Everything occurs, about equally often.
    for attribute, where, number in (
        (data.sizes, lone, len(SIZE_NAMES)),
        (data.places, lone, len(PLACE_NAMES)),
        (data.relations, pair, len(RELATION_NAMES)),
        (data.counts - 2, group, 2),
        (data.second_sizes, pair, len(SIZE_NAMES)),
    ):
        counts = np.bincount(attribute[where], minlength=number)
        assert len(counts) == number
        assert counts.min() > 0.6 * counts.mean()


def test_held_out_combinations_are_balanced():
    shape, color = np.divmod(HELD_OUT, len(COLOR_NAMES))
    np.testing.assert_array_equal(np.bincount(shape), 2)
    np.testing.assert_array_equal(np.bincount(color), 2)
    assert HELD_OUT == sorted(HELD_OUT)


def test_parts_hold_their_combinations():
    for combinations, expected in (
        ("train", set(range(64)) - set(HELD_OUT)),
        ("held_out", set(HELD_OUT)),
        ("all", set(range(64))),
    ):
        data = some(combinations)
        assert set(data.labels) == expected
        second = set(data.second_labels) - {-1}
        assert second == (set() if combinations == "held_out" else expected)


# === Captions ===


@pytest.mark.parametrize("combinations", ["train", "held_out", "all"])
def test_captions_are_true(combinations):
    data = some(combinations)
    for index, caption in enumerate(data.captions):
        scene = scene_of(data, index)
        assert is_true(read_caption(caption), scene), (caption, scene)


def test_reader_tells_true_captions_from_false_ones():
    # The test above could not fail if the reader overlooked what is said.
    data = some()
    wrong = [
        is_true(read_caption(caption), scene_of(data, index - 1))
        for index, caption in enumerate(data.captions)
    ]
    assert np.mean(wrong) < 0.03


def test_no_training_caption_names_a_held_out_combination():
    named = set()
    for caption in some().captions:
        for mention in read_caption(caption)[0]:
            named.add(f"{mention['color']} {mention['shape']}")
    assert not named & set(HELD_OUT_COMBINATIONS)
    assert named >= set(SHAPE_COLOR_CLASSES) - set(HELD_OUT_COMBINATIONS)


def test_captions_vary_and_mention_a_part():
    captions = some().captions.tolist()
    assert len(set(captions)) > 1500
    read = [read_caption(caption) for caption in captions]
    for name, least, most in (
        ("color", 0.8, 0.98),
        ("shape", 0.85, 0.99),
        ("size", 0.2, 0.6),
        ("count", 0.1, 0.3),
        ("place", 0.15, 0.45),
    ):
        mentioned = np.mean([mentions[0][name] is not None for mentions, _ in read])
        assert least < mentioned < most, name
    assert 0.1 < np.mean([relation is not None for _, relation in read]) < 0.35


def test_articles():
    for caption in some().captions:
        words = caption.split()
        for article, word in zip(words, words[1:], strict=False):
            if article in ("a", "an"):
                assert (article == "an") == (word[0] in "aeiou"), caption


# === Pictures ===


def test_large_things_are_larger():
    rng = np.random.default_rng(0)
    scenes = sample_scenes(5000, "train", rng)
    things = arrange(scenes, rng)
    large = np.repeat(scenes.sizes[:, None], 3, axis=1) == 1
    pair = scenes.relations >= 0
    large[pair, 1] = scenes.second_sizes[pair] == 1
    lone = np.repeat(scenes.places[:, None] >= 0, 3, axis=1)
    for kind in (lone, ~lone):
        there = kind & (things.labels >= 0)
        smallest = things.radius[there & large].min()
        assert smallest > 1.15 * things.radius[there & ~large].max()


@pytest.mark.parametrize("combinations", ["train", "held_out"])
def test_things_are_whole_and_apart(combinations):
    rng = np.random.default_rng(0)
    things = arrange(sample_scenes(20_000, combinations, rng), rng)
    there = things.labels >= 0
    for place in (things.x, things.y):
        edges = place - things.radius, place + things.radius
        assert np.all(((edges[0] > 0.015) & (edges[1] < 0.985))[there])
    # Corners of a triangle are the furthest, at sqrt(0.75 + 0.75 ** 2) radii.
    reach = 1.146 * things.radius
    for i, j in ((0, 1), (0, 2), (1, 2)):
        both = there[:, i] & there[:, j]
        distance = np.hypot(*(part[:, i] - part[:, j] for part in (things.x, things.y)))
        assert np.all((distance > reach[:, i] + reach[:, j] + 0.015)[both])


def _components(image):
    """Boolean (things, height, width): connected regions that are not background."""
    image = image.astype("float32") / 255
    # The background is a plane: fitted, then once more without what is far from it.
    size = len(image)
    line = np.linspace(-1, 1, size)
    x, y = (part.ravel() for part in np.meshgrid(line, line))
    basis = np.stack([np.ones(size**2), x, y], axis=1)
    pixels = image.reshape(-1, 3)
    near = np.ones(size**2, bool)
    for limit in (0.3, 0.2, 0.15, 0.12):
        plane, *_ = np.linalg.lstsq(basis[near], pixels[near], rcond=None)
        away = np.linalg.norm(pixels - basis @ plane, axis=1)
        near = away < max(limit, np.quantile(away, 0.5))
    labels, number = ndimage.label((away > 0.2).reshape(size, size))
    masks = labels == np.arange(1, number + 1)[:, None, None]
    # What noise alone makes is a few pixels.
    return masks[masks.sum(axis=(1, 2)) > 12]


def _middle(mask):
    """x and y of the middle of the box around a region, 0 to 1."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    size = len(mask) - 1
    return (columns[[0, -1]].mean() / size, rows[[0, -1]].mean() / size)


def test_pictures_show_number_place_relation_and_size():
    data = captioned_shapes(250, image_size=64, combinations="all", verbose=0)
    for index in range(250):
        masks = _components(data.images[index])
        things, relation = scene_of(data, index)
        number = things[0]["count"] if len(things) == 1 else 2
        assert len(masks) == number, (index, data.captions[index])
        middles = np.array([_middle(mask) for mask in masks])
        # Whole, and away from the frame.
        assert not np.any(masks[:, [0, -1]]) and not np.any(masks[:, :, [0, -1]])
        if things[0]["place"]:
            column, row = np.digitize(middles[0], [0.4, 0.6])
            assert PLACE_NAMES[3 * row + column] == things[0]["place"]
            extent = max(np.ptp(np.argwhere(masks[0]), axis=0)) / 64
            assert (extent > 0.31) == (things[0]["size"] == "large")
        if relation:
            axis = 0 if relation in ("left of", "right of") else 1
            first, second = np.argsort(middles[:, axis])
            if relation in ("right of", "below"):
                first, second = second, first
            between = middles[second] - middles[first]
            assert abs(between[axis]) > 1.5 * abs(between[1 - axis])
            # The first thing of the pair is where the relation says.
            colors = [np.median(data.images[index][masks[i]], 0) for i in (first,)]
            assert _nearest_color(colors[0]) == things[0]["color"]


def _nearest_color(pixel):
    red, green, blue = np.asarray(pixel, "float32") / 255
    hue = np.degrees(np.arctan2(np.sqrt(3) * (green - blue), 2 * red - green - blue))
    low, high = min(red, green, blue), max(red, green, blue)
    if high - low < 0.2:
        return "white"
    if low > 0.35 and (hue % 360 > 280 or hue % 360 < 10):
        return "pink"
    names = ("red", "orange", "yellow", "green", "blue", "purple", "red")
    return names[np.digitize(hue % 360, [14, 45, 75, 170, 250, 330])]


def test_colors_are_what_they_are_called():
    data = captioned_shapes(300, image_size=64, combinations="all", verbose=0)
    for index in np.flatnonzero(data.relations < 0):
        expected = COLOR_NAMES[data.labels[index] % len(COLOR_NAMES)]
        for mask in _components(data.images[index]):
            color = np.median(data.images[index][mask], axis=0)
            assert _nearest_color(color) == expected, (index, color)


def test_shapes_can_be_told_apart_by_their_outline():
    # Cut out, brought to one size and compared with the mean outline of each class.
    data = captioned_shapes(500, image_size=64, combinations="all", verbose=0)
    lone = np.flatnonzero(data.places >= 0)
    outlines = np.stack([_outline(data.images[index]) for index in lone])
    shapes = data.labels[lone] // len(COLOR_NAMES)
    half = len(lone) // 2
    means = np.stack(
        [outlines[:half][shapes[:half] == i].mean(0) for i in range(len(SHAPE_NAMES))]
    )
    distance = np.sum((outlines[half:, None] - means) ** 2, axis=(2, 3))
    assert np.mean(distance.argmin(-1) == shapes[half:]) > 0.97


def _outline(image):
    mask = _components(image)[0]
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype("float32")
    return ndimage.zoom(box, 16 / np.array(box.shape), order=1)


@pytest.mark.parametrize("image_size", [16, 33])
def test_any_image_size_shows_the_same_scene(image_size):
    small, large = (
        captioned_shapes(8, image_size=size, verbose=0) for size in (image_size, 96)
    )
    assert small.images.shape == (8, image_size, image_size, 3)
    for name in small._fields[1:]:
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name))
    zoom = image_size / 96
    shrunk = ndimage.zoom(
        ndimage.gaussian_filter(
            large.images.astype("float32"), (0, 0.5 / zoom, 0.5 / zoom, 0)
        ),
        (1, zoom, zoom, 1),
        order=1,
        grid_mode=True,
        mode="nearest",
    )
    # Of noise alone or of another scene the difference would be several times that.
    assert np.mean(abs(shrunk - small.images)) < 10


# === The function ===


def test_scene_depends_on_seed_and_index_only():
    def make(number, start=0, seed=3):
        return captioned_shapes(number, 16, seed=seed, start=start, verbose=0)

    whole = make(600)
    for start, number in ((0, 10), (250, 20), (256, 5), (300, 300), (599, 1)):
        for part, everything in zip(make(number, start), whole, strict=True):
            np.testing.assert_array_equal(part, everything[start : start + number])
    other = make(600, seed=4)
    assert not np.array_equal(other.images, whole.images)
    assert not np.array_equal(other.captions, whole.captions)
    # No block repeats another one.
    assert len(np.unique(whole.images.reshape(600, -1), axis=0)) == 600


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"num_images": 0}, "num_images=0"),
        ({"num_images": 2.0}, "num_images=2.0"),
        ({"num_images": 1, "image_size": 15}, "image_size=15"),
        ({"num_images": 1, "seed": -1}, "seed=-1"),
        ({"num_images": 1, "start": -1}, "start=-1"),
        ({"num_images": 1, "combinations": "test"}, "combinations='test'"),
        ({"num_images": 1, "combinations": None}, "combinations=None"),
    ],
)
def test_bad_arguments(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        captioned_shapes(**arguments)


def test_progress_bar(capsys):
    captioned_shapes(300, image_size=16, verbose=0)
    assert capsys.readouterr().out == ""
    captioned_shapes(300, image_size=16, verbose=1)
    assert "300/300" in capsys.readouterr().out
