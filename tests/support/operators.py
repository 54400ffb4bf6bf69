"""Operators that PyTorch dispatches: how many, and which copy or wait on a GPU.

    KERAS_BACKEND=torch python -m tests.support.operators "token choice" [training]

prints those of a mixture with a router, each with the line that calls it.
"""

import collections
import contextlib
import sys
import traceback

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_softmoe import layers, routers

# A tensor of numbers of Python is a copy to the device.
COPIES = ("lift_fresh", "lift_fresh_copy", "_pin_memory")
# Numbers, or sizes, that the processor reads from the device: it waits for them.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "item")

# Name -> router, and the arguments of its mixture
MIXTURES = {
    "token choice": (routers.SoftmaxTokenChoiceRouter(8, 2), {}),
    "one choice": (routers.SoftmaxTokenChoiceRouter(8, 1), {}),
    "gather": (routers.SoftmaxTokenChoiceRouter(8, 2), {"dispatcher": "gather"}),
    "priority max": (routers.SoftmaxTokenChoiceRouter(8, 2, priority="max"), {}),
    "priority sum": (routers.SoftmaxTokenChoiceRouter(8, 2, priority="sum"), {}),
    "priority pair": (routers.SoftmaxTokenChoiceRouter(8, 2, priority="pair"), {}),
    "priority random": (routers.SoftmaxTokenChoiceRouter(8, 2, priority="random"), {}),
    "skipping": (
        routers.SoftmaxTokenChoiceRouter(8, 2, priority="max", keep_fraction=0.5),
        {},
    ),
    "normalized gates": (
        routers.SoftmaxTokenChoiceRouter(8, 2, normalize_gates=True, noise_std=0.0),
        {},
    ),
    "bias": (
        routers.SoftmaxTokenChoiceRouter(8, 2, bias_update_rate=0.01, score="sigmoid"),
        {},
    ),
    "bias of two calls": (
        routers.SoftmaxTokenChoiceRouter(
            8, 2, bias_update_rate=0.01, bias_update_every=2
        ),
        {},
    ),
    "random logits": (routers.SoftmaxTokenChoiceRouter(8, 2, random_logits=True), {}),
    "permuted logits": (
        routers.SoftmaxTokenChoiceRouter(8, 2, random_logits="permuted"),
        {},
    ),
    "dropless": (routers.SoftmaxTokenChoiceRouter(8, 2, capacity_factor=None), {}),
    "dropless, skipping": (
        routers.SoftmaxTokenChoiceRouter(8, capacity_factor=None, keep_fraction=0.5),
        {},
    ),
    "sinkhorn token choice": (routers.SinkhornTokenChoiceRouter(8), {}),
    "expert choice": (routers.SoftmaxExpertChoiceRouter(8), {}),
    "expert choice, noise": (routers.SoftmaxExpertChoiceRouter(8, noise_std=1.0), {}),
    "sinkhorn expert choice": (routers.SinkhornExpertChoiceRouter(8), {}),
    "sinkhorn plan": (routers.SinkhornExpertChoiceRouter(8, combine="plan"), {}),
    "sparse transport": (routers.SparseTransportExpertChoiceRouter(8), {}),
    "race": (routers.ExpertRaceRouter(8, 2), {}),
    "soft": (routers.SoftRouter(8), {}),
    "soft, noise": (routers.SoftRouter(8, 2, noise_std=0.1), {}),
    "soft, uniform": (routers.SoftRouter(8, dispatch="uniform"), {}),
    "identity": (routers.IdentityRouter(8), {}),
    "limoe": (routers.LIMoERouter(8), {}),
    "limoe, image first": (
        routers.LIMoERouter(
            8,
            priority="image_first",
            per_modality=True,
            image_experts=5,
            text_experts=5,
        ),
        {},
    ),
}


def mixture(name):
    """Return a built mixture of 8 experts, and other arguments of its calls."""
    router, settings = MIXTURES[name]
    layer = layers.MoE(router, mlp_dim=64, **settings)
    layer.build((None, 16, 32))
    known = {}
    if layer.router.knows_modalities:
        known["modalities"] = (("image", 12), ("text", 4))
    return layer, known


class Operators(TorchDispatchMode):
    """A scope that counts operators.

    Attributes:
        names: `collections.Counter` of their names.
        copies, waits: lists of stacks, of those that copy to a device or wait.
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
    """Return the lines of the library that called an operator, the last two."""
    lines = [
        f"{frame.filename.rpartition('keras_softmoe/')[2]}:{frame.lineno}"
        for frame in traceback.extract_stack(limit=60)
        if "/keras_softmoe/" in frame.filename
    ]
    return " < ".join(lines[:-4:-1]) or "gradient"


def count(layer, training=False, gradient=False, valid=None, images=4, **known):
    """Return the `Operators` of a call; with those of its gradient, if wanted."""
    x = np.random.default_rng(0).normal(size=(images, 16, 32)).astype("float32")
    x = torch.from_numpy(x).requires_grad_(gradient)
    if valid is not None:
        valid = torch.from_numpy(valid)
    known = {"training": training, "mask": valid, **known}
    # The first call makes what others find: tables of constants, states.
    layer(x, **known)
    operators = Operators()
    no_gradient = contextlib.nullcontext() if gradient or training else torch.no_grad()
    with no_gradient, operators:
        outputs = layer(x, **known)
        losses = layer.losses
        if gradient:
            total = outputs.sum()
            for loss in losses:
                total = total + loss
            total.backward()
    return operators


def table():
    """Print a line for each mixture."""
    valid = np.arange(16) < np.array([16, 9, 1, 0])[:, None]
    modes = {
        "predict": {},
        "valid": {"valid": valid},
        "train": {"training": True},
        "step": {"training": True, "gradient": True},
        "step, valid": {"training": True, "gradient": True, "valid": valid},
        "group of 3": {"training": True, "gradient": True, "images": 4, "group": 3},
    }
    for name in MIXTURES:
        cells = []
        for mode in modes.values():
            layer, known = mixture(name)
            mode = dict(mode)
            layer.group_images = mode.pop("group", 1)
            if name.startswith("identity") and layer.group_images != 1:
                pass
            try:
                found = count(layer, **mode, **known)
                cells.append(
                    f"{found.total}/{len(found.copies)}/{len(found.waits)}".rjust(12)
                )
            except Exception as error:
                cells.append(f"{type(error).__name__[:11]}".rjust(12))
        print(name.ljust(24), *cells)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        table()
    else:
        layer, known = mixture(sys.argv[1])
        training = "training" in sys.argv
        valid = None
        if "valid" in sys.argv:
            valid = np.arange(16) < np.array([16, 9, 1, 0])[:, None]
        if "group" in sys.argv:
            layer.group_images = 3
        found = count(
            layer, training, gradient="gradient" in sys.argv, valid=valid, **known
        )
        for name, place in found.places:
            print(name.ljust(24), place)
        print(found.total, "copies", len(found.copies), "waits", len(found.waits))
