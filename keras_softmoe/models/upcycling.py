"""Sparse upcycling: a dense model becomes a mixture of experts."""

import numpy as np
from keras import ops

from keras_softmoe.layers import MoE
from keras_softmoe.models.dense_sources import dense_model
from keras_softmoe.models.vmoe_params import named_variables


def upcycle(dense, moe_layers, router, **moe_settings):
    """Turn a dense model into a mixture of experts that starts where it stands.

    Each expert of a block in `moe_layers` begins as a copy of that block's MLP, and
    all else is copied as it is. The routers are new, with random weights.

    Whether the new model computes at first what the dense one did is a question of the
    router, since all experts of a block are equal at first:

    - `IdentityRouter`: yes, exactly. Every token visits one expert, with weight 1.
    - Token choice: yes, if the gates of a token sum to one and no choice is dropped.
      They do with `normalize_gates=True`, or if every token chooses all experts. To
      drop nothing takes `capacity_factor=num_experts / num_selected_experts`, which
      leaves room for every token at every expert. With other gates a token gets its
      MLP's output times the sum of its gates, with less room possibly nothing.
    - Expert choice: only with `capacity_factor=num_experts`, where every expert takes
      all tokens. Otherwise it is up to the experts how many of them take a token, and
      a token that none takes gets nothing.
    - Soft routing: no, whatever the weights. An expert sees averages of tokens, and
      the MLP of an average is not the average of MLPs: its GELU is not linear.

    Where it does not, some training brings the quality back.

    Args:
        dense: a `ViTMoEBackbone` without experts, or an image classifier on one, which
            stays as it is. Or whatever `dense_model` makes one of: a preset name of
            this library or of KerasHub, a model of KerasHub, a file, a directory or a
            handle.
        moe_layers: tuple of int, the blocks (counted from 0) that get experts.
        router: a router from `keras_softmoe.routers`, a template.
        **moe_settings: other arguments of `layers.MoE`, such as `group_images` and
            `dispatcher`. Those that are not given have its defaults.

    Returns:
        A model of the same class.

    Raises:
        ValueError: if `dense` has experts already, or `moe_layers` and `router` do not
            fit it.

    Source: Komatsuzaki et al. 2023 (Sparse Upcycling), section 3.

    Example:

    >>> router = ksm.routers.SoftmaxTokenChoiceRouter(
    ...     8, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
    ... )
    >>> sparse = ksm.converters.upcycle(dense, moe_layers=(9, 11), router=router)
    """
    dense = dense_model(dense)
    backbone = getattr(dense, "backbone", dense)
    if backbone.moe_layers:
        raise ValueError(
            "Only a dense model can be upcycled. Received: a model with experts in the "
            f"blocks {tuple(backbone.moe_layers)}."
        )
    config = {
        **backbone.get_config(),
        "moe_layers": tuple(moe_layers),
        "router": router,
        **MoE.settings(),
        **moe_settings,
    }
    sparse = type(backbone).from_config(config)
    if backbone is not dense:
        sparse = type(dense).from_config({**dense.get_config(), "backbone": sparse})
    sources = named_variables(dense)
    for name, variable in named_variables(sparse).items():
        if "/Moe/Router/" in name:
            continue
        source = sources[name.replace("/Moe/Mlp/", "/Mlp/")]
        # A copy, because on JAX two models that share memory delete it for each other.
        value = np.array(ops.convert_to_numpy(source))
        if "/Moe/Mlp/" in name:
            # (E, D, H), or (E, 1, H)
            value = value.reshape(-1, value.shape[-1])
        variable.assign(np.broadcast_to(value, variable.shape))
    return sparse
