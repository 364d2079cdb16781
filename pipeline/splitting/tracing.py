"""A model's call as equations, for inputs of any size, with the block's call of each equation.

A recipe describes how a model is called. With it the model is traced anew for every size of a
microbatch, so no part depends on the size of the example.

An `Equation` is no `Step` of `pipeline.core.autodiff.jaxpr`. Steps are read after differentiation
and inline every call, but a part of a model must keep its `jax.checkpoint` and custom derivatives
whole.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from collectives import DATA, STAGE
from collectives.compat import discharged, varying_in
from collectives.tensor import group_size, is_manual
from pipeline.base.axes import axes_in
from pipeline.base.tree import shape_text
from pipeline.base.variables import axis_names, kind_text
from pipeline.facade import Attributes, bind, jaxprs_of, makes_ref
from pipeline.splitting.recording import BlockRecorder, Call, Path, dotted, mark_p, member

Types = tuple[tuple[tuple[int, ...], Any], ...]  # (shape, dtype) of each input
StateTypes = tuple[tuple[Any, ...], ...]  # for each variable of state: types of its leaves
Modes = tuple[tuple[str, bool], ...]  # attributes that train() and eval() set
MODES = "deterministic", "use_running_average"


class HiddenCallError(ValueError):
    """A block is called where the model cannot be cut."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, eq=False)
class Equation:
    """One equation of a model's call.

    Attributes:
      reads: the equation's operands: variables, or literals.
      call: the call of a block that the equation belongs to, or None.
      after: the number of calls that had begun before the equation.
    """

    eqn: Any
    reads: tuple[Any, ...]
    call: int | None
    after: int

    @property
    def vars(self) -> list[Any]:
        return [atom for atom in self.reads if not isinstance(atom, Literal)]


@dataclass(frozen=True, eq=False)
class Trace:
    """The trace of a model's call.

    Attributes:
      given: [calls] the atoms that each call gets.
      returned: [calls] the atoms that each call returns.
      held: [calls] the atoms that the block's variables hold before and after the call.
      state: path of a variable to the atoms of its leaves.
      inputs: the variable of each given array.
      constants: variables whose values are known.
      written: path to the atoms that the model writes to the variable, if they differ from the old
        values.
    """

    equations: tuple[Equation, ...]
    calls: tuple[Call, ...]
    given: tuple[tuple[Any, ...], ...]
    returned: tuple[tuple[Any, ...], ...]
    held: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]
    state: Mapping[Path, tuple[Any, ...]]
    inputs: tuple[Any, ...]
    constants: Mapping[Any, Any]
    outs: tuple[Any, ...]
    out_tree: Any
    written: Mapping[Path, tuple[Any, ...]]

    def run(
        self,
        known: Mapping[Any, Any],
        wanted: Iterable[Any],
        effects: Collection[Equation] = (),
    ) -> list[Any]:
        """Compute the values of atoms by the needed equations, and run the equations with effects.

        Raises:
          KeyError: a needed variable is neither known nor computed by an equation.
        """
        env, wanted = {**self.constants, **known}, list(wanted)
        chosen, missing = self._chosen(env, wanted, effects)
        for var in missing:
            raise KeyError(var)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for one in chosen:
            found = bind(one.eqn, *map(read, one.reads))
            for var, value in zip(one.eqn.outvars, found, strict=True):
                env.setdefault(var, value)
        return [read(atom) for atom in wanted]

    def roots(
        self, known: Iterable[Any], wanted: Iterable[Any], effects: Collection[Equation] = ()
    ) -> set[Any]:
        """Return the variables that `run` needs and neither ``known`` nor an equation provides."""
        given = {atom for atom in known if not isinstance(atom, Literal)}
        return self._chosen(given.union(self.constants), wanted, effects)[1]

    def _chosen(
        self, known: Collection[Any], wanted: Iterable[Any], effects: Collection[Equation]
    ) -> tuple[list[Equation], set[Any]]:
        """Return the equations to run, and the variables that no equation computes."""
        needed = {a for a in wanted if not isinstance(a, Literal) and a not in known}
        chosen = []
        for one in reversed(self.equations):
            if one in effects or needed.intersection(one.eqn.outvars):
                chosen.append(one)
                needed.difference_update(one.eqn.outvars)
                needed.update(var for var in one.vars if var not in known)
        return chosen[::-1], needed


def types_of_state(state: Any) -> tuple[tuple[Path, Any], ...]:
    """Return (path, variable of types) for all the state of a module."""

    def typed(variable: Any) -> Any:
        types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(variable)]
        return jax.tree.unflatten(jax.tree.structure(variable), types)

    return tuple((path, typed(variable)) for path, variable in nnx.to_flat_state(state))


