"""The bank of icons: concepts that many families of sets draw, in three splits."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.icons import concepts, copies, sources
from keras_softmoe.files import atomic_file

# A concept is drawn in as many families.
LEAST_FAMILIES = 8
# Held out: as large a part of all icons, in whole families none of which is larger than
# the second, and as large a part of the concepts. Drawn with this seed.
STYLES_HELD_OUT, LARGEST_HELD_OUT, CONCEPTS_HELD_OUT = 0.13, 0.03, 0.1
_SEED = 55
# Names of pictures that are as similar are captions of each other.
_SAME_PICTURE = 0.985
# A caption is so many words at most.
_LONGEST = 6
SPLITS = ("train", "held_out_styles", "held_out_concepts")


class Bank(NamedTuple):
    """One row for each icon.

    No icon of one split has a copy in another, and of copies with one concept, within a
    split, one is kept.

    Attributes:
        pictures: `(rows, 32, 32)` uint8 array of 16 greys, ink bright.
        label: `(rows,)` int32 array, the concept.
        set: `(rows,)` int32 array, the set.
        family: `(rows,)` int32 array, a number of its family of sets.
        split: `(rows,)` int8 array, an index of `SPLITS`.
        caption_start: `(rows + 1,)` int32 array, where captions of a row begin.
        caption: int32 array, captions of all rows, the name of the icon first.
        concepts: `(concepts,)` str array.
        held_out: `(concepts,)` bool array, concepts that are never trained.
        captions: str array, what `caption` counts.
        sets: `(sets, 5)` str array: key, name, author, licence and address.
    """

    pictures: np.ndarray
    label: np.ndarray
    set: np.ndarray
    family: np.ndarray
    split: np.ndarray
    caption_start: np.ndarray
    caption: np.ndarray
    concepts: np.ndarray
    held_out: np.ndarray
    captions: np.ndarray
    sets: np.ndarray

    def rows(self, split):
        """Return the rows of a split, and their labels, counted from 0.

        Args:
            split: `"train"`, `"held_out_styles"` (trained concepts in families never
                seen) or `"held_out_concepts"` (concepts never seen, in all families).
        """
        rows = np.flatnonzero(self.split == SPLITS.index(split))
        # Position of each concept among those that are held out, or not
        held = np.cumsum(self.held_out)
        number = np.where(self.held_out, held, np.cumsum(~self.held_out)) - 1
        return rows, number[self.label[rows]].astype("int32")

    def captions_of(self, row):
        """All captions of an icon, a list of str, its name first."""
        start, end = self.caption_start[row : row + 2]
        return self.captions[self.caption[start:end]].tolist()

    @property
    def num_concepts(self):
        """Number of concepts that are trained."""
        return int((~self.held_out).sum())

    def summary(self):
        """Counts of the bank, a dict that JSON can hold."""
        found = {
            "icons": len(self.label),
            "concepts": len(self.concepts),
            "concepts_held_out": int(self.held_out.sum()),
            "sets": len(self.sets),
            "families": len(np.unique(self.family)),
            "captions": len(self.captions),
            "captions_an_icon": round(len(self.caption) / len(self.label), 2),
        }
        for index, split in enumerate(SPLITS):
            of = self.split == index
            each = np.bincount(self.label[of], minlength=len(self.concepts))
            each = each[self.held_out == (split == "held_out_concepts")]
            found[split] = {
                "icons": int(of.sum()),
                "families": len(np.unique(self.family[of])),
                "sets": len(np.unique(self.set[of])),
                "icons_a_concept": {
                    "least": int(each.min()),
                    "median": float(np.median(each)),
                    "most": int(each.max()),
                },
            }
        return found


def make_bank(folder, draw=sources.draw, least_families=LEAST_FAMILIES):
    """Make the bank of a collection.

    Args:
        folder: path of the collection.
        draw: callable, as in `sources.draw_all`.
        least_families: int, families that draw a concept.

    Returns:
        `Bank`.
    """
    sets = sources.read_sets(folder)
    named = concepts.name_icons(sets, sources.read_logos(folder), least_families)
    by_key = {of.key: of for of in sets}
    pictures = sources.draw_all([by_key[i.key].icons[i.name] for i in named], draw)
    drawn = np.flatnonzero(pictures.any((1, 2)))
    named, pictures = [named[index] for index in drawn], pictures[drawn]
    numbers = {of.key: number for number, of in enumerate(sets)}
    set_of = np.array([numbers[icon.key] for icon in named])
    first, second, similarity = copies.pairs(copies.drawings(pictures))
    family = copies.families(set_of, [of.author for of in sets], first, second)[set_of]
    names, label = np.unique([icon.concept for icon in named], return_inverse=True)
    enough = _count_families(label, family, len(names)) >= least_families
    held_styles = hold_out_styles(family[enough[label]])
    held = hold_out_concepts(names, enough)
    split = np.where(np.isin(family, held_styles), 1, 0)
    split = np.where(held[label], 2, split).astype("int8")
    split[~enough[label]] = -1
    kept = keep(split, label, first, second)
    alike = similarity >= _SAME_PICTURE
    words = captions_of(named, label, first[alike], second[alike])
    rows = np.flatnonzero(kept)
    words = [words[row] for row in rows]
    captions, caption = np.unique(np.concatenate(words), return_inverse=True)
    # Only what is used is kept, and counted anew.
    used_names, label = np.unique(label[rows], return_inverse=True)
    used_sets, set_of = np.unique(set_of[rows], return_inverse=True)
    return Bank(
        pictures=_in_16_greys(pictures[rows]),
        label=label.astype("int32"),
        set=set_of.astype("int32"),
        family=np.unique(family[rows], return_inverse=True)[1].astype("int32"),
        split=split[rows],
        caption_start=np.cumsum([0, *map(len, words)]).astype("int32"),
        caption=caption.astype("int32"),
        concepts=names[used_names],
        held_out=held[used_names],
        captions=captions,
        sets=np.array([_described(sets[number]) for number in used_sets]),
    )


def _in_16_greys(pictures):
    # 17 = 255 / 15
    return ((pictures.astype("uint16") + 8) // 17 * 17).astype("uint8")


def _described(of):
    return of.key, of.name, of.author, of.licence, of.url


def _count_families(label, family, count):
    once = np.unique(np.stack([label, family]), axis=1)
    return np.bincount(once[0], minlength=count)


def hold_out_styles(family):
    """Numbers of families to hold out, given the family of each icon."""
    numbers, sizes = np.unique(family, return_counts=True)
    parts = sizes / len(family)
    chosen, total = [], 0.0
    for index in np.random.default_rng(_SEED).permutation(len(numbers)):
        fits = parts[index] <= LARGEST_HELD_OUT
        # Of a small collection one family, whatever its size
        if (fits or not chosen) and total < STYLES_HELD_OUT:
            chosen.append(numbers[index])
            total += parts[index]
    return chosen


def hold_out_concepts(names, enough):
    """Whether each concept is held out, a bool array, given which ones there are."""
    order = np.random.default_rng(_SEED + 1).permutation(np.flatnonzero(enough))
    held = np.zeros(len(names), bool)
    held[order[: max(1, round(CONCEPTS_HELD_OUT * len(order)))]] = True
    return held


def keep(split, label, first, second):
    """Whether each icon is kept, a bool array.

    Icons that are held out and have a copy in a split before theirs are dropped, and
    of copies with one concept in one split all but the first.

    Args:
        split: `(N,)` int array, -1 for icons that are not to be kept.
        label: `(N,)` int array.
        first, second: int arrays, pairs of copies.
    """
    kept = split >= 0
    known = kept[first] & kept[second]
    first, second = first[known], second[known]
    apart = split[first] != split[second]
    one, other = first[apart], second[apart]
    kept[np.where(split[one] > split[other], one, other)] = False
    same = ~apart & (label[first] == label[second])
    return kept & copies.distinct(first[same], second[same], len(split))


def captions_of(named, label, first, second):
    """Captions of each icon, tuples of str: its names, then those of its copies.

    Args:
        named: list of `concepts.Named`.
        label: `(N,)` int array.
        first, second: int arrays, pairs of the same picture. Names are taken over from
            icons of the same concept, or of another set.
    """
    found = [dict.fromkeys(icon.captions) for icon in named]
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        if label[one] == label[other] or named[one].key != named[other].key:
            found[one].update(dict.fromkeys(named[other].captions))
            found[other].update(dict.fromkeys(named[one].captions))
    return [
        tuple(words for words in each if len(words.split()) <= _LONGEST)
        or tuple(each)[:1]
        for each in found
    ]


def write(bank, path):
    """Write a bank to a file, with 4 bits a pixel."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = bank.pictures // 17
    packed = grey[:, :, ::2] << 4 | grey[:, :, 1::2]
    with atomic_file(path) as aside, open(aside, "wb") as file:
        np.savez_compressed(file, **bank._replace(pictures=packed)._asdict())


def load(path):
    """Read the bank that `write` wrote."""
    if not Path(path).exists():
        raise ValueError(
            f"There is no bank at '{path}'. `python -m experiments.icons` makes it."
        )
    with np.load(path) as stored:
        content = {name: stored[name] for name in Bank._fields}
    packed = content["pictures"]
    grey = np.stack([packed >> 4, packed & 15], axis=-1)
    pictures = grey.reshape(*packed.shape[:2], -1) * np.uint8(17)
    return Bank(**{**content, "pictures": pictures})
