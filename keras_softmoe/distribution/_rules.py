"""Rules of a layout map: the one that matches a variable, and those that match none."""

import re

from keras_softmoe.distribution._layouts import is_known


class PlacementError(ValueError):
    """Variables do not lie on the devices as their rules say.

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
    """The keys of a layout map that match a path; the path alone, if it is a key."""
    # Not `path in layout_map`, which is true for every path.
    keys = list(layout_map)
    return [path] if path in keys else [key for key in keys if re.fullmatch(key, path)]


def several_match(path, keys):
    """The beginning of the error where several rules match a path: str."""
    return f"Several rules match {path!r}: {', '.join(map(repr, keys))}."


def is_foreign(key, layout, variable):
    """Whether a rule of ours matches a variable that only has a name like ours."""
    return is_known(key) and len(layout.axes) != len(variable.shape)


def reference_name(moment, shapes):
    """The name of the variable of which an optimizer's variable is a moment.

    Args:
        moment: `keras.Variable` of an optimizer.
        shapes: dict from names of variables, as `name_in_optimizer` gives them, to
            their shapes.

    Returns:
        One of the names, or `None`.
    """
    own, shape = moment.path.rpartition("/")[2], tuple(moment.shape)
    names = [n for n in shapes if own.startswith(f"{n}_") and shapes[n] == shape]
    return max(names, key=len, default=None)


def name_in_optimizer(variable):
    """How the names of a variable's moments begin in an optimizer: str."""
    return variable.path.replace("/", "_")


def unmatched_rules(layout_map, used_keys, paths=()):
    """The error for rules of a user that match nothing, `None` if there are none.

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