@dataclass(eq=False)
class Recipe:
    """The way a model is called; equal only to itself.

    Attributes:
      state: (path, variable of types) for all the model's state.
      call: ``call(model, *args, **kwargs)``.
      slots: (args, kwargs) of the example.
      names: names of the arrays in the example, for errors and extras.
      loose: numbers of float inputs that are passed as extras, without a gradient.
    """

    graphdef: Any
    state: tuple[tuple[Path, Any], ...]
    call: Callable[..., Any]
    slots: Any
    names: tuple[str, ...]
    blocks: tuple[Path, ...]
    loose: frozenset[int] = frozenset()

    @functools.cached_property
    def kinds(self) -> dict[Path, Any]:
        """A mapping from path to variable of types."""
        return dict(self.state)

    def leaves_of(self, given: Any) -> list[Any]:
        """Return the arrays of inputs, as `Parts.inputs` makes them."""
        if isinstance(given, dict) and set(given) == set(self.names):
            return [given[name] for name in self.names]
        leaves = jax.tree.leaves(given)
        if len(leaves) != 1 or len(self.names) != 1:
            raise ValueError(
                f"inputs are {len(leaves)} arrays, and the model was split by {len(self.names)}: "
                f"{', '.join(self.names)}; give inputs as parts.inputs() makes them"
            )
        return leaves

    def found_in(self, extras: Mapping[str, Any]) -> dict[int, Any]:
        """Return the inputs that are passed as extras, by their number."""
        return {n: extras[name] for n, name in enumerate(self.names) if name in extras}

    def state_on_rank(
        self, held: Mapping[Path, Any], dtype: Any, varying: frozenset[str]
    ) -> StateTypes:
        """Return the types of all state on a rank, with parts of arrays sharded over manual axes.

        Args:
          held: path to variable of a part; other variables have the types in their metadata.
          dtype: the dtype of float parameters, if it is not the model's.
          varying: manual axes over which every value varies; empty if types do not track that.
        """
        return tuple(
            tuple(
                typed(leaf.shape, leaf.dtype, varying_in(leaf))
                for leaf in jax.tree.leaves(held[path])
            )
            if path in held
            else tuple(
                _on_rank(leaf, variable, dtype, varying) for leaf in jax.tree.leaves(variable)
            )
            for path, variable in self.state
        )

    def other_dtype(self, held: Mapping[Path, Any]) -> Any:
        """Return the dtype to which a pipeline has cast float parameters; None if it has not."""
        for path, variable in held.items():
            if isinstance(variable, nnx.Param):
                was = jax.tree.leaves(self.kinds[path])
                for one, old in zip(jax.tree.leaves(variable), was, strict=True):
                    if one.dtype != old.dtype:
                        return one.dtype
        return None

    def trace(
        self, types: Sequence[Any], modes: Modes = (), state: StateTypes | None = None
    ) -> Trace:
        """Trace the model's call on inputs of these types, by default with the model's whole state.

        ``state`` is the result of `state_on_rank`.

        Raises:
          ValueError: the model makes new state, or blocks are called where the model cannot be cut
            (`HiddenCallError`).
        """
        recorder = BlockRecorder({})
        trees: dict[str, Any] = {}
        leaves = [jax.tree.flatten(variable) for _, variable in self.state]

        def run(values: list[list[Any]], inputs: list[Any]) -> Any:
            flat = [
                (path, jax.tree.unflatten(treedef, new))
                for (path, _), (_, treedef), new in zip(self.state, leaves, values, strict=True)
            ]
            model = nnx.merge(self.graphdef, nnx.from_flat_state(flat), copy=True)
            if modes:
                model.set_attributes(**dict(modes), raise_if_not_found=False)
            modules = [member(model, path) for path in self.blocks]
            recorder.paths |= {
                id(one): path for one, path in zip(modules, self.blocks, strict=True)
            }
            args, kwargs = self.slots.fill(inputs)
            attributes = Attributes(model)
            with recorder.watching(modules):
                found = self.call(model, *args, **kwargs)
            attributes.check("the model")
            outs, trees["out"] = jax.tree.flatten(found)
            after = dict(nnx.to_flat_state(nnx.state(model)))
            for path, variable in after.items():
                if path not in self.kinds:
                    raise ValueError(
                        f"the model makes the {kind_text(variable)} {dotted(path)} when it is "
                        f"called, and a pipeline keeps no such state: return what is needed, or "
                        f"leave it out (sow: switch it off)"
                    )
            return outs, [jax.tree.leaves(after[path]) for path, _ in self.state]

        given = [found for found, _ in leaves] if state is None else [*map(list, state)]
        closed = jax.make_jaxpr(run)(given, list(types))
        if makes_ref(closed.jaxpr):  # a cut cannot pass a ref from one part to another
            closed = discharged(closed)
        counts = [len(found) for found, _ in leaves]
        return _read(closed, recorder.calls, self.state, counts, trees["out"])


