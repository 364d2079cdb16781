"""A whole step's time by the TPU compiler: ``python -m bench.tpu_cycles 8B``.

The cycles of each action of `bench.tpu_llama`'s steps (`bench.cycles`), and what follows of them
for a step by `schedules.simulate`. Nothing runs; needs `libtpu` and no TPU. What is printed stands
in docs/llama.md. Numbers that contradict each other are not printed.

Letters: t = positions, d = width.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import tpu
from bench.cycles import (
    AROUND,
    BLOCK,
    EFFICIENCY,
    ONCE,
    RATE,
    ContradictionError,
    Cycles,
    cycles,
    see_that_they_agree,
)
from bench.tpu_llama import CASES, Case

import jax  # isort: skip
import optax  # type: ignore[import-untyped]
from jax.experimental import topologies

from pipeline import Pipeline, make_optimizer
from pipeline.kernel.scopes import COMMON
from pipeline.planner import CHIPS
from schedules import Costs, simulate

CLOCK = CHIPS["v5p"].clock or 0.0


@dataclass(frozen=True)
class Step:
    """What a step takes.

    Attributes:
      actions: cycles of one run of each action, the slowest of those that share a kind.
      ideal: what the products of a forward pass alone would take at the matrix units' rate.
      seconds: of a step; used: the part of the chips' rate that the model's own operations are.
    """

    actions: dict[str, Cycles]
    ideal: float
    seconds: float
    used: float


def step(case: Case, pipe: Pipeline, text: str) -> Step:
    """The times of a compiled step.

    Raises:
      ContradictionError: as `see_that_they_agree`; or more than all of the chips' rate is used.
    """
    actions: dict[str, Cycles] = {}
    for (_, label), one in cycles(text).items():
        kind = label if label in COMMON or label in (AROUND, ONCE) else label[0]
        if kind not in actions or actions[kind].total < one.total:
            actions[kind] = one
    forward, backward = (actions.get(kind, Cycles()) for kind in "FB")
    config, tokens = case.config, case.rows * case.length
    d, t, layers = config.hidden_size, case.length, config.num_hidden_layers
    tables = config.vocab_size * d
    weights = config.count() - tables * (1 if config.tie_word_embeddings else 2)
    attention = 2 * layers * t * d  # operations of a position forward, half of them masked
    share = pipe.mesh.size // pipe.mesh.shape["data"]
    ideal = tokens * (2 * weights + attention) / share / RATE
    diagonal = 1 + BLOCK / t  # blocks that are computed whole and are half masked
    kernels = tokens * attention * diagonal / share / RATE / EFFICIENCY
    see_that_they_agree(forward, backward, ideal, kernels)
    ranks = pipe.schedule.num_ranks
    costs = Costs(
        f=forward.total,
        i=backward.total / 2,
        w=backward.total / 2,
        head=ranks * actions.get("head", Cycles()).total,
        embed=ranks * actions.get("lookup", Cycles()).total,
    )
    plan = pipe.plan
    slots = simulate(plan.schedule, **plan.clock).pattern  # which the kernel runs
    options: dict[str, Any] = {**plan.sends, "pattern": slots, "shared": plan.shared}
    span = simulate(plan.schedule, costs, "lockstep", **options).makespan
    around = len(plan.training.op) * actions[AROUND].total
    seconds = (span + around + actions[ONCE].total) / CLOCK
    model = 3 * (2 * (weights + tables) + attention) * tokens * case.microbatches
    used = model * case.axes["data"] / (pipe.mesh.size * RATE * CLOCK * seconds)
    if not 0 < used < 1:
        raise ContradictionError(f"{used:.0%} of the chips' rate is used")
    return Step(actions, ideal, seconds, used)


def report(case: Case, path: Path | None = None) -> Step:
    """Compile a step, or read what was compiled; its times."""
    tpu.prepare()
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
    pipe = case.pipeline(slice_.devices)
    if path is not None and path.exists():
        return step(case, pipe, path.read_text(encoding="utf-8"))
    words, optimizer = case.words(), make_optimizer(pipe, optax.adam(1e-4))
    text = pipe.lower(words, words, optimizer=optimizer).compile().as_text()
    if path is not None:
        path.write_text(text, encoding="utf-8")
    return step(case, pipe, text)


def main() -> None:
    """Print a model's lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[n for n, c in CASES.items() if "v5p" in c.topology])
    parser.add_argument("--attention", help="as LlamaConfig takes it, such as chunked")
    parser.add_argument("--hlo", type=Path, help="keep the compiled program here, or read it")
    options = parser.parse_args()
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    case = CASES[options.model]
    case = replace(case, config=replace(case.config, attention=options.attention))
    try:
        found = report(case, options.hlo)
    except ContradictionError as error:
        sys.exit(f"contradiction: {error}")
    print(f"Llama {options.model}, jax {jax.__version__}, cycles in millions", flush=True)
    for what, one in sorted(found.actions.items()):
        print(f"{what:10} {one.total / 1e6:9.2f}, of which in kernels {one.kernels / 1e6:.2f}")
    print(f"{'ideal F':10} {found.ideal / 1e6:9.2f}")
    print(f"step {found.seconds:.2f} s, {found.used:.1%} of the chips' rate used")


if __name__ == "__main__":
    main()
