"""Rules of a layout map: the rule of a variable, and rules without a match."""

import re

from keras_softmoe.distribution._layouts import is_known


class PlacementError(ValueError):
    """Error of variables that are not placed on the devices by their rules.

    Attributes:
        audit: the `Audit` that found it, or `None`.

    Examples:
        >>> distribution = ksm.distribution.expert_parallel()
        >>> try:
        ...     ksm.distribution.audit(classifier, distribution)  # built without it
        ... except ksm.distribution.PlacementError as error:
        ...     print(error)
    """

    audit = None


def matching_keys(layout_map, path):
    """Return the keys of a layout map that match a path; only the path if a key."""
    # Not `path in layout_map`, which is true for every path.
    keys = list(layout_map)
    return [path] if path in keys else [key for key in keys if re.fullmatch(key, path)]


def several_match(path, keys):
    """Return the beginning of the error for several matching rules, a str."""
    return f"Several rules match {path!r}: {', '.join(map(repr, keys))}."


def is_foreign(key, layout, variable):
    """Return whether a rule of this library matches a variable of another library."""
    return is_known(key) and len(layout.axes) != len(variable.shape)


def reference_name(moment, shapes):
    """Return the name of the variable to which a moment of an optimizer belongs.

    Args:
        moment: `keras.Variable` of an optimizer.
        shapes: dict from names of variables, as `name_in_optimizer` returns them, to
            their shapes.

    Returns:
        One of the names, or `None`.
    """
    own, shape = moment.path.rpartition("/")[2], tuple(moment.shape)
    names = [n for n in shapes if own.startswith(f"{n}_") and shapes[n] == shape]
    return max(names, key=len, default=None)


def name_in_optimizer(variable):
    """Return the prefix of the names of a variable's moments, a str."""
    return variable.path.replace("/", "_")


def unmatched_rules(layout_map, used_keys, paths=()):
    """Return the error for rules of a user that match nothing, or `None`.

    Args:
        layout_map: `keras.distribution.LayoutMap`.
        used_keys: set of str, the keys that have matched a path.
        paths: paths of variables and tensors that exist.
    """
    unmatched = [
        key
        for key in layout_map
        if not (is_known(key) or key in used_keys)
        and not any(matching_keys({key: None}, path) for path in paths)
    ]
    if not unmatched:
        return None
    return (
        "Nothing has a path that these rules match: "
        f"{', '.join(map(repr, unmatched))}. A rule that matches nothing leaves its "
        "variable replicated on every device."
    )
