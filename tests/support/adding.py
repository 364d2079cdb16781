"""Stages, embedding and head that add losses, and what they compute where losses are returned.

Letters: M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline import add_loss
from tests.support.models import WIDTH, Readout, Words, normal, unit


class Adding(nnx.Module):
    """`Hostile` with a loss that is not linear in the rows of a microbatch, as a balance is.

    Args:
      rngs: of its weights.
      explicit: return (activation, loss) in place of adding it.
    """

    def __init__(self, rngs: nnx.Rngs, *, explicit: bool = False):
        self.w = normal(rngs, WIDTH, WIDTH)
        self.gate = normal(rngs, WIDTH, 3)
        self.explicit = explicit

    def __call__(self, x):
        chosen = jax.nn.softmax(unit(x) @ self.gate[...])
        value = 0.5 * jnp.sum(jnp.mean(chosen, axis=0) ** 2)
        y = 0.5 * x + jnp.tanh(unit(x) @ self.w[...]) + chosen[:, :1]
        return (y, value) if self.explicit else add_loss(y, value)


class Scanned(nnx.Module):
    """Layers in a scan, each of which adds a loss before it goes on, under `jax.checkpoint`."""

    def __init__(self, rngs: nnx.Rngs, *, explicit: bool = False):
        self.w = normal(rngs, 3, WIDTH, WIDTH)
        self.explicit = explicit

    def __call__(self, x):
        @jax.checkpoint
        def layer(x, w):
            z = unit(x) @ w
            value = jnp.mean(jax.nn.logsumexp(z, axis=-1) ** 2) * 0.1
            z = z if self.explicit else add_loss(z, value)
            return 0.5 * x + jnp.tanh(z), value

        y, values = jax.lax.scan(layer, x, self.w[...])
        return (y, values.sum()) if self.explicit else y


class AddingWords(Words):
    """An embedding with a penalty."""

    def __init__(self, rngs: nnx.Rngs, *, explicit: bool = False):
        super().__init__(rngs)
        self.explicit = explicit

    def __call__(self, words):
        x = super().__call__(words)
        value = 0.3 * jnp.mean(jnp.abs(x)) ** 2
        return (x, value) if self.explicit else add_loss(x, value)


class AddingReadout(Readout):
    """A head with a z-loss."""

    def __init__(self, rngs: nnx.Rngs, *, explicit: bool = False):
        super().__init__(rngs)
        self.explicit = explicit

    def __call__(self, x):
        z = super().__call__(x)
        value = 0.2 * jnp.mean(jax.nn.logsumexp(z, axis=-1)) ** 2
        return (z, value) if self.explicit else add_loss(z, value)


def reference(
    stages: Sequence[nnx.Module], inputs: Any, targets: Any, loss_fn: Any, M: int, **ends: Any
) -> Any:
    """As `tests.support.models.reference`, of stages that return what they add; and the latter.

    What they return is averaged over M microbatches (those of all data shards), the loss taken of
    all rows.
    """
    split = [nnx.split(m, nnx.Param, ...) for m in (*stages, Both(**ends))]

    def f(params):
        merged = [
            nnx.merge(graphdef, p, rest, copy=True)
            for (graphdef, _, rest), p in zip(split, params, strict=True)
        ]
        parts = [merged[-1].embed, *merged[:-1], merged[-1].head]
        outputs, added = [], 0.0
        for rows in jnp.split(inputs, M):
            x = rows
            for part in parts:
                x = part(x) if part else x
                if getattr(part, "explicit", False):
                    x, value = x
                    added += value / M
            outputs.append(x)
        found = loss_fn(jnp.concatenate(outputs), targets)
        main = found[0] / found[1] if isinstance(found, tuple) else found
        return main + added, added

    params = [p for _, p, _ in split]
    (loss, added), grads = jax.jit(jax.value_and_grad(f, has_aux=True))(params)
    return (loss, grads[:-1], grads[-1]), added


class Both(nnx.Module):
    def __init__(self, embed: Any = None, head: Any = None):
        self.embed = embed
        self.head = head
