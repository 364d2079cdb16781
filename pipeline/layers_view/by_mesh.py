"""Compile a function whose arrays are on several meshes: programs for each mesh.

`jax.jit` accepts arrays of one set of devices. An optimizer updates each array separately, and the
updates share only numbers, such as a global norm. So the function is traced once, each equation
runs on the mesh of its arrays, and numbers are sent between meshes. A *part* is the code of one
mesh between two messages; each part is one compiled function.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.compat import trace_context
from collectives.everywhere import send_numbers
from collectives.transfer import elsewhere, waits
from pipeline.base.tree import Tree, shape_text
from pipeline.core.autodiff.jaxpr.evaluate import bind, evaluate, follow, operands, producers
from pipeline.core.autodiff.jaxpr.primitives import bodies, callee

Var = Any
Place = frozenset[Any] | None  # the devices of a mesh; None for a value without, such as a constant
SENT = 1024  # the largest size of an array that is sent from mesh to mesh
Key = tuple[int, Place]  # of a part: the number of messages before it, and its devices


class ByMesh:
    """A compiled function, like `jax.jit`'s, of arrays on several meshes.

    Under a trace the function is called directly.

    Args:
      donate_argnums: the arguments whose memory results may reuse.
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

    def __deepcopy__(self, memo: Any) -> ByMesh:
        """Return the same object, so that a copy of an optimizer shares the compiled programs."""
        return self

    def __call__(self, *args: Tree) -> Any:
        """Run the function; each result is on the mesh of its operands.

        Raises:
          ValueError: an equation reads large arrays of several meshes, or the function has effects.
        """
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._function(*args)
        key = treedef, trace_context(), *((jax.typeof(leaf), _place_of(leaf)) for leaf in leaves)
        if key not in self._programs:
            given = ([n in self._donated] * len(jax.tree.leaves(arg)) for n, arg in enumerate(args))
            donated = [is_donated for of_arg in given for is_donated in of_arg]
            self._programs[key] = _Program(self._function, args, donated, self._options)
        return self._programs[key](leaves)


@dataclass(frozen=True)
class _MeshPart:
    """The code that one mesh runs between two messages.

    Attributes:
      to: for each variable in ``sent`` the sharding that it gets on this mesh.
      kept: the variables that the part reads and must not overwrite.
      given: the variables that the part reads and whose memory its results may reuse.
      run: the function of (kept, given): compiled, if this process has devices of the mesh.
    """

    sent: list[Var]
    to: list[NamedSharding]
    kept: list[Var]
    given: list[Var]
    writes: list[Var]
    run: Callable[[list[Any], list[Any]], list[Any]]


