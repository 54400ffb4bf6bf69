"""Files and directories that appear whole or not at all."""

import errno
import signal
import subprocess
import sys

import pytest

from keras_softmoe.files import (
    NotWritten,
    read_whole,
    recover,
    replaced_directory,
    replaced_file,
)


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


@pytest.mark.parametrize("replaced", [replaced_file, replaced_directory])
def test_what_the_system_refuses(replaced, tmp_path):
    """The error says what could not be written, why, and what to do."""
    (tmp_path / "file").write_text("whole")
    for path in (tmp_path / "file" / "below", tmp_path / ("a" * 300)):
        with pytest.raises(NotWritten, match="cannot be written.*choose a directory"):
            with replaced(path) as aside:
                aside.touch()
    full = [
        OSError(errno.ENOSPC, "No space left on device"),
        # As h5py has it when it closes a file
        RuntimeError("Can't decrement id (unable to close file, errno = 28, error"),
    ]
    for error in full:
        with pytest.raises(ValueError, match="/new' cannot be written.*No space left"):
            with replaced(tmp_path / "new"):
                raise error
    with pytest.raises(OSError, match="another") as caught:
        with replaced(tmp_path / "new"):
            raise OSError("another")
    assert not isinstance(caught.value, NotWritten)
    assert texts(tmp_path) == {"file": "whole"}


@pytest.mark.parametrize("replaced", [replaced_file, replaced_directory])
def test_room_is_made_sure_of(replaced, tmp_path):
    """Before anything is written: HDF5 does not get over a write that is refused."""
    with replaced(tmp_path / "small", room=1000) as aside:
        assert not any(path.is_file() for path in aside.parent.iterdir())
        aside.mkdir(exist_ok=True) if replaced is replaced_directory else aside.touch()
    with pytest.raises(NotWritten, match="large' cannot be written.*Make room"):
        with replaced(tmp_path / "large", room=1 << 60):
            raise AssertionError("not even tried")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


# === Processes that are killed, and several at once ===

KILLED = """
import os, sys, signal
from keras_softmoe import files

if sys.argv[2] == "exchange":
    files._exchange = lambda *paths: False
    rename = files.Path.rename

    def killed(self, target):
        if self.name == "new":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    files.Path.rename = killed
with files.replaced_directory(sys.argv[1]) as aside:
    (aside / "config.json").write_text("second")
    if sys.argv[2] == "write":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(target, where):
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), where])
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["write", "exchange"])
def test_a_process_that_is_killed(where, tmp_path):
    """What was there is there, and the next one to write clears up."""
    target = tmp_path / "preset"
    with replaced_directory(target) as aside:
        (aside / "config.json").write_text("first")
    killed(target, where)
    assert len(list(tmp_path.iterdir())) == (2 if where == "write" else 1)
    recover(target)
    assert texts(target) == {"config.json": "first"}
    with replaced_directory(target) as aside:
        (aside / "config.json").write_text("third")
    assert texts(tmp_path) == {"preset/config.json": "third"}
    assert [path.name for path in tmp_path.iterdir()] == ["preset"]


def test_what_a_living_process_writes_stays(tmp_path):
    with replaced_file(tmp_path / "a") as first, replaced_file(tmp_path / "a") as other:
        first.write_text("first")
        other.write_text("other")
    assert texts(tmp_path) == {"a": "first"}


def test_directories_are_read_whole(tmp_path):
    """A reader beside a writer gets all of one version, or reads again."""
    target = tmp_path / "preset"

    def write(content):
        with replaced_directory(target) as aside:
            for name in ("config", "weights"):
                (aside / name).write_text(content)

    write("first")
    reads = []

    def read():
        config = (target / "config").read_text()
        if not reads:
            write("second")
        reads.append((config, (target / "weights").read_text()))
        return reads[-1]

    assert read_whole(target, read) == ("second", "second")
    assert reads == [("first", "second"), ("second", "second")]
    with pytest.raises(FileNotFoundError):
        read_whole(target, lambda: (target / "none").read_text())


def test_one_process_at_a_time(tmp_path, capfd):
    program = """
import sys, time
from keras_softmoe.files import one_process

with one_process(sys.argv[1], "waiting"):
    with open(sys.argv[2], "a") as file:
        file.write("in ")
        file.flush()
        time.sleep(0.5)
        file.write("out ")
"""
    arguments = [str(tmp_path / "lock"), str(tmp_path / "log")]
    processes = [
        subprocess.Popen([sys.executable, "-c", program, *arguments]) for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "in out " * 2
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert "waiting" in capfd.readouterr().out
