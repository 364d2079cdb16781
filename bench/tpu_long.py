"""Llama 8B on 131,072 tokens by the TPU compiler: ``python -m bench.tpu_long --block``.

A context axis, slices of sequences, or both, on a described v5p slice of 64 chips: 16 rows of a
step, as many tokens as 256 rows of 8192. The planner's prediction stands beside what the compiler
writes. With ``--block`` one block is compiled, forward and backward, a matter of half a minute of a
core. Without, whole steps are, of as many layers as ``--layers`` says: seconds and bytes of more
layers follow from two runs, for a stage runs its blocks one after the other. Nothing runs; needs
`libtpu` and no TPU. What is printed stands in docs/tpu.md.

Letters: S ranks on `stage`, R on `context`, N slices, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import tpu  # before jax
from bench.measure import table
from bench.tpu_cycles import Compiled, compiled

import jax  # isort: skip
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from pipeline.vocabulary import CrossEntropy

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, FixedSlice, SequenceSlice
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.insight.calibrate.compiled import beside, costs_of, find_slice, machine_of
from pipeline.insight.calibrate.cycles import ONCE, Cycles, Machine, Scope, cycles
from pipeline.models.decoders.block import Block
from pipeline.planner import CHIPS, MODELS
from pipeline.planner.costs import Estimate, estimate, mfu, stage_costs, with_equal_slices
from pipeline.planner.layout import MeshLayout, PlannedJob, layers_of_stages
from pipeline.planner.makespan import makespan
from pipeline.planner.memory import LOGIT_PARTS
from pipeline.planner.sequences import SequenceCut, sent_bytes
from pipeline.training.compiling import default_compiler_options
from schedules import simulate

GB = 10**9
TOPOLOGY, CHIP, LENGTH, ROWS = "v5p:4x4x4", CHIPS["v5p"], 131072, 16
MODEL = MODELS["llama-8b"]


def _layout(stage: int, ranks: int, slices: int, remat: str | None, chunks: int = 1) -> MeshLayout:
    """A layout of the slice, with slices of equal time, and so many stages on a rank."""
    data = 64 // (stage * ranks)
    cut = SequenceCut(ranks, "ulysses" if ranks > 1 else "allgather", slices=slices)
    whole = "interleaved_1f1b" if chunks > 1 else "eager_1f1b"
    found = MeshLayout(
        data,
        stage,
        1,
        schedule="seq1f1b" if slices > 1 else whole,
        chunks=chunks,
        microbatches=ROWS // data,
        remat=remat,
        data_parallel="zero1",
        vocabulary="ends" if slices > 1 else "stage",
        cut=cut,
    )
    by_length = with_equal_slices(job_of(MODEL.layers), found) if slices > 1 else None
    return by_length or found


def job_of(layers: int) -> PlannedJob:
    """The model with so many layers, on the slice."""
    model = replace(MODEL, layers=layers)
    return PlannedJob(model, CHIP, 64, ROWS, LENGTH, 1, "lockstep", CHIP.efficiency)


CASES = {
    "context": _layout(4, 8, 1, "stage"),
    "slices": _layout(8, 1, 16, "stage"),
    "both": _layout(4, 8, 4, "stage"),
    "both-kept": _layout(4, 8, 4, None),
    "interleaved": _layout(4, 8, 1, None, chunks=8),
}
# A number of slices, which runs the formula.
_NUMBER = replace(CASES["slices"].cut, lengths=())
CASES["slices-equal"] = replace(CASES["slices"], cut=_NUMBER, vocabulary="stage")


def config_of(layers: int) -> DecoderConfig:
    """The decoder of so many layers."""
    return DecoderConfig(
        vocabulary=MODEL.vocabulary,
        width=MODEL.width,
        layers=layers,
        heads=MODEL.heads,
        kv_heads=MODEL.kv_heads,
        head_dim=MODEL.width // MODEL.heads,
        hidden=MODEL.hidden,
    )


def mesh_of(layout: MeshLayout, devices: list[Any]) -> Mesh:
    """The mesh of a layout."""
    axes = {"data": layout.data, "stage": layout.stage}
    if layout.cut.ranks > 1:
        axes["context"] = layout.cut.ranks
    return make_mesh(devices=devices, **axes)


@dataclass(frozen=True)
class BlockCycles:
    """One block of one action: forward, and backward with the block computed again.

    Attributes:
      forward, both: of its program.
      machine: of the slice.
      sent: bytes of all-to-alls and all-gathers in both, by the compiled program.
    """

    forward: Cycles
    both: Cycles
    machine: Machine
    sent: float

    def seconds(self, one: Cycles) -> float:
        """The seconds of a program."""
        return one.total / self.machine.clock


def block(name: str, number: int, keep: Path | None) -> BlockCycles:
    """Compile one block of a case on one slice, forward alone and forward with its gradients."""
    layout = CASES[name]
    cut = layout.cut
    chip, devices = find_slice(TOPOLOGY)
    mesh = mesh_of(layout, devices)
    machine = machine_of(chip, mesh, devices)
    types = {"dtype": jnp.float32, "activations": jnp.bfloat16, "context": cut.context}
    one = nnx.eval_shape(lambda: Block(config_of(4), 0, nnx.Rngs(0), **types))
    graphdef, state = nnx.split(one)
    lengths = cut.lengths or (LENGTH // cut.slices,) * cut.slices
    part: SequenceSlice = WHOLE_SEQUENCE
    if cut.slices > 1:
        given = cut.slices, cut.lengths
        part = FixedSlice(number, *given) if cut.lengths else SequenceSlice(number, cut.slices)
    t = lengths[number]
    # All are a rank's own.
    x = jax.ShapeDtypeStruct((1, t // cut.ranks, MODEL.width), jnp.bfloat16)
    earlier = None
    if cut.slices > 1:
        heads = max(MODEL.kv_heads, cut.ranks) // cut.ranks
        shape = cut.slices, 1, max(lengths), heads, MODEL.width // MODEL.heads
        kept = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        earlier = {"keys": kept, "values": kept}

    def run(state: Any, x: Any, earlier: Any) -> Any:
        return nnx.merge(graphdef, state).call_slice(x, earlier, part)

    def back(state: Any, x: Any, earlier: Any) -> Any:
        outputs, pullback = jax.vjp(run, state, x, earlier)
        return pullback(outputs)

    programs, flags = {}, default_compiler_options(devices[0])
    for what, function in ("forward", run), ("both", back):

        def on_rank(state: Any, x: Any, earlier: Any, function: Any = function) -> Any:
            return jax.tree.map(lambda a: a[None], function(state, x, earlier))

        call = jax.shard_map(
            on_rank, mesh=mesh, in_specs=P(), out_specs=P(tuple(mesh.axis_names)), check_vma=False
        )
        lower = functools.partial(jax.jit(call).lower, state, x, earlier)
        programs[what] = compiled(lower, keep, f"long-{name}-{number}-{what}", flags)
    read = {what: cycles(made.text, machine)[Scope(ONCE)] for what, made in programs.items()}
    return BlockCycles(read["forward"], read["both"], machine, exchanged(programs["both"].text))


def exchanged(text: str) -> float:
    """Bytes that a chip gives to all-to-alls, by the types of their results."""
    found = 0.0
    for line in text.splitlines():
        if " all-to-all(" in line or " all-to-all-start(" in line:
            kinds, _, _ = line.partition(" all-to-all")
            sizes = [int(n) for n in _shape_of(kinds)]
            found += 2 * functools.reduce(lambda a, b: a * b, sizes, 1)
    return found


def _shape_of(text: str) -> list[str]:
    inner = text.rpartition("[")[2].partition("]")[0]
    return [n for n in inner.split(",") if n]


def predicted_block(name: str, number: int = 0) -> tuple[float, float, float]:
    """The planner's seconds of a block's F and B on one slice, and bytes that it sends."""
    layout, job = CASES[name], job_of(MODEL.layers)
    costs, N = stage_costs(job, layout), layout.cut.slices
    each = MODEL.layers // (layout.stage * layout.chunks) * N
    forward, backward = costs.f[1] / each, costs.b[1] / each  # type: ignore[index]
    share = 1.0 if costs.slices is None else costs.slices[number]
    sent = sum(sent_bytes(MODEL, layout.cut, layout.rows, LENGTH, 1))
    return share * forward, share * backward, sent


def step_of_blocks(name: str, forward: float, both: float) -> float:
    """The seconds of a step whose blocks take what the compiler says, all else as planned.

    Args:
      name: of the case.
      forward: seconds of a block's F.
      both: seconds of its forward and backward, which is B where blocks are computed again.
    """
    layout, job = CASES[name], job_of(MODEL.layers)
    one, costs = estimate(job, layout), stage_costs(job, layout)
    each = MODEL.layers // (layout.stage * layout.chunks) * layout.cut.slices
    backward = both if layout.remat == "stage" else both - forward
    f = tuple(each * forward if planned_f else 0.0 for planned_f in costs.f)  # type: ignore[union-attr]
    costs = replace(costs, f=f, b=(each * backward,) * layout.stage)
    shared = ("embed", "head") if layout.vocabulary == "stage" else ()
    sizes = layout.schedule or "", layout.stage, layout.chunks, layout.microbatches
    span = makespan(*sizes, costs, shared, "lockstep", N=layout.cut.slices)
    return span + one.seconds["data"] + one.seconds["update"]


def pipeline_of(name: str, layers: int, devices: list[Any]) -> Pipeline:
    """A pipeline of types."""
    layout = CASES[name]
    counts = layers_of_stages(layers, layout.stage * layout.chunks)
    types = {"dtype": jnp.float32, "activations": jnp.bfloat16, "context": layout.cut.context}
    types["vocabulary"] = layout.vocabulary
    types["loss_chunks"] = LOGIT_PARTS if layout.vocabulary == "ends" else None
    stages, embed, head = build(config_of(layers), counts, None, **types)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Pipeline(
            stages,
            layout.microbatches,
            embed=embed,
            head=head,
            loss_fn=CrossEntropy() if layout.vocabulary == "stage" else next_token_loss,
            mesh=mesh_of(layout, devices),
            schedule=layout.schedule,
            batch=P("data", "context") if layout.cut.ranks > 1 else P("data"),
            slices=layout.cut.options,
            remat=layout.remat,
            data_parallel=layout.data_parallel,
            vocabulary=layout.vocabulary,
        )


def step(name: str, layers: int, keep: Path | None) -> tuple[float, Compiled]:
    """Compile a whole step: its seconds by the clock of the schedule, and its program."""
    chip, devices = find_slice(TOPOLOGY)
    pipe, layout = pipeline_of(name, layers, devices), CASES[name]
    words = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    optimizer = make_optimizer(pipe, optax.adam(1e-4))
    lower = functools.partial(pipe.lower, words, words, optimizer=optimizer)
    flags = default_compiler_options(devices[0])
    made = compiled(lower, keep, f"long-{name}-{layers}", flags)
    machine, plan, N = machine_of(chip, pipe.mesh, devices), pipe.plan, layout.cut.slices
    read = cycles(made.text, machine)
    message = 2 * layout.tokens(LENGTH) * MODEL.width
    costs = costs_of(read, plan, machine, message)
    # Costs are of whole microbatches. Of slices by length an action's program has one body each, so
    # its cycles are of all; equal slices share one body. A message is of one slice.
    bodies = 1 if layout.cut.lengths else N
    times = {
        field: tuple(bodies * one for one in getattr(costs, field))
        for field in ("f", "i", "w", "b")
    }
    ends = {field: bodies * getattr(costs, field) for field in ("head", "embed")}
    costs = replace(costs, **times, **ends, comm=N * costs.comm)
    slots = simulate(plan.schedule, **plan.clock).pattern
    options: dict[str, Any] = {**plan.sends, "pattern": slots, "shared": plan.shared}
    span = simulate(plan.schedule, costs, "lockstep", **options).makespan
    return span + beside(read, plan, machine), made


def planned(name: str, layers: int) -> Estimate:
    """The planner's step."""
    return estimate(job_of(layers), CASES[name])


