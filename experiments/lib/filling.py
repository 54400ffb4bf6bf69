"""Tables in their places on pages, `<!-- TITLE: begin -->` to `<!-- TITLE: end -->`."""

import re


def filled(text, found):
    """The text with the tables of these titles in their places.

    Raises:
        ValueError: if a place has a title of no table, or no end.
    """

    def fill(match):
        if match[1] not in found:
            raise ValueError(f"There are {sorted(found)}. Received: title={match[1]!r}")
        return (
            f"<!-- {match[1]}: begin -->\n\n{found[match[1]]}\n<!-- {match[1]}: end -->"
        )

    marked = r"<!-- ([^>]*?): begin -->\n.*?<!-- \1: end -->"
    if len(re.findall("<!-- [^>]*: (?:begin|end) -->", text)) != 2 * len(
        re.findall(marked, text, flags=re.DOTALL)
    ):
        raise ValueError("A place for a table lacks its beginning or its end.")
    return re.sub(marked, fill, text, flags=re.DOTALL)
