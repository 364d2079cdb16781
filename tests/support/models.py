"""Tiny models for the tests of `pipeline`, and what they compute without any pipeline.

Everything acts on rows one by one, so that a whole batch and its microbatches agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.core.model.unlike import Overlaid

WIDTH = 8  # of every activation
WORDS = 11  # of the vocabulary of `Words`
CLASSES = 5  # what `Readout` makes of a row


def normal(rngs: nnx.Rngs, *shape: int, dtype: Any = jnp.float32) -> nnx.Param:
    """Weights that keep the size of what they are multiplied with."""
    fan_in = shape[-2] if len(shape) > 1 else 1
    return nnx.Param((jax.random.normal(rngs.params(), shape) * fan_in**-0.5).astype(dtype))


class Block(nnx.Module):
    """A residual MLP."""

    def __init__(self, rngs: nnx.Rngs, *, hidden: int = 2 * WIDTH, dtype: Any = jnp.float32):
        self.up = normal(rngs, WIDTH, hidden, dtype=dtype)
        self.down = normal(rngs, hidden, WIDTH, dtype=dtype)

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


class Hostile(nnx.Module):
    """Divides by the norm of a row: what a bubble computes on zeros, or on NaN, is NaN."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH)
        self.b = normal(rngs, 1, WIDTH)

    def __call__(self, x):
        return 0.5 * x + jnp.tanh(unit(x) @ self.w[...] + self.b[...])


def unit(x):
    """Rows of length one; no epsilon, on purpose."""
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))


class Layered(nnx.Module):
    """A scan over layers within a stage."""

    def __init__(self, rngs: nnx.Rngs, *, layers: int = 3):
        self.w = normal(rngs, layers, WIDTH, WIDTH)

    def __call__(self, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, self.w[...])[0]


class Tree(nnx.Module):
    """An activation of three leaves: floats that change, floats and integers that pass through."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH)
        self.table = normal(rngs, 3, WIDTH)

    def __call__(self, x):
        change = jnp.tanh(x["row"] @ self.w[...] + self.table[...][x["kind"]]) * x["gate"]
        return {**x, "row": x["row"] + change}


class Sided(nnx.Module):
    """Takes a mask and positions beside its input."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH)

    def __call__(self, x, *, mask, positions):
        angle = positions.astype(jnp.float32)[:, None]
        return x + jnp.where(mask, jnp.tanh(x @ self.w[...]) * jnp.cos(angle), 0.0)


class Sliced(nnx.Module):
    """Takes its weights out of one array, by static index and by static range."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, 3, WIDTH, WIDTH)

    def __call__(self, x):
        w = self.w[...]
        rows = w[1:3]
        return x + jnp.tanh(x @ w[0]) @ rows[0] + x @ rows[1] * 0.1


class Noisy(nnx.Module):
    """Dropout behind a matrix."""

    def __init__(self, rngs: nnx.Rngs, *, rate: float = 0.5):
        self.w = normal(rngs, WIDTH, WIDTH)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(x @ self.w[...]))


class Half(nnx.Module):
    """Weights in bfloat16, activations in float32."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH, dtype=jnp.bfloat16)

    def __call__(self, x):
        return x + jnp.tanh(x @ self.w[...].astype(jnp.float32))


class Words(nnx.Module):
    """Embeds integers."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = normal(rngs, WORDS, WIDTH)

    def __call__(self, words):
        return self.table[...][words]


class Readout(nnx.Module):
    """Logits of a row; hostile to zeros like `Hostile`."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, CLASSES)

    def __call__(self, x):
        return unit(x) @ self.w[...] * 3.0


def build(kind: Callable[..., nnx.Module], count: int, *, seed: int = 0, **options: Any) -> list:
    """That many stages, each with weights of its own."""
    return [kind(nnx.Rngs(seed + 1000 * k), **options) for k in range(count)]


