"""Bytes of a step on each device that types and timetable fix.

Letters: S ranks, D data shards. One program runs on all ranks, so every rank allocates as much as
the rank that needs most. The refs of the traced step (messages, stashes, crossings, sums of
gradients) are counted. The temporaries of an action depend on the compiler, and are not counted:
`Compiled.memory_analysis()` has them, as ``describe(compiled=True)`` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

from collectives.compat import is_on_host, live
from pipeline.base.tree import nbytes
from pipeline.core.autodiff.jaxpr.evaluate import follow
from pipeline.core.autodiff.jaxpr.primitives import HEAVY, callee, equations, traits
from pipeline.core.autodiff.jaxpr.scopes import CASTS, HOST_POOLS
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.step import runtime
from pipeline.insight.scopes import find_shard_map

POOLS = "messages", "stashes", "crossings"  # refs with one entry for each place
NAMES = (*POOLS, "carries", "kept", "windows", "totals")


@dataclass(frozen=True)
class PlaceBytes:
    """Buffers of equal size for one kind of value.

    Attributes:
      count: number of buffers.
      each: bytes of one buffer.
    """

    count: int = 0
    each: int = 0

    @property
    def size(self) -> int:
        return self.count * self.each


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a step on each device, without the temporaries of an action.

    Attributes:
      weights: bytes of arguments: parameters and all other state of the stages and ends.
      batch: bytes of arguments: inputs, targets and extras of the data shard.
      returned: bytes of results: the loss and the gradients, in the weights' dtype. Gradients are
        summed in these results if the dtype has 4 bytes, as sums have.
      totals: sums of gradients that are not summed in the results.
      messages: activations and their gradients on a rank. There is one buffer more than the
        timetable needs: messages that are not read are written to it.
      stashes: residuals from F to B.
      crossings: values that I leaves for W.
      carries: values that slices of sequences leave for later slices (keys and values), and their
        gradients.
      kept: gradients for the inputs, unless the arrays that keep them are returned.
      casts: weights in the narrower dtype that stages compute in, if they are cast once a step.
      gathered: whole weights in their own dtype, if shards are gathered once a step.
      windows: whole weights and gradients of the chunks that a rank works on, if it gathers them
        chunk by chunk.
      host_stashes: stashes in host memory, which count in no sum of device bytes.
      host_crossings: crossings in host memory, which count in no sum of device bytes.
      has_update: whether the step ends with the optimizer's update.
      optimizer: bytes of arguments: the optimizer's state on the device.
      host_optimizer: the optimizer's state in host memory, which counts in no sum of device bytes.
    """

    weights: int
    batch: int
    returned: int
    totals: int
    messages: PlaceBytes
    stashes: PlaceBytes
    crossings: PlaceBytes
    kept: int
    casts: int = 0
    gathered: int = 0
    carries: int = 0
    windows: int = 0
    host_stashes: PlaceBytes = PlaceBytes()
    host_crossings: PlaceBytes = PlaceBytes()
    has_update: bool = False
    optimizer: int = 0
    host_optimizer: int = 0

    @property
    def host(self) -> int:
        """Bytes in host memory, for each device."""
        return self.host_stashes.size + self.host_crossings.size + self.host_optimizer

    @property
    def arguments(self) -> int:
        return self.weights + self.optimizer + self.batch

    @property
    def temporaries(self) -> int:
        """The bytes that the step holds between actions, in addition to arguments and results."""
        places = self.messages.size + self.stashes.size + self.crossings.size
        return (
            places
            + self.carries
            + self.kept
            + self.windows
            + self.totals
            + self.casts
            + self.gathered
        )

    @property
    def total(self) -> int:
        return self.arguments + self.returned + self.temporaries

    @property
    def least(self) -> int:
        """The fewest bytes of a step with any compiler, which may sum in the memory of results."""
        return self.total - min(self.returned, self.totals)

    @property
    def largest(self) -> tuple[str, int]:
        """The largest part, in words, and its bytes."""
        parts = {
            "the weights": self.weights,
            "the optimizer's state": self.optimizer,
            "the batch": self.batch,
            "the gradients": self.returned + self.totals,
            _text("message", self.messages): self.messages.size,
            _text("residual stash", self.stashes): self.stashes.size,
            _text("stash of what I leaves for W", self.crossings): self.crossings.size,
            "keys and values of slices": self.carries,
            "the windows of whole weights": self.windows,
            "the gradients for the inputs": self.kept,
            "the weights in the dtype of activations": self.casts,
            "the gathered weights": self.gathered,
        }
        return max(parts.items(), key=lambda item: item[1])


def _text(what: str, places: PlaceBytes) -> str:
    head, *tail = what.split(" of ")
    name = " of ".join([plural(head, places.count), *tail])
    return f"{places.count} {name}, {places.each:,} bytes each"