def _on_rank(leaf: Any, variable: Any, dtype: Any, varying: frozenset[str]) -> Any:
    """Return the type of a leaf of state on a rank, from the metadata of its variable."""
    names = axis_names(variable)
    own = [
        [a for a in axes_in(entry) if is_manual(a) and a not in (STAGE, DATA)] for entry in names
    ]
    ranks = [math.prod(map(group_size, axes)) for axes in own]
    shape = [n // r for n, r in itertools.zip_longest(leaf.shape, ranks, fillvalue=1)]
    is_cast = dtype is not None and isinstance(variable, nnx.Param)
    is_cast = is_cast and jnp.issubdtype(leaf.dtype, jnp.floating)
    over = varying.union(*own) if varying else varying
    return typed(shape, dtype if is_cast else leaf.dtype, over)


def typed(shape: Sequence[int], dtype: Any, varying: Collection[str]) -> Any:
    """Return the type of an array that varies over manual axes."""
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    mesh = jax.sharding.get_abstract_mesh()
    where = NamedSharding(mesh, PartitionSpec())
    over = jax.sharding.ManualAxisType(varying=frozenset(varying))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where, manual_axis_type=over)


def _read(
    closed: Any, calls: Sequence[Call], state: Any, counts: Sequence[int], out_tree: Any
) -> Trace:
    jaxpr = closed.jaxpr
    alias: dict[Any, Any] = {}
    literals: dict[Any, Any] = {}
    begun: dict[int, tuple[Any, ...]] = {}
    ended: dict[int, tuple[Any, ...]] = {}
    equations, now = [], None

    def atom(one: Any) -> Any:
        if isinstance(one, Literal):  # one object for equal literals, as for variables
            weak = getattr(one.aval, "weak_type", False)
            return literals.setdefault((str(one.aval), weak, repr(one.val)), one)
        return alias.get(one, one)

    for eqn in jaxpr.eqns:
        reads = tuple(map(atom, eqn.invars))
        if eqn.primitive is not mark_p:
            equations.append(Equation(eqn, reads, now, len(begun)))
            continue
        number, is_begin = eqn.params["number"], eqn.params["way"] == "begin"
        (begun if is_begin else ended)[number] = reads
        now = number if is_begin else None
        alias.update(zip(eqn.outvars, reads, strict=True))
    for call in calls:
        if call.number not in ended:
            raise HiddenCallError(
                call.path,
                f"{dotted(call.path)} is called within a loop, a branch, or a function that jax or "
                f"nnx transform (scan, cond, jit, remat): a pipeline cuts between calls in plain "
                f"Python; name blocks that are called there, by blocks=, or let call= do it",
            )
    invars = iter(jaxpr.invars)
    of_state = {
        path: tuple(next(invars) for _ in range(n))
        for (path, _), n in zip(state, counts, strict=True)
    }
    outs = list(map(atom, jaxpr.outvars))
    new = iter(outs[out_tree.num_leaves :])
    written = {}
    for path, old in of_state.items():
        now_there = tuple(itertools.islice(new, len(old)))
        if any(one is not two for one, two in zip(now_there, old, strict=True)):
            written[path] = now_there
    given, returned, held_by = [], [], []
    for call in calls:
        a, b = call.given.values, call.returned.values
        before, after = begun[call.number], ended[call.number]
        given.append(before[:a])
        returned.append(after[:b])
        held_by.append((before[a:], after[b:]))
    return Trace(
        tuple(equations),
        tuple(calls),
        tuple(given),
        tuple(returned),
        tuple(held_by),
        of_state,
        tuple(invars),
        dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        tuple(outs[: out_tree.num_leaves]),
        out_tree,
        written,
    )


def types_of(leaves: Sequence[Any]) -> Types:
    """Return the types of leaves: the key under which traces are cached."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def text_of(types: Types) -> str:
    """Write types as text, such as ``int32[4,16], bool[4,16,16]``."""
    return ", ".join(shape_text(jax.ShapeDtypeStruct(*one)) for one in types)


# --- operations ---


def operations(eqn: Any) -> float:
    """Count an equation's operations: two per multiply-add, one per element of any other result."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [var.aval.shape for var in eqn.outvars if hasattr(var.aval, "shape")]
    made = float(sum(math.prod(shape) for shape in shapes))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * made * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out = params["dimension_numbers"].rhs_spec[0]
        return 2 * made * math.prod(kernel) / kernel[out]
    inner = [sum(map(operations, body.eqns)) for body in jaxprs_of(eqn)]
    if inner:
        times = params.get("length", 1) if name == "scan" else 1
        return float(times) * (max(inner) if name == "cond" else sum(inner))
    return made
