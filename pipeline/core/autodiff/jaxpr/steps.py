"""A computation as a flat list of steps, which can be split.

Unlike a jaxpr's equation, a step may call any function, so half of a loop can replace the loop.
`pipeline.core.autodiff.jaxpr.reader` converts a jaxpr to steps.

Three other readers of jaxprs use other forms, because each drops facts that another needs: the
reader for splitting keeps calls whole, the reader for forecasts keeps only sizes, and the reader
for layerwise optimizers has one value for K rows of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from jax.extend.core import Literal


class Cost(IntEnum):
    """The cost of a step, without the cost of reading its operands.

    CHEAP steps are recomputed rather than stashed. LIGHT steps (reductions, random bits) run at
    most once, in the half that saves bytes. HEAVY steps (matrix products, unknown operations) run
    once, in the half that needs them.
    """

    CHEAP = 0
    LIGHT = 1
    HEAVY = 2


class Name:
    """The name of a value; ``aval`` is the value's type."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


Atom = Any  # a Name or a Literal


@dataclass(frozen=True, eq=False)
class JaxprBlock:
    """A list of steps with inputs and outputs.

    Attributes:
      steps: the steps in the order in which they run.
      constants: the values of names that are neither inputs nor results of steps.
    """

    inputs: tuple[Name, ...]
    steps: tuple[JaxprStep, ...]
    outs: tuple[Atom, ...]
    constants: dict[Name, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class JaxprLoop:
    """The body of a `scan`; its inputs are constants, then the carry, then slices."""

    body: JaxprBlock
    num_consts: int
    num_carry: int
    params: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Branches:
    """The branches of a `cond`; its step reads an index, then the branches' operands."""

    blocks: tuple[JaxprBlock, ...]


@dataclass(frozen=True, eq=False)
class JaxprStep:
    """One operation of a computation.

    Attributes:
      call: a function from the operands' values to the results' values.
      effect: whether the step has an effect (a print) other than adding to a ref among the block's
        inputs.
      through: whether result n equals operand n, so that each result can be computed alone.
      moves: whether the step only moves or reformats its operand.
      inner: the body of the step, if the body can be split.
    """

    reads: tuple[Atom, ...]
    makes: tuple[Name, ...]
    call: Callable[..., Sequence[Any]]
    cost: Cost
    label: str
    effect: bool = False
    through: bool = False
    moves: bool = False
    inner: JaxprLoop | Branches | None = None

    @property
    def names(self) -> list[Name]:
        """The operands that are not literals."""
        return names(self.reads)

    def sources(self, result: Name) -> list[Name]:
        """List the names from which one result is computed."""
        if self.through:
            return names([self.reads[self.makes.index(result)]])
        return self.names


def cost_inside(steps: Iterable[JaxprStep]) -> Cost:
    """Return the cost of a body: not to be recomputed, even if its steps are cheap."""
    return max((step.cost for step in steps), default=Cost.LIGHT, key=int) or Cost.LIGHT


def narrow(step: JaxprStep, wanted: Sequence[bool]) -> JaxprStep:
    """Restrict a step with ``through`` to some of its results."""
    parts = [p for p, w in zip(zip(step.reads, step.makes, strict=True), wanted, strict=True) if w]
    return replace(step, reads=tuple(r for r, _ in parts), makes=tuple(m for _, m in parts))


def names(atoms: Iterable[Atom]) -> list[Name]:
    """List the atoms that are not literals."""
    return [atom for atom in atoms if isinstance(atom, Name)]


def prune(
    steps: Iterable[JaxprStep],
    wanted: Iterable[Atom],
    inputs: Iterable[Name],
    always: Callable[[JaxprStep], bool] = lambda _: False,
) -> tuple[JaxprStep, ...]:
    """Select the steps that compute wanted values from known values, and pinned steps."""
    inputs, needed, path = set(inputs), set(names(wanted)), []
    for step in reversed(list(steps)):
        is_needed = [n in needed and n not in inputs for n in step.makes]
        if not any(is_needed) and not always(step):
            continue
        if step.through and not all(is_needed):
            step = narrow(step, is_needed)  # noqa: PLW2901
        needed.update(step.names)
        path.append(step)
    return tuple(path[::-1])


def run(steps: Iterable[JaxprStep], values: dict[Name, Any]) -> dict[Name, Any]:
    """Run steps; return all their values together with the known values."""
    env = dict(values)
    for step in steps:
        results = step.call(*(read(env, atom) for atom in step.reads))
        for name, value in zip(step.makes, results, strict=True):
            env.setdefault(name, value)
    return env


def run_block(block: JaxprBlock, inputs: Iterable[Any]) -> list[Any]:
    env = run(block.steps, block.constants | dict(zip(block.inputs, inputs, strict=True)))
    return [read(env, atom) for atom in block.outs]


def read(env: dict[Name, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]
