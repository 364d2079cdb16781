"""`pipeline.split`: an unchanged model becomes embed, stages and head.

Letters: K stages, N rows of a batch.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from pipeline.base.arguments import is_whole, linen_remedy
from pipeline.base.tree import Tree, is_array, shape_text
from pipeline.base.variables import kind_text, raw, with_value
from pipeline.lint.outside import warn_of_parameters_read_from_outside
from pipeline.splitting.alone import find_changed
from pipeline.splitting.blocks import find_blocks
from pipeline.splitting.cutting import choose_counts
from pipeline.splitting.layouts import Layout
from pipeline.splitting.parts import Blocks, SplitCut, SplitPart
from pipeline.splitting.placing import PlacedBlock, costs_of_calls
from pipeline.splitting.recording import Slots, dotted, is_object, member
from pipeline.splitting.regular import Regular
from pipeline.splitting.tracing import MODES, Recipe, Trace, types_of_state


@dataclass(frozen=True, eq=False)
class Parts:
    """A model in parts, for ``Pipeline(**parts, num_microbatches=...)``.

    Attributes:
      stages: [K] modules.
      embed, head: modules, which share the parameters that both use.
      blocks: [K] the paths of the blocks that each stage calls.
      costs: [K] operations of each stage on the example; embed counts for the first stage and head
        for the last.
      why: empty if stages call the model's blocks themselves; else the reason why they run as
        equations.
      unused: paths of the model's parameters that the call does not use, so that no part has them.
    """

    stages: list[nnx.Module]
    embed: nnx.Module
    head: nnx.Module
    blocks: tuple[tuple[str, ...], ...]
    costs: tuple[float, ...]
    why: str
    unused: tuple[str, ...]
    _recipe: Recipe = field(repr=False)
    _extras: tuple[int, ...] = field(repr=False)
    _tables: Any = field(repr=False)  # for stages, embed and head

    def keys(self) -> tuple[str, ...]:
        """The names of the `Pipeline` options in these parts."""
        return "stages", "embed", "head"

    def __getitem__(self, name: str) -> Any:
        if isinstance(name, int):  # as `*parts` asks
            raise TypeError("parts are given by name: Pipeline(**parts, num_microbatches=M)")
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def inputs(self, *args: Any, **kwargs: Any) -> tuple[Tree, dict[str, Tree]]:
        """Convert the model's arguments to (inputs, extras) of a pipeline.

        Raises:
          ValueError: arguments that differ from the example's in more than the sizes of arrays.
        """
        given, leaves, _ = _read(self._recipe.call, args, kwargs)
        want = self._recipe.slots
        if given != want:
            raise ValueError(
                f"the model was split by an example of {_slots_text(want)}, and this is "
                f"{_slots_text(given)}: only arrays may differ; split the model by such an example"
            )
        names = self._recipe.names
        _check_rows(names, leaves)
        extras = {names[n]: leaves[n] for n in self._extras}
        if len(leaves) == 1:
            return leaves[0], extras
        return dict(zip(names, leaves, strict=True)), extras

    def to_layers(self, tree: Tree) -> dict[str, Any]:
        """Return the layer view (`Pipeline.to_layers`) of a tree like the model's parameters.

        ``nnx.update(pipe, pipe.from_layers(parts.to_layers(nnx.state(model, nnx.Param))))`` loads
        the model's weights. Paths that the tree lacks are missing in the layers too.
        """
        flat = {path: raw(variable) for path, variable in nnx.to_flat_state(tree)}
        *stages, embed, head = (
            unflatten_mapping({own: flat[path] for own, path in table.items() if path in flat})
            for table in self._tables
        )
        return {"stages": stages, "embed": embed, "head": head}

    def from_layers(self, layers: Mapping[str, Any]) -> nnx.State[Any, Any]:
        """Undo `to_layers`: a state of the model, of weights, gradients or moments.

        ``nnx.update(model, parts.from_layers(pipe.to_layers(nnx.state(pipe, nnx.Param))))`` gives a
        model the weights that its pipeline has learned.
        """
        parts = *layers["stages"], layers["embed"], layers["head"]
        kinds, found = self._recipe.kinds, {}
        for table, part in zip(self._tables, parts, strict=True):
            flat = {tuple(map(str, p)): raw(x) for p, x in flatten_mapping(part).items()}
            for own, path in table.items():
                if (value := flat.get(tuple(map(str, own)))) is not None:
                    found[path] = with_value(kinds[path], value)
        return nnx.from_flat_state(list(found.items()))

    def __str__(self) -> str:
        total = sum(self.costs) or 1.0
        lines = []
        for k, (names, cost) in enumerate(zip(self.blocks, self.costs, strict=True)):
            ends = ["embed"] * (k == 0), ["head"] * (k == len(self.stages) - 1)
            lines.append(
                f"stages[{k}]  {100 * cost / total:5.1f}%  "
                f"{', '.join([*ends[0], *_short(names), *ends[1]])}"
            )
        how = f"run as equations: {self.why}" if self.why else "call the model's own blocks"
        unused = [f"unused: {', '.join(self.unused)}"] * bool(self.unused)
        return "\n".join([f"{len(self.stages)} stages that {how}", *lines, *unused])


def split(
    model: nnx.Module,
    num_stages: int,
    *args: Any,
    blocks: str | Sequence[str] | None = None,
    call: Callable[..., Any] | None = None,
    cut: Sequence[int] | Layout | None = None,
    costs: Sequence[float] | None = None,
    extras: Sequence[str] = (),
    **kwargs: Any,
) -> Parts:
    """Cut an unchanged model into stages between calls of its blocks.

    The model is called once on types to see how it calls its blocks; ``args`` and ``kwargs`` are
    arrays or types. Its operations before the first call of a block become embed, and its
    operations after the last call become the head. Nothing is run, and the model stays unchanged.
    Parts share its variables, until a `Pipeline` makes its own copies.

    If each block is called on the previous block's result, and otherwise on the same values as all
    others, a stage calls the blocks themselves. Else (skips, cross attention, work between blocks)
    a stage runs its part of the model's equations, traced anew for every size of microbatch.
    Messages then hold all values that later parts need. Both ways compute what the model computes,
    on each microbatch by itself.

    Args:
      model: the model; its weights may be types (`nnx.eval_shape`).
      num_stages: K.
      args: an example of the model's arguments. Arrays, or `jax.ShapeDtypeStruct`, have the batch
        as leading axis. Other arguments (None, flags) stay as they are.
      blocks: the path of a list of modules, or of numbered attributes, such as "layers" or "blocks"
        for ``blocks.0``; several paths for an encoder and a decoder. By default the outermost
        numbered modules are taken that are called often enough, without groups that have less than
        a twentieth of all operations.
      call: ``call(model, *args, **kwargs)``, if something else than the model's own ``__call__`` is
        to be trained: to leave arguments out, or to take logits from a tuple.
      cut: [K] the number of calls of blocks of each stage, or a layout such as "E|(t|)*10L"
        (docs/weights.md). By default the costliest stage is as cheap as possible.
      costs: cost of each call of a block, in the order of calls; by default operations are counted.
        The operations of embed and head are always counted, for the first and the last stage; give
        a cut to avoid this.
      extras: names of float arguments that go to stages as extras. Integers and booleans do so
        anyway; other floats travel in messages, so that they have a gradient.
      kwargs: keyword arguments of the example, like ``args``.

    Raises:
      TypeError: the model does not take these arguments.
      ValueError: the model has no blocks or too few, or cannot be cut; the error says why.
    """
    if not isinstance(model, nnx.Module):
        if remedy := linen_remedy(model):
            raise ValueError(f"model is {remedy}")
        raise ValueError(f"model is of type {type(model).__name__}: must be an nnx.Module")
    if not is_whole(num_stages, 1):
        raise ValueError(f"num_stages={num_stages!r}: must be a number of stages, 1 or more")
    if call is not None:
        warn_of_parameters_read_from_outside((), call=call)
    own, call = (model, operator.call) if call is None else (None, call)
    slots, leaves, names = _read(call, args, kwargs, own)
    _check_rows(names, leaves)
    loose = _loose(extras, names)
    graphdef, state = nnx.split(model)
    recipe = Recipe(graphdef, types_of_state(state), call, slots, names, (), loose)
    types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    found, trace, regular = find_blocks(model, recipe, types, num_stages, blocks)
    recipe.blocks = tuple(itertools.chain(*(group.paths for group in found)))
    counts = choose_counts(trace, num_stages, cut, costs, found)
    if isinstance(regular, Regular):
        regular = find_changed(model, trace, regular) or regular
    is_regular = isinstance(regular, Regular)
    cutting = SplitCut(recipe, counts, is_regular=is_regular)
    placed = regular if isinstance(regular, Regular) else cutting.place(trace, counts)
    _check_written(trace, recipe)
    return _parts(model, cutting, trace, placed, "" if is_regular else str(regular))


# --- arguments ---


def _read(
    call: Callable[..., Any], args: Any, kwargs: Any, model: Any = None
) -> tuple[Slots, list[Any], tuple[str, ...]]:
    """Read the structure, the arrays and the arrays' names from the arguments of a call."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_object)
    parameters = _parameters(call, model)
    slots, leaves, names = [], [], []
    for path, leaf in pairs:
        first, *rest = path[1:]
        if path[0].idx == 1:
            name = str(first.key)
        else:
            is_named = first.idx < len(parameters)
            name = parameters[first.idx] if is_named else f"args[{first.idx}]"
        name = ".".join([name, *(jax.tree_util.keystr((one,), simple=True) for one in rest)])
        if is_object(leaf):
            raise ValueError(
                f"{name} is of type {type(leaf).__name__}, a part of a model: what has state or "
                f"random streams belongs to the model itself; make the model with it (rngs=), or "
                f"leave it to call="
            )
        if is_array(leaf):
            leaves.append(leaf)
            names.append(name)
        slots.append(None if is_array(leaf) else (leaf,))
    return Slots(treedef, tuple(slots)), leaves, tuple(names)


