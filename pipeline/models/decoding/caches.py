"""A model for decoding: its modules with caches, as types, and the caches' initial values.

An embed without a cache is checked to map a token to the same value at every position.

Letters: V chunks, b rows of a microbatch on one data shard, P tokens of a prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import STAGE
from collectives.compat import varying_in
from pipeline.base.agreed.vocabulary import SplitEmbedding
from pipeline.base.tree import Leaves, Tree, at, blank, vary_like, zeros
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.model import Declared, Model, Weights
from pipeline.core.model.overlay import Leaf, Spot, View, overlay
from pipeline.core.model.stage import Definition, StagePosition
from pipeline.core.step.calls.declared import state_spots
from pipeline.core.step.calls.ends import embed, ends_values, finish
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.models.layers.vocabulary import VocabularyEmbedding

Cells = tuple[int, ...]  # indices of leaves
Begin = Callable[[Tree], Tree]  # non-parameter state to that state with initial caches
METHOD = "start_decoding"


def start_decoding(module: Any, rows: int, length: int, dtype: Any = None) -> None:
    """Prepare a part of a model, in place, to take one token after the other.

    The part is set to evaluate (`nnx.Module.eval`). An `nnx.MultiHeadAttention` in the part gets
    caches. Any other module with a method ``start_decoding(rows, length)`` makes its own caches,
    variables of type `nnx.Cache`.

    Args:
      module: a stage, embed or head. Prompts come several tokens at a time if all classes with such
        a method say ``prefills = True``.
      rows: the number of sequences that the part sees at once.
      length: the number of tokens of each sequence.
      dtype: the dtype of caches of flax's attention; by default the dtype in which the attention
        computes.
    """
    module.eval()
    for _, part in list(nnx.iter_graph(module)):
        if isinstance(part, nnx.MultiHeadAttention):
            kind = dtype or part.dtype or part.param_dtype
            part.init_cache((rows, length, part.in_features), dtype=kind)
            part.decode = True
        elif isinstance(part, nnx.Module) and hasattr(part, METHOD):
            getattr(part, METHOD)(rows, length)


def keeps_caches(pipe: Any) -> bool:
    """Tell whether a model declares that it decodes: a module has a method `start_decoding`.

    flax's attention alone is no such declaration: positions that an embed adds may lack a cache.
    """
    return any(hasattr(module, METHOD) for module in _own_caches(pipe))


def may_have_caches(pipe: Any) -> bool:
    """Tell whether `start_decoding` gives any module of the stages caches.

    A cache of embed is ignored: it may count positions, but holds nothing of earlier tokens.
    """
    return bool(_own_caches(pipe, ends=False))


def takes_many(pipe: Any) -> bool:
    """True if every module with a cache takes several tokens in one call (``prefills = True``).

    (flax's `MultiHeadAttention` does not.)
    """
    return all(getattr(module, "prefills", False) for module in _own_caches(pipe))


def _own_caches(pipe: Any, *, ends: bool = True) -> list[nnx.Module]:
    """Return the modules that `start_decoding` gives caches, in stages and optionally the ends."""
    held = (*pipe.chunks, *((pipe.embed, pipe.head) if ends else ()))
    parts = [part for part in held if isinstance(part, nnx.Module)]
    modules = (module for part in parts for _, module in nnx.iter_graph(part))
    return [m for m in modules if isinstance(m, nnx.MultiHeadAttention) or hasattr(m, METHOD)]


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model whose parts have caches.

    Attributes:
      starts: for each chunk and for the ends: a function from non-parameter state to this state
        with caches.
    """

    model: Model
    starts: tuple[Begin, ...]

    def weights(self, weights: Weights) -> Weights:
        """Return a rank's weights, with caches at their initial values."""
        *chunks, ends = self.starts
        rests = zip(chunks, weights.chunks_rest, strict=True)
        return replace(
            weights,
            chunks_rest=tuple(start(rest) for start, rest in rests),
            ends_rest=ends(weights.ends_rest),
        )


def make_decoder(rank: Rank, cache: Any, start: Callable[[Any], None]) -> Decoder:
    """Make the model with caches.

    Args:
      cache: a filter of the cache variables; each microbatch has its own.
      start: a function that prepares a module for decoding, in place.

    Raises:
      ValueError: ``start`` changes a part's parameters, or the filter finds no variable.
    """
    is_cache = nnx.filterlib.to_predicate(cache)
    model, weights = rank.model, rank.weights
    parts: list[tuple[list[StagePosition], Cells, Begin]] = []
    for v, rest in enumerate(weights.chunks_rest):
        own = [position for position in model.stages if position.chunk == v]
        if own[0].views.rest.spots is None:
            one = _ready(own[0].definition, rank.params(v), rest, is_cache, start)
            parts.append(
                ([replace(stage, definition=one.definition) for stage in own], one.cells, one.begin)
            )
        else:
            parts.append(_ready_unlike(rank, own, is_cache, start))
    ends = _ready(model.ends, weights.ends, weights.ends_rest, is_cache, start)
    if not any((*(cells for _, cells, _ in parts), ends.cells)):
        raise ValueError(
            f"no part of the model has a cache ({cache!r}) when it starts to decode, and without "
            f"one a stage sees a token and nothing before it; use nnx.MultiHeadAttention, give the "
            f"modules that need one a method start_decoding(rows, length) that makes nnx.Cache "
            f"variables, or pass start="
        )
    found = {(position.rank, position.chunk): position for of, _, _ in parts for position in of}
    stages = tuple(found[position.rank, position.chunk] for position in model.stages)
    declared = Declared(
        tuple(position.definition.state for position in stages),
        ends.definition.state,
        tuple(cells for _, cells, _ in parts),
        ends.cells,
    )
    decoding = replace(model, stages=stages, ends=ends.definition, declared=declared, loss_fn=None)
    return Decoder(decoding, (*(begin for _, _, begin in parts), ends.begin))


def with_types_of_writes(rank: Rank, kinds: Sequence[StageKind]) -> Weights | None:
    """Make a rank's caches vary over all mesh axes of the values written to them.

    Returns:
      The weights; None if the caches vary over these axes already.
    """
    weights, declared = rank.weights, rank.model.declared
    chunks = [jax.tree.leaves(rest) for rest in weights.chunks_rest]
    ends = jax.tree.leaves(weights.ends_rest)
    before = [*map(varying_in, (*itertools.chain(*chunks), *ends))]
    for kind in kinds:
        spots, v = state_spots(rank, kind.position), kind.position.chunk
        for spot, written in zip(spots, _stage_writes(kind), strict=True):
            chunks[v][spot.cell] = vary_like(chunks[v][spot.cell], written)
    for leaves in _ends_writes(rank, kinds[0].y) if declared.ends_cells else ():
        for n, written in zip(declared.ends_cells, leaves, strict=True):
            ends[n] = vary_like(ends[n], written)
    if before == [*map(varying_in, (*itertools.chain(*chunks), *ends))]:
        return None
    return replace(
        weights,
        chunks_rest=tuple(map(_with_leaves, weights.chunks_rest, chunks)),
        ends_rest=_with_leaves(weights.ends_rest, ends),
    )


def _stage_writes(kind: StageKind) -> Leaves:
    """Return the types that a stage writes to its declared state, in the state's order."""

    def run() -> Tree:
        return kind.stage(*kind.example(), blank(kind.x, ()), paths=kind.state_paths).state

    return jax.tree.leaves(jax.eval_shape(run))


def _ends_writes(rank: Rank, y: Tree) -> list[Leaves]:
    """Return the types that embed and head write to the ends' declared state, in state order."""
    values = ends_values(rank)
    found: list[Callable[[], Outcome]] = []
    if rank.model.has_embed:
        inputs = at(rank.batch.inputs, 0)
        found.append(lambda: embed(rank, rank.ends, inputs, 0, now=True, values=values))
    if rank.model.has_head:
        given = rank, rank.ends, blank(y, rank.axes), 0
        found.append(lambda: finish(*given, take_loss=False, values=values))
    return [jax.tree.leaves(jax.eval_shape(run).state) for run in found]


def _with_leaves(tree: Tree, leaves: Sequence[Any]) -> Tree:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _ready_unlike(
    rank: Rank, stages: Sequence[StagePosition], is_cache: Any, start: Callable[[Any], None]
) -> tuple[list[StagePosition], Cells, Begin]:
    """Prepare a chunk whose stages share cells: each stage's caches get new cells."""
    v = stages[0].chunk
    cells = jax.tree.leaves(rank.weights.chunks_rest[v])
    ready, lists, known = [], [], []
    for stage in stages:
        views = stage.views
        params = jax.eval_shape(lambda views=views: views.params.tree(rank.chunks.whole(v)))
        rest = views.rest.tree(cells)
        one = _ready(stage.definition, params, rest, is_cache, start)
        spots = jax.tree.unflatten(views.rest.treedef, range(len(views.rest.spots)))
        old = dict(nnx.to_flat_state(spots))
        now: dict[Any, Any] = {}  # by leaf: its old spot, or the description of a new leaf
        n = 0
        for path, variable in nnx.to_flat_state(one.types):
            kept = path in old and path not in one.definition.state
            places = jax.tree.leaves(old[path]) if kept else []
            for m, leaf in enumerate(jax.tree.leaves(variable)):
                name = *map(str, path), str(m)
                group = n in one.cells, leaf.dtype
                now[n] = views.rest.spots[places[m]] if kept else Leaf(group, name, leaf.shape)
                n += 1
        ready.append(one)
        known.append(now)
        lists.append([leaf for leaf in now.values() if isinstance(leaf, Leaf)])
    made, spots_of = overlay(lists)
    moved = []
    for stage, one, now, added in zip(stages, ready, known, spots_of, strict=True):
        more = iter(replace(spot, cell=spot.cell + len(cells)) for spot in added)
        spots = tuple(spot if isinstance(spot, Spot) else next(more) for spot in now.values())
        views = replace(stage.views, rest=View(jax.tree.structure(one.types), spots))
        moved.append(replace(stage, definition=one.definition, views=views))

    def begin(rest: Tree) -> Tree:
        had = jax.tree.leaves(rest)
        now = [jnp.zeros(cell.shape, cell.group[1]) for cell in made]
        index = jax.lax.axis_index(STAGE)
        for stage, one, old in zip(moved, ready, stages, strict=True):
            own = one.begin(old.views.rest.tree(had))
            zeros = [*had, *map(jnp.zeros_like, now)]
            filled = stage.views.rest.fill(zeros.copy, own)[len(had) :]
            mine = index == stage.rank
            now = [jnp.where(mine, x, y) for x, y in zip(filled, now, strict=True)]
        return nnx.State({n: nnx.Variable(x) for n, x in enumerate([*had, *now])})

    caches = (n + len(cells) for n, cell in enumerate(made) if cell.group[0])
    return moved, tuple(caches), begin


class _Ready(NamedTuple):
    """A module's definition with caches, indices of cache leaves, state maker, and state types."""

    definition: Definition
    cells: Cells
    begin: Begin
    types: Tree


def _ready(
    definition: Definition, params: Tree, rest: Tree, is_cache: Any, start: Callable[[Any], None]
) -> _Ready:
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

    params_types, rest_types = jax.eval_shape(lambda: (params, rest))

    def begin(rest: Tree) -> Tree:
        # No new value depends on these zeros.
        empty = jax.tree.map(zeros, (params_types, rest_types))
        had = dict(nnx.to_flat_state(rest))
        now = nnx.to_flat_state(run(*empty)[1])
        known = [(path, new if path in paths else had.get(path, new)) for path, new in now]
        return nnx.from_flat_state(known)

    ready = Definition(seen[0], definition.label, frozenset(paths))
    return _Ready(ready, tuple(cells), begin, types[1])


CHECKED = 8  # tokens of a prompt that are checked
ROUNDING = 1e-3  # largest difference of a token's values, relative to the largest number


def check_embed(pipe: Any, tokens: Any, max_new_tokens: int) -> None:
    """Refuse an embed that adds positions but does not count the positions seen.

    While text is generated, embed gets one token at a time, and treats it as the first token of a
    text.

    On a mesh with further axes nothing is checked: an embed may name these axes, and only the
    kernel has them.

    Args:
      tokens: [N, P] prompts.

    Raises:
      ValueError: a token has another value after other tokens than alone.
    """
    embed, axes = pipe.embed, pipe.plan.axes
    further = {name for name, size in pipe.plan.mesh.shape.items() if size > 1}
    further -= {STAGE, *axes.rows}
    if further or isinstance(tokens, jax.core.Tracer) or not _is_unknown(embed):
        return
    row = tokens[:1, :CHECKED]
    if row.shape[1] == 1:
        if max_new_tokens == 1:  # there is no second position
            return
        row = jnp.concatenate([row, row], axis=1)
    if isinstance(embed, nnx.Module):
        embed = nnx.merge(*nnx.split(embed))
        embed.eval()
    last = row.shape[1] - 1
    both = zip(jax.tree.leaves(embed(row)), jax.tree.leaves(embed(row[:, last:])), strict=True)
    for behind, alone in both:
        if behind.ndim < 2 or behind.shape[1] != last + 1:
            continue
        one, two = (x.astype(jnp.float32) for x in (behind[:, last:], alone))
        share = jnp.abs(one - two).max() / jnp.maximum(jnp.abs(one).max(), 1e-30)
        if isinstance(share, jax.core.Tracer):  # the weights are arguments of a jit
            return
        if (differ := float(share)) > ROUNDING:
            raise ValueError(
                f"generate() of a model with caches gives embed one token at a time, and embed= of "
                f"type {type(embed).__name__} makes something else of a token alone than of the "
                f"same token at position {last} (they differ by {differ:.2g} of the largest): it "
                f"adds positions and remembers none; give it a method start_decoding(rows, length) "
                f"that makes an nnx.Cache of the position it is at, or pass start="
            )


def _is_unknown(embed: Any) -> bool:
    """Tell whether an embed may add positions, and has no cache that counts them."""
    if embed is None or isinstance(embed, SplitEmbedding):
        return False
    if not isinstance(embed, nnx.Module):
        return True
    parts = [part for _, part in nnx.iter_graph(embed) if isinstance(part, nnx.Module)]
    if type(embed) is VocabularyEmbedding:
        return False
    return not any(
        hasattr(part, METHOD) or isinstance(part, nnx.MultiHeadAttention) for part in parts
    )
