"""Time of Keras' calls: tiny layers beside plain PyTorch code of the same shapes.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

Arithmetic is next to nothing at these sizes, so the ratios say what calls, checks and
operators cost. On an accelerator they decide how long a model of any size takes until
its products are as long as the calls around them. The plain modules have the weights
and the mathematics of ours, and none of their options. Run it twice: ratios of two
processes differ by a few percent.
"""

import argparse
import os
import statistics

# Before Keras: it compares with PyTorch only.
os.environ["KERAS_BACKEND"] = "torch"

import torch
from timing import Patience, contest, summarize
from torch import nn
from torch.nn import functional

import keras_softmoe as ksm

WIDTH, HEADS, MLP_DIM, BLOCKS = 32, 4, 64, 12
IMAGES, IMAGE, PATCH, TOKENS = 4, 16, 4, 16
EXPERTS, SLOTS = 4, 4


class Block(nn.Module):
    """Attention and an MLP, each after a normalization and beside a residual path."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.query, self.key, self.value, self.output = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.mlp_norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.first, self.second = nn.Linear(WIDTH, MLP_DIM), nn.Linear(MLP_DIM, WIDTH)

    def forward(self, x):
        tokens, heads = self.attention_norm(x), (*x.shape[:2], HEADS, -1)
        query, key, value = (
            dense(tokens).view(heads).transpose(1, 2)
            for dense in (self.query, self.key, self.value)
        )
        means = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.output(means.transpose(1, 2).reshape(x.shape))
        hidden = functional.gelu(self.first(self.mlp_norm(x)), approximate="tanh")
        return x + self.second(hidden)


class ViT(nn.Module):
    """A dense ViT without a class token: the mean of the tokens."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, images):
        tokens = self.patches(images.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        return self.norm(self.blocks(tokens + self.position)).mean(1)


class Experts(nn.Module):
    """An MLP for each expert, on `(E, N, D)` slots."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, MLP_DIM))
        self.first_bias = nn.Parameter(torch.zeros(EXPERTS, 1, MLP_DIM))
        self.second = nn.Parameter(torch.randn(EXPERTS, MLP_DIM, WIDTH))
        self.second_bias = nn.Parameter(torch.zeros(EXPERTS, 1, WIDTH))

    def forward(self, slots):
        hidden = torch.baddbmm(self.first_bias, slots, self.first)
        hidden = functional.gelu(hidden, approximate="tanh")
        return torch.baddbmm(self.second_bias, hidden, self.second)


class SoftMoE(nn.Module):
    """Soft MoE, section 2.1."""

    def __init__(self):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(WIDTH, EXPERTS * SLOTS))
        self.scale = nn.Parameter(torch.ones(()))
        self.experts = Experts()

    def forward(self, x):
        directions = self.scale * functional.normalize(self.directions, dim=0)
        logits = functional.normalize(x, dim=-1) @ directions
        slots = logits.softmax(1).transpose(1, 2) @ x
        slots = slots.view(-1, EXPERTS, SLOTS, WIDTH).transpose(0, 1)
        outputs = self.experts(slots.reshape(EXPERTS, -1, WIDTH))
        outputs = outputs.view(EXPERTS, -1, SLOTS, WIDTH).transpose(0, 1)
        return logits.softmax(2) @ outputs.reshape(-1, EXPERTS * SLOTS, WIDTH)


class TokenChoice(nn.Module):
    """Token choice with a capacity, dispatched by one-hot weights (V-MoE, 2.2)."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(WIDTH, EXPERTS))
        self.experts = Experts()

    def forward(self, x):
        gates, chosen = (x @ self.router).softmax(-1).topk(1)
        # (B, S, E), and the place of each token among those of its expert
        is_chosen = functional.one_hot(chosen[..., 0], EXPERTS)
        place = ((is_chosen.cumsum(1) - 1) * is_chosen).sum(-1)
        # One place more, for tokens without a slot: (B, S, C)
        in_slot = functional.one_hot(place.clamp(max=SLOTS), SLOTS + 1)[..., :SLOTS]
        dispatch = is_chosen[..., None] * in_slot[:, :, None]
        dispatch = dispatch.to(x.dtype).flatten(2)
        slots = (dispatch.transpose(1, 2) @ x).view(-1, EXPERTS, SLOTS, WIDTH)
        slots = slots.transpose(0, 1).reshape(EXPERTS, -1, WIDTH)
        outputs = self.experts(slots).view(EXPERTS, -1, SLOTS, WIDTH).transpose(0, 1)
        outputs = outputs.reshape(-1, EXPERTS * SLOTS, WIDTH)
        return (dispatch * gates) @ outputs


def predicting(module, inputs, **kwargs):
    """A call without gradients, as a function without arguments."""

    def run():
        with torch.no_grad():
            return module(inputs, **kwargs)

    return run


def training(function, inputs, weights):
    """A call and the gradients of its sum, as a function without arguments."""
    return lambda: torch.autograd.grad(function(inputs).sum(), weights)


def pairs():
    """Yield the name of a case, our step and the plain one."""
    images, plain = torch.randn(IMAGES, IMAGE, IMAGE, 3), ViT()
    backbone = ksm.models.ViTMoEBackbone(
        image_shape=(IMAGE, IMAGE, 3),
        patch_size=PATCH,
        num_layers=BLOCKS,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        mlp_dim=MLP_DIM,
        pooling="gap",
    )
    name = f"dense ViT of {BLOCKS} blocks"
    yield name, predicting(backbone, images), predicting(plain, images)
    weights = [weight.value for weight in backbone.trainable_variables]
    yield (
        f"{name}, with gradients",
        training(
            lambda x: backbone(x, training=True)["pooled_output"], images, weights
        ),
        training(plain, images, list(plain.parameters())),
    )
    tokens = torch.randn(IMAGES, TOKENS, WIDTH)
    router = ksm.routers.SoftmaxTokenChoiceRouter(EXPERTS, capacity_factor=1.0)
    layers = {
        "`SoftMoE`": (ksm.layers.SoftMoE(EXPERTS, MLP_DIM, SLOTS), SoftMoE()),
        "`MoE`, token choice": (ksm.layers.MoE(router, MLP_DIM), TokenChoice()),
    }
    for name, (layer, plain) in layers.items():
        layer(tokens)
        yield name, predicting(layer, tokens), predicting(plain, tokens)


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="calls of each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    patience = Patience(options.rounds, seconds=60.0)
    for name, ours, plain in pairs():
        for _ in range(10):
            ours(), plain()
        results = contest({"ours": ours, "plain": plain}, patience)
        found = summarize(*results, "ours", ["plain"])
        ratio, ms = found["ratios"]["plain"]["median"], found["ms"]
        quartiles = statistics.quantiles(
            mine / theirs
            for mine, theirs in zip(
                results[1]["ours"], results[1]["plain"], strict=True
            )
        )
        print(
            f"{name}: {ratio:.2f} (middle half {quartiles[0]:.2f} to "
            f"{quartiles[2]:.2f}); {ms['ours']:.3f} and {ms['plain']:.3f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
