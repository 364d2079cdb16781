"""The compiled functions of a pipeline, facts from their traces, and their lifetime.

JAX keeps the static arguments of a jitted function, and all its traces and compiled programs, as
long as the function exists. So each pipeline has its own jitted functions, in a `Compiled`. Its
clones and the pipelines that `nnx.merge` makes share this `Compiled`; it is freed with the last
of these pipelines. Graphs of `nnx.split` do not keep it alive, because JAX's caches remember
thousands of graphs that were arguments of `nnx.jit`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

REVIVED = 8


class FunctionKey(NamedTuple):
    """The static arguments of a compiled function."""

    plan: Hashable
    name: str
    model: Hashable
    options: frozenset[tuple[str, Any]]


@dataclass(eq=False)
class StepFacts:
    """Facts about a plan's training step, known after its trace.

    Attributes:
      straight: True if the step was one loop over microbatches; None before the first trace.
      unsplit: parts of a stage's backward that could not be split.
      last: the types of model, weights and batch in the last step.
    """

    straight: bool | None = None
    unsplit: tuple[str, ...] = ()
    last: tuple[Any, Any, Any] | None = None


@dataclass(eq=False)
class Compiled:
    """Compiled functions and facts that calls of a pipeline keep for later calls.

    Attributes:
      plans: by M, the plans of calls whose M differs from the pipeline's.
      narrow: by model and types, True if a step computes in floats in which gradients may vanish.
      trained: by filter and structure, the parameters that the filter trains.
      writes: models whose steps write declared state.
      warned: keys of checks and warnings that are due once, such as a step's memory by its types.
      ring: the pipeline of types whose placement `generate` uses.
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
    """A plan's weak reference to the `Compiled` of its pipelines; the pipelines keep it alive."""

    def __init__(self) -> None:
        self._refer: Callable[[], Compiled | None] = lambda: None
        self._has_lived = False
        self._pipes: weakref.WeakKeyDictionary[Any, Compiled] = weakref.WeakKeyDictionary()

    def make(self) -> Compiled:
        """Make a `Compiled` and refer to it weakly; the caller keeps it alive."""
        programs = Compiled()
        self._refer = weakref.ref(programs)
        return programs

    def get(self) -> Compiled:
        """Return the `Compiled` of the pipelines; make a new one if no pipeline is left."""
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
    """Return a `Compiled` for graphs whose pipelines no longer exist; the last few are kept.

    This serves loops that call `nnx.merge` in every step and drop the pipeline after the step.
    """
    return programs.make()


class PlanOfPipeline:
    """The attribute ``plan`` of a pipeline. Setting it keeps the `Compiled` alive.

    Every new pipeline sets it, also a pipeline that `nnx.merge` or `nnx.clone` makes. To flax it is
    a plain attribute.
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