def moved(model: nnx.Module, *, scale: float = 0.3) -> nnx.Module:
    """The model with other weights: they start at zero in places, where gradients are zero too."""
    state = nnx.state(model, nnx.Param)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    leaves = [
        w + scale * jax.random.normal(key, w.shape) for w, key in zip(leaves, keys, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(treedef, leaves))
    return model


def squares(outputs, targets):
    """Mean squared error over the rows of a microbatch."""
    return jnp.mean(jnp.sum((outputs - targets) ** 2, axis=-1))


def cross_entropy(logits, labels):
    """Mean negative log likelihood."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.mean(chosen)


def rows(count: int, *, seed: int = 0, width: int = WIDTH) -> jax.Array:
    """[count, width] normal numbers."""
    return jax.random.normal(jax.random.key(seed + 77), (count, width))


def words(count: int, *, most: int = WORDS, seed: int = 0) -> jax.Array:
    """[count] integers below ``most``."""
    return jax.random.randint(jax.random.key(seed + 78), (count,), 0, most)


# --- without a pipeline ---


def compose(stages, embed, head, inputs, extras=None):
    """The plain composition of a model over all rows at once."""
    x = inputs if embed is None else embed(inputs)
    for stage in stages:
        x = stage(x, **(extras or {}))
    return x if head is None else head(x)


def reference(
    stages: Sequence[nnx.Module],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    embed: Any = None,
    head: Any = None,
    extras: dict[str, Any] | None = None,
    wrt_inputs: bool = False,
) -> Any:
    """Loss, gradients [K] of the stages and (embed, head), and of the inputs if asked for.

    A loss of (sum, weight) is divided over all rows.
    """
    split = [nnx.split(m, nnx.Param, ...) for m in (*stages, Ends(embed, head))]

    def f(params, inputs):
        merged = [
            nnx.merge(graphdef, p, rest, copy=True)
            for (graphdef, _, rest), p in zip(split, params, strict=True)
        ]
        ends = merged[-1]
        found = loss_fn(compose(merged[:-1], ends.embed, ends.head, inputs, extras), targets)
        return found[0] / found[1] if isinstance(found, tuple) else found

    params = [p for _, p, _ in split]
    take = jax.value_and_grad(f, argnums=(0, 1) if wrt_inputs else 0)
    loss, grads = jax.jit(take)(params, inputs)
    if wrt_inputs:
        return loss, grads[0][:-1], grads[0][-1], grads[1]
    return loss, grads[:-1], grads[-1]


class Ends(nnx.Module):
    def __init__(self, embed: Any, head: Any):
        self.embed = embed
        self.head = head


# --- comparing ---


def by_stage(pipe: Any, grads: nnx.State) -> list[Any]:
    """[K] gradients in layer order, out of the [S, ...] leaves of each chunk."""
    if any(isinstance(chunk, Overlaid) for chunk in pipe.chunks):
        filled = nnx.clone(pipe)
        nnx.update(filled, grads)
        return [nnx.state(stage, nnx.Param) for stage in filled.stages()]
    found: dict[int, Any] = {}
    for rank, held in enumerate(pipe.plan.stages_of):
        for chunk, stage in enumerate(held):
            found[stage] = jax.tree.map(lambda g, r=rank: g[r], grads["chunks"][chunk])
    return [found[k] for k in range(len(found))]


def row_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error of any row, beside its largest entry; NaN if any is.

    Rows of an array are of any size beside each other, and a wrong one must not hide behind a large
    one. A hundredth of the array's largest entry is added, since a small row may be a difference of
    large numbers.
    """
    size = np.abs(wanted)
    rows = size.max(axis=-1, keepdims=True) if size.ndim > 1 else size.max()
    return float((np.abs(found - wanted) / (rows + max(0.01 * size.max(), 1e-30))).max())


def distance(found: Any, wanted: Any) -> float:
    """The largest `row_error` of any leaf."""
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert [x.shape for x in found] == [x.shape for x in wanted]
    errors = [0.0]
    for x, y in zip(found, wanted, strict=True):
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert b.any(), "a gradient of zeros proves nothing"
        errors.append(row_error(a, b))
    return float(np.max(errors))


def assert_matches(pipe: Any, found: Any, wanted: Any, *, tolerance: float = 1e-5) -> None:
    """Loss and every gradient of `Pipeline.value_and_grad` against `reference`."""
    loss, grads = found
    want_loss, want_stages, want_ends = wanted[:3]
    errors = {"loss": distance(loss, want_loss)}
    for k, (a, b) in enumerate(zip(by_stage(pipe, grads), want_stages, strict=True)):
        errors[f"stage {k}"] = distance(a, b)
    errors["ends"] = distance(grads.get("ends", {}), want_ends)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong
