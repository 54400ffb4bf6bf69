"""Operators that PyTorch dispatches: how many, and which copy or wait on a GPU.

    KERAS_BACKEND=torch python -m tests.support.operators [name] [options]

prints their numbers for mixtures with each router, or for one also their names, each
with the lines that call it. Options are `training`, `gradient`, `mask` and `group`.
"""

import collections
import contextlib
import functools
import sys

import keras
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_softmoe import layers, routers

# A tensor of numbers of Python is a copy to the device.
COPIES = ("lift_fresh", "lift_fresh_copy", "_pin_memory")
# Numbers, or sizes, that the processor reads from the device: it waits for them.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "item")

_two = functools.partial(routers.SoftmaxTokenChoiceRouter, 8, 2)
# Name -> router of the mixture, which has another dispatcher for "gather"
MIXTURES = {
    "token choice": _two(),
    "one choice": routers.SoftmaxTokenChoiceRouter(8, 1),
    "gather": _two(),
    **{f"priority {x}": _two(priority=x) for x in ("max", "sum", "pair", "random")},
    "skipping": _two(priority="max", keep_fraction=0.5),
    "normalized gates": _two(normalize_gates=True, noise_std=0.0),
    "bias": _two(bias_update_rate=0.01, score="sigmoid"),
    "bias of two calls": _two(bias_update_rate=0.01, bias_update_every=2),
    "random logits": _two(random_logits=True),
    "permuted logits": _two(random_logits="permuted"),
    "dropless": _two(capacity_factor=None),
    "dropless, skipping": routers.SoftmaxTokenChoiceRouter(
        8, capacity_factor=None, keep_fraction=0.5
    ),
    "sinkhorn token choice": routers.SinkhornTokenChoiceRouter(8),
    "expert choice": routers.SoftmaxExpertChoiceRouter(8),
    "expert choice, noise": routers.SoftmaxExpertChoiceRouter(8, noise_std=1.0),
    "sinkhorn expert choice": routers.SinkhornExpertChoiceRouter(8),
    "sinkhorn plan": routers.SinkhornExpertChoiceRouter(8, combine="plan"),
    "sparse transport": routers.SparseTransportExpertChoiceRouter(8),
    "race": routers.ExpertRaceRouter(8, 2),
    "soft": routers.SoftRouter(8),
    "soft, noise": routers.SoftRouter(8, 2, noise_std=0.1),
    "soft, uniform": routers.SoftRouter(8, dispatch="uniform"),
    "identity": routers.IdentityRouter(8),
    "limoe": routers.LIMoERouter(8),
    "limoe, image first": routers.LIMoERouter(
        *(8, 1),
        priority="image_first",
        per_modality=True,
        image_experts=5,
        text_experts=5,
    ),
}


def made(name, **settings):
    """Return a built mixture of 8 experts, and other arguments of its calls."""
    if name == "gather":
        settings["dispatcher"] = "gather"
    layer = layers.MoE(MIXTURES[name], mlp_dim=64, **settings)
    layer.build((None, 16, 32))
    known = {}
    if layer.router.knows_modalities:
        known["modalities"] = (("image", 12), ("text", 4))
    return layer, known


class Operators(TorchDispatchMode):
    """A scope that counts operators.

    Attributes:
        names: `collections.Counter` of their names.
        copies, waits: lists of the places of those that copy to a device, or wait.
        places: list of names and the line of the library that calls each.
    """

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()
        self.copies, self.waits, self.places = [], [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        self.names[name] += 1
        result = function(*args, **kwargs or {})
        place = _place()
        self.places.append((name, place))
        is_copy = name == "_to_copy" and result.device != args[0].device
        if is_copy or name in COPIES:
            self.copies.append(f"{name}: {place}")
        if name in WAITS:
            self.waits.append(f"{name}: {place}")
        return result

    @property
    def total(self):
        return self.names.total()


def _place():
    """Return the last lines of the library that called an operator."""
    lines, frame = [], sys._getframe(2)
    while frame and len(lines) < 3:
        _, inside, file = frame.f_code.co_filename.rpartition("/keras_softmoe/")
        if inside:
            lines.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "outside of the library"


def count(call, *inputs, gradient=False, **known):
    """Return the `Operators` of the second call, and of its gradient if wanted.

    The first call makes what others find: tables of constants, states.

    Args:
        call: Keras layer or model.
        *inputs, **known: arrays and others, its arguments.
        gradient: bool, whether the sum of outputs and losses is differentiated.
    """
    inputs, known = keras.tree.map_structure(
        lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x,
        (inputs, known),
    )
    call(*inputs, **known)
    scope = contextlib.nullcontext() if known.get("training") else torch.no_grad()
    with scope, Operators() as operators:
        outputs = keras.tree.flatten(call(*inputs, **known))
        if gradient:
            sums = [output.sum() for output in outputs] + call.losses
            sum(sums[1:], start=sums[0]).backward()
    return operators


def tokens():
    """Return 4 images of 16 tokens, and the mask of their real ones."""
    x = np.random.default_rng(0).normal(size=(4, 16, 32)).astype("float32")
    return x, np.arange(16) < np.array([16, 9, 1, 0])[:, None]


def main(name="", *options):
    for mixture in MIXTURES if not name else [name]:
        layer, known = made(mixture)
        (x, mask), training = tokens(), "training" in options
        layer.group_images = 3 if "group" in options else 1
        mask, gradient = mask if "mask" in options else None, "gradient" in options
        found = count(
            layer, x, mask=mask, training=training, gradient=gradient, **known
        )
        if name:
            print(*(f"{name:24} {place}" for name, place in found.places), sep="\n")
        print(f"{mixture:24} {found.total:4} operators,", end=" ")
        print(f"{len(found.copies)} copies, {len(found.waits)} waits")


if __name__ == "__main__":
    main(*sys.argv[1:])
