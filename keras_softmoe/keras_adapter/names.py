"""Names of the weights of a layer."""

import re

import keras
from keras.src.utils.naming import to_snake_case


def named_weights(layer):
    """Yield `(path, weight)` of a layer, each weight once, in the order of `weights`.

    Automatic names such as `dense_7` have a counter of the process, which starts anew
    here, so that all instances have the same names.
    Would be replaced by: names of Keras that are unique in a model.
    """
    seen, taken = set(), set()

    def unique(prefix, name, kind):
        if _is_counted(name, kind):
            name = name.rpartition("_")[0]
        name = new = prefix + name.replace(".", "_")
        count = 0
        while new in taken:
            count += 1
            new = f"{name}_{count}"
        taken.add(new)
        return new

    def below(part, prefix):
        for weight in part._trainable_variables + part._non_trainable_variables:
            if id(weight) not in seen:
                seen.add(id(weight))
                yield unique(prefix, weight.name, keras.Variable), weight
        for child in part._layers:
            if id(child) not in seen:
                seen.add(id(child))
                yield from below(child, f"{unique(prefix, child.name, type(child))}/")

    return below(layer, "")


def _is_counted(name, kind):
    """Return whether a name is an automatic one with a counter."""
    if not name[-1:].isdigit():
        return False
    stem = r"\w+" if issubclass(kind, keras.Model) else to_snake_case(kind.__name__)
    return bool(re.fullmatch(rf"{stem}_\d+", name))
