"""Damage to files of presets, and harm that they could do."""

import json
import os
import shutil
import sys

import h5py
import numpy as np

# What configurations are changed into, beside what stands elsewhere in them.
HOSTILE = [
    *(None, True, -1, 0, 1.5, 10**9, 10**30, 1e308, "", "x", [], {}, [[]], "\0"),
    float("nan"),
    "a" * 10**5,
    list(range(10**5)),
    {"class_name": "__lambda__", "config": {"value": "f"}},
]


# What somebody does who runs code or writes.
_HARM = {
    *("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.rename"),
    *("os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "shutil.rmtree", "socket.connect"),
}


class Canary:
    """A file outside, which nobody may open, and one that code would make."""

    def __init__(self, folder):
        self.secret = folder / "secret.h5"
        with h5py.File(self.secret, "w") as file:
            file["0"] = np.zeros(3, "float32")
        self.made = folder / "made"
        self._seen, self._is_watching = [], False
        # There is no way to take a hook away again.
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if not self._is_watching:
            return
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            own = ("/dev/", "/proc/")
            is_own = str(path).startswith(own) or "__pycache__" in str(path)
            if str(self.secret) in str(path) or (writes and not is_own):
                self._seen.append((event, str(path)[:80]))
        elif event in _HARM:
            self._seen.append((event, str(arguments)[:80]))

    def __enter__(self):
        self._seen.clear()
        # HDF5 opens files without telling Python. Who reads one that was never read
        # since it was written changes the time of that, if the file system keeps it.
        os.utime(self.secret, ns=(0, 1))
        self._is_watching = True

    def __exit__(self, *exception):
        self._is_watching = False
        assert not self._seen, f"opened, wrote or ran {self._seen}"
        assert not self.made.exists(), "code was executed"
        assert not os.stat(self.secret).st_atime_ns, "opened the secret"

    def values(self):
        """Values that open the secret, or run code, in the hands of the careless."""
        code = f"__import__('pathlib').Path({str(self.made)!r}).touch()"
        return [
            str(self.secret),
            f"../{self.secret.name}",
            code,
            {
                "module": "builtins",
                "class_name": "eval",
                "config": {"source": code},
                "registered_name": None,
            },
            {
                "module": "os",
                "class_name": "system",
                "config": {"command": f"touch {self.made}"},
                "registered_name": "system",
            },
            {
                "module": "keras.layers",
                "class_name": "Lambda",
                "config": {"name": "lambda", "function": ["4wAAAAA=", None, None]},
                "registered_name": None,
            },
            {
                "module": "keras.layers",
                "class_name": "TFSMLayer",
                "config": {"filepath": str(self.secret)},
                "registered_name": None,
            },
        ]


# === Damage to a file ===


def flip_bits(file, rng, canary):
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 16])):
        # Mostly at the beginning, where HDF5 keeps what it knows of itself.
        end = len(content) if rng.random() < 0.5 else min(4000, len(content))
        content[rng.integers(end)] ^= 1 << rng.integers(8)
    file.write_bytes(bytes(content))


def truncate(file, rng, canary):
    content = file.read_bytes()
    file.write_bytes(content[: rng.integers(len(content))])


def overwrite(file, rng, canary):
    content = bytearray(file.read_bytes())
    start, size = rng.integers(len(content)), int(rng.choice([4, 64, 1000]))
    content[start : start + size] = rng.bytes(size)
    file.write_bytes(bytes(content))


def remove(file, rng, canary):
    file.unlink()


def replace_by_folder(file, rng, canary):
    file.unlink()
    file.mkdir()


def replace_by_pipe(file, rng, canary):
    file.unlink()
    os.mkfifo(file)


def replace_by_nothing(file, rng, canary):
    file.unlink()
    file.symlink_to("nowhere")


def swap(file, rng, canary):
    others = sorted(p for p in file.parent.iterdir() if p.is_file() and p != file)
    shutil.copyfile(others[rng.integers(len(others))], file)


def edit_json(file, rng, canary):
    """Change something, anywhere, into something else."""
    saved = json.loads(file.read_text())
    found = list(places(saved))
    for _ in range(rng.choice([1, 1, 2])):
        parent, key = found[rng.integers(len(found))]
        values = [*HOSTILE, *canary.values()]
        chosen = rng.integers(len(values) + 3)
        if chosen < len(values):
            parent[key] = values[chosen]
        elif chosen == len(values) and isinstance(parent, dict):
            parent.pop(key, None)
        else:
            other, name = found[rng.integers(len(found))]
            with_cycle = json.dumps(other.get(name) if isinstance(other, dict) else 0)
            parent[key] = json.loads(with_cycle)
    file.write_text(json.dumps(saved))


def nest(file, rng, canary):
    file.write_text('{"a":' * 10**5 + "1" + "}" * 10**5)


