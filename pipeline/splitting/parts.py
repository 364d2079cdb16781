"""The modules that a cut model becomes: stages that call blocks, and parts run as equations."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

from collectives.compat import varying_in
from pipeline.base.rows import batch_part
from pipeline.base.tree import Tree
from pipeline.splitting.placing import PlacedBlock, place
from pipeline.splitting.recording import Path, dotted
from pipeline.splitting.regular import BlockTemplate, Regular, find_regular
from pipeline.splitting.tracing import MODES, Modes, Recipe, Trace, Types, text_of, typed, types_of


@dataclass(frozen=True)
class Message:
    """A message from one part to the next.

    Attributes:
      values: activations, and values of earlier parts that later parts need.
      types: types of the model's inputs, for the rows of ``values``.
      dtype: the dtype of parameters, if the pipeline keeps or casts parameters in another dtype
        than the model's.
    """

    values: tuple[Any, ...]
    types: Types
    dtype: Any = None


jax.tree_util.register_dataclass(Message, data_fields=["values"], meta_fields=["types", "dtype"])


class SplitCut:
    """A model's call, cut into parts and traced for inputs of each type.

    It is equal only to itself; the stages of one model share it.

    Attributes:
      tables: for each stage, embed and head (in this order), a dict from a variable's path in that
        part to its path in the model.
    """

    def __init__(self, recipe: Recipe, counts: Sequence[int], *, is_regular: bool) -> None:
        self.recipe = recipe
        self.counts = tuple(counts)
        self.is_regular = is_regular
        self.tables: list[dict[Path, Path]] = []
        self._known: dict[Any, tuple[Trace, PlacedBlock | Regular]] = {}

    @property
    def last(self) -> int:
        """The number of the head's part."""
        return len(self.counts) + 1

    def place(self, trace: Trace, counts: Sequence[int]) -> PlacedBlock:
        return place(trace, counts, self.recipe.kinds, self.recipe.loose)

    def at(
        self,
        types: Types,
        modes: Modes,
        dtype: Any,
        held: Mapping[Path, Any],
        values: Sequence[Any],
    ) -> tuple[Trace, PlacedBlock | Regular]:
        """Return the call on inputs of these types, with the running part's variables and arrays.

        Raises:
          ValueError: the model calls its blocks in another way than with the example.
        """
        mesh = jax.sharding.get_abstract_mesh()
        config = jax.config.jax_numpy_dtype_promotion, jax.config.jax_enable_x64  # type: ignore[attr-defined]
        varying = [frozenset(varying_in(x)) for x in (*jax.tree.leaves([*held.values()]), *values)]
        common = frozenset.intersection(*varying) if varying else frozenset[str]()
        state = self.recipe.state_on_rank(held, dtype, common)
        key = types, modes, state, common, jax.tree.structure(batch_part()), mesh, config
        if key in self._known:
            return self._known[key]
        trace = self.recipe.trace([typed(*one, common) for one in types], modes, state)
        if len(trace.calls) != sum(self.counts):
            raise ValueError(
                f"on inputs of {text_of(types)} the model calls {len(trace.calls)} blocks, and "
                f"{sum(self.counts)} on the example that it was split by: split it by an "
                f"example of that kind"
            )
        found: PlacedBlock | Regular
        if self.is_regular:
            regular = find_regular(trace, lambda counts: self.place(trace, counts))
            if isinstance(regular, str):
                raise ValueError(
                    f"on inputs of {text_of(types)} the model calls its blocks differently than on "
                    f"the example that it was split by ({regular}): split it by an example "
                    f"of that kind"
                )
            found = regular
        else:
            found = self.place(trace, self.counts)
        # The trace of a layer that leaves padding out contains the mask of this one call.
        if not any(isinstance(value, jax.core.Tracer) for value in trace.constants.values()):
            self._known[key] = trace, found
        return trace, found

    def ends_of(self, number: int, found: PlacedBlock | Regular) -> tuple[Any, Any, Any]:
        """Return a part's inputs, outputs and equations with effects, if it runs as equations."""
        trace = (found.placed if isinstance(found, Regular) else found).trace
        if isinstance(found, Regular):
            effects = found.placed.effects
            if number:
                return (*found.last, *found.carried), trace.outs, effects[-1]
            return (), (*found.first, *found.carried), effects[0]
        sent = found.messages[number - 1] if number else ()
        sends = trace.outs if number == self.last else found.messages[number]
        return sent, sends, found.effects[number]

    def writes(self, number: int, found: PlacedBlock | Regular) -> dict[Path, tuple[Any, ...]]:
        """Return the values that a part writes to the model's state, without random streams."""
        placed = found.placed if isinstance(found, Regular) else found
        if isinstance(found, Regular) and number:
            number = len(placed.trace.calls) + 1
        kinds = self.recipe.kinds
        return {
            path: atoms
            for path, atoms in placed.trace.written.items()
            if not isinstance(kinds[path], nnx.RngState)
            and any(placed.part.get(atom) == number for atom in atoms)
        }


def hold(variables: Mapping[Path, Any]) -> nnx.Dict[Any]:
    """Make a module that holds variables by their paths."""
    found: nnx.Dict[Any] = nnx.Dict()
    for path, variable in variables.items():
        node = found
        for name in map(str, path[:-1]):
            if name not in node:
                node[name] = nnx.Dict()
            node = node[name]
        node[str(path[-1])] = variable
    return found


def held_by(module: nnx.Dict[Any], paths: Sequence[Path]) -> dict[Path, Any]:
    return {
        path: functools.reduce(lambda node, name: node[str(name)], path, module) for path in paths
    }


