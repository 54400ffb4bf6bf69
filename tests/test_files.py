"""Files and directories that appear whole or not at all."""

import errno
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from keras_softmoe import files
from keras_softmoe.files import (
    WriteError,
    atomic_directory,
    atomic_file,
    read_whole,
    restore_interrupted,
)
from tests.skips import REASONS

MARKS = ["*.json"]


def replaced_preset(directory, **settings):
    return atomic_directory(directory, MARKS, **settings)


def write_config(directory, content):
    with atomic_directory(directory, MARKS) as aside:
        (aside / "config.json").write_text(content)


def texts(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_file(tmp_path):
    target = tmp_path / "deep" / "card.json"
    for content in ("first", "second"):
        with atomic_file(target) as aside:
            aside.write_text(content)
            assert aside.suffix == ".json"
            # Not there before all is written
            assert not target.exists() or target.read_text() != content
        assert target.read_text() == content
    with pytest.raises(KeyboardInterrupt), atomic_file(target) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert texts(tmp_path) == {"deep/card.json": "second"}


def test_directory(tmp_path):
    target = tmp_path / "deep" / "preset"
    for content in ("first", "second"):
        with atomic_directory(target, MARKS) as aside:
            (aside / "config.json").write_text(content)
            found = target / "config.json"
            assert not found.exists() or found.read_text() == "first"
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
            with atomic_directory(path, MARKS) as aside:
                (aside / "config.json").write_text("half")
                raise KeyboardInterrupt
        assert texts(tmp_path) == {"preset/config.json": "whole"}
        assert [path.name for path in tmp_path.iterdir()] == ["preset"]


def test_files_that_are_not_kept(tmp_path):
    target = tmp_path / "preset"
    target.mkdir()
    for name in ("model.weights.h5", "metadata.json"):
        (target / name).write_text("old")
    with atomic_directory(target, MARKS, lambda path: path.suffix == ".json") as aside:
        (aside / "model.weights.json").write_text("new")
    assert texts(target) == {"metadata.json": "old", "model.weights.json": "new"}


@pytest.mark.parametrize("replaced", [atomic_file, replaced_preset])
def test_what_the_system_refuses(replaced, tmp_path):
    """The error says what could not be written, why, and what to do."""
    (tmp_path / "file").write_text("whole")
    for path in (tmp_path / "file" / "below", tmp_path / ("a" * 300)):
        with pytest.raises(WriteError, match="cannot be written.*choose a directory"):
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
    assert not isinstance(caught.value, WriteError)
    assert texts(tmp_path) == {"file": "whole"}


@pytest.mark.parametrize("replaced", [atomic_file, replaced_preset])
def test_room_is_made_sure_of(replaced, tmp_path):
    """Before anything is written: HDF5 does not get over a write that is refused."""
    with replaced(tmp_path / "small", room=1000) as aside:
        assert not any(path.is_file() for path in aside.parent.iterdir())
        aside.mkdir(exist_ok=True) if replaced is replaced_preset else aside.touch()
    with pytest.raises(WriteError, match="large' cannot be written.*Make room"):
        with replaced(tmp_path / "large", room=1 << 60):
            raise AssertionError("not even tried")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def write_again(target, where):
    """Write a directory, and be killed: in the middle, or after the first move."""
    move, moved = files.move, []

    def killed_move(file, path):
        if moved:
            os.kill(os.getpid(), signal.SIGKILL)
        moved.append(path)
        move(file, path)

    files.move = killed_move
    with replaced_preset(target) as aside:
        for name in ("assets.json", "config.json"):
            (aside / name).write_text("second")
        if where == "write":
            os.kill(os.getpid(), signal.SIGKILL)


def killed(target, where):
    # Writing files is safe in a fork, which is there at once.
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=write_again, args=(target, where))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["write", "replace"])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_process_that_is_killed(where, is_read, tmp_path):
    """The next process finds one version, and removes what is left."""
    target = tmp_path / "preset"
    names = ("assets.json", "config.json")
    with atomic_directory(target, MARKS) as aside:
        for name in (*names, "other.json"):
            (aside / name).write_text("first")
    killed(target, where)
    contents = [(target / name).read_text() for name in names]
    assert contents == ["first" if where == "write" else "second", "first"]
    assert len(os.listdir(target)) == 4
    if is_read:
        restore_interrupted(target)
        content = "first" if where == "write" else "second"
        found = read_whole(target, lambda: texts(target))
        assert found == {**dict.fromkeys(names, content), "other.json": "first"}
    write_config(target, "third")
    assert texts(target)["config.json"] == "third"
    assert sorted(os.listdir(target)) == [*names, "other.json"]
    assert os.listdir(tmp_path) == ["preset"]


def test_a_killed_process_is_completed_by_readers(tmp_path):
    target = tmp_path / "preset"
    write_config(target, "first")
    killed(target, "replace")
    names = ("assets.json", "config.json")
    assert read_whole(target, lambda: texts(target)) == dict.fromkeys(names, "second")


def test_what_a_living_process_writes_stays(tmp_path):
    with atomic_file(tmp_path / "a") as first, atomic_file(tmp_path / "a") as other:
        first.write_text("first")
        other.write_text("other")
    assert texts(tmp_path) == {"a": "first"}


def test_directories_are_read_whole(tmp_path):
    """A reader beside a writer gets all of one version, or reads again."""
    target = tmp_path / "preset"

    def write(content):
        with atomic_directory(target, MARKS) as aside:
            for name in ("config.json", "weights"):
                (aside / name).write_text(content)

    write("first")
    reads = []

    def read():
        config = (target / "config.json").read_text()
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

lock, log, ready = sys.argv[1:]
with open(ready, "a") as file:
    file.write(".")
# Imports take longer than the scope.
while len(open(ready).read()) < 2:
    time.sleep(0.01)
with one_process(lock, "waiting"):
    with open(log, "a") as file:
        file.write("in ")
        file.flush()
        time.sleep(0.5)
        file.write("out ")
