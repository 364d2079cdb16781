"""Choices of the planner against measurements: ``python -m bench.plan``.

For each of 22 small problems, a model, a batch and 2 to 8 devices, `pipeline.plan` says how to lay
it out, from what one block takes on 1, 2, 4 and 8 sequences, calibrated in a process of one core.
Then steps are measured in turns: its choice, the next that it names, the best that it sees of every
other schedule, and some at random (weights are whole on every data shard: no FSDP). Chosen / best
is wanted below 1.05; so is the best pipeline that it sees over the best pipeline measured, for data
parallelism alone wins wherever little has to be sent.

Two devices compute, one on each core; where there are more, blocks wait (`bench.waiting`), as long
as they have rows, and the two cores have nothing but messages to carry. It ends
with the reason where a calibration contradicts itself or layouts have other losses. Letters: V
chunks, M microbatches.
"""

from __future__ import annotations

import functools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cases import Layers, mean_square
from bench.measure import ContradictionError, Timer, behind_itself, in_turns, seconds, table
from bench.pinned import call
from bench.waiting import elsewhere, is_elsewhere, machine, parser_of, show, waited

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from examples.gpt import Sizes, Stage
from pipeline import CalibrationError, Pipeline, plan
from pipeline.insight.calibrate.measure import EXCHANGES, exchanges
from pipeline.planner import Chip, ModelSizes, Plans
from pipeline.planner.candidates import layouts_of
from pipeline.planner.costs import Estimate, estimate
from pipeline.planner.layout import MeshLayout, layers_of_stages
from pipeline.planner.plans import short
from schedules import Costs

ROUNDS = 5
WANTED = 1.05
FAMILIES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v")
REMATS = (None, "stage")
ROWS = (1, 2, 4, 8)  # sequences of a microbatch that are calibrated
RANDOM = 2  # layouts beside the best of each schedule
SAME = 1e-4  # of losses, relative
WAIT = 0.002  # seconds that a block waits for a sequence, in F, I and W each
FREE = 1e15  # bytes a second of what is not measured: updates
HEADS = 4


class Patient(nnx.Module):
    """Blocks whose F, I and W wait in proportion to rows: [rows, 1, d] -> [rows, 1, d]."""

    def __init__(self, d: int, count: int, rngs: nnx.Rngs) -> None:
        self.scales = nnx.List([nnx.Param(rngs.params.normal((1, d))) for _ in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        time = WAIT * x.shape[0]
        for scale in self.scales:
            x = x + waited(0.1 * jnp.tanh(x * waited(scale[...], 0.0, time)), time, time)
        return x


@dataclass(frozen=True)
class Problem:
    """A model to be laid out.

    Attributes:
      kind: "mlp", "gpt" or "waits".
      layers: blocks.
      width: of each.
      seq: positions, or rows, of what the planner calls a sequence.
      batch: sequences.
      devices: 2, or for "waits" up to 8.
    """

    kind: str
    layers: int
    width: int
    seq: int
    batch: int
    devices: int

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.layers} x {self.width}, {self.batch} x {self.seq}, "
            f"{self.devices} devices"
        )

    @property
    def model(self) -> tuple[str, int, int]:
        """Key of the model, which is calibrated once."""
        return self.kind, self.width, self.seq

    def stage(self, count: int, rngs: nnx.Rngs) -> nnx.Module:
        """A stage of so many blocks."""
        if self.kind == "gpt":
            return Stage(Sizes(self.layers, self.width, HEADS, self.seq), count, rngs)
        return (Patient if self.kind == "waits" else Layers)(self.width, count, rngs)

    def stages(self, counts: Sequence[int]) -> list[nnx.Module]:
        """Stages, whose weights do not depend on how many there are."""
        rngs = nnx.Rngs(0)
        return [self.stage(count, rngs) for count in counts]

    def data(self, batch: int) -> tuple[Any, Any]:
        """Inputs and targets, [batch, seq, width]."""
        shape = (batch, self.seq, self.width)
        found = (jax.random.normal(jax.random.key(seed), shape) for seed in (1, 2))
        x, t = (np.asarray(one) for one in found)
        return x, t

    @property
    def sizes(self) -> ModelSizes:
        """For the planner: parameters as many as there are, roughly, and one word."""
        ratio = {"mlp": 2, "gpt": 4, "waits": 1}[self.kind]
        return ModelSizes(self.layers, self.width, 1, 1, ratio * self.width, 1)


