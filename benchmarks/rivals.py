"""Other people's layers and models at the shapes of ours, with random weights.

Packages that are not installed are left out. What each rival computes differently is
in `DIFFERENCES`, under the name that it has in the results.
"""

import importlib.metadata
import importlib.util

import keras

KERAS_HUB = "keras-hub"
TRANSFORMERS = "transformers"
SOFT_MOE_PYTORCH = "soft-moe-pytorch"
SOFT_MIXTURE = "soft-mixture-of-experts"

DIFFERENCES = {
    KERAS_HUB: (
        "`ViTBackbone`: the exact GELU instead of its tanh approximation; its only "
        "output are the tokens of the last layer, and ours is asked for no more."
    ),
    TRANSFORMERS: (
        "`ViTModel` without pooling, from a configuration with the tanh approximation "
        "of GELU: the same mathematics. It is fed its own layout, channels first."
    ),
    SOFT_MOE_PYTORCH: (
        "`SoftMoE`: RMS-normalizes tokens and slot parameters, each with a learned "
        "factor per channel, where ours has one learned scale; its slots then mix the "
        "normalized tokens; the exact GELU; one expert after the other. Told not to "
        "move idle experts to the CPU."
    ),
    SOFT_MIXTURE: (
        "`SoftMoE`: logits are plain products, nothing is normalized. Its experts are "
        "one dense layer; here they are two of its banks with a GELU between, which "
        "makes them our MLPs."
    ),
}


def installed(package):
    """Whether the package can be imported."""
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def described():
    """Dict from each rival that this backend can meet to its version and `differs`."""
    if keras.backend.backend() == "torch":
        names = [name for name in DIFFERENCES if installed(name)]
    else:
        names = [KERAS_HUB]
    return {
        name: {
            "version": importlib.metadata.version(name),
            "differs": DIFFERENCES[name],
        }
        for name in names
    }


def soft_moe_layers(num_experts, slots_per_expert, width, mlp_dim):
    """Dict of the Soft MoE layers of PyTorch packages, empty on other backends."""
    layers = {}
    if keras.backend.backend() == "torch":
        for package, make in (
            (SOFT_MOE_PYTORCH, _soft_moe_pytorch),
            (SOFT_MIXTURE, _soft_mixture_of_experts),
        ):
            if installed(package):
                module = make(num_experts, slots_per_expert, width, mlp_dim)
                layers[package] = _as_layer(module)
    return layers


def _soft_moe_pytorch(num_experts, slots_per_expert, width, mlp_dim):
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(
        dim=width,
        num_experts=num_experts,
        num_slots=slots_per_expert,
        expert_mult=mlp_dim / width,
        offload_unused_experts_to_cpu=False,
    )


def _soft_mixture_of_experts(num_experts, slots_per_expert, width, mlp_dim):
    import torch
    from soft_mixture_of_experts.multi_expert import MultiExpertLayer
    from soft_mixture_of_experts.soft_moe import SoftMoE

    layer = SoftMoE(width, width, num_experts, slots_per_expert)
    layer.experts = torch.nn.Sequential(
        MultiExpertLayer(width, mlp_dim, num_experts),
        torch.nn.GELU(approximate="tanh"),
        MultiExpertLayer(mlp_dim, width, num_experts),
    )
    return layer


def keras_hub_vit(image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim):
    """KerasHub's dense ViT, from `(B, height, width, 3)` images to tokens."""
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        (image_size, image_size, 3),
        patch_size,
        num_layers,
        num_heads,
        hidden_dim,
        mlp_dim,
    )
    return keras.Model(backbone.input, backbone.output)


def transformers_vit(
    image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim
):
    """Dense ViT of `transformers`, from `(B, 3, height, width)` images to tokens."""
    import torch
    from transformers import ViTConfig, ViTModel

    class Tokens(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, images):
            return self.model(pixel_values=images).last_hidden_state

    config = ViTConfig(
        hidden_size=hidden_dim,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=mlp_dim,
        hidden_act="gelu_pytorch_tanh",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-6,
        image_size=image_size,
        patch_size=patch_size,
    )
    module = Tokens(ViTModel(config, add_pooling_layer=False))
    num_tokens = (image_size // patch_size) ** 2 + 1
    layer = _as_layer(module, output_shape=(None, num_tokens, hidden_dim))
    images = keras.Input((3, image_size, image_size))
    return keras.Model(images, layer(images))


def _as_layer(module, **kwargs):
    """A PyTorch module as a Keras layer that holds weights in our dtype."""
    import torch

    policy = keras.config.dtype_policy()
    if policy.compute_dtype != policy.variable_dtype:
        raise ValueError(
            "PyTorch's packages know no mixed precision of Keras: compare in float32 "
            f"or bfloat16. Received: dtype policy {policy.name!r}."
        )
    module = module.to(getattr(torch, policy.variable_dtype))
    return keras.layers.TorchModuleWrapper(module, **kwargs)
