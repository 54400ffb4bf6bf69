"""A program that calls mixtures on a device that no machine has.

Its tensors have shapes and no values. PyTorch raises an error if an operator has
tensors of another device, too.
"""

import keras
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from keras_softmoe.ops import assignment
from keras_softmoe.routers import soft, sparse
from tests.support import operators

DEVICE = "farther"


def like(x):
    """Return a tensor without values on the device."""
    return torch.empty(tuple(x.shape), dtype=x.dtype, device=DEVICE)


def move(layer):
    """Give a layer weights on the device."""
    for variable in layer.variables:
        variable._value = torch.nn.Parameter(like(variable.value), variable.trainable)


def call(name, training, has_mask, group_images):
    # PyTorch has grouped products of other dtypes on processors alone.
    dtype = "bfloat16" if name.startswith("dropless") else None
    layer, known = operators.made(name, dtype=dtype)
    layer.group_images = group_images
    x, mask = map(torch.from_numpy, operators.tokens())
    with FakeTensorMode(), keras.device(DEVICE):
        move(layer)
        x, mask = like(x).requires_grad_(), like(mask) if has_mask else None
        outputs = layer(x, mask=mask, training=training, **known)
        total = outputs.sum()
        for loss in layer.losses:
            total = total + loss
        total.backward()
        assert x.grad.device == outputs.device == torch.device(DEVICE, 0)


def main():
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    # Noise has a generator, which such a device has not.
    for module in (soft, sparse):
        module.normal_like = lambda x, seed, stddev=1.0: torch.randn_like(x)
    assignment.uniform = lambda shape, like, seed: torch.rand_like(like[..., 0])
    for name in operators.MIXTURES:
        call(name, False, False, 1)
        call(name, True, True, 1)
        call(name, True, True, 3)
    print("all on one device")


if __name__ == "__main__":
    main()