def problems() -> list[Problem]:
    """All of them: 22."""
    found = [
        Problem("gpt", layers, width, 64, batch, 2)
        for layers, width in ((4, 128), (8, 128), (4, 256))
        for batch in (8, 16)
    ]
    found += [
        Problem("mlp", layers, width, 32, batch, 2)
        for layers, width in ((4, 512), (8, 512), (4, 1024))
        for batch in (8, 16)
    ]
    found.append(Problem("mlp", 6, 512, 32, 16, 2))
    found.append(Problem("gpt", 6, 128, 64, 16, 2))
    found += [
        Problem("waits", layers, 32, 1, batch, devices)
        for devices in (4, 8)
        for layers in (8, 16)
        for batch in (16, 32)
    ]
    return found


# --- what the planner is told


def _block_costs(problem: Problem, rounds: int) -> dict[int, Costs]:
    """Seconds of one block on each size of microbatch, in the process that calls this."""
    found = {}
    for rows in ROWS:
        x, t = problem.data(4 * rows)
        pipe = Pipeline(
            problem.stages([1, 1]),
            4,
            mesh=make_mesh(stage=1),
            loss_fn=mean_square,
            remat=None,
        )
        given = pipe.calibrate(x, t, rounds=rounds, repeats=max(4, 32 // rows)).costs
        f, i, w, b = (float(getattr(given, kind)[1]) for kind in ("f", "i", "w", "b"))
        found[rows] = Costs(f, i, w, b=b)
    return found


def given_costs(problem: Problem, rounds: int) -> dict[int, Costs]:
    """Seconds of a block, measured on one core.

    Raises:
      CalibrationError: of which model, and why.
    """
    try:
        return call(_block_costs, problem, rounds)
    except CalibrationError as error:
        raise CalibrationError(f"{problem.kind} of width {problem.width}: {error}") from error


def link(problem: Problem, rounds: int) -> float:
    """Bytes a second of a message of one sequence between two devices here."""
    size = 4 * problem.seq * problem.width * ROWS[1]
    step = exchanges(make_mesh(stage=2), size)
    (times,) = in_turns({"exchanges": functools.partial(seconds, step)}, rounds).values()
    return size / (statistics.median(times) / EXCHANGES)


def planned(problem: Problem, costs: Mapping[int, Costs], link: float) -> Plans:
    """The planner's answer, for a chip that is a core of this machine."""
    chip = Chip("core", 1e12, 10**12, FREE, link, 0, problem.devices, link)
    return plan(
        model=problem.sizes,
        devices=problem.devices,
        chip=chip,
        batch=problem.batch,
        seq=problem.seq,
        schedules=FAMILIES,
        remat=REMATS,
        clock="barriers",
        costs=costs,
    )


# --- what is measured


def candidates(plans: Plans) -> list[Estimate]:
    """The choice, the next best, the best of each schedule, some at random; no two the same."""
    job = plans.job
    layouts = [
        one
        for one in layouts_of(job, FAMILIES, REMATS, {})
        if one.vocabulary == "ends" and (one.schedule is None or one.data_parallel != "fsdp")
    ]
    found = [estimate(job, one) for one in layouts if one.data_parallel in _RUNS]
    found.sort(key=lambda one: one.step)
    best: dict[Any, Estimate] = {}
    for one in found:
        best.setdefault(one.layout.schedule, one)
    own = [one for one in plans.ranked if one.layout.data_parallel in _RUNS]
    others = random.Random(0).sample(found, min(RANDOM, len(found)))
    kept: dict[MeshLayout, Estimate] = {}
    for one in [*own, *best.values(), *others]:
        kept.setdefault(one.layout, one)
    return list(kept.values())


_RUNS = ("replicated", "zero1")  # of what the planner names; FSDP of one jit is XLA's affair


def step_of(problem: Problem, layout: MeshLayout) -> Any:
    """Loss and gradients of a layout, to be run."""
    devices = jax.devices()[: problem.devices]
    x, t = problem.data(problem.batch)
    if layout.schedule is None:
        return _alone(problem, layout, devices, x, t)
    counts = layers_of_stages(problem.layers, layout.stage * layout.chunks)
    pipe = Pipeline(
        problem.stages(counts),
        layout.microbatches,
        schedule=layout.schedule,
        mesh=make_mesh(data=layout.data, stage=layout.stage, devices=devices),
        loss_fn=mean_square,
        remat=layout.remat,
        data_parallel=layout.data_parallel,
    )
    return functools.partial(pipe.value_and_grad, x, t)


def _alone(problem: Problem, layout: MeshLayout, devices: Any, x: Any, t: Any) -> Any:
    """Without a pipeline: one jit over data shards, gradients summed over microbatches."""
    mesh = jax.make_mesh((layout.data,), ("data",), devices=devices)
    (stage,) = problem.stages([problem.layers])
    graphdef, params = nnx.split(stage)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    apply = lambda params, x: nnx.merge(graphdef, params)(x)  # noqa: E731

    def loss(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        run = apply if layout.remat is None else jax.checkpoint(apply)
        return mean_square(run(params, x), t)

    def local(params: Any, x: jax.Array, t: jax.Array) -> Any:
        def body(total: Any, batch: Any) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, total, grads), value

        rows = (layout.microbatches, -1, *x.shape[1:])
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, values = jax.lax.scan(body, zeros, (x.reshape(rows), t.reshape(rows)))
        return jax.lax.pmean((values.mean(), total), "data")

    spec = (P(), P("data"), P("data"))
    # Gradients of a shard are its own until they are summed, once.
    step = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    batch = jax.device_put((x, t), NamedSharding(mesh, P("data")))
    return functools.partial(jax.jit(step), params, *batch)


@dataclass(frozen=True)
class Answer:
    """Seconds of a problem, predicted and measured.

    Attributes:
      problem: which.
      chosen: the planner's choice, in words; and of pipelines.
      best: the quickest measured.
      ratio: the choice over the best.
      piped: the best pipeline that it sees over the best pipeline.
      predicted: the choice's, over what it took.
      spread: the largest median distance from a median, relative.
      tried: how many were measured.
    """

    problem: str
    chosen: str
    best: str
    ratio: float
    piped: float
    predicted: float
    spread: float
    tried: int


def words(layout: MeshLayout) -> str:
    """A layout with what distinguishes it."""
    said = f"{short(layout)}, M={layout.microbatches}"
    said += f", V={layout.chunks}" * (layout.chunks > 1)
    return said + f", remat={layout.remat}" * (layout.remat is not None)


def answer(problem: Problem, costs: Mapping[int, Costs], speed: float, rounds: int) -> Answer:
    """Plan it, measure it.

    Raises:
      ContradictionError: layouts have other losses.
    """
    plans = planned(problem, costs, speed)
    estimates = candidates(plans)
    timers: dict[MeshLayout, Timer] = {}
    losses = {}
    for one in estimates:
        step = step_of(problem, one.layout)
        losses[one.layout] = float(step()[0])
        timers[one.layout] = behind_itself(functools.partial(seconds, step))
    wanted = statistics.median(losses.values())
    for layout, loss in losses.items():
        if not abs(loss - wanted) <= SAME * abs(wanted):
            raise ContradictionError(
                f"{problem}, {words(layout)}: the loss is {loss:.6g}, with others {wanted:.6g}: "
                f"what computes something else is not timed"
            )
    taken = in_turns(timers, rounds)
    middles = {layout: statistics.median(times) for layout, times in taken.items()}
    spread = max(
        statistics.median(abs(t - middles[layout]) for t in times) / middles[layout]
        for layout, times in taken.items()
    )
    predicted = {one.layout: one.step for one in estimates}
    chosen = min(predicted, key=lambda one: predicted[one])
    best = min(middles, key=lambda one: middles[one])
    pipelines = [one for one in middles if one.schedule is not None]
    mine = min(pipelines, key=lambda one: predicted[one])
    return Answer(
        str(problem),
        words(chosen),
        words(best),
        middles[chosen] / middles[best],
        middles[mine] / min(middles[one] for one in pipelines),
        predicted[chosen] / middles[chosen],
        spread,
        len(middles),
    )


def run(some: Sequence[Problem], rounds: int) -> list[Answer]:
    """Answers to problems that this process has the devices for."""
    costs: dict[Any, dict[int, Costs]] = {}
    speeds: dict[Any, float] = {}
    found = []
    for problem in some:
        if problem.model not in costs:
            costs[problem.model] = given_costs(problem, rounds)
            speeds[problem.model] = link(problem, rounds)
        found.append(answer(problem, costs[problem.model], speeds[problem.model], rounds))
        one = found[-1]
        print(f"{one.problem}: {one.ratio:.3f}, pipelines {one.piped:.3f}", file=sys.stderr)
    return found


def conclusion(answers: Sequence[Answer]) -> str:
    """The conclusion for a reader."""
    good = [one for one in answers if one.ratio <= WANTED]
    piped = [one for one in answers if one.piped <= WANTED]
    worst = max(answers, key=lambda one: one.ratio)
    noisy = max(one.spread for one in answers)
    return (
        f"{len(good)} of {len(answers)} choices are within 5% of the best measured, the worst is "
        f"{worst.ratio:.3f} ({worst.problem}); of pipelines alone {len(piped)}.\n"
        f"Turns lie up to {noisy:.1%} from their median: a ratio nearer to 1 says nothing."
    )


def tables(answers: Iterable[Answer]) -> str:
    """A row a problem."""
    rows = [
        [
            one.problem,
            one.chosen,
            one.best if one.best != one.chosen else "the same",
            f"{one.ratio:.3f}",
            f"{one.piped:.3f}",
            f"{one.predicted:.2f}",
            f"{one.spread:.1%}",
            str(one.tried),
        ]
        for one in answers
    ]
    header = ["problem", "chosen", "best measured", "chosen / best", "pipelines"]
    return table([*header, "predicted / taken", "+-", "measured"], rows)


def main() -> None:
    """Print conclusion and table."""
    parser = parser_of("bench.plan", __doc__, ROUNDS)
    parser.add_argument("--only", nargs="*", type=int, help="numbers of problems, from 0")
    options = parser.parse_args()
    start = time.perf_counter()
    some = problems()
    if options.only is not None:
        some = [some[n] for n in options.only]
    try:
        if is_elsewhere(options, Problem, run):
            return
        here = [one for one in some if one.kind != "waits"]
        there = [one for one in some if one.kind == "waits"]
        answers = run(here, options.rounds)
        if there:
            devices = max(one.devices for one in there)
            found = elsewhere("bench.plan", there, devices, options.rounds)
            answers += [Answer(**one) for one in found]
    except (CalibrationError, RuntimeError) as error:
        sys.exit(f"no comparison: {error}")
    said = conclusion(answers)
    where = (
        f"{machine(len(os.sched_getaffinity(0)))}; medians of {options.rounds} turns; "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    show(options, said, where, ("problems", list(map(asdict, answers))), tables(answers))


if __name__ == "__main__":
    main()
