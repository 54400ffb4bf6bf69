"""The signatures of all public names have types; `make lint` checks their examples."""

import inspect

from tests.support import docstrings


def signatures():
    """Dict from `module.name`, or `module.name.method`, to the functions that are ours.

    What a class overrides of Keras and KerasHub keeps their signature, without types.
    """
    found = {}
    for name, value in docstrings.public_names().items():
        if inspect.isfunction(value):
            found[name] = inspect.unwrap(value)
            continue
        others = [cls for cls in value.__mro__ if not is_ours(cls)]
        for part, method in vars(value).items():
            method = getattr(method, "__func__", getattr(method, "fget", method))
            is_new = not any(part in vars(cls) for cls in others)
            is_public = part == "__init__" or (not part.startswith("_") and is_new)
            if is_public and inspect.isfunction(method) and is_ours(method):
                found[f"{name}.{part}"] = inspect.unwrap(method)
    return found


def is_ours(value):
    return value.__module__.startswith("keras_softmoe")


def test_every_parameter_has_a_type():
    found = signatures()
    assert len(found) > 100
    for name, function in found.items():
        signature = inspect.signature(function)
        untyped = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty
            and parameter.kind != parameter.VAR_KEYWORD
            and parameter.name not in ("self", "cls")
        ]
        assert not untyped, name
        if not name.endswith("__init__"):
            assert signature.return_annotation is not signature.empty, name