def places(tree):
    """Pairs of a dict or list in a tree and a key or index of it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield tree, key
            yield from places(value)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield tree, index
            yield from places(value)


def edit_weights(file, rng, canary):
    """Change a group or a dataset of a file of weights."""
    with h5py.File(file, "a") as opened:
        names = []
        opened.visititems(lambda n, x: names.append((n, isinstance(x, h5py.Dataset))))
        datasets = [name for name, is_dataset in names if is_dataset]
        groups = [name for name, is_dataset in names if not is_dataset]
        name = datasets[rng.integers(len(datasets))]
        group = groups[rng.integers(len(groups))]
        kind = rng.integers(11)
        shape, dtype = opened[name].shape, opened[name].dtype
        if kind == 4:
            opened[name][...] = np.full(shape, rng.choice([np.nan, np.inf]))
            return
        if kind in (0, 5):
            del opened[group]
        elif kind not in (4, 6):
            del opened[name]
        if kind == 1:
            opened[name] = np.zeros((*shape, 2), dtype)
        elif kind == 2:
            opened[name] = np.full(shape, b"x")
        elif kind == 3:
            opened[name] = np.full(shape, 1j)
        elif kind == 5:
            opened[group] = h5py.SoftLink("/")
        elif kind == 6:
            opened[f"{group}/more"] = h5py.SoftLink(f"/{group}")
        elif kind == 7:
            opened[name] = h5py.ExternalLink(str(canary.secret), "/0")
        elif kind == 8:
            opened.create_dataset(
                name, shape, dtype, external=[(str(canary.secret), 0, 1 << 20)]
            )
        elif kind == 9:
            layout = h5py.VirtualLayout(shape=shape or (1,), dtype=dtype)
            source = h5py.VirtualSource(str(canary.secret), "0", shape=shape or (1,))
            layout[...] = source
            opened.create_virtual_dataset(name, layout)
        elif kind == 10:
            # Claims 64 GB and takes none.
            opened.create_dataset(name, (1 << 34,), "float32", chunks=(1 << 20,))


def edit_shards(file, rng, canary):
    """Names of files of weights that climb out of the directory, or are none."""
    saved = json.loads(file.read_text())
    names = sorted(saved["weight_map"])
    wrong = [
        f"../{canary.secret.name}",
        str(canary.secret),
        "",
        ".",
        "none.h5",
        None,
        3,
    ]
    for name in rng.choice(names, min(3, len(names)), replace=False):
        saved["weight_map"][str(name)] = wrong[rng.integers(len(wrong))]
    file.write_text(json.dumps(saved))


OF_PARTS = (flip_bits, truncate, overwrite, remove)
OF_ANY = (*OF_PARTS, replace_by_folder, swap, replace_by_pipe, replace_by_nothing)
OF_JSON = (*OF_ANY, *(edit_json,) * 12, nest)
OF_WEIGHTS = (*OF_ANY, *(edit_weights,) * 8)


def damage(folder, rng, canary):
    """Damage one file of a preset, or two together; returns what was done."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".md")
    if rng.random() < 0.25:
        return _change_together(folder, rng, canary)
    done = []
    for _ in range(rng.choice([1, 1, 2])):
        file = files[rng.integers(len(files))]
        if not file.is_file() or not file.stat().st_size:
            continue
        changes = {".json": OF_JSON, ".h5": OF_WEIGHTS}.get(file.suffix, OF_ANY)
        if file.name == "model.weights.json":
            changes = (*(edit_shards,) * 3, *(edit_json,) * 2)
        done.append(_change(file, changes, rng, canary))
    return ", ".join(done)


def damage_parts(parts, rng, canary):
    """Damage one file of an archive."""
    files = sorted(p for p in parts.rglob("*") if p.is_file())
    file = files[rng.integers(len(files))]
    more = {".json": (edit_json,) * 8, ".h5": (edit_weights,) * 8}
    return _change(file, OF_PARTS + more.get(file.suffix, ()), rng, canary)


def _change(file, changes, rng, canary):
    change = changes[rng.integers(len(changes))]
    try:
        change(file, rng, canary)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        # Already too damaged for this.
        return f"no {change.__name__} {file.name} ({type(error).__name__})"
    return f"{change.__name__} {file.name}"


def _change_together(folder, rng, canary):
    """The same change in `config.json` and in the backbone of `task.json`."""
    config = json.loads((folder / "config.json").read_text())
    names = sorted(config["config"])
    name = names[rng.integers(len(names))]
    values = [*HOSTILE, *canary.values(), 2, 4, 16, [0], [4, 4, 3], "gap", "token"]
    value = values[rng.integers(len(values))]
    for file in ("config.json", "task.json"):
        if (folder / file).is_file():
            saved = json.loads((folder / file).read_text())
            backbone = saved["config"].get("backbone", saved)
            backbone["config"][name] = value
            (folder / file).write_text(json.dumps(saved))
    return f"{name} of both files"
