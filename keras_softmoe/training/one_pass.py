"""A step of an optimizer in one pass over its arrays, on PyTorch."""

import keras
from keras import ops


def adam_in_one_pass(
    variable, gradient, momentum, velocity, steps, rate, betas, epsilon, decay
):
    """Take a step of `training.Adam` in place on PyTorch, where that is supported.

    Operation by operation, PyTorch writes half a dozen arrays of the size of a bank of
    experts into new memory. The compilers of the other backends do not.

    Args:
        variable: `keras.Variable`.
        gradient: tensor like the variable.
        momentum: `keras.Variable`, the first moment.
        velocity: `keras.Variable`, the second moment.
        steps: int tensor, the number of steps before this one.
        rate: float or scalar tensor, the learning rate.
        betas: pair of float, decays of the moments.
        epsilon: float, added to the root of the second moment.
        decay: float, decay of the variable, multiplied by `rate`.

    Returns:
        bool, whether the step was taken. If not, nothing has changed.
    """
    if keras.backend.backend() != "torch":
        return False
    import torch
    from torch.optim.adamw import adamw

    tensors = variable.value.data, gradient, momentum.value.data, velocity.value.data
    # A tensor spread over devices has a type of its own.
    if torch.compiler.is_compiling() or any(
        type(x) is not torch.Tensor
        or x.dtype not in (torch.float32, torch.float64)
        or x.dtype != tensors[0].dtype
        or x.device.type not in ("cpu", "cuda")
        for x in tensors
    ):
        return False
    if not all(x.is_contiguous() for x in tensors):
        return False
    adamw(
        *([x] for x in tensors),
        max_exp_avg_sqs=[],
        state_steps=[ops.cast(steps, "float32")],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=ops.convert_to_tensor(rate),
        weight_decay=decay,
        eps=epsilon,
        maximize=False,
    )
    return True