def blocks(names: list[str], keep: Path | None) -> list[list[str]]:
    """A row for each case of what one block takes."""
    rows = []
    for name in names:
        cut = CASES[name].cut
        for number in sorted({0, cut.slices - 1}):
            forward, backward, sent = predicted_block(name, number)
            found = block(name, number, keep)
            share = cut.lengths[number] / LENGTH * cut.slices if cut.lengths else 1.0
            ours = 1 - 1 / cut.ranks  # the rest of an exchange stays on its chip
            taken = found.seconds(found.forward), found.seconds(found.both)
            both = taken[1] - (0.0 if CASES[name].remat == "stage" else taken[0])
            rows.append(
                [
                    name,
                    f"{cut}, {number}" if cut.slices > 1 else str(cut),
                    f"{forward:.3f}",
                    f"{found.seconds(found.forward):.3f}",
                    f"{backward:.3f}",
                    f"{both:.3f}",
                    f"{found.forward.kernels / found.forward.total:.0%}",
                    f"{share * sent / 1e6:.0f}",
                    f"{ours * found.sent / 1e6:.0f}",
                    f"{planned(name, MODEL.layers).step:.1f}",
                    "-" if name == "slices-equal" else f"{step_of_blocks(name, *taken):.1f}",
                ]
            )
    return rows


