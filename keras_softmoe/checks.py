"""Checks of arguments, which say what was wrong, what is accepted and what to do."""

import difflib
import math
import numbers


def is_whole_number(value, least=1):
    """Whether a value is an integer of at least so much. NumPy's are, bools are not."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and value >= least


def check_whole_numbers(least, **arguments):
    """Raise unless every argument is a whole number, `least` or more.

    Integers of NumPy are accepted. Some layers of Keras refuse them: convert with `int`
    what goes there.
    """
    wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
    for name, value in arguments.items():
        if not is_whole_number(value, least):
            raise ValueError(
                f"`{name}` must be {wanted}. Received: {name}={value!r}. Pass such an "
                "int."
            )


def check_numbers(least=None, over=None, under=None, **arguments):
    """Raise unless every argument is a finite number in a range.

    Args:
        least: float or `None`, the smallest number that is accepted.
        over: float or `None`, what every number must be greater than.
        under: float or `None`, what every number must be less than.
        **arguments: the arguments.
    """
    bounds = [("at least", least), ("over", over), ("under", under)]
    wanted = " and ".join(f"{word} {n:g}" for word, n in bounds if n is not None)
    for name, value in arguments.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if (
            not (is_number and math.isfinite(value))
            or (least is not None and value < least)
            or (over is not None and value <= over)
            or (under is not None and value >= under)
        ):
            raise ValueError(
                f"`{name}` must be a finite number{' ' * bool(wanted)}{wanted}. "
                f"Received: {name}={value!r}. Pass such a float or int."
            )


def check_choice(argument, value, accepted):
    """Raise unless the value of an argument is among the accepted ones, a tuple."""
    if value not in accepted:
        raise ValueError(
            f"Unknown `{argument}`. Accepted: {', '.join(map(repr, accepted))}. "
            f"Received: {argument}={value!r}."
        )


def check_names(owner, given, accepted):
    """Raise unless all names of arguments are accepted.

    Args:
        owner: str, what takes the arguments.
        given: iterable of str, their names.
        accepted: iterable of str.

    Raises:
        TypeError: as Python does, but with the nearest names that are accepted.
    """
    accepted = list(dict.fromkeys(accepted))
    unknown = [name for name in given if name not in accepted]
    if unknown:
        raise TypeError(
            f"{owner} has no such argument.{did_you_mean(unknown, accepted)} "
            f"Accepted: {', '.join(accepted)}. Received: {', '.join(unknown)}."
        )


def did_you_mean(unknown, accepted):
    """A sentence with the nearest accepted name for each unknown one, or nothing."""
    nearest = [difflib.get_close_matches(name, accepted, n=1) for name in unknown]
    hints = [f"`{near}`" for found in nearest for near in found]
    return f" Did you mean {' and '.join(dict.fromkeys(hints))}?" if hints else ""
