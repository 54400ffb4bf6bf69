"""Checks of arguments, with errors that name the rule and the value received."""

import difflib
import inspect
import numbers
import operator
import reprlib
import typing

import numpy as np

# Maximum values of arguments by name, far larger than in any model of the papers.
# Larger ones are typing errors or come from damaged files; they would fill the memory.
_SIZES = (
    "hidden_dim num_experts num_predicted_experts slots_per_expert multiple_of "
    "group_images image_shape patch_size grid num_patches sequence_length "
    "num_registers representation_dim embedding_dim output_dim image_projection_dim "
    "text_projection_dim"
)
LARGEST = {name: 1 << 16 for name in _SIZES.split()} | {
    "num_layers": 256,
    "num_heads": 1024,
    "mlp_dim": 1 << 20,
    "expert_mlp_dim": 1 << 20,
    "devices": 1 << 20,
    "vocabulary_size": 1 << 24,
    "num_classes": 1 << 24,
    "num_iterations": 10_000,
}
# Maximum of other integers, and of numbers that float32 can still multiply.
_LARGEST_INTEGER, _LARGEST_NUMBER = 1 << 63, 1e30

# Rows of an array checked at once, so that memory does not grow with the array.
_ROWS = 256

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 160
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 12


def quote(value):
    """Return the `repr` of a value for a message, shortened in the middle."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        # Python does not print integers of thousands of digits.
        return f"a {type(value).__name__}"


def received(**values):
    """Return `"Received: name=value, ...."` to end a message, with values shortened."""
    return f"Received: {', '.join(f'{k}={quote(v)}' for k, v in values.items())}."


def is_whole_number(value, least=1, name=None):
    """Return whether a value is an integer from `least` to `LARGEST[name]`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and least <= value <= LARGEST.get(name, _LARGEST_INTEGER)


def check_whole_numbers(least, **arguments):
    """Raise unless every argument is an integer from `least` to `LARGEST[name]`."""
    wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
    for name, value in arguments.items():
        if not is_whole_number(value, least, name):
            raise ValueError(
                f"`{name}` must be {wanted}{at_most(name)}. {received(**{name: value})}"
            )


def check_num_heads(num_heads, width):
    """Raise unless `num_heads` divides `width`."""
    if width % num_heads:
        raise ValueError(
            "The heads share the width equally, so `num_heads` must divide it. "
            + received(num_heads=num_heads, width=width)
        )


def at_most(name):
    """Return the part of a message that names the maximum of an argument, if any."""
    return f", at most {LARGEST[name]:,}" if name in LARGEST else ""


