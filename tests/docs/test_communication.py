"""bench/notes/communication.md: its formulas against the optimised HLO, byte for byte within 1%.

Letters as on the page, which is where the formulas are read from.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.placement.placement import DEFERRED
from pipeline.core.step import runtime
from pipeline.insight.forecast import traffic
from schedules.lowering.needs import needed, segments
from schedules.lowering.program import Program
from tests.support.hlo import Sent

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import LlamaConfig, build, ends_by_stage, loss_fn

NOTES = Path(__file__).parents[2] / "bench" / "notes"
PAGE = (NOTES / "communication.md").read_text(encoding="utf-8")
M, ROWS, LENGTH, WORDS = 4, 2, 8, 64
DATA_AXES = ("data",), ("data", "stage"), ("stage",)
TENSOR_AXES = ("data", "tensor"), ("data", "stage", "tensor"), ("tensor",), ("stage", "tensor")
slow = pytest.mark.slow
RARE = [slow, pytest.mark.exhaustive]


def table(title: str) -> dict[str, list[str]]:
    """The rows of all tables whose head begins so, by their first cell."""
    pattern = rf"^\| {re.escape(title)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)"
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for body in re.findall(pattern, PAGE, re.MULTILINE)
        for row in body.splitlines()
    ]
    return {row[0]: row[1:] for row in rows}


def value(cell: str, letters: dict[str, Any]) -> float:
    """The value of a formula of the page."""
    shares = {"ar": lambda n: 2 * (n - 1) / n, "ag": lambda n: (n - 1) / n}
    return float(eval(cell.strip("`"), {"__builtins__": {}}, {**shares, **letters}))


# --- a pipeline, and what the page says of it ---


def model(*, stages: int, layers: int, vocabulary: str, **changes: Any) -> tuple[Any, ...]:
    config = LlamaConfig.tiny(
        num_hidden_layers=stages * layers, vocab_size=WORDS, vocabulary_multiple_of=8, **changes
    )
    parts, embed, head = build(config, stages, seed=0)
    if vocabulary == "ends":
        return config, parts, embed, head, loss_fn(config)
    return config, parts, *ends_by_stage(config, seed=5)


@functools.cache
def made(
    mesh: tuple[int, int, int],
    *,
    changes: tuple[tuple[str, Any], ...] = (),
    layers: int = 1,
    chunks: int = 1,
    vocabulary: str = "ends",
    **options: Any,
) -> tuple[Pipeline, Any, int]:
    """A Llama on a mesh (data, stage, tensor), its batch and its width."""
    D, S, R = mesh
    config, parts, embed, head, loss = model(
        stages=S * chunks, layers=layers, vocabulary=vocabulary, **dict(changes)
    )
    pipe = Pipeline(
        parts,
        M,
        mesh=make_mesh(data=D, stage=S, **({"tensor": R} if R > 1 else {})),
        embed=embed,
        head=head,
        loss_fn=loss,
        vocabulary=vocabulary,
        **options,
    )
    return pipe, jax.ShapeDtypeStruct((M * ROWS * D, LENGTH), jnp.int32), config.hidden_size


def size(pipe: Pipeline, variables: Any, *, itemsize: int) -> int:
    """Bytes of numbers on a device, as if nothing were sharded over data."""
    total = 0
    for leaf in variables:
        axes = [a for entry in leaf.sharding.spec if entry for a in np.atleast_1d(entry)]
        shards = np.prod([pipe.mesh.shape[a] for a in axes if a != "data"], dtype=int)
        total += leaf.size // shards * itemsize
    return total


def apart(module: Any) -> list[Any]:
    """Weights whose gradients differ between tensor ranks until the step ends."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return [v.get_value() for _, v in flat if v.get_metadata(DEFERRED, None)]


def is_shared(weight: Any) -> bool:
    """True if all stage ranks share the table of embed or head."""
    return "stage" in tuple(weight.sharding.spec)


def letters(pipe: Pipeline, width: int, *, layers: int, sequence: bool) -> dict[str, Any]:
    """Letters that do not depend on the rank."""
    D, S, R = (pipe.mesh.shape.get(axis, 1) for axis in ("data", "stage", "tensor"))
    ends = jax.tree.leaves(nnx.state(pipe.ends, nnx.Param))
    of_ends = apart(pipe.ends)
    chunks = jax.tree.leaves(nnx.state(pipe.chunks, nnx.Param))
    sums = 2 if pipe.plan.grad_dtype == jnp.bfloat16 else 4
    rows = ROWS * LENGTH
    return {
        "S": S,
        "D": D,
        "R": R,
        "M": M,
        "V": pipe.plan.num_chunks,
        "L": layers,
        "n": rows,
        "d": width,
        "A": 4 * rows * width,
        "m": 4 * rows * width // (R if sequence else 1),
        "G": size(pipe, chunks, itemsize=sums),
        "W": size(pipe, chunks, itemsize=4),
        "E": size(pipe, [w for w in ends if not is_shared(w)], itemsize=sums),
        "Y": size(pipe, filter(is_shared, ends), itemsize=sums),
        "U": size(pipe, ends, itemsize=4),
        "H": size(pipe, apart(pipe.chunks) + [w for w in of_ends if is_shared(w)], itemsize=sums),
        "J": size(pipe, [w for w in of_ends if not is_shared(w)], itemsize=sums),
    }