def plural(name: str, count: int) -> str:
    """A noun, in the plural unless the count is 1."""
    if count == 1:
        return name
    return f"{name}es" if name.endswith("sh") else "carries" if name == "carry" else f"{name}s"


def predict(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    *,
    used: bool = False,
    **wanted: bool,
) -> StepBytes:
    """Count the bytes of `runtime.train` on each device.

    Args:
      weights: [S, ...] leaves of chunks, and leaves of the ends; arrays or their types.
      batch: [N, ...] leaves; arrays or their types.
      used: whether the step's program also uses the gradients, which are then temporaries, not
        results.
      wanted: other options of `runtime.train`.
    """
    traced = runtime.train.trace(plan, model, weights, batch, **wanted)
    body = find_shard_map(traced.jaxpr.jaxpr)
    refs, in_results = _refs(body)
    sizes = [nbytes(var.aval) for var in body.invars]
    count = len(jax.tree.leaves(batch))
    first = len(sizes) - count - len(jax.tree.leaves(weights))
    found: dict[str, PlaceBytes] = {}
    for eqn in refs:
        name, aval = _name(eqn), eqn.outvars[0].aval
        places = aval.shape[0] if name in POOLS else 1
        before = found.get(name, PlaceBytes()).each
        size = 0 if eqn in in_results and not used else nbytes(aval)
        found[name] = PlaceBytes(places, before + size // places)
    pools: dict[str, Any] = {name: found.get(name, PlaceBytes()) for name in POOLS}
    rest: dict[str, Any] = {
        name: found.get(name, PlaceBytes()).size for name in NAMES if name not in POOLS
    }
    return StepBytes(
        weights=sum(sizes[first : len(sizes) - count]),
        batch=sum(sizes[len(sizes) - count :]),
        returned=0 if used else sum(nbytes(var.aval) for var in body.outvars),
        casts=_made_once(body, _is_cast),
        gathered=_made_once(body, _is_gather),
        **pools,
        **rest,
        **_on_host(body),
    )


def _refs(body: Any) -> tuple[list[Any], list[Any]]:
    """List the equations that make the step's refs, and those whose ref becomes a result.

    A result has the memory of a ref if it is computed from the ref's final value element by
    element. A sum over devices has memory of its own.
    """
    refs: list[Any] = []

    def equation(eqn: Any, reads: list[Any]) -> list[Any]:
        inner = callee(eqn)
        if inner is not None:
            return follow(inner.jaxpr, reads, [None] * len(inner.jaxpr.constvars), none, equation)
        if eqn.primitive.name == "new_ref":
            refs.append(eqn)
            return [eqn]
        if traits(eqn).identity:
            return reads
        nothing = [None] * len(eqn.outvars)
        is_copy = eqn.primitive.name in ("get", "freeze") or traits(eqn).cost < HEAVY
        if len(nothing) != 1 or not is_copy:
            return nothing
        size = nbytes(eqn.outvars[0].aval)
        sources = (ref for ref in reads if ref and nbytes(ref.outvars[0].aval) == size)
        return [next(sources, None)]

    none = lambda _: None  # noqa: E731
    results = follow(body, [None] * len(body.invars), [None] * len(body.constvars), none, equation)
    return refs, [ref for ref in results if ref is not None]


def _made_once(body: Any, belongs: Callable[[Any], bool]) -> int:
    """Count the bytes of weights that some equations make before the ticks."""
    lean, _ = live(body, keep_inputs=True)
    made = {var: eqn for eqn in equations(lean) if belongs(eqn) for var in eqn.outvars}
    between = {v for eqn in made.values() for v in eqn.invars if not isinstance(v, Literal)}
    return sum(nbytes(var.aval) for var in made if var not in between)


def _is_cast(eqn: Any) -> bool:
    return CASTS in _scopes(eqn)


def _is_gather(eqn: Any) -> bool:
    return traits(eqn).hlo == "all-gather" and not _is_cast(eqn)


def _scopes(eqn: Any) -> list[str]:
    return str(eqn.source_info.name_stack).split("/")


def _on_host(body: Any) -> dict[str, Any]:
    """Return the pools in host memory, by name."""
    found: dict[str, PlaceBytes] = {}
    for eqn in equations(body):
        name = next((scope for scope in _scopes(eqn) if scope in HOST_POOLS), "")
        if not name or eqn.primitive.name != "device_put":
            continue
        aval = eqn.outvars[0].aval
        if not is_on_host(aval):
            continue
        count, before = aval.shape[0], found.get(name, PlaceBytes()).each
        found[name] = PlaceBytes(count, before + nbytes(aval) // count)
    return found


def _name(eqn: Any) -> str:
    """Name the use of a ref, by the name scope of its creation.

    The name scope is the only information that JAX carries from the Python code that makes a ref to
    its equation. The ref that Python holds during a trace cannot be found again among the variables
    of the jaxpr.
    """
    return next((scope for scope in _scopes(eqn) if scope in NAMES), "totals")
