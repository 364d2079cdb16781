"""Functions of arrays that lie on several meshes, compiled for each.

`jax.jit` takes arrays of one set of devices. An optimizer's update, whose weights may lie on the
meshes of several ranks (``stage_meshes``), does the same for each array, and between arrays only
numbers pass: a global norm, a count, whether all is finite. So the function is traced once as a
whole, each equation runs on the mesh where its arrays lie, and numbers are sent. What runs on one
mesh between two such messages, a *part*, is one compiled function.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipeline.base.tree import Tree, shape_text
from pipeline.core.autodiff.jaxpr.evaluate import bind, evaluate, follow, operands, producers
from pipeline.core.autodiff.jaxpr.primitives import bodies, callee

Var = Any
Place = frozenset[Any] | None  # the devices of a mesh; None for what has none, such as a constant
SENT = 1024  # the most numbers of an array that is sent from mesh to mesh
Key = tuple[int, Place]  # of a part: how many messages come before it, and where it runs


class ByMesh:
    """A function as `jax.jit` makes it, but of arrays of several meshes.

    Within a trace it is the function itself.

    Args:
      function: of trees of arrays.
      donate_argnums: the arguments whose memory results may take.
      compiler_options: as of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        donate_argnums: Sequence[int] = (),
        compiler_options: Any = None,
    ) -> None:
        self._function, self._donated = function, {*donate_argnums}
        self._options = compiler_options
        self._programs: dict[Any, _Program] = {}

    def __call__(self, *args: Tree) -> Any:
        """The results, each on the mesh of the arrays that it is made of.

        Raises:
          ValueError: arrays of several meshes meet, or the function has effects.
        """
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._function(*args)
        key = treedef, *((jax.typeof(leaf), _place_of(leaf)) for leaf in leaves)
        if key not in self._programs:
            given = ([n in self._donated] * len(jax.tree.leaves(arg)) for n, arg in enumerate(args))
            donated = [is_donated for of_arg in given for is_donated in of_arg]
            self._programs[key] = _Program(self._function, args, donated, self._options)
        return self._programs[key](leaves)


@dataclass(frozen=True)
class _MeshPart:
    """A part of a function.

    Attributes:
      place: where it runs.
      kept, given: the variables that it reads, and those whose memory it may take.
      writes: the variables that it returns.
      run: it, of both.
    """

    place: Place
    kept: list[Var]
    given: list[Var]
    writes: list[Var]
    run: Callable[[list[Any], list[Any]], list[Any]]


