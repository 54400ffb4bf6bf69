"""Removed public names say what replaces them."""

import importlib

import pytest

from keras_softmoe.moved import REPLACEMENTS


def test_removed_names_say_what_to_use():
    for room, names in REPLACEMENTS.items():
        module = importlib.import_module(f"keras_softmoe.{room}".rstrip("."))
        for name in names:
            with pytest.raises(AttributeError, match=f"{name}` was removed. Use "):
                getattr(module, name)


def test_other_names_are_missing_as_usual():
    for room in REPLACEMENTS:
        module = importlib.import_module(f"keras_softmoe.{room}".rstrip("."))
        with pytest.raises(AttributeError, match="has no attribute 'absent'"):
            module.absent  # noqa: B018
