"""Carries of slices: what a slice leaves for the later slices of its microbatch, and its gradient.

Letters: N slices of a microbatch, unit u = slice u mod N of microbatch u // N. A stage reads the
carries of earlier slices as one tree of [N, ...] leaves. Its backward gives a gradient for each of
them; they are added up in at least float32, and read by the backward of the slice that left the
carry. The table says where they lie (`schedules.lowering.kinds`). Where slices have lengths of
their own, all carries are as long as those of the longest slice, with zeros at their ends.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.tree import Leaves, Tree, cropped, padded, partition, vary_like, zeros
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.autodiff.outcome import SlicedInput
from pipeline.core.model.overlay import overlay_trees
from pipeline.core.step.calls.groups import GroupedModel
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.calls.messages import types_text
from pipeline.core.step.stores.device import Pool, PoolView
from schedules.lowering.program import Program


@dataclasses.dataclass(frozen=True, eq=False)
class Carries:
    """The carries that stages of one kind read and leave.

    Attributes:
      types: of one carry, of the longest slice.
      own: of a carry of the slice whose actions these are.
      part: its number, if slices have lengths of their own.
      axes: the mesh axes over which carries vary whose types do not say it.
      num_slices: N.
      values, gradients: by place; gradients of float leaves alone.
    """

    types: Tree
    own: Tree
    part: int | None
    axes: tuple[str, ...]
    num_slices: int
    values: Any
    gradients: Any

    def given(self, row: Any, x: Tree) -> SlicedInput:
        """The input of a stage: an activation, and the carries of earlier slices."""
        part, N = self._part(row), self.num_slices
        count = N - 1 if self.part is None else self.part
        found = [jax.tree.leaves(self.values[row["carry"][n]]) for n in range(count)]
        leaves = []
        for number, t in enumerate(jax.tree.leaves(self.types)):
            nothing = vary(zeros(t), varying_in(t, otherwise=self.axes))
            # What lies in a place that nobody wrote may be NaN: it is replaced, not multiplied.
            own = [found[n][number] for n in range(count)]
            if self.part is None:
                own = [jnp.where(n < part, own[n], nothing) for n in range(count)]
            leaves.append(jnp.stack([*own, *[nothing] * (N - count)]))
        return SlicedInput(x, jax.tree.unflatten(jax.tree.structure(self.types), leaves))

    def keep(self, row: Any, carry: Tree) -> None:
        """Keep what a slice leaves."""
        self.values[row["carry"][self._part(row)]] = padded(carry, self.types)

    def cotangent(self, row: Any) -> Leaves:
        """The gradient for what a slice has left, complete when its backward runs."""
        part = self._part(row)
        found = self.gradients[row["carry_gradient"][part]]
        floats, _ = partition(self.own)
        is_last = part == self.num_slices - 1
        found = cropped(found, floats)
        return [
            jnp.where(is_last, jnp.zeros_like(g), g).astype(t.dtype)
            for g, t in zip(found, floats, strict=True)
        ]

    def add(self, row: Any, gradients: Leaves) -> None:
        """Add the gradients for the carries of earlier slices, [N, ...] each."""
        is_last = self._part(row) == self.num_slices - 1
        for n in range(self.num_slices - 1 if self.part is None else self.part):
            place = row["carry_gradient"][n]
            before = self.gradients[place]
            self.gradients[place] = [
                jnp.where(is_last, jnp.zeros_like(old), old) + new[n].astype(old.dtype)
                for old, new in zip(before, gradients, strict=True)
            ]

    def _part(self, row: Any) -> Any:
        return row["microbatch"] % self.num_slices if self.part is None else self.part


def make_carries(local: LocalModel, program: Program, *, training: bool) -> list[Carries]:
    """The carries of each group of a rank's stages, one where all are alike; none without slices.

    Args:
      local: the rank's part of the model.
      program: what runs.
      training: whether anything goes back.
    """
    N, axes = program.schedule.num_slices, local.axes
    if N == 1:
        return []
    is_grouped = isinstance(local, GroupedModel)
    models = [group.local for group in local.groups] if is_grouped else [local]  # type: ignore[attr-defined]
    types = [model.earlier for model in models]
    for model in models:
        _check_lengths(model)
    sums = [_sums(own) if training else [] for own in types]
    pools = []
    for trees, name in ((types, "carry"), (sums, "carry_gradient")):
        cells, views = overlay_trees(trees) if is_grouped else (trees[0], [None])
        pool = Pool(cells, program.values[name].device + 1, axes, "carries")
        own = [PoolView(pool, view, tree, axes) for view, tree in zip(views, trees, strict=True)]
        pools.append(own if is_grouped else [pool])
    return [
        Carries(model.earlier, model.carry, model.rank.slices.number, axes, N, *pair)
        for model, *pair in zip(models, *pools, strict=True)
    ]


def _check_lengths(model: LocalModel) -> None:
    """Check that a carry of one slice fits into one of the longest.

    Raises:
      ValueError: it has other leaves, or a larger one.
    """
    pairs = list(itertools.zip_longest(*map(jax.tree.leaves, (model.carry, model.earlier))))
    trees: list[Any] = [jax.tree.structure(one) for one in (model.carry, model.earlier)]
    fits = trees[0] == trees[1] and all(
        (a.dtype, a.ndim) == (b.dtype, b.ndim)
        and all(x <= y for x, y in zip(a.shape, b.shape, strict=True))
        for a, b in pairs
    )
    if not fits:
        raise ValueError(
            f"call_slice returned as own {types_text(model.carry)} for slice "
            f"{model.rank.slices.number}, and {types_text(model.earlier)} for the longest: own has "
            f"the same leaves for every slice, as long as the slice or of one shape for all"
        )


def _sums(types: Tree) -> Leaves:
    """Types of the gradients of a carry, in the dtypes in which they are summed."""
    floats, _ = partition(types)
    return jax.eval_shape(lambda: as_summed(vary_like(list(map(zeros, floats)), floats)))
