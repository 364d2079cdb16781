"""An entry of the zoo: a model, a batch, and the lines that a user writes to split it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

N, LENGTH, WORDS = 8, 6, 32


@dataclass(frozen=True)
class Case:
    """A model with its batch and its loss."""

    model: nnx.Module
    args: tuple[Any, ...]
    targets: Any
    loss_fn: Callable[[Any, Any], Any]
    call: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Entry:
    """One row of the table in docs/split.md.

    Attributes:
      name: Row of the table.
      package: Distribution that has the model.
      make: Builds the case; imports the package, so only where it is installed. Takes the mesh if
        `by_mesh`.
      glue: Functions and classes that a user writes beside the call of `split`.
      pipe: Options of `Pipeline` that the model needs.
      wrt: Trained variables.
      by_microbatch: True where the loss of a batch is not the mean of its parts' losses
        because layers normalise over the batch: the reference then runs microbatch by microbatch.
      by_mesh: True where layers place their activations on the mesh that they are built with.
    """

    name: str
    package: str
    make: Callable[..., Case]
    glue: tuple[Callable[..., Any], ...] = ()
    pipe: tuple[tuple[str, Any], ...] = ()
    wrt: Any = nnx.Param
    by_microbatch: bool = False
    by_mesh: bool = False

    @property
    def lines(self) -> int:
        """Number of lines of glue, blank lines left out."""
        sources = (inspect.getsource(one) for one in self.glue)
        return sum(bool(line.strip()) for source in sources for line in source.split("\n"))


def words(rows: int = N, length: int = LENGTH) -> jax.Array:
    """Token ids [N, T] without the padding token 0."""
    return jax.random.randint(jax.random.key(1), (rows, length), 1, WORDS)


def positions_and_mask() -> tuple[jax.Array, jax.Array]:
    """Positions [N, T] and a causal mask [N, T, T]."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (N, LENGTH))
    return positions, jnp.broadcast_to(
        jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (N, LENGTH, LENGTH)
    )


def normal(*shape: int, seed: int = 1) -> jax.Array:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def stirred(model: nnx.Module, scale: float = 0.02) -> nnx.Module:
    """The model with noise on every float parameter.

    Some packages initialise layers with zeros; without noise the layers before them have no
    gradient, and nothing is compared.
    """
    noise = np.random.default_rng(7)

    def stir(x: nnx.Variable) -> nnx.Variable:
        drawn = noise.normal(scale=scale, size=x.shape).astype(x.dtype)
        return x.replace(x[...] + drawn)

    nnx.update(model, nnx.map_state(lambda _, x: stir(x), nnx.state(model, nnx.Param)))
    return model
