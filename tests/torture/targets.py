"""Paths that are something else already, given to every function that writes.

A file, a pipe, a socket, a device, links, mount points, directories of others, odd
parents. What is not to be replaced stays as it was, what is to be written is there, and
nothing else is left.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import tempfile

import keras
import numpy as np

from keras_softmoe import analysis, checkpoints, converters, models, presets, routers
from keras_softmoe.distribution import Backup
from tests.support import checkpoint_writer as writer, tiny
from tests.torture import victims

WORK = "three years of work"


def odd_targets(tally):
    """Write with every function to every kind of target; each pair is a case."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, (write, is_whole, suffix) in _writers(folder).items():
            makes_file = is_whole is _is_file
            for prepare in TARGETS:
                place = folder / f"{name}_{prepare.__name__}".replace(" ", "_")
                place.mkdir()
                case = f"{name} to {prepare.__name__.replace('_', ' ')}"
                with contextlib.ExitStack() as stack:
                    prepared = prepare(place, makes_file, suffix, stack)
                    if prepared is None:
                        continue
                    target, written = prepared
                    if (name, prepare) in REFUSED:
                        written = None
                    before = _seen(place)
                    with tally.case(case, seconds=120):
                        _check(write, is_whole, place, target, written, before)


def _check(write, is_whole, place, target, written, before):
    """Write, and see that all else is as it was.

    Args:
        written: `pathlib.Path` where the new content lies then, or `None` if the
            function has to refuse.
    """
    try:
        write(target)
    except ValueError:
        assert written is None, "refused"
        after = _seen(place)
        assert after == before, f"{before} became {after}"
        raise
    assert written is not None, "was written"
    assert is_whole(written), f"nothing whole in {written}"
    after = _seen(place)
    for path, found in before.items():
        # A new model is shorter or longer than the work.
        if path != written:
            assert after.get(path) == found, f"{path}: {found} became {after.get(path)}"
    left = [p for p in after if ".aside-" in p.as_posix()]
    assert not left, f"left behind: {left}"


def _seen(place):
    """Dict from all paths to what they are: kind, mode, and the work in files."""
    found = {}
    for path in sorted(place.rglob("*")):
        mode = path.lstat().st_mode
        is_work = stat.S_ISREG(mode) and path.stat().st_size == len(WORK)
        content = path.read_text() if is_work else None
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        found[path] = (stat.S_IFMT(mode), oct(stat.S_IMODE(mode)), content)
    return found


# === Functions that write ===


def _is_file(path):
    return path.is_file() and path.stat().st_size != len(WORK)


def _writers(folder):
    """Dict from names to what writes a path, what tells that it is whole, a suffix."""
    model = victims.version(1)
    sparse = tiny.classifier(router=routers.SoftmaxTokenChoiceRouter(4))
    params = converters.to_vmoe_params(sparse)
    writer.write_checkpoint(folder / "checkpoint", params, num_shards=2)
    np.savez(folder / "download.npz", **params)
    images = tiny.pixels(4)

    def back_up(path):
        backup = Backup(path, delete=False)
        victims.fit(victims.trained_model(), backup, epochs=1)

    def download(path):
        # It writes to a directory that is there, under the name of what it fetches.
        if path.parent.parent.is_dir() and not path.parent.exists():
            path.parent.mkdir()
        source = pathlib.Path(tempfile.mkdtemp(dir=folder), path.name)
        # No file has a name that is too long: then there is none to fetch.
        if len(os.fsencode(path.name)) < 256:
            shutil.copy(folder / "download.npz", source)
        copy = checkpoints.download_checkpoint(str(source), str(path.parent), verbose=0)
        assert copy == str(path)

    def has(name):
        return lambda path: (path / name).is_file()

    found = {
        "save_to_preset": (lambda path: model.save_to_preset(str(path)), _loads, ""),
        "preprocessor.save_to_preset": (
            lambda path: model.preprocessor.save_to_preset(str(path)),
            has("preprocessor.json"),
            "",
        ),
        "presets.write": (
            lambda path: presets.write("vit_small_patch16_224", path),
            has("config.json"),
            "",
        ),
        "convert_vmoe_checkpoint": (
            lambda path: converters.convert_vmoe_checkpoint(
                str(folder / "checkpoint"),
                str(path),
                image_shape=(8, 8, 3),
                verbose=0,
            ),
            has("model.weights.h5"),
            "",
        ),
        "Backup": (back_up, has("training.h5"), ""),
        "Routing.save": (
            lambda path: analysis.analyze(
                sparse, images, num_pictures=1, verbose=0
            ).save(path),
            _is_file,
            ".html",
        ),
        "download_checkpoint": (download, _is_file, ".npz"),
    }
    if keras.backend.backend() == "torch":
        found["export"] = (
            lambda path: model.export(str(path), format="torch"),
            _is_file,
            ".pt2",
        )
    if keras.backend.backend() == "tensorflow":
        found["export"] = (
            lambda path: model.export(str(path), format="tf_saved_model"),
            has("saved_model.pb"),
            "",
        )
    return found