def _parameters(call: Callable[..., Any], model: Any) -> list[str]:
    """Return the names of positional parameters, without the model."""
    function = type(model).__call__ if model is not None else call
    found = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [one.name for one in found if one.kind in kinds][1:]


def _check_rows(names: Sequence[str], leaves: Sequence[Any]) -> None:
    if not leaves:
        raise ValueError(
            "the model is given no array: give split an example of what it is called with, such "
            "as split(model, 4, tokens)"
        )
    for name, leaf in zip(names, leaves, strict=True):
        if not leaf.shape or leaf.shape[:1] != leaves[0].shape[:1]:
            raise ValueError(
                f"{name} is {shape_text(leaf)}, {names[0]} {shape_text(leaves[0])}: all arrays "
                f"have the batch as leading axis; repeat for each row what has none, or leave it "
                f"to call="
            )


def _loose(extras: Sequence[str], names: Sequence[str]) -> frozenset[int]:
    given = (extras,) if isinstance(extras, str) else tuple(extras)
    for name in given:
        if name not in names:
            raise ValueError(
                f"extras={name!r}: no array that the model is given has this name; they are "
                f"{', '.join(names)}"
            )
    return frozenset(n for n, name in enumerate(names) if name in given)


def _slots_text(slots: Slots) -> str:
    args, kwargs = slots.fill(["an array"] * slots.values)
    parts = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
    return f"({', '.join(parts)})"