"""
    arguments = [str(tmp_path / name) for name in ("lock", "log", "ready")]
    processes = [
        subprocess.Popen([sys.executable, "-c", program, *arguments]) for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "in out " * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "ready"]
    assert "waiting" in capfd.readouterr().out


def make_file(path):
    path.write_text("three years of work")


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as opened:
        # Its address may be 108 bytes long.
        folder = os.getcwd()
        os.chdir(path.parent)
        opened.bind(path.name)
        os.chdir(folder)


def make_circle(path):
    path.symlink_to(path.name)


def make_directory(path):
    path.mkdir()
    (path / "notes").write_text("kept")


OTHERS = [make_file, make_pipe, make_socket, make_circle, make_directory]


@pytest.mark.parametrize("replaced", [atomic_file, replaced_preset])
@pytest.mark.parametrize("make", OTHERS)
def test_other_kinds_of_files_stay(make, replaced, tmp_path):
    if make is (make_file if replaced is atomic_file else make_directory):
        return
    target = tmp_path / "target.json"
    make(target)
    before = target.lstat()
    (tmp_path / "link").symlink_to(target)
    for path in (target, tmp_path / "link"):
        with pytest.raises(WriteError, match="target.json.*(stays|unchanged)"):
            with replaced(path):
                raise AssertionError("not even tried")
    assert (target.lstat().st_ino, target.lstat().st_mode) == before[1::-1]
    if make in (make_file, make_directory):
        assert set(texts(tmp_path).values()) <= {"three years of work", "kept"}


def test_devices_stay():
    """What a superuser could replace."""
    device = os.stat("/dev/null")
    for replaced in (atomic_file, replaced_preset):
        with pytest.raises(WriteError, match="it is a device"), replaced("/dev/null"):
            raise AssertionError("not even tried")
    assert os.stat("/dev/null") == device


def test_files_of_another_directory_stay(tmp_path):
    """New ones go beside them; one of the same name is refused, nothing is changed."""
    (tmp_path / "README.md").write_text("mine")
    write_config(tmp_path, "first")
    assert texts(tmp_path) == {"README.md": "mine", "config.json": "first"}
    (tmp_path / "config.json").unlink()
    with pytest.raises(WriteError, match="'README.md' in it is another file"):
        with atomic_directory(tmp_path, MARKS) as aside:
            (aside / "config.json").write_text("second")
            (aside / "README.md").write_text("second")
    assert texts(tmp_path) == {"README.md": "mine"}


def test_a_file_beside_another_one_stays(tmp_path):
    """OpenVINO writes `model.bin` beside `model.xml`, for example."""
    (tmp_path / "model.bin").write_text("mine")
    for _ in range(2):
        with pytest.raises(WriteError, match="model.bin' is another one"):
            with atomic_file(tmp_path / "model.xml") as aside:
                aside.write_text("new")
                aside.with_suffix(".bin").write_text("new")
        assert texts(tmp_path) == {"model.bin": "mine"}
    (tmp_path / "model.xml").write_text("old")
    with atomic_file(tmp_path / "model.xml") as aside:
        aside.write_text("new")
        aside.with_suffix(".bin").write_text("new")
    assert texts(tmp_path) == {"model.bin": "new", "model.xml": "new"}


@pytest.mark.parametrize("replaced", [atomic_file, replaced_preset])
def test_targets_of_links_are_written(replaced, tmp_path):
    """Of one to an existing path, and of one to a path that is still free."""
    for number in range(2):
        (tmp_path / "latest").unlink(missing_ok=True)
        (tmp_path / "latest").symlink_to(f"run_{number}")
        for content in ("first", "second"):
            with replaced(tmp_path / "latest") as aside:
                new = aside / "config.json" if aside.is_dir() else aside
                new.write_text(content)
            assert (tmp_path / "latest").is_symlink()
            run = tmp_path / f"run_{number}"
            run = run / "config.json" if run.is_dir() else run
            assert run.read_text() == content


def test_names_of_any_length(tmp_path):
    """As long as the file system allows, although temporary names are longer."""
    for replaced in (atomic_file, replaced_preset):
        name = ("ä" * 127) + ("f" if replaced is atomic_file else "d")
        for _ in range(2):
            with replaced(tmp_path / name) as aside:
                new = aside / "config.json" if aside.is_dir() else aside
                new.write_text("new")
        assert (tmp_path / name).exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_modes_are_kept(tmp_path):
    target, file = tmp_path / "preset", tmp_path / "file"
    for _ in range(3):
        with atomic_directory(target, MARKS) as aside:
            (aside / "config.json").touch()
            (aside / "assets").mkdir()
            (aside / "assets" / "words").touch()
        with atomic_file(file) as aside:
            aside.touch()
        modes = {target: 0o2775, target / "assets": 0o750, target / "other": 0o604}
        modes |= {target / "config.json": 0o640, file: 0o600}
        (target / "other").touch()
        for path, mode in modes.items():
            assert not _ or stat.S_IMODE(path.stat().st_mode) == mode, path
            path.chmod(mode)
        before = (target / "other").stat().st_ino
    assert (target / "other").stat().st_ino == before


def test_a_directory_stays(tmp_path, monkeypatch):
    """Also a working one, with links, directories and attributes of the user."""
    target = tmp_path / "preset"

    def write(content):
        with atomic_directory(target, MARKS, lambda path: path.name != "old") as new:
            (new / "config.json").write_text(content)
            (new / "assets").mkdir()
            (new / "assets" / "words").write_text(content)

    write("first")
    (target / "old").write_text("old")
    (target / "kept").write_text("first")
    (target / "link").symlink_to("nowhere")
    (target / "empty").mkdir()
    (target / "empty").chmod(0o2770)
    monkeypatch.chdir(target)
    before, names = target.stat(), sorted({*os.listdir(target)} - {"old"})
    for content in ("second", "third"):
        write(content)
        written = {"config.json": content, "assets/words": content}
        assert texts(target) == {**written, "kept": "first"}
        assert sorted(os.listdir(target)) == names
        assert (target.stat().st_ino, target.stat().st_mode) == before[1::-1]
    assert os.listdir(tmp_path) == ["preset"]


def test_files_behind_links_are_written(tmp_path):
    """On a larger disk, for example."""
    target = tmp_path / "preset"
    target.mkdir()
    (tmp_path / "large.json").write_text("old")
    (target / "config.json").symlink_to(tmp_path / "large.json")
    write_config(target, "new")
    assert (target / "config.json").is_symlink()
    assert (tmp_path / "large.json").read_text() == "new"


def test_all_files_are_put_back(tmp_path, monkeypatch):
    target = tmp_path / "preset"
    target.mkdir()
    for name in ("a.json", "b.json", "old.json"):
        (target / name).write_text("first")
    (target / "link").symlink_to("nowhere")
    move = files.move

    def fails_once(file, path):
        if path.name == "b.json" and file.parent.name == "ready":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        move(file, path)

    monkeypatch.setattr(files, "move", fails_once)
    with pytest.raises(WriteError, match="unchanged"):
        with atomic_directory(target, MARKS, keep=lambda path: False) as aside:
            for name in ("a.json", "a_new.json", "b.json"):
                (aside / name).write_text("second")
    names = ("a.json", "b.json", "old.json")
    assert texts(target) == dict.fromkeys(names, "first")
    assert sorted(os.listdir(target)) == sorted([*names, "link"])


def test_mount_points(tmp_path):
    target = tmp_path / "volume"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(target)]
    try:
        is_mounted = not subprocess.run(command, capture_output=True).returncode
    except OSError:
        is_mounted = False
    if not is_mounted:
        pytest.skip(REASONS["mount"])
    try:
        for content in ("first", "second"):
            write_config(target, content)
            with atomic_file(target / "file") as aside:
                aside.write_text(content)
            assert texts(target) == {"config.json": content, "file": content}
        assert target.is_mount()
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
