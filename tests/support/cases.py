"""Hypothesis strategies for scores, tokens and padding masks.

Shapes come from a short list, because a backend compiles anew for every shape. The
list holds the corners: one expert, one token, more experts than tokens.
"""

import hypothesis.strategies as st
import numpy as np

# (G, S, E)
GROUP_SHAPES = [(2, 1, 3), (2, 6, 1), (1, 3, 5), (2, 8, 4)]
FLAVOURS = ["normal", "ties", "equal", "zero", "huge"]


def array(flavour, shape, seed):
    """Float32 array of shape (G, S, last axis), of one of the `FLAVOURS`."""
    rng = np.random.default_rng(seed)
    values = {
        "normal": lambda: rng.normal(size=shape),
        # Few distinct values, so that most comparisons are ties.
        "ties": lambda: rng.integers(0, 3, size=shape) / 4.0,
        # Every token of a group is the same.
        "equal": lambda: np.repeat(rng.normal(size=shape)[:, :1], shape[1], axis=1),
        "zero": lambda: np.zeros(shape),
        "huge": lambda: rng.choice([-1e4, 1e4], size=shape) + rng.normal(size=shape),
    }
    return values[flavour]().astype("float32")


# Two groups of eight tokens
TOKENS = array("normal", (2, 8, 4), 0)


@st.composite
def scores(draw, flavours=FLAVOURS, shapes=GROUP_SHAPES):
    """Float32 scores (G, S, E)."""
    shape = draw(st.sampled_from(shapes))
    return array(draw(st.sampled_from(flavours)), shape, draw(st.integers(0, 99)))


def padding(shape, seed):
    """Bool (G, S), at least one token of a group kept; None for an even seed."""
    if seed % 2 == 0:
        return None
    rng = np.random.default_rng(seed)
    valid = rng.random(shape) < 0.6
    valid[:, rng.integers(shape[1])] = True
    return valid


def hide(tokens, valid):
    """Tokens with NaN in place of padding, which nobody may look at."""
    if valid is None:
        return tokens
    return np.where(valid[..., None], tokens, np.float32(np.nan))


seeds = st.integers(0, 99)
