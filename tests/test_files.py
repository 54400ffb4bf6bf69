"""Files and directories that appear whole or not at all."""

import pytest

from keras_softmoe.files import replaced_directory, replaced_file


def texts(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_file(tmp_path):
    target = tmp_path / "deep" / "card.json"
    for content in ("first", "second"):
        with replaced_file(target) as aside:
            aside.write_text(content)
            assert aside.suffix == ".json"
            # Not there before all is written
            assert not target.exists() or target.read_text() != content
        assert target.read_text() == content
    with pytest.raises(KeyboardInterrupt), replaced_file(target) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert texts(tmp_path) == {"deep/card.json": "second"}


def test_directory(tmp_path):
    target = tmp_path / "deep" / "preset"
    for content in ("first", "second"):
        with replaced_directory(target) as aside:
            (aside / "config.json").write_text(content)
            assert content not in texts(target).values()
        assert texts(target)["config.json"] == content
        (target / "assets").mkdir(exist_ok=True)
        (target / "assets" / "card").write_text("kept")
    assert texts(target) == {"config.json": "second", "assets/card": "kept"}
    assert [path.name for path in target.parent.iterdir()] == ["preset"]


def test_directory_after_a_failure(tmp_path):
    target = tmp_path / "preset"
    target.mkdir()
    (target / "config.json").write_text("whole")
    for path in (target, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            with replaced_directory(path) as aside:
                (aside / "config.json").write_text("half")
                raise KeyboardInterrupt
        assert texts(tmp_path) == {"preset/config.json": "whole"}
        assert [path.name for path in tmp_path.iterdir()] == ["preset"]


def test_files_that_are_not_kept(tmp_path):
    target = tmp_path / "preset"
    target.mkdir()
    for name in ("model.weights.h5", "metadata.json"):
        (target / name).write_text("old")
    with replaced_directory(target, lambda path: path.suffix == ".json") as aside:
        (aside / "model.weights.json").write_text("new")
    assert texts(target) == {"metadata.json": "old", "model.weights.json": "new"}
