import sys
import unicodedata

import numpy as np
import pytest

from experiments.synthetic import GLYPH_CLASSES, _glyph_bank as glyph_bank, fonts
from tests.support.close import assert_near


def test_classes_hold_no_digit_of_any_script():
    assert len(set(GLYPH_CLASSES)) == len(GLYPH_CLASSES) == 179
    for character in GLYPH_CLASSES:
        # NFKC turns wide, circled, superscript and other digits into plain ones.
        for plain in unicodedata.normalize("NFKC", character):
            assert unicodedata.category(plain)[0] != "N", character
            assert unicodedata.numeric(plain, None) is None, character


def test_twins_of_digits_in_other_scripts_are_left_out():
    twins = "".join(
        unicodedata.lookup(name)
        for name in (
            "CYRILLIC CAPITAL LETTER ZE",
            "CYRILLIC SMALL LETTER BE",
            "CYRILLIC CAPITAL LETTER CHE",
            "ARMENIAN CAPITAL LETTER OH",
            "ARMENIAN SMALL LETTER SHA",
            "GEORGIAN LETTER VIN",
        )
    )
    assert not set(twins) & set(GLYPH_CLASSES)


def test_every_class_has_several_fonts():
    bank = glyph_bank.glyph_bank()
    size = fonts.FIELD
    assert bank.fields.shape == (2, bank.count.sum(), size, size)
    assert bank.fields.dtype == np.uint8
    assert bank.count.min() >= 2
    np.testing.assert_array_equal(bank.first[1:], bank.first[:-1] + bank.count[:-1])


def test_glyphs_fill_the_box_and_stay_inside_it():
    bank = glyph_bank.glyph_bank(tuple("AO-"))
    outline = bank.fields[1] / fonts.STEPS - fonts.OFFSET
    ink = outline < 0
    extent = [np.flatnonzero(ink.any(axis=axis)) for axis in ((0, 1), (0, 2))]
    for places in extent:
        assert places.min() >= fonts.MARGIN
        assert places.max() < fonts.FIELD - fonts.MARGIN
    # The letter fills the height; the dash, last class, must not become a block.
    letter, dash = ink[bank.first[0]], ink[bank.first[2]]
    assert letter.any(axis=1).sum() >= fonts.BOX - 2
    assert dash.any(axis=1).sum() < fonts.BOX / 2


def test_missing_glyph_is_named():
    with pytest.raises(ImportError, match="has some of the glyph classes.*missing"):
        glyph_bank.glyph_bank.__wrapped__(("A", "\U000e0041"))


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"keras-softmoe\[viz\]"):
        glyph_bank.glyph_bank.__wrapped__()


def test_distance_equals_brute_force():
    mask = np.random.default_rng(0).random((3, 30, 30)) < 0.02
    received = fonts.distance_to(mask)
    place = np.stack(np.meshgrid(np.arange(30), np.arange(30), indexing="ij"), -1)
    for one, distance in zip(mask, received, strict=True):
        away = np.linalg.norm(place[:, :, None] - place[one], axis=-1).min(axis=-1)
        assert_near(distance, away, atol=1e-4)


def test_thinning_leaves_the_centre_line():
    # A bar 7 high and 30 wide, and a frame whose hole has to survive.
    ink = np.zeros((2, 40, 40), bool)
    ink[0, 16:23, 5:35] = True
    ink[1, 8:32, 8:32] = True
    ink[1, 14:26, 14:26] = False
    thin = glyph_bank._thin(ink)
    assert not (thin & ~ink).any()
    bar = thin[0]
    # Away from its ends the bar is one pixel, in the middle row.
    assert (bar[:, 12:28].sum(axis=0) == 1).all()
    assert bar[19, 12:28].all()
    # From the middle of the hole the ring is met in each direction, once.
    for line in (thin[1][20, :], thin[1][:, 20]):
        assert line[:20].sum() == line[20:].sum() == 1
