"""A rank's cell as one of its stages sees it, where stages are not alike."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from pipeline.backward.masks import Way
from pipeline.base.tree import Tree, signature
from pipeline.model.randomness import split_streams
from pipeline.model.stage import Seat

if TYPE_CHECKING:
    from pipeline.rank.cell import Cell


class Lazy(Sequence[Any]):
    """A list whose elements are made when somebody asks, which is inside their branch."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._make(index)


def seen_by(cell: Cell, seat: Seat, x: Tree = None, y: Tree = None, way: Way | None = None) -> Cell:
    """The cell with the definition and the state of one stage, and of those like it.

    Args:
      cell: the rank's.
      seat: the stage's.
      x: the type of its input, if it is known.
      y: the type of its output, if it is known.
      way: how far its backward goes, if it matters.
    """
    seen = copy.copy(cell)
    seen.way = way or cell.way
    seen.model = dataclasses.replace(cell.model, chunk=seat.definition)
    seen.lanes, seen.home, seen.activation, seen.output = (), seat.chunk, x, y
    if seat.views is None:
        seen.chunk_tree = jax.tree.structure(cell.states.chunks[seat.chunk])
        return seen
    params, rest = seat.views.params, seat.views.rest

    def state(chunk: int) -> tuple[Tree, Tree]:
        return split_streams(rest.tree(jax.tree.leaves(cell.states.chunks_rest[chunk])))

    seen.chunk_tree, seen.view = params.treedef, params
    seen.weights = Lazy(cell.num_chunks, lambda chunk: params.leaves(cell.weights[chunk]))
    seen.streams = Lazy(cell.num_chunks, lambda chunk: state(chunk)[0])
    seen.fixed = Lazy(cell.num_chunks, lambda chunk: state(chunk)[1])
    return seen


def code(cell: Cell, seat: Seat) -> Any:
    """What stages that are one computation have in common, but for their activations."""
    states = cell.states.chunks[seat.chunk], cell.states.chunks_rest[seat.chunk]
    return seat.definition, seat.views or signature(states)
