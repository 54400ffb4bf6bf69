"""From the names of icons to concepts, and the words that say what a picture shows."""

import re
from collections import Counter, defaultdict
from typing import NamedTuple

# Words that say how an icon is drawn, wherever they stand in a name.
_STYLE = frozenset(
    "outline outlined fill filled rounded linear duotone twotone alt variant bulk ltr "
    "rtl baseline micro mini xs sm md lg xl duo monochrome"
    " ios android".split()
)
# Words that may be the subject as well ("traffic light", "bold text"): of style where
# they begin or end many names of a set, and as a pair.
_OFTEN_STYLE = frozenset(
    "bold broken regular solid light thin sharp round line lines stroke medium small "
    "large big color colored mono flat black white dark square circle box f s l o d b "
    "remix tone two ui icon block glyph simple basic default free full in a".split()
)
_OFTEN = 0.03
# What an icon stands on.
_GROUND = frozenset("circle circled square squared box boxed rectangle".split())
# A sign, a letter or a number is no picture of a thing.
_SIGNS = frozenset(
    "letter letters number numbers numeric alphabet alpha counter roman logo logos "
    "brand brands flag emoji glyph font digit".split()
)
# Words of grammar, and those that add nothing in a name: they stand in captions only.
_GRAMMAR = frozenset(
    "a an and at by for in of on or the to with mark sign symbol icon".split()
)
_NUMBERS = frozenset("one two three four five six seven eight nine zero ten".split())
# What one set calls so, another one calls otherwise: the first word names the concept.
_SAME = (
    "plus add",
    "minus remove subtract",
    "close xmark times cancel cross multiply",
    "check checkmark tick",
    "info information",
    "question help",
    "exclamation alert warning",
    "settings setting cog gear preferences",
    "mail email envelope",
    "user person account profile",
    "home house",
    "trash bin",
    "search magnifier magnify",
    "image picture photo",
    "chevron angle",
    "dots more ellipsis",
    "menu bars",
    "bicycle bike",
    "microphone mic",
    "phone telephone",
    "time clock",
    "comment message chat",
    "globe world earth",
    "cart trolley",
    "dollar usd",
    "euro eur",
    "file document",
    "infinity infinite",
    "equal equals",
    "divide division",
    "picker eyedropper",
    "edit pencil",
    "smile smiley happy",
    "power shutdown",
    "tv television",
    "cake birthday",
    "airplane plane aeroplane",
    "thunder lightning",
)
_NAMED = {word: line.split()[0] for line in _SAME for word in line.split()}
# A brand occurs in three sets of logos, or more; a set that marks a name as one counts
# as three of them.
_LEAST_LOGOS, _LEAST_EVIDENCE, _WEIGHT = 3, 9, 3
_BRAND_MARKS = frozenset("brand brands logo logos".split())
_WORD = re.compile(r"[a-z]{2,}\d{0,2}|\d[a-z]+|[a-z]\d{1,2}")
_SIZE = re.compile(r"\d+(px|x\d+)?|v\d+")


def style_of(names, affixes=()):
    """Words of style of a set: those of its themes, and those that many names carry.

    Args:
        names: sequence of str, the names of its icons.
        affixes: sequence of str, what names of its themes begin or end with.

    Returns:
        frozenset of str.
    """
    ends = Counter()
    for name in names:
        words = name.split("-")
        if len(words) > 1:
            ends.update({words[0], words[-1]} & _OFTEN_STYLE)
    often = {word for word, count in ends.items() if count > _OFTEN * len(names)}
    return frozenset(often.union(*(affix.split("-") for affix in affixes)) - {""})


def words_of(name, style=frozenset()):
    """Words of a name without those of style and size, a tuple of str.

    They are empty if the name says nothing else, and where a name holds a sign: a
    letter, a number, a brand that says so.

    Args:
        name: str, such as `"home-2-outline"`.
        style: set of str, words of style of its set.
    """
    if not name.isascii():
        return ()
    words = [word for word in re.split("[-_ ]+", name.lower()) if word]
    words = [re.sub(r"(?<=[a-z]{3})\d{1,2}$", "", word) for word in words]
    if _SIGNS.intersection(words):
        return ()
    words = [w for w in words if w not in _STYLE and not _SIZE.fullmatch(w)]
    # Style stands at the ends; "light" in the middle is a word of the subject.
    while len(words) > 1 and words[-1] in style:
        words.pop()
    while len(words) > 1 and words[0] in style:
        words.pop(0)
    on_ground = [word for word in words if word not in _GROUND]
    words = on_ground or words
    return tuple(words) if all(map(_WORD.fullmatch, words)) else ()


def concept_of(words):
    """The concept of words, a str, empty if there is none.

    These are the words in alphabetical order, each by the name that it has in most
    sets, without words of grammar.
    """
    known = {_NAMED.get(word, word) for word in words}
    if known <= _NUMBERS:
        return ""
    return " ".join(sorted(known - _GRAMMAR))


class Named(NamedTuple):
    """An icon with a concept.

    Attributes:
        key: str, its set.
        name: str, its name there.
        concept: str.
        captions: tuple of str, words of its names in this set.
    """

    key: str
    name: str
    concept: str
    captions: tuple


def name_icons(sets, logos, least_sets):
    """The icons whose concept is no brand and occurs in several sets.

    Args:
        sets: list of `sources.IconSet`.
        logos: list of lists of str, names of icons in sets of logos.
        least_sets: int.

    Returns:
        list of `Named`.
    """
    brands = brands_of(sets, logos)
    found, where = [], defaultdict(set)
    for of in sets:
        style = style_of(list(of.icons), of.affixes)
        for name in of.icons:
            concept = concept_of(words_of(name, style))
            if not concept or concept in brands:
                continue
            names = (words_of(x, style) for x in (name, *of.aliases.get(name, ())))
            captions = dict.fromkeys(" ".join(words) for words in names if words)
            found.append(Named(of.key, name, concept, tuple(captions)))
            where[concept].add(of.key)
    return [icon for icon in found if len(where[icon.concept]) >= least_sets]


def brands_of(sets, logos):
    """Concepts that are brands, a set of str; arguments as in `name_icons`."""
    in_logos, marked = Counter(), Counter()
    for names in logos:
        style = style_of(names)
        in_logos.update({concept_of(words_of(name, style)) for name in names})
    for of in sets:
        style = style_of(list(of.icons), of.affixes) | _BRAND_MARKS
        parts = [name.split("-") for name in of.icons]
        brands = [words for words in parts if _BRAND_MARKS.intersection(words)]
        kept = ([w for w in words if w not in style] for words in brands)
        marked.update({concept_of(words_of("-".join(words))) for words in kept})
    return {
        concept
        for concept, count in in_logos.items()
        if count >= _LEAST_LOGOS
        and count + _WEIGHT * marked[concept] >= _LEAST_EVIDENCE
    }
