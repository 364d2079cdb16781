"""Trees of layers, and the stacks in which a pipeline holds them.

Letters: S ranks, K stages, V = K // S chunks. A model without a pipeline is a tree of layers; the
*layer view* is that tree, whatever S, V and the placement::

    {"stages": [K trees], "embed": tree, "head": tree}

in layer order, each tree a dictionary by attribute, as `nnx.state` of the module has it. A pipeline
holds the leaves of S layers in one array [S, ...] sharded over ``stage``, and those of stages that
are not alike in cells (`pipeline.model.unlike`): both are a `Stack` here. Nobody outside has to
know them: what belongs to layers (labels, masks, an optimizer's rules, weights to load) is said in
the layer view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import NamedSharding, PartitionSpec

from collectives import STAGE
from pipeline.base.tree import Tree, row_of, shape_text
from pipeline.base.variables import metadata, raw
from pipeline.layerwise.layout import layout_name
from pipeline.layerwise.reroll import Cut, Rerolled
from pipeline.model.chunks import stack_rows
from pipeline.model.ends import find_tables
from pipeline.model.overlay import Spot
from pipeline.model.unlike import Overlaid
from pipeline.sharding.distribute import distribute
from pipeline.sharding.placement import LAYERS, Spread, spread_of

Path = tuple[Any, ...]
Layers = dict[str, Any]  # "stages", "embed", "head"
Name = tuple[int, Path]  # of a layer's leaf: the stage, and the path in it


@dataclass(frozen=True)
class Ref:
    """Stands for a leaf of a stage's tree.

    Attributes:
      stack, slot: the indices of where it lies.
      rank: in which row.
    """

    stack: int
    slot: int
    rank: int


@dataclass(frozen=True)
class EndRef:
    """Stands for a leaf of embed or head, by its index."""

    end: int


@dataclass(frozen=True)
class Slot:
    """A place in the rows of a stack, which layers of several ranks may have.

    Attributes:
      spot: where in a row; None for all of it.
      shape: of the layer's leaf.
      names: whose leaf lies there, by rank.
    """

    spot: Spot | None
    shape: tuple[int, ...]
    names: tuple[tuple[int, Name], ...]

    def read(self, stack: Any) -> Any:
        """[S, ...] the leaves of all ranks, some of which may have no such leaf."""
        return stack if self.spot is None else jax.vmap(self.spot.read)(stack)

    def fill(self, cell: Any, stack: Any) -> Any:
        """[S, ...] a cell with leaves in the rows of all ranks."""
        return stack if self.spot is None else jax.vmap(self.spot.fill)(cell, stack)


@dataclass(frozen=True)
class Stack:
    """One array of a pipeline's parameters, or of an optimizer's state, for S layers.

    Attributes:
      path: where it is.
      row: the shape of a rank's part.
      slots: what lies in it.
      spread: its layout; also of its gradient, and of what an optimizer keeps of it.
    """

    path: Path
    row: tuple[int, ...]
    slots: tuple[Slot, ...]
    spread: Spread

    def inputs(self, array: Any) -> list[tuple[Any, Cut | None]]:
        """[S, ...] for each slot, and where it comes from."""
        return [
            (slot.read(array), None if slot.spot is None else Cut(array, slot.spot))
            for slot in self.slots
        ]

    def collect(self, program: Rerolled, results: Sequence[Mapping[int, Any]], ranks: int) -> Any:
        """The array, of a program's results.

        Args:
          program: the program.
          results: for each slot the result that belongs there, by rank.
          ranks: S.
        """
        if self.slots[0].spot is None:
            return program.stack(tuple(results[0].get(rank) for rank in range(ranks)))
        parts = [
            (slot.spot, rank, value)
            for slot, of_rank in zip(self.slots, results, strict=True)
            for rank, value in of_rank.items()
            if slot.spot is not None
        ]
        shape = ranks, *self.row
        cell = program.cell(parts, shape)
        if cell is not None:
            return cell
        cell = jnp.zeros(shape, parts[0][2].aval.dtype)
        for slot, of_rank in zip(self.slots, results, strict=True):
            stack = program.stack(tuple(of_rank.get(rank) for rank in range(ranks)))
            held = np.isin(np.arange(ranks), list(of_rank))
            mask = jax.lax.broadcast_in_dim(held, shape, (0,))
            cell = jnp.where(mask, slot.fill(cell, stack), cell)
        return cell


@dataclass(frozen=True)
class End:
    """An array of embed or head.

    Attributes:
      path: where it is, in the layer view.
      shape: its own; stored: with the rows of zeros behind its last one, of a table that is shared.
      spread: its layout.
    """

    path: Path
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    spread: Spread

    def cut(self, array: Any) -> Any:
        """The array without those rows."""
        if self.stored == self.shape:
            return array
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, array.dtype)
        return array[: self.shape[0]]

    def fill(self, array: Any) -> Any:
        """The array with them."""
        if self.stored == self.shape:
            return array
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.stored, array.dtype)
        return jnp.pad(array, [(0, b - a) for a, b in zip(self.shape, self.stored, strict=True)])


@dataclass(frozen=True)
class LayerView:
    """Where each leaf of each layer lies.

    Attributes:
      ranks: S.
      stacks: the arrays of the stages.
      ends: those of embed and head.
      tree: the layers; leaves are `Ref` and `EndRef`.
      places: [K] the rank and the chunk of each stage.
    """

    ranks: int
    stacks: tuple[Stack, ...]
    ends: tuple[End, ...]
    tree: Layers
    places: tuple[tuple[int, int], ...]


def layer_view(pipe: Any, *, trained: bool = False) -> LayerView:
    """The layer view of a pipeline's parameters.

    Args:
      pipe: the pipeline.
      trained: only of those that it trains.
    """
    stages_of, masks = pipe.schedule.stages_of, pipe.trained
    stacks: list[Stack] = []
    for v, chunk in enumerate(pipe.chunks):
        held = [row[v] for row in stages_of]
        flat = nnx.to_flat_state(nnx.state(chunk, nnx.Param))
        of_rank = [masks.stages[k] if trained else None for k in held]
        slots = _slots(chunk, held, flat, of_rank)
        stacks += [
            Stack(("chunks", v, *path), tuple(x.shape[1:]), here, spread_of(x, (STAGE,)))
            for (path, x), here in zip(flat, slots, strict=True)
            if here
        ]
    stages: list[dict[Path, Ref]] = [{} for _ in range(sum(map(len, stages_of)))]
    for n, stack in enumerate(stacks):
        for m, slot in enumerate(stack.slots):
            for rank, (k, path) in slot.names:
                stages[k][path] = Ref(n, m, rank)
    ends = _ends(pipe, masks.ends if trained else None)
    tree = {"embed": {}, "head": {}} | unflatten_mapping(
        {e.path: EndRef(n) for n, e in enumerate(ends)}
    )
    places = {k: (rank, v) for rank, held in enumerate(stages_of) for v, k in enumerate(held)}
    return LayerView(
        len(stages_of),
        tuple(stacks),
        ends,
        {"stages": [*map(unflatten_mapping, stages)]} | tree,
        tuple(places[k] for k in range(len(places))),
    )


def _ends(pipe: Any, mask: Sequence[bool] | None) -> tuple[End, ...]:
    """The arrays of embed and head, or those of a mask."""
    params = nnx.state(pipe.ends, nnx.Param)
    tables = find_tables(params, pipe.ends, pipe.plan.shared)
    words = {tables.embed: tables.embed_words, tables.head: tables.head_words}
    found = []
    for n, (path, variable) in enumerate(nnx.to_flat_state(params)):
        shape = tuple(variable.shape)
        own = (words[n], *shape[1:]) if n in words else shape
        if mask is None or mask[n]:
            found.append(End(tuple(path), own, shape, spread_of(variable, ())))
    return tuple(found)


def _slots(
    chunk: nnx.Module,
    held: Sequence[int],
    flat: Sequence[tuple[Path, Any]],
    masks: Sequence[Sequence[bool] | None],
) -> list[tuple[Slot, ...]]:
    """What lies in each array of a chunk.

    Args:
      chunk: the chunk.
      held: the stage of each rank.
      flat: paths and variables of the arrays.
      masks: [S] which of a stage's leaves count; None for all.
    """
    found: list[dict[Spot | None, list[tuple[int, Name]]]] = [{} for _ in flat]
    for rank, (k, mask) in enumerate(zip(held, masks, strict=True)):
        spots: Sequence[Spot | None] = [None] * len(flat)
        cells, paths = list(range(len(flat))), [tuple(path) for path, _ in flat]
        if isinstance(chunk, Overlaid):
            view = chunk.views[rank].params
            numbers: Any = jax.tree.unflatten(view.treedef, range(view.treedef.num_leaves))
            own = nnx.to_flat_state(numbers)
            spots = here = [view.spots[raw(number)] for _, number in own]
            cells, paths = [spot.cell for spot in here], [tuple(path) for path, _ in own]
        for n, (cell, spot, path) in enumerate(zip(cells, spots, paths, strict=True)):
            if mask is None or mask[n]:
                found[cell].setdefault(spot, []).append((rank, (k, path)))
    shapes = [tuple(variable.shape[1:]) for _, variable in flat]
    return [
        tuple(Slot(s, shape if s is None else s.shape, tuple(names)) for s, names in cell.items())
        for shape, cell in zip(shapes, found, strict=True)
    ]


def to_layers(pipe: Any, tree: Tree) -> Layers:
    """What `Pipeline.to_layers` returns."""
    order, view = layout_name(pipe.schedule.stages_of), layer_view(pipe)
    if not _has_all(tree, [s.path for s in view.stacks] + [("ends", *e.path) for e in view.ends]):
        view = layer_view(pipe, trained=True)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for other in {metadata(x).get(LAYERS, order) for x in leaves} - {order}:
        raise ValueError(
            f"to_layers was given a tree that holds layers as {other}, and the pipeline holds them "
            f"as {order}; call the method of the pipeline whose tree it is"
        )

    def one(ref: Ref | EndRef) -> Any:
        if isinstance(ref, EndRef):
            end = view.ends[ref.end]
            leaf = found_in(tree, ("ends", *end.path))
            return end.cut(leaf) if getattr(leaf, "shape", None) == end.stored else leaf
        stack = view.stacks[ref.stack]
        slot, leaf = stack.slots[ref.slot], found_in(tree, stack.path)
        if not hasattr(leaf, "shape"):  # a label, of all that lies there
            return leaf
        shape = tuple(leaf.shape)
        if shape[:1] != (view.ranks,) or (slot.spot is not None and shape[1:] != stack.row):
            wanted = view.ranks, *(stack.row if slot.spot is not None else ("...",))
            raise ValueError(
                f"to_layers: {_text(stack.path)} has the shape {shape}; an array at this place "
                f"holds the layers of {view.ranks} ranks: ({', '.join(map(str, wanted))})"
            )
        part = row_of(leaf, ref.rank)
        if slot.spot is None:
            return part
        if isinstance(part, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(slot.shape, part.dtype)
        return slot.spot.read(part)

    return jax.tree.map(one, view.tree)


def from_layers(pipe: Any, layers: Layers) -> nnx.State[Any, Any]:
    """What `Pipeline.from_layers` returns."""
    view = layer_view(pipe)
    _check_layers(view, layers)
    stages = dict(enumerate(layers["stages"]))
    names = [(k, *p) for x in view.stacks for slot in x.slots for _, (k, p) in slot.names]
    if not (_has_all(stages, names) and _has_all(layers, [end.path for end in view.ends])):
        view = layer_view(pipe, trained=True)
    variables = dict(nnx.to_flat_state(nnx.state(pipe, nnx.Param)))
    found = []
    for stack in view.stacks:
        leaves = {
            (rank, slot): found_in(layers["stages"][k], path)
            for slot in stack.slots
            for rank, (k, path) in slot.names
        }
        found.append((stack.path, _joined(pipe.mesh, view, stack, leaves)))
    for end in view.ends:
        leaf = found_in(layers, end.path)
        if getattr(leaf, "shape", None) == end.shape:
            leaf = _placed(end.fill(leaf), NamedSharding(pipe.mesh, end.spread.stored))
        found.append((("ends", *end.path), leaf))
    return nnx.from_flat_state(
        [(p, variables[p].replace(x) if hasattr(x, "shape") else x) for p, x in found]
    )


def _has_all(tree: Tree, paths: Iterable[Path]) -> bool:
    """Whether a tree has leaves at all of some paths."""
    try:
        for path in paths:
            found_in(tree, path)
    except ValueError:
        return False
    return True


def _check_layers(view: LayerView, layers: Any) -> None:
    """See that it is a tree of the pipeline's layers."""
    wanted = len(view.tree["stages"])
    if not (isinstance(layers, Mapping) and layers.keys() == view.tree.keys()):
        said = sorted(layers) if isinstance(layers, Mapping) else type(layers).__name__
        raise ValueError(
            f"from_layers was given {said}; give the layer view, a dictionary of "
            f"{', '.join(map(repr, view.tree))} as pipe.to_layers(tree) returns it"
        )
    if len(layers["stages"]) != wanted:
        raise ValueError(
            f"from_layers was given {len(layers['stages'])} stages, the pipeline has {wanted}; "
            f"give one tree for each, in layer order"
        )


