"""The storage of carries, made before the first tick of a program with slices."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from pipeline.base.tree import Leaves, Tree, partition, types_text, vary_like, zeros
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.model.overlay import overlay_trees
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.stores.device import Pool
from pipeline.core.step.stores.slices import Carries
from schedules.lowering.program import Program


def make_carries(step: OpenedStep, program: Program) -> list[Carries]:
    N, axes = program.schedule.num_slices, step.rank.axes
    if N == 1:
        return [Carries() for _ in step.kinds]
    # If slices differ in length, all carries have the shape of the longest slice's carry, so that a
    # place fits every carry.
    types = [kind.earlier for kind in step.kinds]
    for kind in step.kinds:
        _check_lengths(kind)
    sums = [sums_of_carry(own) if step.request.training else [] for own in types]
    # All kinds share one pool; each has a view for its carry. The additional place is the discard
    # place, for values that are not read.
    pools = []
    for trees, name in ((types, "carry"), (sums, "carry_gradient")):
        cells, views = overlay_trees(trees)
        pool = Pool(cells, program.values[name].device + 1, axes, "carries")
        pools.append(map(pool.viewed, views))
    return [
        Carries(kind.earlier, kind.carry, kind.rank.slices.number, axes, N, *pair)
        for kind, *pair in zip(step.kinds, *pools, strict=True)
    ]


def _check_lengths(kind: StageKind) -> None:
    """Raise ValueError if a slice's carry does not fit into the longest slice's carry."""
    pairs = list(itertools.zip_longest(*map(jax.tree.leaves, (kind.carry, kind.earlier))))
    trees: list[Any] = [jax.tree.structure(carry) for carry in (kind.carry, kind.earlier)]
    fits = trees[0] == trees[1] and all(
        (a.dtype, a.ndim) == (b.dtype, b.ndim)
        and all(x <= y for x, y in zip(a.shape, b.shape, strict=True))
        for a, b in pairs
    )
    if not fits:
        raise ValueError(
            f"call_slice returned as own {types_text(kind.carry)} for slice "
            f"{kind.rank.slices.number}, and {types_text(kind.earlier)} for the longest: own has "
            f"the same leaves for every slice, as long as the slice or of one shape for all"
        )


def sums_of_carry(types: Tree) -> Leaves:
    """Return the types of a carry's gradients, in the dtypes in which they are summed."""
    floats, _ = partition(types)
    return jax.eval_shape(lambda: as_summed(vary_like(list(map(zeros, floats)), floats)))
