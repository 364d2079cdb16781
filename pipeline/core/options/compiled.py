"""The compiled functions of a pipeline, facts from their traces, and their lifetime.

JAX keeps the static arguments of a jitted function as long as the function, and with them all that
was traced and compiled. So each pipeline has jitted functions of its own, in a `Compiled` that it
shares with its clones and with the pipelines that `nnx.merge` makes, and that goes with the last of
them. Graphs of `nnx.split` do not keep it alive, for caches of JAX remember thousands of graphs
that were arguments of `nnx.jit`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

REVIVED = 8


class FunctionKey(NamedTuple):
    """The static arguments of a compiled function.

    Attributes:
      plan: the plan, one for each M.
      name: of the function that is jitted.
      model: the static part of the model.
      options: keyword arguments of the function.
    """

    plan: Hashable
    name: str
    model: Hashable
    options: frozenset[tuple[str, Any]]


@dataclass(eq=False)
class StepFacts:
    """Facts about the step of a plan, known after its trace.

    Attributes:
      straight: True if the step was one loop over microbatches; None before the first trace.
      unsplit: parts of a stage's backward that could not be split.
      last: model, weights and batch of the last step, as types.
    """

    straight: bool | None = None
    unsplit: tuple[str, ...] = ()
    last: tuple[Any, Any, Any] | None = None


@dataclass(eq=False)
class Compiled:
    """Compiled functions and facts that calls of a pipeline keep for later calls.

    Attributes:
      functions: jitted functions.
      facts: by plan.
      plans: by M, the plans of calls with another M than the pipeline's.
      narrow: by model and types, True if a step computes in floats in which gradients vanish.
      trained: by filter and structure, the parameters that the filter trains.
      states: by structure, the declared state.
      writes: models whose steps write declared state.
      warned: types of steps whose memory was looked at, and parameters that nobody reads.
      ring: the pipeline of types in whose placement `generate` runs.
    """

    functions: dict[FunctionKey, Callable[..., Any]] = field(default_factory=dict)
    facts: dict[Hashable, StepFacts] = field(default_factory=dict)
    plans: dict[int, Any] = field(default_factory=dict)
    narrow: dict[Hashable, bool] = field(default_factory=dict)
    trained: dict[Any, Any] = field(default_factory=dict)
    states: dict[Hashable, Any] = field(default_factory=dict)
    writes: set[Hashable] = field(default_factory=set)
    warned: set[Hashable] = field(default_factory=set)
    ring: Any = None


class Programs:
    """The way from a plan to the `Compiled` of its pipelines, which keep that alive."""

    def __init__(self) -> None:
        self._refer: Callable[[], Compiled | None] = lambda: None
        self._has_lived = False
        self._pipes: weakref.WeakKeyDictionary[Any, Compiled] = weakref.WeakKeyDictionary()

    def make(self) -> Compiled:
        """Make a `Compiled`, which lives as long as the caller keeps it."""
        programs = Compiled()
        self._refer = weakref.ref(programs)
        return programs

    def get(self) -> Compiled:
        """Find the `Compiled` of the pipelines, or make another where none of them is left."""
        programs = self._refer()
        return _revived(self) if programs is None else programs

    def keep_for(self, pipe: Any) -> None:
        """Keep the `Compiled` as long as a pipeline lives; only the first pipeline makes one."""
        if pipe not in self._pipes:
            first = self._refer() is None and not self._has_lived
            self._pipes[pipe] = self.make() if first else self.get()
            self._has_lived = True


@functools.lru_cache(maxsize=REVIVED)
def _revived(programs: Programs) -> Compiled:
    """A `Compiled` for graphs that have outlived their pipeline.

    A loop that merges a graph in every step and drops the pipeline behind it needs one, so the last
    few are kept.
    """
    return programs.make()


class PlanOfPipeline:
    """The attribute ``plan`` of a pipeline, which keeps its `Compiled` alive.

    It is set in every pipeline that is made, also by `nnx.merge` and `nnx.clone`; flax sees a plain
    attribute.
    """

    def __get__(self, pipe: Any, owner: Any) -> Any:
        if pipe is None:
            return self
        try:
            return vars(pipe)["plan"]
        except KeyError:
            raise AttributeError("plan") from None

    def __set__(self, pipe: Any, plan: Any) -> None:
        plan.programs.keep_for(pipe)
        vars(pipe)["plan"] = plan
