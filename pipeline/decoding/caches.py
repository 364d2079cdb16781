"""A model that decodes: its modules with caches, as types, and what is in the caches at first.

Letters: V chunks, b rows of a microbatch on one data shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from pipeline.base.tree import Tree, zeros
from pipeline.model.model import Declared, Model, Weights
from pipeline.model.stage import Definition, Seat

Start = Callable[..., None]  # (module, rows, length)
METHOD = "start_decoding"


def start_decoding(module: Any, rows: int, length: int, dtype: Any = None) -> None:
    """Ready a part of a model, in place, for one token after the other.

    It is set to evaluate (`nnx.Module.eval`). An `nnx.MultiHeadAttention` in it gets caches;
    another module its own, if it has a method ``start_decoding(rows, length)``, which makes
    variables of type `nnx.Cache`.

    Args:
      module: a stage, embed or head.
      rows: how many sequences it will see at once.
      length: how many tokens of each.
      dtype: of the caches of flax's attention; by default that in which it computes.
    """
    module.eval()
    for _, part in list(nnx.iter_graph(module)):
        if isinstance(part, nnx.MultiHeadAttention):
            kind = dtype or part.dtype or part.param_dtype
            part.init_cache((rows, length, part.in_features), dtype=kind)
            part.decode = True
        elif isinstance(part, nnx.Module) and hasattr(part, METHOD):
            getattr(part, METHOD)(rows, length)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model whose parts have caches.

    Attributes:
      model: the static half.
      starts: of each chunk and of the ends: other state before to other state now.
    """

    model: Model
    starts: tuple[Callable[[Tree, Tree], Tree], ...]

    def weights(self, weights: Weights) -> Weights:
        """A rank's weights, with caches as they are at first."""
        *chunks, ends = self.starts
        rests = zip(chunks, weights.chunks, weights.chunks_rest, strict=True)
        return dataclasses.replace(
            weights,
            chunks_rest=tuple(start(params, rest) for start, params, rest in rests),
            ends_rest=ends(weights.ends, weights.ends_rest),
        )


def make_decoder(
    model: Model, weights: Weights, cache: Any, start: Callable[[Any], None]
) -> Decoder:
    """The model with caches.

    Args:
      model: of stages that are alike.
      weights: a rank's.
      cache: a filter, what belongs to one microbatch.
      start: readies a module in place.

    Raises:
      ValueError: a part makes parameters, or there is nothing that a filter finds.
    """
    is_cache = nnx.filterlib.to_predicate(cache)
    definitions: dict[int, Definition] = {seat.chunk: seat.definition for seat in model.stages}
    found = [
        _ready(definitions[v], weights.chunks[v], weights.chunks_rest[v], is_cache, start)
        for v in range(len(definitions))
    ]
    ends = _ready(model.ends, weights.ends, weights.ends_rest, is_cache, start)
    cells = [cells for _, cells, _ in (*found, ends)]
    if not any(cells):
        raise ValueError(
            f"no part of the model has a cache ({cache!r}) when it starts to decode, and without "
            f"one a stage sees a token and nothing before it; use nnx.MultiHeadAttention, give the "
            f"modules that need one a method start_decoding(rows, length) that makes nnx.Cache "
            f"variables, or pass start="
        )
    seats = tuple(Seat(found[seat.chunk][0], seat.rank, seat.chunk, None) for seat in model.stages)
    declared = Declared(
        tuple(seat.definition.state for seat in seats), ends[0].state, tuple(cells[:-1]), cells[-1]
    )
    decoding = dataclasses.replace(model, stages=seats, ends=ends[0], declared=declared)
    return Decoder(decoding, tuple(start for _, _, start in (*found, ends)))


def _ready(
    definition: Definition, params: Tree, rest: Tree, is_cache: Any, start: Callable[[Any], None]
) -> tuple[Definition, tuple[int, ...], Callable[[Tree, Tree], Tree]]:
    """A module's definition with caches, their leaves, and what makes its other state."""
    seen: list[Any] = []

    def run(params: Tree, rest: Tree) -> tuple[Tree, Tree]:
        module = nnx.merge(definition.graphdef, params, rest, copy=True)
        start(module)
        parts: Any = nnx.split(module, nnx.Param, ...)
        seen[:] = parts[:1]
        return parts[1], parts[2]

    types = jax.eval_shape(run, params, rest)
    structures: list[Any] = [jax.tree.structure(types[0]), jax.tree.structure(params)]
    if structures[0] != structures[1]:
        before, after = (
            {".".join(map(str, path)) for path, _ in nnx.to_flat_state(one)}
            for one in (params, types[0])
        )
        raise ValueError(
            f"{definition.label} has other parameters when it starts to decode "
            f"({', '.join(sorted(before ^ after)) or 'of another type'}); make caches, which are "
            f"no nnx.Param"
        )
    paths: set[Any] = set()
    cells: list[int] = []
    n = 0
    for path, variable in nnx.to_flat_state(types[1]):
        count = len(jax.tree.leaves(variable))
        if is_cache(path, variable):
            paths.add(path)
            cells += range(n, n + count)
        n += count

    def begin(params: Tree, rest: Tree) -> Tree:
        empty = jax.tree.map(zeros, (params, rest))  # on which nothing that is new depends
        had = dict(nnx.to_flat_state(rest))
        now = nnx.to_flat_state(run(*empty)[1])
        known = [(path, new if path in paths else had.get(path, new)) for path, new in now]
        return nnx.from_flat_state(known)

    return Definition(seen[0], definition.label, frozenset(paths)), tuple(cells), begin
