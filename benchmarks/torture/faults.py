"""Processes that are killed, disks that are full, caches that cannot be written.

After a kill at any moment what was there before is there, or what was to come, whole;
and the next to write clears up.
"""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import signal
import tempfile

import h5py
import keras
import numpy as np

from benchmarks.torture import victims
from keras_softmoe import catalogue, converters, models, presets
from keras_softmoe.distribution import Backup
from keras_softmoe.distribution.backup import open_backup
from keras_softmoe.files import WriteError, atomic_file
from tests.support import checkpoint_writer as writer
from tests.support.processes import Program
from tests.support.references import to_numpy

KINDS = ("save", "convert", "backup")
KILLED = (-signal.SIGKILL, -signal.SIGALRM)


def kills(tally, num_kills, seed):
    """Kill programs that save, convert or back up; a kill is a case."""
    rng, kinds = np.random.default_rng(seed), KINDS[:num_kills]
    with tempfile.TemporaryDirectory() as folder:
        wholes = {kind: _Whole(kind, pathlib.Path(folder, kind)) for kind in kinds}
        for number in range(num_kills):
            whole = wholes[kinds[number % len(kinds)]]
            if number // len(kinds) % 2:
                when = ("time", float(rng.random() * whole.seconds))
            else:
                when = ("event", int(rng.integers(1, whole.events + 1)))
            with tally.case(f"{whole.kind}, killed at {when}", seconds=300):
                whole.kill_and_check(*when, number)


class _Whole:
    """A program that runs to its end, and what it leaves."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        folder.mkdir()
        if kind == "convert":
            release(folder)
        elif kind == "save":
            victims.version(1).save_to_preset(str(folder / "first"))
        self.directory = self._fresh("whole_run")
        self._run("never")
        known = json.loads((folder / "whole").read_text())
        self.events, self.seconds = known["events"], known["seconds"]
        self.result = self._result()

    def _fresh(self, name):
        directory = self.folder / name
        directory.mkdir()
        if self.kind == "save":
            shutil.copytree(self.folder / "first", directory / "preset")
        return directory

    def _run(self, *when):
        code, output = Program(
            "benchmarks.torture.victims", self.kind, self.directory, *when
        ).wait()
        assert code in (0, *KILLED), output[-2000:]
        return code

    def kill_and_check(self, when, at, number):
        self.directory = self._fresh(f"run_{number}")
        killed = self._run(when, at)
        if self.kind == "save":
            self._check_saved()
        elif self.kind == "backup" and killed:
            file = self.directory / "backup" / "training.h5"
            if file.exists():
                with open_backup(file) as backup:
                    assert backup.done[0] <= victims.EPOCHS
        if killed:
            self._run("time", 600)
        assert self._result() == self.result
        for left in list(self.directory.rglob(".*")):
            # The next to write there clears up.
            with (
                contextlib.suppress(FileNotFoundError),
                atomic_file(left.with_name("other")) as new,
            ):
                new.touch()
        hidden = [p.name for p in self.directory.rglob(".*")]
        assert not hidden, f"left behind: {hidden}"
        shutil.rmtree(self.directory)

    def _check_saved(self):
        """The preset is that of one save, all of it."""
        model = models.ViTMoEImageClassifier.from_preset(str(self.directory / "preset"))
        values = {float(v) for w in model.weights for v in np.ravel(to_numpy(w))}
        assert values in ({1.0}, {2.0}), f"a mixture: {values}"
        assert model.name == f"version_{int(values.pop())}"

    def _result(self):
        """What the program made, to be compared."""
        if self.kind == "save":
            self._check_saved()
            return sorted(p.name for p in (self.directory / "preset").iterdir())
        if self.kind == "backup":
            with np.load(self.folder / "trained.npz") as file:
                found = {name: file[name].tolist() for name in file}
            (self.folder / "trained.npz").unlink()
            return found
        return _weights_in(self.directory / "keras_softmoe" / victims.NAME)


def _weights_in(preset):
    """Dict from datasets of a preset to their bytes."""
    found = {}

    def note(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = np.asarray(item).tobytes()

    for file in sorted(preset.glob("*.h5")):
        with h5py.File(file) as opened:
            opened.visititems(note)
    assert found
    return found


def release(folder):
    """Write the checkpoint of a convertible preset."""
    model = victims.released_model()
    (folder / "bucket").mkdir()
    params = converters.to_vmoe_params(model)
    writer.write_checkpoint(folder / "bucket" / "vmoe_nano", params, num_shards=2)


# === No room, no permission ===


@contextlib.contextmanager
def _largest_file(size):
    """Scope in which the system lets no file grow over a size: `EFBIG`.

    The limit of the process, as a quota or a full disk would be: the write that exceeds
    it fails, in the middle of a file. (A disk of a given size takes a superuser.)
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disks(tally, cases, seed):
    """Save, convert and back up with room for 0.2 to 5 times the largest file."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        release(folder)
        first, second = victims.version(1), victims.version(2)
        first.save_to_preset(str(folder / "preset"))
        size = max(p.stat().st_size for p in (folder / "preset").iterdir())
        trained = victims.trained_model()
        victims.fit(trained, Backup(folder / "whole", delete=False))
        backup_size = (folder / "whole" / "training.h5").stat().st_size
        for number, factor in enumerate(np.geomspace(0.2, 5, -(-cases // 3))):
            for kind in ("save", "convert", "backup"):
                name = f"{kind} with room for {factor:.2f} times the largest file"
                home = folder / f"home_{number}"
                with tally.case(name, mentions=["cannot be"], seconds=120):
                    try:
                        if kind == "save":
                            with _largest_file(int(factor * size)):
                                second.save_to_preset(str(folder / "preset"))
                        elif kind == "convert":
                            with (
                                _catalogue(folder, home),
                                _largest_file(int(factor * size)),
                            ):
                                presets.convert(victims.NAME, verbose=0)
                        else:
                            backup = Backup(home / "backup", every=1)
                            with _largest_file(int(factor * backup_size)):
                                victims.fit(trained, backup, epochs=1)
                    finally:
                        _check_nothing_lost(kind, folder, home)
                        first.save_to_preset(str(folder / "preset"))


def _check_nothing_lost(kind, folder, home):
    if kind == "save":
        path = str(folder / "preset")
        model = models.ViTMoEImageClassifier.from_preset(path)
        values = {float(v) for w in model.weights for v in np.ravel(to_numpy(w))}
        assert values in ({1.0}, {2.0}), values
    elif kind == "convert" and (home / "keras_softmoe").exists():
        left = [p.name for p in (home / "keras_softmoe").iterdir()]
        assert left in ([], [victims.NAME]), left
    elif kind == "backup" and (home / "backup").exists():
        left = [p.name for p in (home / "backup").iterdir()]
        assert left in ([], ["training.h5"]), left


@contextlib.contextmanager
def _catalogue(folder, home):
    before = os.environ.get("KERAS_HOME")
    victims.add_release(folder)
    os.environ["KERAS_HOME"] = str(home)
    try:
        yield
    finally:
        catalogue.rows().pop(victims.NAME)
        os.environ.pop("KERAS_HOME")
        if before is not None:
            os.environ["KERAS_HOME"] = before


def unwritable_places(tally, cases, seed):
    """A cache, a preset or a backup where nothing can be written.

    (Not by its mode, which does not stop a superuser: a file stands where a directory
    has to be, and a name is longer than any file system allows.)
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        release(folder)
        (folder / "file").touch()
        model = victims.version(1)
        trained = victims.trained_model()
        for place in (folder / "file" / "below", folder / ("a" * 300)):
            name = place.name[:8]
            with tally.case(f"convert to {name}", [victims.NAME, "KERAS_HOME"]):
                with _catalogue(folder, place):
                    presets.convert(victims.NAME, verbose=0)
                raise AssertionError("was written")
            with tally.case(f"load from {name}", [victims.NAME, "KERAS_HOME"]):
                with _catalogue(folder, place):
                    models.ViTMoEImageClassifier.from_preset(victims.NAME)
                raise AssertionError("was written")
            with tally.case(f"save to {name}", [name]):
                model.save_to_preset(str(place))
                raise AssertionError("was written")
            with tally.case(f"back up to {name}", [name]):
                victims.fit(trained, Backup(place))
                raise AssertionError("was written")
            with tally.case(f"write an architecture to {name}", [name]):
                presets.write("vit_small_patch16_224", place)
                raise AssertionError("was written")
        assert issubclass(WriteError, ValueError) and keras.backend.backend()


