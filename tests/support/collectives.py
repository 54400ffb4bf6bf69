"""What a compiled step sends between devices, read from its text."""

import math
import re
from typing import NamedTuple

_OPERATION = re.compile(
    r"= (?P<result>.*?) (?P<name>all-to-all|all-gather|all-reduce|reduce-scatter"
    r"|collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        name: str, for example `"all-to-all"`.
        shapes: list of tuple, of the tensors that come out of it.
        bytes: int, size of all that comes out of it on one device.
        source: str, the operation in the model that it stems from.
    """

    name: str
    shapes: list
    bytes: int
    source: str


def collectives(text):
    """The collective operations in the text of a compiled module, in order."""
    found = []
    for line in text.splitlines():
        match = _OPERATION.search(line)
        if match is None:
            continue
        source = re.search(r'op_name="([^"]*)"', line)
        results = _SHAPE.findall(match["result"])
        shapes = [tuple(map(int, filter(None, dims.split(",")))) for _, dims in results]
        sizes = [
            math.prod(shape) * _bytes(dtype)
            for (dtype, _), shape in zip(results, shapes, strict=True)
        ]
        name = source[1] if source else ""
        found.append(Collective(match["name"], shapes, sum(sizes), name))
    return found


def _bytes(dtype):
    return 1 if dtype == "pred" else int(_BITS.search(dtype)[0]) // 8