def is_number(value):
    """Return whether a value is a finite number. Those of NumPy count, bools do not."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and -_LARGEST_NUMBER < value < _LARGEST_NUMBER


def check_numbers(least=None, over=None, under=None, most=None, **arguments):
    """Raise unless every argument is a finite number in a range.

    `least` and `most` are inclusive bounds, `over` and `under` exclusive ones.
    """
    if under is None and most is None:
        under = _LARGEST_NUMBER
    bounds = [
        ("at least", least, operator.ge),
        ("over", over, operator.gt),
        ("under", under, operator.lt),
        ("at most", most, operator.le),
    ]
    bounds = [bound for bound in bounds if bound[1] is not None]
    wanted = " and ".join(f"{word} {n:g}" for word, n, _ in bounds)
    for name, value in arguments.items():
        if not is_number(value) or not all(holds(value, n) for _, n, holds in bounds):
            raise ValueError(
                f"`{name}` must be a finite number {wanted}. "
                + received(**{name: value})
            )


def check_finite(name, array, row="row", remedy=""):
    """Raise unless numbers are finite; `name` and `row` are for the message."""
    # NumPy has no kind for bfloat16.
    if array.dtype.kind not in "fc" and "float" not in array.dtype.name:
        return
    for start in range(0, len(array), _ROWS):
        finite = np.isfinite(array[start : start + _ROWS])
        if not finite.all():
            wrong = start + int(np.argwhere(~finite)[0, 0])
            raise ValueError(
                f"{name} must be finite numbers. Received: NaN or infinity, first in "
                f"{row} {wrong} of {len(array)}.{remedy}"
            )


def check_choice(argument, value, accepted):
    """Raise unless the value of an argument is in `accepted`, a tuple.

    Accepted are strings, bools or `None`: arrays are refused without comparing.
    """
    is_array = hasattr(value, "__array__") and getattr(value, "ndim", 1)
    if is_array or value not in accepted:
        raise ValueError(
            f"Unknown `{argument}`. Accepted: {', '.join(map(repr, accepted))}. "
            + received(**{argument: value})
        )


def check_bools(**arguments):
    """Raise unless every argument is `True` or `False`."""
    for name, value in arguments.items():
        check_choice(name, value, (False, True))


def check_names(owner, given, accepted):
    """Raise a `TypeError` unless all names given to `owner` are accepted."""
    accepted = list(dict.fromkeys(accepted))
    unknown = [name for name in given if name not in accepted]
    if unknown:
        raise TypeError(
            f"{owner} has no such argument.{did_you_mean(unknown, accepted)} "
            f"Accepted: {', '.join(accepted)}. Received: "
            f"{', '.join(unknown[:12])}{', ...' * (len(unknown) > 12)}."
        )


def keyword_names(method):
    """Return a method's argument names, and the keys of `**x: Unpack[a TypedDict]`."""
    _, *parameters = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in kinds]
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            for unpacked in typing.get_args(parameter.annotation):
                names += typing.get_type_hints(unpacked)
    return names


def did_you_mean(unknown, accepted):
    """Return a sentence with the nearest accepted name of each unknown one."""
    names = [name[:80] for name in unknown if isinstance(name, str)][:12]
    nearest = [difflib.get_close_matches(name, accepted, n=1) for name in names]
    hints = [f"`{near}`" for found in nearest for near in found]
    return f" Did you mean {' and '.join(dict.fromkeys(hints))}?" if hints else ""


def pair(size, name="patch_size"):
    """Return `(height, width)` of `size`, a positive integer or two of them."""
    sizes = tuple(size) if np.iterable(size) else (size, size)
    if len(sizes) != 2 or not all(is_whole_number(s, 1, name) for s in sizes):
        raise ValueError(
            f"`{name}` must be a positive integer, or two of them for height and width"
            f"{at_most(name)}. {received(**{name: size})}"
        )
    return sizes


def checked_image_shape(image_shape):
    """Return `(height, width, channels)` as a tuple of positive integers."""
    shape = tuple(image_shape) if np.iterable(image_shape) else ()
    name = "image_shape"
    if len(shape) != 3 or not all(is_whole_number(size, 1, name) for size in shape):
        raise ValueError(
            f"`{name}` must be (height, width, channels), all known and positive "
            f"integers{at_most(name)}. {received(image_shape=image_shape)}"
        )
    return shape


def patch_grid(image_shape, patch_size):
    """Return the `(rows, columns)` of patches, which must cover the image exactly.

    The arguments are results of `checked_image_shape` and `pair`.
    """
    (height, width, _), (of_rows, of_columns) = image_shape, patch_size
    rows, columns = height // of_rows, width // of_columns
    covers = (rows * of_rows, columns * of_columns) == (height, width)
    if covers and rows * columns <= LARGEST["num_patches"]:
        return rows, columns
    rule = (
        f"An image must have at most {LARGEST['num_patches']:,} patches, since "
        f"attention compares each with each, not {rows} x {columns}."
        if covers
        else "The patches must cover the image exactly: the patch size has to divide "
        "height and width."
    )
    sizes = received(image_shape=image_shape, patch_size=patch_size)
    raise ValueError(f"{rule} {sizes}")


def table(rows, left=1):
    """Return a table of rows of str, whose first `left` columns are aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    lines = (map(lambda f, x, n: f(x, n), aligned, row, widths) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
