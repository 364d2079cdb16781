"""Decoders of google-tunix, that nobody here wrote, in the parts that a pipeline wants."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

N, LENGTH, WORDS = 4, 6, 32
SIZES = {"embed_dim": 16, "hidden_dim": 24, "num_heads": 2, "head_dim": 8, "num_kv_heads": 1}


class Blocks(nnx.Module):
    """Some of a model's decoder layers."""

    def __init__(self, layers):
        self.layers = nnx.List(layers)

    def __call__(self, x, *, positions, mask):
        for layer in self.layers:
            _, x = layer(x, positions, None, mask)
        return x


class Embed(nnx.Module):
    def __init__(self, model):
        self.embedder = model.embedder

    def __call__(self, words):
        return self.embedder.encode(words)


class Head(nnx.Module):
    """The layers after the blocks of these models."""

    def __init__(self, model):
        self.norm, self.cap = model.final_norm, getattr(model, "final_logits_softcap", None)
        self.out = getattr(model, "lm_head", None)
        self.embedder = None if self.out else model.embedder

    def __call__(self, x):
        x = self.norm(x)
        logits = self.out(x) if self.out else self.embedder.decode(x)
        return logits if self.cap is None else jnp.tanh(logits / self.cap) * self.cap
