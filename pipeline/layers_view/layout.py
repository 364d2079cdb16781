"""A record of the order of layers in a pipeline's state, so that no other order is loaded.

Letters: S ranks, V chunks. For V > 1, arrays [S, ...] of equal shape hold different layers in
different placements. So the order is recorded twice: in the metadata of every parameter of a stage,
which `nnx.update` and `nnx.merge` copy; and in the name of a mark, an additional variable, for
states that are dictionaries of arrays, such as a checkpoint.

For the placement "loop" the pipeline's state has no mark, so that it equals the state of its
stages; an optimizer's state has one mark. Other placements have two marks, because `nnx.merge`
compares only the number of leaves, not their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.base.variables import kind_text, metadata, raw, remade
from pipeline.core.model.stage import as_type
from pipeline.core.placement.distribute import distribute
from pipeline.core.placement.placement import LAYERS

StagesOf = Sequence[Sequence[int]]  # [S] lists of the V stages on each rank


class Mark(nnx.Variable[Any]):
    """A variable whose name records the order of layers; its value has no meaning."""


class Layout(nnx.Module):
    """The marks (`Mark`) of a state: variables whose names record the order of layers.

    Args:
      stages_of: [S] lists of the V stages on each rank.
      types: whether the state has types in place of arrays.
      loop: whether to add a mark for the placement "loop" too, as in an optimizer's state.
    """

    def __init__(self, stages_of: StagesOf, mesh: Mesh, *, types: bool, loop: bool = False) -> None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        for name in _marks(stages_of, loop=loop):
            value: Any = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
            if not types:
                value = distribute(np.zeros((), np.int32), everywhere)
            setattr(self, name, Mark(value))


@dataclass(frozen=True, eq=False)
class PipelineOrigin:
    """The modules from which a pipeline was made.

    Attributes:
      variables: the types of the stages' variables after placement, by path.
      copies: `pipeline.lint.copies.Copies`, the modules that the pipeline has copied.
    """

    variables: Mapping[Any, Any]
    copies: Any

    def __deepcopy__(self, memo: Any) -> PipelineOrigin:
        """Return the same object: a copy of a pipeline has the same origin."""
        return self


def layout_name(stages_of: StagesOf) -> str | None:
    """Name the order of layers, such as ``loop_2x2`` for S = V = 2; None for V = 1."""
    S, V = len(stages_of), len(stages_of[0])
    if V == 1:
        return None
    down = [tuple(range(v * S, (v + 1) * S)) for v in range(V)]
    back = [row[::-1] if v % 2 else row for v, row in enumerate(down)]
    columns = list(zip(*stages_of, strict=True))
    orders = "_".join(str(k) for rank in stages_of for k in rank)
    kind = "loop" if columns == down else "v" if columns == back else f"stages_{orders}"
    return f"{kind}_{S}x{V}"


def _marks(stages_of: StagesOf, *, loop: bool) -> list[str]:
    name = layout_name(stages_of)
    if name is None:
        return []
    return [name] * loop if name.startswith("loop") else [name, f"{name}_back"]


def mark(chunks: Iterable[nnx.Module], stages_of: StagesOf) -> None:
    """Write the order of layers to the metadata of all parameters of the chunks."""
    name = layout_name(stages_of)
    for chunk in chunks:
        if name is not None:
            flat = nnx.to_flat_state(nnx.state(chunk, nnx.Param))
            marked = [(p, remade(v, raw(v), {**metadata(v), LAYERS: name})) for p, v in flat]
            nnx.update(chunk, nnx.from_flat_state(marked))


def types_of(chunks: nnx.Module) -> dict[Any, Any]:
    """Return the variables of all stages as types, with metadata, by path in the pipeline."""
    flat = nnx.to_flat_state(jax.tree.map(as_type, nnx.state(chunks)))
    return {("chunks", *path): leaf for path, leaf in flat if isinstance(leaf, nnx.Variable)}


def check_layout(
    what: str, stages_of: StagesOf, layout: Layout, variables: Iterable[tuple[Any, Any]]
) -> None:
    """Check that a state's layers are in a pipeline's order.

    Args:
      what: the name of the state's owner, for messages.
      stages_of: [S] lists of the V stages on each rank.
      layout: the state's `Layout`, whose variables name the order of its layers.
      variables: the variables of stages, with their paths.

    Raises:
      ValueError: the state has another pipeline's order of layers, or a variable's leading axis is
        not S.
    """
    order, S, streams = layout_name(stages_of), len(stages_of), False
    others: set[Any] = {str(name).removesuffix("_back") for name in nnx.state(layout)}
    for path, variable in variables:
        others.add(metadata(variable).get(LAYERS, order))
        shape = getattr(raw(variable), "shape", (S,))
        if shape == ():  # a variable of layers has an axis of ranks
            raise ValueError(
                f"{what} has a variable of type {kind_text(variable)} at "
                f"{'.'.join(map(str, path))}, a scalar where there is one for each of {S} ranks: "
                f"it was added after the pipeline was made; change stages before that (adapters "
                f"are put on each stage, and not on a pipeline)"
            )
        if shape[:1] != (S,):
            others.add(f"an array {shape} at {'.'.join(map(str, path))}")
            streams |= isinstance(variable, nnx.RngState)
    others.discard(order)
    if others:
        first, *more = sorted(others)
        text = f"{first} and {len(more)} more" if more else first
        remedy = "; random streams have no layers: make the pipeline anew first" if streams else ""
        raise ValueError(
            f"{what} holds the layers of {S} ranks{f' as {order}' if order else ''}, and was given "
            f"the state of a pipeline that holds them otherwise ({text}); carry "
            f"it over by layers: pipe.from_layers(other.to_layers(tree)), other being a pipeline "
            f"as that one was{remedy}"
        )
