"""Pages are whole, small and need nothing else. No backend is needed."""

import pytest
from matplotlib.figure import Figure

from keras_softmoe.analysis import page as pages
from keras_softmoe.analysis.page import Page
from keras_softmoe.files import writing
from tests.support.reading import Reading


def make_page():
    page = Page("A & B")
    page.section("First <section>", "What & why")
    page.table(["name", "number"], [["<x>", 1], ["y", 2.5]])
    page.section("Second")
    figure = Figure((2, 1))
    figure.subplots().plot([0, 1])
    page.figure(figure, 'It "shows" <a line>.')
    return page


def test_a_page(tmp_path):
    path = make_page().write(tmp_path / "page.html")
    found = Reading(path)
    assert found.headings == ["First <section>", "Second"]
    assert found.tables == [[["name", "number"], ["<x>", "1"], ["y", "2.5"]]]
    assert found.captions == ['It "shows" <a line>.']
    (image,) = found.images
    assert image.startswith(b"\x89PNG")
    # An empty icon, and the sections.
    assert found.references == ["data:,", "#section-1", "#section-2"]
    text = path.read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in text
    assert 'alt="It &quot;shows&quot; &lt;a line&gt;."' in text
    for name in ("section-1", "section-2"):
        assert text.count(f'id="{name}"') == 1
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_figures_get_coarser_until_the_page_is_small(monkeypatch, tmp_path):
    full = make_page().write(str(tmp_path / "full.html")).stat().st_size
    monkeypatch.setattr(pages, "MOST_BYTES", full - 1)
    smaller = make_page().write(tmp_path / "small.html")
    assert smaller.stat().st_size < full
    assert Reading(smaller).images
    monkeypatch.setattr(pages, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        make_page().write(tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_what_was_there_is_replaced_when_the_page_is_complete(monkeypatch, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("before")

    def broken(*arguments):
        assert path.read_text() == "before"
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(writing.os, "replace", broken)
        with pytest.raises(OSError, match="no space"):
            make_page().write(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    make_page().write(path)
    assert Reading(path).images