def _joined(
    mesh: Any, view: LayerView, stack: Stack, leaves: Mapping[tuple[int, Slot], Any]
) -> Any:
    """What a stack holds, of its layers' leaves."""
    values = list(leaves.values())
    if not any(hasattr(leaf, "shape") for leaf in values):
        if any(leaf != values[0] for leaf in values):
            raise ValueError(
                f"from_layers: {_text(stack.path)} is one array for layers of which some have "
                f"{values[0]!r} and others {next(x for x in values if x != values[0])!r}; give "
                f"what differs between layers to make_optimizer, whose masks and labels are trees "
                f"of layers"
            )
        return values[0]
    rows: list[Any] = [None] * view.ranks
    for (rank, slot), leaf in leaves.items():
        if slot.spot is not None and tuple(leaf.shape) != slot.shape:
            raise ValueError(
                f"from_layers: a layer's leaf of {_text(stack.path)} has the shape "
                f"{tuple(leaf.shape)}, its parameter {slot.shape}; stages that are not alike share "
                f"storage, in which there is room for leaves of the parameters' shapes"
            )
        if slot.spot is None:
            rows[rank] = leaf
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            rows[rank] = jax.ShapeDtypeStruct(stack.row, leaf.dtype)
        else:
            before = jnp.zeros(stack.row, leaf.dtype) if rows[rank] is None else rows[rank]
            rows[rank] = slot.spot.fill(before, leaf)
    like = next(row for row in rows if row is not None)
    rows = [jnp.zeros(like.shape, like.dtype) if row is None else row for row in rows]
    if len({(tuple(row.shape), row.dtype) for row in rows}) > 1:
        texts = dict.fromkeys(map(shape_text, rows))
        raise ValueError(
            f"from_layers: {_text(stack.path)} is one array, its layers have {', '.join(texts)}; "
            f"give leaves of one shape and dtype"
        )
    is_like = tuple(like.shape) == stack.row
    spec = stack.spread.stored if is_like else PartitionSpec(STAGE)
    return stack_rows(rows, NamedSharding(mesh, spec))


def _placed(array: Any, sharding: NamedSharding) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    if isinstance(array, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return distribute(array, sharding)


def _text(path: Path) -> str:
    return ".".join(map(str, path))


def found_in(tree: Tree, path: Path) -> Any:
    """What a tree of mappings has at a path, out of its variable if it is one's.

    Raises:
      ValueError: nothing.
    """
    node = raw(tree)
    for name in path:
        names = [one for one in (name, str(name)) if isinstance(node, Mapping) and one in node]
        if not names:
            raise ValueError(
                f"a tree has no leaf {'.'.join(map(str, path))}; give one that is shaped like the "
                f"pipeline's parameters: nnx.state(pipe, nnx.Param), gradients, moments"
            )
        node = raw(node[names[0]])
    return node
