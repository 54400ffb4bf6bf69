"""States of the global random generators of a process, as arrays."""

import random

import keras
import numpy as np


def generator_states():
    """Return the states of the generators of Python, of NumPy and of the backend.

    (JAX has none. Layers with a seed keep their state in a variable of the model.)

    Returns:
        dict from names to arrays.
    """
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    found = {
        "python": np.array([version, *words], "int64"),
        "python_gauss": np.array([np.nan if gauss is None else gauss]),
        "numpy": state["state"]["key"],
        "numpy_position": np.array([state["state"]["pos"], state["has_gauss"]]),
        "numpy_gauss": np.array([state["gauss"]]),
    }
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        found["torch"] = torch.get_rng_state().numpy()
        for index, cuda in enumerate(torch.cuda.get_rng_state_all()):
            found[f"torch_cuda_{index}"] = cuda.numpy()
    elif backend == "tensorflow":
        import tensorflow as tf

        found["tensorflow"] = tf.random.get_global_generator().state.numpy()
    return found


def set_generator_states(states):
    """Restore the states of generators from `generator_states`.

    States of another backend, and of missing accelerators, are ignored.

    Args:
        states: dict from names to arrays.
    """
    _set_host_states(states)
    set_backend_states(states)


def _set_host_states(states):
    version, *words = (int(word) for word in states["python"])
    gauss = float(states["python_gauss"][0])
    random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    position, has_gauss = (int(n) for n in states["numpy_position"])
    np.random.set_state(  # noqa: NPY002 (the one that users' code may draw from)
        {
            "bit_generator": "MT19937",
            "state": {"key": states["numpy"], "pos": position},
            "has_gauss": has_gauss,
            "gauss": float(states["numpy_gauss"][0]),
        }
    )


def set_backend_states(states):
    """Restore the states of the generators of the backend only."""
    backend = keras.backend.backend()
    if backend == "torch" and "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
        for index in range(torch.cuda.device_count()):
            if f"torch_cuda_{index}" in states:
                cuda = torch.from_numpy(states[f"torch_cuda_{index}"])
                torch.cuda.set_rng_state(cuda, index)
    elif backend == "tensorflow" and "tensorflow" in states:
        import tensorflow as tf

        tf.random.get_global_generator().state.assign(states["tensorflow"])