class SplitPart(nnx.Module):
    """A part of a model that runs as equations, with the variables that the part uses.

    Args:
      number: the number of the part: 0 is embed, 1 to K are stages, K + 1 is the head.
      modes: names of the modes that modules of the model have.
    """

    def __init__(
        self, cut: SplitCut, number: int, variables: Mapping[Path, Any], modes: Sequence[str]
    ) -> None:
        self.cut = cut
        self.number = number
        self.paths = tuple(variables)
        for name in modes:
            setattr(self, name, None)  # the model's value; train() and eval() set it
        self.of_model = hold(variables)  # checkpoints contain this name

    def __call__(self, given: Any, **extras: Tree) -> Any:
        """Run the part: embed takes inputs, other parts a message; the head returns outputs."""
        recipe, held = self.cut.recipe, held_by(self.of_model, self.paths)
        modes = tuple(
            (name, getattr(self, name)) for name in MODES if getattr(self, name, None) is not None
        )
        dtype = recipe.other_dtype(held)
        if self.number:
            types, sent = given.types, given.values
            dtype = given.dtype if dtype is None else dtype
            inputs = recipe.found_in(extras)
        else:
            leaves = recipe.leaves_of(given)
            types, sent = types_of(leaves), ()
            inputs = dict(enumerate(leaves))
        trace, found = self.cut.at(types, modes, dtype, held, [*sent, *inputs.values()])
        arrives, sends, effects = self.cut.ends_of(self.number, found)
        # A pipeline may have cast the message.
        known = {
            var: value if value.dtype == var.aval.dtype else value.astype(var.aval.dtype)
            for var, value in zip(arrives, sent, strict=True)
            if not isinstance(var, Literal)
        }
        known.update((trace.inputs[n], value) for n, value in inputs.items())
        for path, variable in held.items():
            known.update(zip(trace.state[path], jax.tree.leaves(variable), strict=True))
        writes = self.cut.writes(self.number, found)
        wanted = [*sends, *(atom for atoms in writes.values() for atom in atoms)]
        try:
            values = trace.run(known, wanted, effects)
        except KeyError as error:
            raise ValueError(self._missing(trace, error.args[0], types, modes)) from None
        news = iter(values[len(sends) :])
        for path, atoms in writes.items():
            leaves = [next(news) for _ in atoms]
            tree = jax.tree.structure(held[path].get_raw_value())
            held[path].set_value(jax.tree.unflatten(tree, leaves))
        values = values[: len(sends)]
        if self.number == self.cut.last:
            return jax.tree.unflatten(trace.out_tree, values)
        return Message(tuple(values), types, dtype)

    def _missing(self, trace: Trace, var: Any, types: Types, modes: Modes) -> str:
        of = {v: f"its {dotted(path)}" for path, vs in trace.state.items() for v in vs}
        names = self.cut.recipe.names
        of |= {v: f"extras[{names[n]!r}]" for n, v in enumerate(trace.inputs)}
        mode = ", ".join(f"{name}={value}" for name, value in modes)
        return (
            f"on inputs of {text_of(types)}{f' with {mode}' if mode else ''} a part of the model "
            f"needs {of.get(var, 'a value')}, which it does not have: give extras as "
            f"parts.inputs() makes them, or split the model by an example of that kind"
        )


class Blocks(nnx.Module):
    """A stage of blocks that are called one after another.

    Args:
      blocks: the model's own blocks.
      templates: the arguments and results of each block's call.
      constants: by path, the model's state that blocks get as arguments, or from which such
        arguments are computed.
    """

    def __init__(
        self,
        blocks: Sequence[nnx.Module],
        templates: Sequence[BlockTemplate],
        cut: SplitCut,
        constants: Mapping[Path, Any],
    ) -> None:
        self.blocks = nnx.List(blocks)
        self.templates = tuple(templates)
        self.cut = cut
        self.paths = tuple(constants)
        self.constants = hold(constants)

    def __call__(self, given: Message, **extras: Tree) -> Message:
        """Run the blocks, and return the message after the last block."""
        if not self.templates:
            return given
        num_acts = len(self.templates[0].acts)
        acts, carried = list(given.values[:num_acts]), given.values[num_acts:]
        sides = self._sides(given, extras)
        for block, template in zip(self.blocks, self.templates, strict=True):
            values = {"act": acts, "carried": carried, "side": sides}
            args, kwargs = template.given.fill(
                [values[kind][number] for kind, number in template.sources]
            )
            returned = block(*args, **kwargs)
            found = template.returned.read(returned)
            acts = [found[at] for at in template.acts]
        return Message((*acts, *carried), given.types, given.dtype)

    def _sides(self, given: Message, extras: Mapping[str, Tree]) -> list[Any]:
        """Compute the arguments of every block that depend on inputs alone."""
        if not any(kind == "side" for one in self.templates for kind, _ in one.sources):
            return []
        recipe = self.cut.recipe
        held, inputs = held_by(self.constants, self.paths), recipe.found_in(extras)
        values = [*given.values, *inputs.values()]
        trace, found = self.cut.at(given.types, (), given.dtype, held, values)
        known = {trace.inputs[n]: value for n, value in inputs.items()}
        for path, variable in held.items():
            known.update(zip(trace.state[path], jax.tree.leaves(variable), strict=True))
        try:
            return [*map(jnp.asarray, trace.run(known, found.sides))]  # type: ignore[union-attr]
        except KeyError as error:
            names = [recipe.names[n] for n, var in enumerate(trace.inputs) if var is error.args[0]]
            raise ValueError(
                f"extras lack {' '.join(map(repr, names)) or 'something'}, which blocks need as an "
                f"input, or to compute one: give extras as parts.inputs() makes them"
            ) from None