# --- parts ---


def _check_written(trace: Trace, recipe: Recipe) -> None:
    """Check that every array that the model writes is a variable, which ``state=`` can name."""
    for path, kind in recipe.state:
        if path in trace.written and not isinstance(kind, nnx.Variable):
            raise ValueError(
                f"the model writes to its {kind_text(kind)} {dotted(path)} when it is called: "
                f"make it an nnx.Variable, and declare it by Pipeline(state=...)"
            )


def _parts(
    model: nnx.Module, cut: SplitCut, trace: Trace, found: PlacedBlock | Regular, why: str
) -> Parts:
    variables = {path: member(model, path) for path in trace.state}
    paths_of = {var: path for path, held in trace.state.items() for var in held}
    number_of = {var: n for n, var in enumerate(trace.inputs)}
    modes = [
        name for name in MODES if any(hasattr(one, name) for _, one in nnx.iter_modules(model))
    ]
    needed: set[int] = set()

    def part(number: int) -> SplitPart:
        arrives, sends, effects = cut.ends_of(number, found)
        writes = cut.writes(number, found)
        wanted = [*sends, *(atom for atoms in writes.values() for atom in atoms)]
        roots = trace.roots(arrives, wanted, effects)
        if 0 < number < cut.last:
            needed.update(number_of[var] for var in roots if var in number_of)
        used = {paths_of[var] for var in roots if var in paths_of} | set(writes)
        streams = {
            path
            for path in trace.state
            if any(path[:-1] == one[:-1] for one in used if _is_stream(variables[one]))
            and _is_stream(variables[path])
        }
        return SplitPart(
            cut, number, {p: variables[p] for p in variables if p in used | streams}, modes
        )

    ends = [0, *itertools.accumulate(cut.counts)]
    stages: list[nnx.Module] = []
    if isinstance(found, Regular):
        roots = trace.roots((), found.sides)
        needed.update(number_of[var] for var in roots if var in number_of)
        constants = {paths_of[var]: variables[paths_of[var]] for var in roots if var in paths_of}
        for start, stop in itertools.pairwise(ends):
            own = [member(model, call.path) for call in trace.calls[start:stop]]
            stages.append(Blocks(own, found.templates[start:stop], cut, constants))
    else:
        stages = [part(number) for number in range(1, cut.last)]
    embed, head = part(0), part(cut.last)
    costs, before, behind = costs_of_calls(trace)
    of_stages = [sum(costs[start:stop]) for start, stop in itertools.pairwise(ends)]
    of_stages[0] += before
    of_stages[-1] += behind
    calls = [dotted(call.path) for call in trace.calls]
    blocks = tuple(tuple(calls[start:stop]) for start, stop in itertools.pairwise(ends))
    ids = {id(node): path for path, node in variables.items()}
    # For each part, the path in the part to the path in the model.
    tables = cut.tables = [
        {path: ids[id(node)] for path, node in nnx.iter_graph(one) if id(node) in ids}
        for one in (*stages, embed, head)
    ]
    of_parts = {path for table in tables for path in table.values()}
    unused = tuple(
        dotted(path)
        for path, node in variables.items()
        if isinstance(node, nnx.Param) and path not in of_parts
    )
    return Parts(
        stages=stages,
        embed=embed,
        head=head,
        blocks=blocks,
        costs=tuple(of_stages),
        why=why,
        unused=unused,
        _recipe=cut.recipe,
        _extras=tuple(sorted(needed)),
        _tables=tables,
    )


def _is_stream(variable: Any) -> bool:
    return isinstance(variable, nnx.RngState)


def _short(names: Sequence[str]) -> Iterator[str]:
    """Shorten names to ``layers.0-3`` for each run of numbers."""
    runs: list[tuple[str, int, int]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if number.isdigit() and runs and runs[-1][0] == stem and runs[-1][2] + 1 == int(number):
            runs[-1] = stem, runs[-1][1], int(number)
        elif number.isdigit():
            runs.append((stem, int(number), int(number)))
        else:
            runs.append((name, -1, -1))
    for stem, first, last in runs:
        yield stem if first < 0 else f"{stem}.{first}" + (f"-{last}" if last > first else "")
