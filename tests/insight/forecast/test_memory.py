"""Bytes, messages and repeated work of a compiled step, read off the executable; nothing runs.

Letters: S ranks, K stages, V chunks per rank, M microbatches, D data shards, b rows of a
microbatch.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.hlo import computations, in_loops, opcode, result

WIDTH, HIDDEN = 96, 160  # of an activation, and inside a stage: both found nowhere else
ROWS = 112  # b


class Wide(nnx.Module):
    """A residual MLP large enough that its arrays outweigh a program's tables."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = models.normal(rngs, WIDTH, HIDDEN)
        self.down = models.normal(rngs, HIDDEN, WIDTH)

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


def lower(family, M, *, S=4, V=1, D=1, **options):
    """The pipeline, and its step lowered for abstract rows."""
    pipe = Pipeline(
        [nnx.eval_shape(lambda: Wide(nnx.Rngs(0))) for _ in range(V * S)],
        M,
        schedule=family,
        mesh=make_mesh(stage=S, data=D),
        loss_fn=models.squares,
        **options,
    )
    x = jax.ShapeDtypeStruct((M * D * ROWS, WIDTH), jnp.float32)
    return pipe, pipe.lower(x, x)


def temporary(family, M, **options):
    """The pipeline, and the bytes of its step beside arguments and results, on one device."""
    pipe, lowered = lower(family, M, **options)
    return pipe, lowered.compile().memory_analysis().temp_size_in_bytes


# --- memory against M ---


@pytest.mark.few
def places_of(pipe) -> tuple[int, int]:
    """Places on the device for messages and for stashes."""
    values = pipe.plan.training.values
    return values["operand"].device, values["stash"].device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "remat"),
    [
        ("1f1b", "stage"),
        ("1f1b", None),
        pytest.param("eager_1f1b", "stage", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_number_of_microbatches(family, remat):
    few, many = (temporary(family, M, remat=remat) for M in (8, 64))
    places = [places_of(pipe) for pipe, _ in (few, many)]
    assert places[0] == places[1]
    assert sum(places[0]) > 4  # there is something to hold
    assert many[1] == pytest.approx(few[1], rel=0.01)


@pytest.mark.few
@pytest.mark.parametrize("remat", ["stage", None])
def test_the_memory_of_gpipe_grows_by_its_places(remat):
    """By an activation per buffer and, without remat, by the residuals of a stage per stash."""
    few, many = (temporary("gpipe", M, remat=remat) for M in (8, 64))
    a, b = (places_of(pipe) for pipe, _ in (few, many))
    activation = ROWS * WIDTH * 4
    residuals = activation + ROWS * HIDDEN * 4  # the input and what tanh returns
    buffers, stashes = b[0] - a[0], b[1] - a[1]
    assert (buffers, stashes) == (56, 0 if remat else 56)
    predicted = buffers * activation + stashes * residuals
    assert predicted > 0.6 * many[1]
    assert many[1] - few[1] == pytest.approx(predicted, rel=0.02)


# --- the size of the program against M ---


@pytest.mark.few
@pytest.mark.parametrize("family", ["gpipe", "1f1b", "eager_1f1b"])
def test_no_tick_is_unrolled(family):
    few, many = (lower(family, M)[1].as_text() for M in (8, 512))
    assert few.count("\n") > 200
    assert many.count("\n") == few.count("\n")


@pytest.mark.parametrize("remat", ["stage", None])
def test_no_index_is_tested_for_being_negative(remat):
    """`ref[place]` tests each index of each axis: 146 and 206 comparisons, where 11 are meant."""
    text = lower("zb_h1", 8, remat=remat)[1].as_text()
    assert text.count("stablehlo.dynamic_update_slice") > 1
    assert text.count("stablehlo.compare") < 30


def test_the_optimised_program_does_not_grow_with_microbatches():
    few, many = (lower("1f1b", M)[1].compile().as_text() for M in (8, 512))
    assert len(many) == pytest.approx(len(few), rel=0.02)
    assert many.count("\n") == pytest.approx(few.count("\n"), rel=0.02)


# --- the optimised HLO ---


WEIGHT = re.compile(rf"\[(\d+,)*({WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]")
STEPS = [
    ("1f1b", "stage", 1),
    ("1f1b", None, 2),
    ("eager_1f1b", "stage", 2),
    ("gpipe", None, 1),
]


@pytest.mark.few
@pytest.mark.parametrize(("family", "remat", "V"), STEPS)
def test_what_a_tick_does_not_do(family, remat, V):
    """No reduction of gradients and no copy of weights in the loop over ticks."""
    _, lowered = lower(family, 6, S=2, V=V, D=2, remat=remat)
    text = lowered.compile().as_text()
    found = computations(text)
    inside = list(in_loops(found))
    opcodes = {opcode(line).removesuffix("-start") for line in inside}
    assert {"collective-permute", "dot"} <= opcodes
    assert not opcodes & {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}

    moves = ("copy", "copy-start", "dynamic-slice", "dynamic-update-slice", "gather", "concatenate")
    moved = [line for line in inside if opcode(line) in moves]
    assert moved  # activations are
    assert [line for line in moved if WEIGHT.search(result(line))] == []

    reduced = [line for line in found["ENTRY"] if opcode(line).startswith("all-reduce")]
    gradients = [line for line in reduced if WEIGHT.search(result(line))]
    assert sum(len(WEIGHT.findall(result(line))) for line in gradients) == 2 * V
    # Over data, never over stage; newer releases name the axes.
    groups = ("replica_groups={{0,2},{1,3}}", "replica_groups=mesh['data'=2,'stage'=2] {'data'}")
    assert all(any(group in line for group in groups) for line in gradients)


@pytest.mark.few
def test_weights_appear_in_sharded_shape_only():
    S, V = 4, 2
    _, lowered = lower("1f1b", 4, S=S, V=V)
    text = lowered.compile().as_text()
    leads = {lead for lead, _ in WEIGHT.findall(text)}
    assert leads == {"", "1,"}  # never all ranks', all stages' or even a rank's chunks'
    entry = text[text.index("ENTRY") :].splitlines()[0]
    assert len(WEIGHT.findall(entry.split("->")[0])) == 2 * V
    assert "all-gather" not in text
