"""Memory of slices: what lowering counts, what the trace predicts, what the compiler allocates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.decoders import DecoderConfig, build, next_token_loss
from schedules.lowering.lower import lower

S, M, T, ROWS = 4, 8, 256, 8


@pytest.mark.parametrize("name", ["seq1f1b", "seq1f1b_zb"])
def test_places_follow_the_formulas(name):
    """Rank r has S - 1 - r + N units in flight; nobody reads what the last slices leave."""
    for N in (2, 3, 4, 8):
        schedule = schedules.build(name, num_ranks=S, num_microbatches=M, num_slices=N)
        program = schedules.check_program(lower(schedule))
        assert program.values["carry"].device == max(peak(order, N) for order in schedule.orders)
        assert N - 1 <= program.values["carry"].device <= S - 2 + N
        assert program.values["carry_gradient"].device == N - 1
        forward = schedules.check_program(lower(schedule.forward()))
        assert [forward.values[n].device for n in ("carry", "carry_gradient")] == [N - 1, 0]


def peak(order: Any, N: int) -> int:
    """The most carries that a rank holds: from F of a slice to the backward of the one after it."""
    held = most = 0
    for action in order:
        held += action.kind == "F" and action.slice < N - 1
        most = max(most, held)
        held -= action.kind in "BI" and action.slice > 0
    return most


def compiled(slices: int, remat: Any) -> tuple[int, int]:
    """Temporary bytes of a step: predicted from the trace, and of the compiler."""
    config = DecoderConfig(
        vocabulary=16, width=64, layers=S, heads=1, kv_heads=1, head_dim=16, hidden=64
    )
    stages, embed, head = build(config, [1] * S, nnx.Rngs(0))
    pipe = Pipeline(
        stages,
        M,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(stage=S, devices=jax.devices()[:S]),
        schedule="1f1b" if slices == 1 else "seq1f1b",
        slices=slices,
        remat=remat,
    )
    tokens = jnp.zeros((ROWS, T), jnp.int32)
    text = str(pipe.describe(tokens, tokens, compiled=True))
    (line,) = [line for line in text.splitlines() if "temporaries" in line]
    predicted, found = line.split(":")[0].split()[-1], line.split("compiled ")[1]
    return tuple(int(number.replace(",", "")) for number in (predicted, found))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_compiled_bytes_fall_with_slices(remat):
    """A rank holds (S - 1 + N) / N microbatches: with S = 4 it is 4, 2.5, 1.75."""
    found = {N: compiled(N, remat) for N in (1, 2, 4)}
    for predicted, real in found.values():
        assert predicted == pytest.approx(real, rel=0.35)
    assert found[2][1] < 0.75 * found[1][1]
    assert found[4][1] < 0.6 * found[1][1]