def exchanges(program: Program) -> list[int]:
    """[S] X, where nothing is masked."""
    found = [0] * program.schedule.num_ranks
    for start, stop, _ in segments(program):
        for index in range(len(program.slots)):
            for _, channel in needed(program, index, start, stop).channels:
                for source, _ in channel.edges if channel.shift else ():
                    found[source] += stop - start
    return found


def said(pipe: Pipeline, width: int, *, layers: int, sequence: bool) -> dict[Any, list[float]]:
    """[S] bytes over each set of axes, by the formulas of the page."""
    plan, known = pipe.plan, letters(pipe, width, layers=layers, sequence=sequence)
    S, shared = known["S"], bool(plan.shared)
    remat = f"`remat={'None' if plan.remat is None else chr(34) + plan.remat + chr(34)}`"
    places = [1] * S if shared else [0, *[1] * (S - 2), 2][:S]  # first, between, last

    gathered = table('`gather="action"`, Q')[remat]
    data = f'`"{plan.data_parallel}"`' + ', `gather="action"`' * (plan.gather == "action")
    data_row = table("`data_parallel=`")[data]
    over_tensor = table("sums over `tensor` too")[
        '`"replicated"`' if plan.data_parallel == "replicated" else '`"zero1"`, `"fsdp"`'
    ]
    of_tensor = table("Llama")[remat + ", sequence parallel" * sequence]
    found: dict[Any, list[float]] = {}

    def add(axes: tuple[str, ...], cell: str, rank: int, **more: Any) -> None:
        present = tuple(axis for axis in axes if pipe.mesh.shape.get(axis, 1) > 1)
        if present:
            row = found.setdefault(present, [0.0] * S)
            row[rank] += value(cell, {**known, **more})

    for rank, place in enumerate(places):
        q = value(gathered[place], known)
        add(("stage",), table("what")["messages"][0], rank, X=exchanges(plan.training)[rank])
        for axes, cell in zip(DATA_AXES, data_row, strict=True):
            add(axes, cell, rank, Q=q)
        for axes, cell in zip(TENSOR_AXES, over_tensor, strict=True):
            add(axes, cell, rank)
        if shared:
            what = '`vocabulary="stage"`' + ", sequence parallel" * sequence
            add(("stage",), table("what")[what][0], rank)
        add(("tensor",), of_tensor[place], rank)
    return {axes: row for axes, row in found.items() if any(row)}


# --- every option ---

SEQUENCE = (("sequence_parallel", True),)
TIED = (("tie_word_embeddings", True),)
CASES = [
    ((2, 2, 2), "eager_1f1b", {"changes": SEQUENCE, "data_parallel": "zero1"}),
    (
        (2, 4, 1),
        "zb_h1",
        {"changes": TIED, "data_parallel": "fsdp", "remat": None, "vocabulary": "stage"},
    ),
]
LONG = [
    ((1, 4, 2), "1f1b", {"remat": None, "layers": 2}),
    ((1, 4, 2), "1f1b", {"changes": SEQUENCE, "layers": 2}),
    ((1, 4, 2), "gpipe", {"changes": SEQUENCE, "remat": None}),
    ((1, 4, 2), "1f1b", {"changes": SEQUENCE, "remat": "gathered", "layers": 2}),
    ((1, 2, 4), "zb_h1", {"changes": (*SEQUENCE, *TIED, ("loss_chunks", 2))}),
    ((1, 2, 4), "zb_h1", {"changes": TIED, "remat": None}),
    ((2, 2, 2), "1f1b", {"data_parallel": "fsdp", "gather": "action"}),
    ((2, 2, 2), "zb_h1", {"data_parallel": "fsdp", "gather": "action", "remat": None}),
    ((2, 2, 2), "1f1b", {"pattern": "partner", "data_parallel": "fsdp"}),
    ((2, 2, 2), "eager_1f1b", {"vocabulary": "stage", "data_parallel": "zero1"}),
    (
        (2, 2, 2),
        "zb_h1",
        {"changes": SEQUENCE, "vocabulary": "stage", "data_parallel": "zero1", "remat": None},
    ),
    (
        (1, 4, 2),
        "1f1b",
        {"changes": (*SEQUENCE, *TIED), "vocabulary": "stage", "remat": "gathered"},
    ),
    ((2, 4, 1), "1f1b", {"delayed": True, "data_parallel": "zero1"}),
    ((2, 4, 1), "1f1b", {"vocabulary": "stage", "changes": TIED}),
    ((2, 4, 1), "gpipe", {"vocabulary": "stage", "data_parallel": "fsdp", "remat": None}),
    ((4, 2, 1), "1f1b", {"changes": TIED}),
    ((4, 2, 1), "interleaved_1f1b", {"chunks": 2, "data_parallel": "zero1"}),
    ((4, 2, 1), "zb_v", {"chunks": 2, "data_parallel": "fsdp"}),
    ((8, 1, 1), "1f1b", {"data_parallel": "fsdp", "remat": None}),
    ((1, 4, 2), "1f1b", {}),
]