def steps(names: list[str], layers: int, keep: Path | None) -> list[list[str]]:
    """A row for each case of a whole step."""
    rows, job = [], job_of(layers)
    for name in names:
        wanted = planned(name, layers)
        seconds, made = step(name, layers, keep)
        rows.append(
            [
                name,
                str(CASES[name].cut),
                f"{wanted.step:.2f}",
                f"{seconds:.2f}",
                f"{mfu(job, wanted.step):.1%}",
                f"{mfu(job, seconds):.1%}",
                f"{wanted.hbm / GB:.1f}",
                f"{made.hbm / GB:.1f}",
            ]
        )
    return rows


BLOCK_HEAD = ["case", "sequences", "F", "compiled", "B", "compiled", "kernels", "MB sent"]
BLOCK_HEAD += ["compiled", "step, s", "of such blocks"]
STEP_HEAD = ["case", "sequences", "s", "compiled", "MFU", "compiled", "HBM, GB", "compiled"]


def main() -> None:
    """Print predictions, and what the compiler says beside them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="by default all")
    parser.add_argument("--block", action="store_true", help="one block, not whole steps")
    parser.add_argument("--layers", type=int, default=32, help="of whole steps (32)")
    parser.add_argument("--predict", action="store_true", help="the planner's numbers alone")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs, read if there")
    options = parser.parse_args()
    names = options.names or list(CASES)
    if options.predict:
        job = job_of(options.layers)
        for name in names:
            one = planned(name, options.layers)
            print(f"{name}: {one.step:.2f} s, MFU {mfu(job, one.step):.1%}, {one.hbm / GB:.1f} GB")
            print(f"  a block: {predicted_block(name)}")
        return
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    tpu.prepare()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    print(f"jax {jax.__version__}, {TOPOLOGY}, {ROWS} rows of {LENGTH:,} positions", flush=True)
    start = time.perf_counter()
    if options.block:
        print(table(BLOCK_HEAD, blocks(names, options.keep)))
    else:
        print(table(STEP_HEAD, steps(names, options.layers, options.keep)))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
