"""Memory of a step on each device, predicted from types alone.

Letters: S ranks, D data shards. One program runs on all ranks, so every rank allocates as much as
the rank that needs most. The prediction reads the traced step that is also compiled. It counts the
step's refs (messages, stashes, crossings, gradients), and the most that is live in addition within
an action (`pipeline.insight.forecast.liveness`). With ``remat="stage"`` that is mainly the
residuals of one stage, which its backward recomputes. The live bytes depend on what the compiler
fuses, and so on the platform of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import Mesh

from pipeline.base.tree import nbytes
from pipeline.core.autodiff.jaxpr.primitives import equations
from pipeline.core.autodiff.jaxpr.scopes import CASTS, HOST_POOLS
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.step import runtime
from pipeline.insight.forecast.fusion import Compiler
from pipeline.insight.forecast.liveness import XLA_FOR_CPU, Walk, find_shard_map
from pipeline.insight.forecast.narrower import cast_once, rounded

NAMES = ("messages", "stashes", "crossings", "carries", "kept", "windows", "totals")


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
        """The bytes of all buffers."""
        return self.count * self.each


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes of a step on each device.

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
      workspace: the most that is live in addition: within one action, or at the end of the step,
        when gradients are summed over ``data``.
      casts: weights in the narrower dtype that stages compute in, if they are cast once a step.
      windows: whole weights and gradients of the chunks that a rank works on, if it gathers them
        chunk by chunk.
      host_stashes: stashes in host memory, which count in no sum of device bytes.
      host_crossings: crossings in host memory, which count in no sum of device bytes.
      lent: results that are written at the end of the step; until then the memory of these results
        holds any temporaries except stashes.
    """

    weights: int
    batch: int
    returned: int
    totals: int
    messages: PlaceBytes
    stashes: PlaceBytes
    crossings: PlaceBytes
    kept: int
    workspace: int
    casts: int = 0
    lent: int = 0
    carries: int = 0
    windows: int = 0
    host_stashes: PlaceBytes = PlaceBytes()
    host_crossings: PlaceBytes = PlaceBytes()

    @property
    def host(self) -> int:
        """Bytes in host memory, for each device."""
        return self.host_stashes.size + self.host_crossings.size

    @property
    def arguments(self) -> int:
        """Bytes of a step's arguments."""
        return self.weights + self.batch

    @property
    def temporaries(self) -> int:
        """The bytes held in addition to arguments and results."""
        passing = self.messages.size + self.crossings.size + self.kept + self.workspace
        passing += self.carries
        held = self.stashes.size + self.totals + self.casts + self.windows
        return held + max(0, passing - self.lent)

    @property
    def total(self) -> int:
        """The total bytes."""
        return self.arguments + self.returned + self.temporaries

    @property
    def largest(self) -> tuple[str, int]:
        """The largest part, in words, and its bytes."""
        parts = {
            "the weights": self.weights,
            "the batch": self.batch,
            "the gradients": self.returned + self.totals,
            _text("message", self.messages): self.messages.size,
            _text("residual stash", self.stashes): self.stashes.size,
            _text("stash of what I leaves for W", self.crossings): self.crossings.size,
            "keys and values of slices": self.carries,
            "the windows of whole weights": self.windows,
            "the gradients for the inputs": self.kept,
            "the workspace of one action": self.workspace,
            "the weights in the dtype of activations": self.casts,
        }
        return max(parts.items(), key=lambda item: item[1])


def _text(what: str, places: PlaceBytes) -> str:
    head, *tail = what.split(" of ")
    name = " of ".join([plural(head, places.count), *tail])
    return f"{places.count} {name}, {places.each:,} bytes each"


def plural(name: str, count: int) -> str:
    """A noun, in the plural unless the count is 1."""
    return name if count == 1 else f"{name}es" if name.endswith("sh") else f"{name}s"