# === Several processes ===


def three_at_once(tally, cases, seed):
    """Three processes convert a preset, or two save while one reads, or each its own.

    The last: one converts, one saves where that goes, and one loads, five times.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        release(folder)
        for number in range(-(-cases // 3)):
            home = folder / f"home_{number}"
            home.mkdir()
            with tally.case(f"three converting, round {number}", seconds=300):
                _run_together(home, "convert", "convert", "convert")
                left = [p.name for p in (home / "keras_softmoe").iterdir()]
                assert left == [victims.NAME], left
                assert _weights_in(home / "keras_softmoe" / victims.NAME)
            mixed = folder / f"mixed_{number}"
            mixed.mkdir()
            name = f"one converting, one saving, one loading, round {number}"
            with tally.case(name, seconds=300):
                _run_together(mixed, "convert", "save over", "load")
                place = mixed / "keras_softmoe"
                assert [p.name for p in place.iterdir()] == [victims.NAME]
                victims.check_one_version(
                    models.ViTMoEImageClassifier.from_preset(str(place / victims.NAME))
                )
            shared = folder / f"shared_{number}"
            shared.mkdir()
            victims.version(1).save_to_preset(str(shared / "preset"))
            with tally.case(f"two saving, one reading, round {number}", seconds=300):
                programs = [
                    Program("benchmarks.torture.victims", "save", shared, "time", 600)
                    for _ in range(2)
                ]
                for _ in range(6):
                    _check_nothing_lost("save", shared, None)
                for program in programs:
                    code, output = program.wait()
                    assert code == 0, output[-2000:]
                _check_nothing_lost("save", shared, None)
                assert [p.name for p in shared.iterdir()] == ["preset"]


def _run_together(directory, *runs):
    programs = [
        Program("benchmarks.torture.victims", run, directory, "time", 600)
        for run in runs
    ]
    for program in programs:
        code, output = program.wait()
        assert code == 0, output[-2000:]
