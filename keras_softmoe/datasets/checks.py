"""Argument checks shared by the loaders."""

import numbers


def check_whole_numbers(least, **arguments):
    """Raises `ValueError` unless every argument is a whole number, `least` or more."""
    for name, value in arguments.items():
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or value < least:
            raise ValueError(
                f"`{name}` must be a whole number of at least {least}. "
                f"Received: {name}={value!r}. Pass an int in that range."
            )