def name(case: Any) -> str:
    (D, S, R), family, options = case
    said = [f"{k}={v}" for k, v in options.items() if k != "changes"]
    return "-".join([f"{D}x{S}x{R}", family, *(k for k, _ in options.get("changes", ())), *said])


@pytest.mark.few
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name(c)) for c in CASES]
    + [pytest.param(c, id=name(c), marks=slow if n % 2 else RARE) for n, c in enumerate(LONG)],
)
def test_bytes_sent_in_a_step(case):
    """The page, the traced step and the compiled one say the same."""
    mesh, family, options = case
    pipe, tokens, width = made(mesh, schedule=family, **options)
    wanted = said(
        pipe,
        width,
        layers=options.get("layers", 1),
        sequence=SEQUENCE[0] in options.get("changes", ()),
    )
    compiled = Sent(pipe.lower(tokens, tokens).compile().as_text(), pipe.plan.training, pipe.mesh)
    assert {axes for axes, _ in compiled.bytes} == set(wanted)
    for axes, row in wanted.items():
        assert compiled.over(*axes).tolist() == pytest.approx(row, rel=0.01), axes
    assert_predicted(pipe, tokens, compiled)
    # Over data once a step, unless actions gather.
    most = {key: runs for key, runs in compiled.runs.items() if "data" in key[0]}
    gathers = (("data",), "all-gather") if pipe.plan.gather == "action" else None
    assert {runs for key, runs in most.items() if key != gathers} <= {1}


def assert_predicted(pipe: Pipeline, tokens: Any, compiled: Sent) -> None:
    found = traffic.predict_traffic(pipe.plan, *pipe._operands(tokens, tokens, None))
    assert not found.is_least
    assert {k: v.tolist() for k, v in found.sent.items()} == {
        k: pytest.approx(v.tolist()) for k, v in compiled.bytes.items()
    }


@slow
def test_outputs_on_every_rank():
    pipe, tokens, width = made((2, 4, 1), schedule="1f1b")
    operands = pipe._operands(tokens, (), None)
    step = runtime.outputs.lower(pipe.plan, *operands).compile()
    compiled = Sent(step.as_text(), pipe.plan.forward, pipe.mesh)
    known = letters(pipe, width, layers=1, sequence=False) | {"O": 4 * M * ROWS * LENGTH * WORDS}
    messages = [known["m"] * count for count in exchanges(pipe.plan.forward)]
    outputs = value(table("call")["`pipe(inputs)`, of O bytes of outputs"][0], known)
    wanted = [outputs + sent for sent in messages]
    assert messages[3] == 0 < messages[0]
    assert compiled.over("stage").tolist() == pytest.approx(wanted, rel=0.01)
    assert {axes for axes, _ in compiled.bytes} == {("stage",)}


@pytest.mark.parametrize("bits", [16, pytest.param(32, marks=slow)])
def test_bits_of_gradients(bits):
    """XLA's CPU backend sums what has 16 bits in 32, so what the program says is looked at."""
    options = {} if bits == 32 else {"grad_dtype": jnp.bfloat16}
    pipe, tokens, width = made((2, 2, 1), schedule="1f1b", **options)
    known = letters(pipe, width, layers=1, sequence=False)
    assert known["G"] * 32 == known["W"] * bits
    found = traffic.predict_traffic(pipe.plan, *pipe._operands(tokens, tokens, None))
    row = table("`data_parallel=`")[f'`"{pipe.plan.data_parallel}"`']
    wanted = [value(cell, known) for cell in row[:2]]
    assert found.over("data").tolist() == [wanted[0]] * 2
    assert found.over("data", "stage").tolist() == [wanted[1]] * 2
