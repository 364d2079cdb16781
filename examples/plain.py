"""A run of the model without a pipeline, to which the pipeline's losses are compared.

It has the interface of `pipeline.Pipeline` that training needs, and adds up microbatches the
same way: their mean loss, in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx


class Plain(nnx.Module):
    """Embed, stages and head one after the other on one device."""

    def __init__(
        self,
        stages: Sequence[nnx.Module],
        num_microbatches: int,
        *,
        embed: nnx.Module,
        head: nnx.Module,
        loss_fn: Callable[[jax.Array, jax.Array], jax.Array],
    ):
        self.stages = nnx.List(stages)
        self.embed = embed
        self.head = head
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = self.embed(inputs)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)

    def value_and_grad(self, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, nnx.State]:
        """Mean loss over the microbatches, and its gradient in NNX layout."""
        graph, parameters = nnx.split(self, nnx.Param)
        m = self.num_microbatches

        def loss_of(parameters: nnx.State, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
            tokens, targets = batch
            return self.loss_fn(nnx.merge(graph, parameters)(tokens), targets)

        def accumulate(total, batch):
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(loss_of)(parameters, batch)
            ), None

        batches = jax.tree.map(lambda x: x.reshape(m, -1, *x.shape[1:]), (inputs, targets))
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters))
        total, _ = jax.lax.scan(accumulate, zero, batches)
        return jax.tree.map(lambda x: x / m, total)

    def loss(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean loss, forward only."""
        return self.loss_fn(self(inputs), targets)
