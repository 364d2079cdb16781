"""The models of `bench.cases` in torch. Read by an interpreter that has torch and no jax.

Parameters have the names that flax gives them, so that weights and gradients travel as a mapping.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self, weights: dict) -> None:
        super().__init__()
        self.up, self.down = weights["up"], weights["down"]

    def forward(self, x):
        hidden = torch.relu(x @ self.up)
        return x + (hidden * hidden) @ self.down


class Block(nn.Module):
    """Attention and MLP with pre-norm, rotary positions and squared ReLU."""

    def __init__(self, weights: dict, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.own = nn.ParameterDict({name.replace(".", "_"): w for name, w in weights.items()})
        half = weights["qkv.weight"].shape[0] // heads // 2
        angles = torch.arange(context)[:, None] * 1000.0 ** (-torch.arange(half)[None] / half)
        self.cos, self.sin = torch.cos(angles), torch.sin(angles)

    def norm(self, x, name):
        return functional.rms_norm(x, x.shape[-1:], self.own[f"{name}_scale"], eps=1e-6)

    def rotate(self, x):
        first, second = x.chunk(2, dim=-1)
        turned = [first * self.cos - second * self.sin, first * self.sin + second * self.cos]
        return torch.cat(turned, dim=-1)

    def forward(self, x):
        b, t, d = x.shape
        qkv = (self.norm(x, "attention_norm") @ self.own["qkv_weight"]).reshape(
            b, t, 3, self.heads, -1
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = self.rotate(q), self.rotate(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(b, t, d) @ self.own["mix_weight"]
        hidden = torch.relu(self.norm(x, "mlp_norm") @ self.own["up_weight"])
        return x + (hidden * hidden) @ self.own["down_weight"]


def make_stage(layers: list, case: dict):
    """A stage, and its parameters by layer and name.

    Args:
      layers: name -> array for each of its layers.
      case: the fields of a `bench.cases.Case`.
    """
    own = [
        {name: nn.Parameter(torch.from_numpy(w.copy())) for name, w in layer.items()}
        for layer in layers
    ]
    if case["kind"] == "mlp":
        modules = [Layer(weights) for weights in own]
    else:
        modules = [Block(weights, case["heads"], case["context"]) for weights in own]
    return nn.Sequential(*modules), own


def mean_square(outputs, targets):
    """The loss of a microbatch."""
    return ((outputs - targets) ** 2).sum() / math.prod(outputs.shape)
