"""A second call of anything compiles nothing, of whatever placement and number of microbatches."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest
from flax import nnx

import collectives
from pipeline import Pipeline, generate
from pipeline.vocabulary import CrossEntropy
from tests.models.decoding.test_generate import PROMPTS, Embed, Flax, Own, Tied

TOKENS = np.asarray(PROMPTS)[:4]


def alike(num_stages):
    return [Own(nnx.Rngs(k)) for k in range(num_stages)]


def unlike(num_stages):
    """Stages whose weights share storage, so that another placement lays them out anew."""
    return [(Own, Flax)[k % 3 == 1](nnx.Rngs(k)) for k in range(num_stages)]


@contextlib.contextmanager
def compilations():
    """The events of compilers, as they come."""
    found: list[str] = []

    def count(name: str, *_: object, **__: object) -> None:
        if "backend_compile" in name:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


CASES = [(alike, "zb_v"), (unlike, "zb_v"), (alike, "1f1b"), (unlike, "interleaved_1f1b")]


@pytest.mark.few
@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_a_second_call_compiles_nothing(kind, schedule):
    """The first round compiles each program; the second, with other weights and words, none."""
    stages, embed = kind(2 if schedule == "1f1b" else 4), Embed(nnx.Rngs(100))
    for module in (*stages, embed):
        module.eval()
    pipe = Pipeline(
        stages,
        4,
        schedule=schedule,
        embed=embed,
        head=Tied(embed),
        loss_fn=CrossEntropy(),
        mesh=collectives.make_mesh(stage=2),
    )

    def round_of_calls(tokens):
        jax.block_until_ready(pipe.value_and_grad(tokens, tokens))
        pipe.loss(tokens, tokens, num_microbatches=2)
        pipe(tokens, num_microbatches=2)
        for M in (2, 1):
            generate(pipe, tokens, 2, num_microbatches=M)

    with compilations() as first:
        round_of_calls(TOKENS)
    assert len(first) >= 5  # else nothing is counted
    pipe.embed.words[...] = 2 * pipe.embed.words[...]
    with compilations() as second:
        round_of_calls(TOKENS[::-1])
    assert not second