def _loads(path):
    victims.check_one_version(models.ViTMoEImageClassifier.from_preset(str(path)))
    return True


# === Targets ===
#
# Each takes a directory of its own, whether a file is to be written and with which
# suffix, and a stack for what has to be undone. It returns the path to write and where
# the new content is to be, `None` if it has to be refused; or `None` in place of both
# where there are none.


def a_new_path(place, makes_file, suffix, stack):
    path = place / "deep" / f"new{suffix}"
    return path, path


def a_file(place, makes_file, suffix, stack):
    path = place / f"work{suffix}"
    path.write_text(WORK)
    path.chmod(0o640)
    return path, path if makes_file else None


def an_empty_directory(place, makes_file, suffix, stack):
    path = place / f"empty{suffix}"
    path.mkdir()
    path.chmod(0o2775)
    return path, None if makes_file else path


def a_directory_of_others(place, makes_file, suffix, stack):
    path = place / f"project{suffix}"
    (path / "empty").mkdir(parents=True)
    (path / "notes").write_text(WORK)
    (path / "link").symlink_to("nowhere")
    path.chmod(0o2770)
    return path, None if makes_file else path


def a_pipe(place, makes_file, suffix, stack):
    os.mkfifo(place / f"pipe{suffix}")
    return place / f"pipe{suffix}", None


def a_socket(place, makes_file, suffix, stack):
    folder = os.getcwd()
    os.chdir(place)
    try:
        stack.enter_context(socket.socket(socket.AF_UNIX)).bind(f"socket{suffix}")
    finally:
        os.chdir(folder)
    return place / f"socket{suffix}", None


def a_device(place, makes_file, suffix, stack):
    try:
        path = place / f"null{suffix}"
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        return None
    return path, None


def a_link_to_a_file(place, makes_file, suffix, stack):
    (place / "work").write_text(WORK)
    path = place / f"link{suffix}"
    path.symlink_to("work")
    return path, place / "work" if makes_file else None


def a_link_to_a_directory(place, makes_file, suffix, stack):
    (place / "run_7").mkdir()
    path = place / f"latest{suffix}"
    path.symlink_to(place / "run_7")
    return path, None if makes_file else place / "run_7"


def a_link_to_nothing(place, makes_file, suffix, stack):
    path = place / f"latest{suffix}"
    path.symlink_to("run_8")
    return path, place / "run_8"


def a_link_in_a_circle(place, makes_file, suffix, stack):
    path = place / f"circle{suffix}"
    path.symlink_to(path.name)
    return path, None


def a_file_as_parent(place, makes_file, suffix, stack):
    (place / "work").write_text(WORK)
    return place / "work" / f"below{suffix}", None


def a_link_as_parent(place, makes_file, suffix, stack):
    (place / "disk").mkdir()
    (place / "link").symlink_to("disk")
    return place / "link" / f"new{suffix}", place / "disk" / f"new{suffix}"


def a_mount_point(place, makes_file, suffix, stack):
    path = place / "volume"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(path)]
    try:
        if subprocess.run(command, capture_output=True).returncode:
            return None
    except OSError:
        return None
    stack.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
    if makes_file:
        path = path / f"file{suffix}"
    return path, path


def a_name_of_255_bytes(place, makes_file, suffix, stack):
    path = place / ("ä" * 125 + "12345"[len(suffix) :] + suffix)
    return path, path


def a_name_that_is_too_long(place, makes_file, suffix, stack):
    return place / ("n" * 256 + suffix), None


TARGETS = [
    *(a_new_path, a_file, an_empty_directory, a_directory_of_others, a_pipe),
    *(a_socket, a_device, a_link_to_a_file, a_link_to_a_directory, a_link_to_nothing),
    *(a_link_in_a_circle, a_file_as_parent, a_link_as_parent, a_mount_point),
    *(a_name_of_255_bytes, a_name_that_is_too_long),
]
# It wants an empty directory, and says so.
REFUSED = [("convert_vmoe_checkpoint", a_directory_of_others)]