class _Program:
    """The parts of a function for arguments of these types and places.

    Args:
      function: the function.
      args: its arguments, of which types and places count.
      donated: by leaf whether results may take its memory.
      compiler_options: as of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Tree],
        donated: Sequence[bool],
        compiler_options: Any,
    ) -> None:
        leaves, treedef = jax.tree.flatten(args)

        def flat(*leaves: Any) -> Any:
            return function(*jax.tree.unflatten(treedef, leaves))

        of_leaves = map(jax.typeof, leaves)
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in of_leaves]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*types)
        inline = functools.partial(_run_inline, closed.jaxpr, closed.consts)
        self._closed = jax.make_jaxpr(lambda *values: inline(values))(*types)
        if self._closed.effects:
            raise ValueError(
                f"an update of arrays on several meshes (stage_meshes=) has the effects "
                f"{self._closed.effects}, as a callback such as jax.debug.print has, which belongs "
                f"to one program: leave it out"
            )
        self._tree = jax.tree.structure(shapes)
        meshes = [x.sharding.mesh for x in leaves if _place_of(x) is not None]
        self._everywhere = {frozenset(m.devices.flat): NamedSharding(m, P()) for m in meshes}
        places, jaxpr = list(map(_place_of, leaves)), self._closed.jaxpr
        self._keys = self._find_keys(places)
        self._results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        given = {var for var, is_donated in zip(jaxpr.invars, donated, strict=True) if is_donated}
        self._parts = self._make_parts(given - {*self._results}, compiler_options)

    def _find_keys(self, places: Sequence[Place]) -> dict[Var, Key]:
        """By variable the part that makes it.

        Arguments are of step -1. A variable without a key, such as a mask that is made of one
        number, each part makes itself.
        """
        jaxpr, home = self._closed.jaxpr, next(filter(None, places), None)
        pairs = zip(jaxpr.invars, places, strict=True)
        keys: dict[Var, Key] = {var: (-1, place) for var, place in pairs if place is not None}
        numbers: dict[Var, set[Var]] = {}  # of which a variable without a key is made

        def step(place: Place, of: set[Var]) -> int:
            return max([0, *(keys[v][0] + (keys[v][1] != place) for v in of)])

        for eqn in jaxpr.eqns:
            reads = {var: keys[var][1] for var in operands(eqn) if var in keys}
            of = {*reads}.union(*(numbers.get(var, ()) for var in operands(eqn)))
            found = self._place_of_equation(eqn, reads, home)
            if found is None:
                numbers |= dict.fromkeys(eqn.outvars, of)
            else:
                keys |= dict.fromkeys(eqn.outvars, (step(found, of), found))
        results = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - {*jaxpr.invars}
        return keys | {v: (step(home, numbers[v]), home) for v in results - keys.keys()}

    @staticmethod
    def _place_of_equation(eqn: Any, places: dict[Var, Place], home: Place) -> Place:
        """Where an equation runs: on the mesh of its largest array.

        None for one that makes an array of single numbers, such as a mask: a part runs it where it
        needs the result.
        """
        if eqn.primitive.name == "sharding_constraint":
            return frozenset(eqn.params["sharding"].device_set)
        large = {place: var.aval for var, place in places.items() if var.aval.size > SENT}
        if len(large) > 1:
            first, second = map(shape_text, [*large.values()][:2])
            raise ValueError(
                f"{eqn.primitive.name} takes {first} and {second} of stages on different meshes "
                f"(stage_meshes=), between which up to {SENT:,} numbers pass, such as a norm: take "
                f"an optimizer that updates each array by itself, or mesh= for ranks of one shape"
            )
        largest = max(places, key=lambda var: var.aval.size, default=None)
        is_of_numbers = largest is None or largest.aval.size == 1
        if is_of_numbers and (largest is None or any(var.aval.size > 1 for var in eqn.outvars)):
            return None
        of_numbers = {*places.values()} if is_of_numbers else {places[largest]}
        return home if len(of_numbers) > 1 else next(iter(of_numbers))

    def _make_parts(self, donated: set[Var], compiler_options: Any) -> list[_MeshPart]:
        """The parts, each after those whose results it reads."""
        jaxpr, constants = self._closed.jaxpr, self._closed.consts
        makes: dict[Key, list[Var]] = defaultdict(list)
        for var in (var for eqn in jaxpr.eqns for var in eqn.outvars):
            if var in self._keys:
                makes[self._keys[var]].append(var)
        reads = {key: self._reads(key, makes[key]) for key in sorted(makes, key=lambda k: k[0])}
        wanted = {*self._results}.union(*reads.values())
        last = {var: key for key, of in reads.items() for var in of}
        parts = []
        for key, of in reads.items():
            writes = [var for var in makes[key] if var in wanted]
            given = [var for var in of if var in donated and last[var] == key]
            kept = [var for var in of if var not in {*given}]

            def run(
                kept_values: list[Any],
                given_values: list[Any],
                names: list[Var] = [*kept, *given],  # noqa: B006  read only
                writes: list[Var] = writes,
            ) -> list[Any]:
                values = dict(zip(jaxpr.constvars, constants, strict=True))
                values |= zip(names, [*kept_values, *given_values], strict=True)
                return evaluate(jaxpr, values, writes)

            jitted = jax.jit(run, donate_argnums=1, compiler_options=compiler_options)
            parts.append(_MeshPart(key[1], kept, given, writes, jitted))
        return [part for part in parts if part.writes]

    def _reads(self, key: Key, makes: Sequence[Var]) -> list[Var]:
        """The variables that a part needs of others and of the arguments."""
        jaxpr, made_by = self._closed.jaxpr, producers(self._closed.jaxpr)
        found: dict[Var, None] = {}
        seen, frontier = {*makes, *jaxpr.constvars}, list(makes)
        while frontier:
            for var in operands(made_by[frontier.pop()]):
                if var not in seen:
                    seen.add(var)
                    is_own = var in made_by and self._keys.get(var, key) == key
                    frontier += [var] if is_own else []
                    found |= {} if is_own else {var: None}
        return list(found)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The results."""
        values = dict(zip(self._closed.jaxpr.invars, leaves, strict=True))
        for part in self._parts:
            of_both = part.kept, part.given
            kept, given = ([self._at(values[v], part.place) for v in of] for of in of_both)
            values |= zip(part.writes, part.run(kept, given), strict=True)
        results = [
            v.val if isinstance(v, Literal) else values[v] for v in self._closed.jaxpr.outvars
        ]
        return jax.tree.unflatten(self._tree, results)

    def _at(self, value: Any, place: Place) -> Any:
        """A value where a part runs; a number of another mesh is sent."""
        is_here = _place_of(value) in (place, None)
        return value if is_here or place is None else jax.device_put(value, self._everywhere[place])


def _run_inline(jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Run a jaxpr with the equations of functions that it calls in place of the calls.

    Of a cond all branches run, each array where it lies, and one result is selected.
    """

    def run(eqn: Any, given: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "cond":
            which, *values = given
            results = [_run_inline(of.jaxpr, of.consts, values) for of in bodies(eqn)]
            return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]
        body = callee(eqn)
        return bind(eqn, *given) if body is None else _run_inline(body.jaxpr, body.consts, given)

    return follow(jaxpr, values, constants, lambda literal: literal.val, run)


def _place_of(x: Any) -> Place:
    """The devices of a mesh on which an array lies; None for an array that can be used anywhere."""
    sharding = getattr(x, "sharding", None)
    return frozenset(sharding.device_set) if isinstance(sharding, NamedSharding) else None
