"""The storage of carries, made before the first tick of a program with slices."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from pipeline.base.tree import Leaves, Tree, partition, types_text, vary_like, zeros
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.model.overlay import overlay_trees
from pipeline.core.step.calls.groups import GroupedModel
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.stores.device import Pool
from pipeline.core.step.stores.slices import Carries, WholeSequences
from schedules.lowering.program import Program


def make_carries(local: LocalModel, program: Program, *, training: bool) -> list[WholeSequences]:
    """Make the carries of each group of a rank's stages; one element if all stages are alike.

    Args:
      local: the rank's part of the model.
      program: the program that runs.
      training: whether the program has backwards, and so gradients of carries.
    """
    N, axes = program.schedule.num_slices, local.axes
    is_grouped = isinstance(local, GroupedModel)
    models = [model for _, model in local.kinds]
    if N == 1:
        return [WholeSequences() for _ in models]
    # If slices differ in length, all carries have the shape of the longest slice's carry, so that a
    # place fits every carry.
    types = [model.earlier for model in models]
    for model in models:
        _check_lengths(model)
    sums = [_sums(own) if training else [] for own in types]
    # All groups share one pool; each has a view for its carry. The additional place is the discard
    # place, for values that are not read.
    pools = []
    for trees, name in ((types, "carry"), (sums, "carry_gradient")):
        cells, views = overlay_trees(trees) if is_grouped else (trees[0], [])
        pool = Pool(cells, program.values[name].device + 1, axes, "carries")
        seen = [pool.seen(view, tree, axes) for view, tree in zip(views, trees, strict=False)]
        pools.append(seen if is_grouped else [pool])
    return [
        Carries(model.earlier, model.carry, model.rank.slices.number, axes, N, *pair)
        for model, *pair in zip(models, *pools, strict=True)
    ]


def _check_lengths(model: LocalModel) -> None:
    """Raise ValueError if a slice's carry does not fit into the longest slice's carry."""
    pairs = list(itertools.zip_longest(*map(jax.tree.leaves, (model.carry, model.earlier))))
    trees: list[Any] = [jax.tree.structure(carry) for carry in (model.carry, model.earlier)]
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
    """Return the types of a carry's gradients, in the dtypes in which they are summed."""
    floats, _ = partition(types)
    return jax.eval_shape(lambda: as_summed(vary_like(list(map(zeros, floats)), floats)))