class _Program:
    """A function compiled in parts, for arguments of given types and places.

    Args:
      args: the function's arguments; only their types and places are used.
      donated: for each leaf of ``args``, whether results may reuse the leaf's memory.
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
        # Not `jax.ShapeDtypeStruct`: without x64, a trace narrows its 64-bit dtypes.
        types = [ShapedArray(t.shape, t.dtype, weak_type=t.weak_type) for t in of_leaves]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*types)
        places = list(map(_place_of, leaves))
        for conds in (False, True):
            run = functools.partial(_run_inline, closed.jaxpr, closed.consts, conds=conds)
            self._closed = jax.make_jaxpr(lambda *values, run=run: _distinct(run(values)))(*types)
            self._keys, has_mixed_cond = self._find_keys(places)
            if not has_mixed_cond:
                break
        if self._closed.effects:
            raise ValueError(
                f"an update of arrays on several meshes (stage_meshes=) has the effects "
                f"{self._closed.effects}, as a callback such as jax.debug.print has, which belongs "
                f"to one program: leave it out"
            )
        self._tree = jax.tree.structure(shapes)
        meshes = [x.sharding.mesh for x in leaves if _place_of(x) is not None]
        self._everywhere = {frozenset(m.devices.flat): NamedSharding(m, P()) for m in meshes}
        self._devices = tuple(dict.fromkeys(d for m in meshes for d in m.devices.flat))
        jaxpr = self._closed.jaxpr
        self._made_by = producers(jaxpr)
        self._results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        given = {var for var, is_donated in zip(jaxpr.invars, donated, strict=True) if is_donated}
        self._parts = self._make_parts(given - {*self._results}, compiler_options)

    def _find_keys(self, places: Sequence[Place]) -> tuple[dict[Var, Key], bool]:
        """Assign each variable to the part that computes it; tell whether a cond mixes meshes.

        Arguments have the step -1, the number of messages before a part. Variables without a key,
        such as a mask made from one number, are computed in every part that reads them.
        """
        jaxpr, home = self._closed.jaxpr, next(filter(None, places), None)
        pairs = zip(jaxpr.invars, places, strict=True)
        keys: dict[Var, Key] = {var: (-1, place) for var, place in pairs if place is not None}
        numbers: dict[Var, set[Var]] = {}  # the sources of each variable without a key

        def step(place: Place, of: set[Var]) -> int:
            return max([0, *(keys[v][0] + (keys[v][1] != place) for v in of)])

        is_mixed = False
        for eqn in jaxpr.eqns:
            reads = {var: keys[var][1] for var in operands(eqn) if var in keys}
            of = {*reads}.union(*(numbers.get(var, ()) for var in operands(eqn)))
            found = self._place_of_equation(eqn, reads, home)
            arrays = {place for var, place in reads.items() if var.aval.ndim}
            is_mixed |= eqn.primitive.name == "cond" and len(arrays) > 1
            if found is None:
                numbers |= dict.fromkeys(eqn.outvars, of)
            else:
                keys |= dict.fromkeys(eqn.outvars, (step(found, of), found))
        results = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - {*jaxpr.invars}
        keys |= {v: (step(home, numbers[v]), home) for v in results - keys.keys()}
        return keys, is_mixed

    @staticmethod
    def _place_of_equation(eqn: Any, places: dict[Var, Place], home: Place) -> Place:
        """Return the place where an equation runs: the mesh of its largest array.

        The result is None for an equation that makes an array from single numbers, such as a mask:
        each part that needs the result runs it.
        """
        if eqn.primitive.name == "sharding_constraint":
            return frozenset(eqn.params["sharding"].device_set)
        atoms = [atom for atom in eqn.invars[1:] if not isinstance(atom, Literal)]
        cases = {var: places[var] for var in atoms if var in places}
        if eqn.primitive.name == "select_n" and cases:  # the place of its cases, not its predicate
            places = cases
        arrays = {var: place for var, place in places.items() if var.aval.ndim}
        large = {place: var.aval for var, place in arrays.items() if var.aval.size > SENT}
        if len(large) > 1 and eqn.primitive.name != "cond":
            first, second = map(shape_text, [*large.values()][:2])
            raise ValueError(
                f"{eqn.primitive.name} takes {first} and {second} of stages on different meshes "
                f"(stage_meshes=), between which up to {SENT:,} numbers pass, such as a norm: take "
                f"an optimizer that updates each array by itself, or mesh= for ranks of one shape"
            )
        of_ones = all(var.aval.size == 1 for var in places)
        if of_ones and (not places or any(var.aval.size != 1 for var in eqn.outvars)):
            return None
        if arrays:
            return arrays[max(arrays, key=lambda var: var.aval.size)]
        of_numbers = {*places.values()}
        return home if len(of_numbers) > 1 else next(iter(of_numbers))

    def _make_parts(self, donated: set[Var], compiler_options: Any) -> list[_MeshPart]:
        """Make the parts, each after the parts whose results it reads."""
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
            is_given = {*given}
            kept = [var for var in of if var not in is_given]

            def part_of_update(
                kept_values: list[Any],
                given_values: list[Any],
                names: list[Var] = [*kept, *given],  # noqa: B006  read only
                writes: list[Var] = writes,
            ) -> list[Any]:
                values = dict(zip(jaxpr.constvars, constants, strict=True))
                values |= zip(names, [*kept_values, *given_values], strict=True)
                return evaluate(jaxpr, values, writes)

            options: Any = {"donate_argnums": 1, "compiler_options": compiler_options}
            jitted = self._jitted(part_of_update, key[1], writes, options)
            sent = [var for var in of if self._keys.get(var, key)[1] != key[1]]
            to = [self._everywhere[key[1]] for _ in sent if key[1] is not None]
            parts.append(_MeshPart(sent, to, kept, given, writes, jitted))
        return [part for part in parts if part.writes]

    def _jitted(
        self, part: Callable[..., Any], place: Any, writes: Sequence[Var], options: Any
    ) -> Callable[..., list[Any]]:
        """Wrap a part for a place; where other processes hold it, return results elsewhere."""
        # A result of a sharding constraint has exactly that sharding, so that the arguments of the
        # next call have equal types. All processes have to know how numbers lie that are sent.
        whole: Any = self._everywhere.get(place)
        shardings = []
        for var, eqn in ((var, self._made_by[var]) for var in writes):
            is_named = eqn.primitive.name == "sharding_constraint"
            other = whole if var.aval.size <= SENT else None
            shardings.append(eqn.params["sharding"] if is_named else other)
        if whole is None or whole.mesh.local_devices:
            run = jax.jit(part, out_shardings=shardings, **options)
            is_waited = whole is not None and waits(whole.mesh)
            return (lambda *of: jax.block_until_ready(run(*of))) if is_waited else run
        pairs = zip((var.aval for var in writes), shardings, strict=True)
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=s or whole) for t, s in pairs]
        return lambda *_: list(map(elsewhere, types))

    def _reads(self, key: Key, makes: Sequence[Var]) -> list[Var]:
        """List the variables that a part reads from other parts and from the arguments."""
        jaxpr, made_by = self._closed.jaxpr, self._made_by
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
        values = dict(zip(self._closed.jaxpr.invars, leaves, strict=True))
        for part in self._parts:
            # One call for all arrays is ten times faster than one call for each.
            sent = send_numbers([values[v] for v in part.sent], part.to, self._devices)
            here = dict(zip(part.sent, sent, strict=True))
            kept, given = ([here.get(v, values[v]) for v in of] for of in (part.kept, part.given))
            values |= zip(part.writes, part.run(kept, given), strict=True)
        outputs = self._closed.jaxpr.outvars
        results = [jnp.asarray(v.val) if isinstance(v, Literal) else values[v] for v in outputs]
        return jax.tree.unflatten(self._tree, results)


def _run_inline(
    jaxpr: Any, constants: Sequence[Any], values: Sequence[Any], *, conds: bool
) -> list[Any]:
    """Run a jaxpr with calls inlined.

    With ``conds`` a cond is replaced too: all its branches run, and `select_n` selects the results.
    So each equation of a branch can run on the mesh of its arrays.
    """

    def run(eqn: Any, given: list[Any]) -> Sequence[Any]:
        if conds and eqn.primitive.name == "cond":
            which, *values = given
            results = [_run_inline(of.jaxpr, of.consts, values, conds=True) for of in bodies(eqn)]
            return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]
        body = callee(eqn)
        if body is None:
            return bind(eqn, *given)
        return _run_inline(body.jaxpr, body.consts, given, conds=conds)

    return follow(jaxpr, values, constants, lambda literal: literal.val, run)


def _distinct(results: Sequence[Any]) -> list[Any]:
    """Copy constants and repeated results, so that no two results share memory."""
    seen = set[int]()
    distinct = []
    for x in results:
        is_new = isinstance(x, jax.core.Tracer) and id(x) not in seen
        distinct.append(x if is_new else jnp.copy(x))
        seen.add(id(x))
    return distinct


def _place_of(x: Any) -> Place:
    """Return the devices of an array with a NamedSharding; None for any other value."""
    sharding = getattr(x, "sharding", None)
    return _devices(sharding) if isinstance(sharding, NamedSharding) else None


@functools.lru_cache(1024)
def _devices(sharding: NamedSharding) -> Place:
    return frozenset(sharding.device_set)
