"""The stores of carries: what a stage returns for one slice and reads for all later slices.

Letters: N slices of a microbatch; unit u is slice u mod N of microbatch u // N. A stage reads the
carries of earlier slices as one tree of [N, ...] leaves, and its backward returns one gradient for
each of these carries. Gradients are summed in at least float32. The backward of a slice reads the
sum for the carry that the slice returned. The tables of a program say at which index each carry is
stored (`schedules.lowering.kinds`). Slices of different lengths have carries of different lengths;
shorter ones are padded with zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.tree import Leaves, Tree, cropped, padded, partition, zeros
from pipeline.core.autodiff.outcome import SlicedInput


@dataclasses.dataclass(frozen=True, eq=False)
class Carries:
    """The carries that stages of one structure read and write; by default there are no slices.

    Attributes:
      types: the types of a carry of the longest slice.
      own: the types of a carry of the slice that these actions run.
      part: the index of this slice, if slices differ in length; else None.
      axes: the mesh axes over which carries vary, if their types name no axes.
      num_slices: N.
      values, gradients: the places of carries, and of gradients for their float leaves.
    """

    types: Tree = ()
    own: Tree = ()
    part: int | None = None
    axes: tuple[str, ...] = ()
    num_slices: int = 1
    values: Any = None
    gradients: Any = None

    @property
    def has_carries(self) -> bool:
        return self.num_slices > 1

    def input(self, row: Any, x: Tree) -> Tree:
        """Return the input of a stage: an activation; with slices also earlier slices' carries."""
        if not self.has_carries:
            return x
        part, N = self._part(row), self.num_slices
        # Slices that differ in length have separate traces, which read exactly the carries of
        # earlier slices. Equal slices share one trace, which reads N - 1 places and masks the
        # places that are not yet written.
        count = N - 1 if self.part is None else self.part
        carries = [jax.tree.leaves(self.values[row["carry"][n]]) for n in range(count)]
        leaves = []
        for number, t in enumerate(jax.tree.leaves(self.types)):
            nothing = vary(zeros(t), varying_in(t, otherwise=self.axes))
            # A place that this microbatch has not written may contain NaN: select, do not multiply.
            parts = [carries[n][number] for n in range(count)]
            if self.part is None:
                parts = [jnp.where(n < part, parts[n], nothing) for n in range(count)]
            leaves.append(jnp.stack([*parts, *[nothing] * (N - count)]))
        return SlicedInput(x, jax.tree.unflatten(jax.tree.structure(self.types), leaves))

    def earlier(self, row: Any) -> Tree:
        return self.input(row, ()).earlier if self.has_carries else ()

    def keep(self, row: Any, carry: Tree) -> None:
        """Store the carry of a slice in its place."""
        if self.has_carries:
            self.values[row["carry"][self._part(row)]] = padded(carry, self.types)

    def cotangent(self, row: Any, dy: Leaves) -> Leaves:
        """Return the gradients for output and carry; the carry's is the sum over later slices."""
        if not self.has_carries:
            return dy
        part = self._part(row)
        gradients = self.gradients[row["carry_gradient"][part]]
        floats, _ = partition(self.own)
        # No slice reads the carry of the last slice, and its gradient's place was never written:
        # the gradient is zero.
        is_last = part == self.num_slices - 1
        gradients = cropped(gradients, floats)
        of_carry = [
            jnp.where(is_last, jnp.zeros_like(g), g).astype(t.dtype)
            for g, t in zip(gradients, floats, strict=True)
        ]
        return [*dy, *of_carry]

    def back(self, row: Any, dx: Leaves) -> Leaves:
        """Return the activation's gradients; add gradients for earlier carries, [N, ...] each."""
        if not self.has_carries:
            return dx
        count = len(dx) - len(partition(self.types)[0])
        dx, gradients = dx[:count], dx[count:]
        # Backwards run from the last slice to the first. The last slice's backward overwrites the
        # gradients of an earlier microbatch in the places; the other backwards add.
        is_last = self._part(row) == self.num_slices - 1
        for n in range(self.num_slices - 1 if self.part is None else self.part):
            place = row["carry_gradient"][n]
            before = self.gradients[place]
            self.gradients[place] = [
                jnp.where(is_last, jnp.zeros_like(old), old) + new[n].astype(old.dtype)
                for old, new in zip(before, gradients, strict=True)
            ]
        return dx

    def _part(self, row: Any) -> Any:
        return row["microbatch"] % self.num_slices if self.part is None else self.part