def predict(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    *,
    want_inputs: bool = False,
    used: bool = False,
) -> MemoryPrediction:
    """Predict the bytes of `runtime.train` on each device.

    Args:
      plan: the options of the pipeline.
      model: the user's model.
      weights: [S, ...] leaves of chunks, and leaves of the ends; arrays or their types.
      batch: [N, ...] leaves; arrays or their types.
      want_inputs: whether gradients for the inputs are wanted.
      used: whether the step's program also uses the gradients, which are then temporaries, not
        results.
    """
    traced = runtime.train.trace(plan, model, weights, batch, want_inputs=want_inputs)
    body, compiler = find_shard_map(traced.jaxpr.jaxpr), compiler_of(plan.mesh)
    returned = 0 if used else sum(nbytes(var.aval) for var in body.outvars)
    walk = Walk(body, returned=not used, compiler=compiler)
    halved = rounded(body) if compiler.rounds else set()
    sizes = [nbytes(var.aval) for var in body.invars]
    count = len(jax.tree.leaves(batch))
    first = len(sizes) - count - len(jax.tree.leaves(weights))
    found: dict[str, PlaceBytes] = {}
    for ref, eqn in walk.refs.items():
        name, var = _name(eqn), eqn.outvars[0]
        places = var.aval.shape[0] if name in NAMES[:3] else 1
        before = found.get(name, PlaceBytes()).each
        size = ref.size // 2 if var in halved else ref.size
        found[name] = PlaceBytes(places, before + size // places)
    held, casts = sum(ref.size for ref in walk.refs), _cast_before(body)
    totals = found.get("totals", PlaceBytes()).size
    return MemoryPrediction(
        weights=sum(sizes[first : len(sizes) - count]),
        batch=sum(sizes[len(sizes) - count :]),
        returned=returned,
        totals=totals,
        messages=found.get("messages", PlaceBytes()),
        stashes=found.get("stashes", PlaceBytes()),
        crossings=found.get("crossings", PlaceBytes()),
        carries=found.get("carries", PlaceBytes()).size,
        windows=found.get("windows", PlaceBytes()).size,
        kept=found.get("kept", PlaceBytes()).size,
        workspace=max(0, walk.peak - held - casts),
        casts=casts + (cast_once(body) if compiler.rounds else 0),
        lent=min(returned, totals) if compiler.lends else 0,
        **_on_host(walk.hosts),
    )


def _cast_before(body: Any) -> int:
    """Count the bytes of narrow copies of weights made before the ticks, gathered or not."""
    made = {
        var: eqn
        for eqn in equations(body)
        if CASTS in str(eqn.source_info.name_stack).split("/")
        for var in eqn.outvars
    }
    between = {v for eqn in made.values() for v in eqn.invars if not isinstance(v, Literal)}
    return sum(nbytes(var.aval) for var in made if var not in between)


def _on_host(made: Iterable[Any]) -> dict[str, PlaceBytes]:
    """Return the pools in host memory, by name, from the equations that make them."""
    found: dict[str, PlaceBytes] = {}
    for eqn in made:
        stack, aval = str(eqn.source_info.name_stack).split("/"), eqn.outvars[0].aval
        name = next(scope for scope in stack if scope in HOST_POOLS)
        count, before = aval.shape[0], found.get(name, PlaceBytes()).each
        found[name] = PlaceBytes(count, before + nbytes(aval) // count)
    return found


def compiler_of(mesh: Mesh) -> Compiler:
    """Return the model of the compiler for a mesh's devices; CPU's for unknown platforms."""
    lone = frozenset(str(axis) for axis, size in mesh.shape.items() if size == 1)
    # Described GPUs have the name of their runtime as platform, real GPUs do not.
    kinds = {
        "tpu": Compiler(products_fuse=True, rounds=True, lone=lone),
        "gpu": (gpu := Compiler(products_add=True, lone=lone, lends=True)),
        "cuda": gpu,
    }
    return kinds.get(mesh.devices.flat[0].platform, XLA_FOR_CPU)


def _name(eqn: Any) -> str:
    """Name the use of a ref, by the name scope of its creation.

    The name scope is the only information that JAX carries from the Python code that makes a ref to
    its equation. The ref that Python holds during a trace cannot be found again among the variables
    of the jaxpr.
    """
    scopes: Iterable[str] = str(eqn.source_info.name_stack).split("/")
    return next((scope for scope in scopes if scope in NAMES), "totals")
