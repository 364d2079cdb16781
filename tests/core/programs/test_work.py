"""The work that each compiled action repeats: collectives, and casts of weights.

What an action does is done M times a step. So a collective or a cast that belongs to a step, not to
a microbatch, shows here, in six configurations of a model of two stages.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from collectives.compat import lower_without_devices
from pipeline import Pipeline
from pipeline.base.rows import batch_part, data_mask
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of
from pipeline.core.programs import program
from pipeline.training.batches import masked, padded
from tests.support import models
from tests.support.hlo import MEETINGS, opcode
from tests.support.tensor_stages import Parallel

KINDS = (*MEETINGS, "collective-permute")
SHAPE = (models.WIDTH, 16)  # of a weight of `Mixed`, and of no activation


class Mixed(nnx.Module):
    """A stage with float32 weights that computes in bfloat16."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = models.normal(rngs, *SHAPE), models.normal(rngs, *SHAPE[::-1])

    def __call__(self, x):
        up, down = (w[...].astype(jnp.bfloat16) for w in (self.up, self.down))
        return x + (jnp.tanh(x.astype(jnp.bfloat16) @ up) @ down).astype(x.dtype)


class Counting(nnx.Module):
    """A stage that divides by the rows of the whole step that are data."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)

    def __call__(self, x):
        part, mask = batch_part(), data_mask()
        return x @ self.w[...] if mask is None else x @ self.w[...] / part.mean_rows


def collectives(text: str) -> Counter[str]:
    """Count the collectives of a compiled program."""
    return Counter(kind for line in text.splitlines() if (kind := opcode(line.strip())) in KINDS)


def casts(jaxpr: Any) -> int:
    """Count the casts of weights to bfloat16 in a traced program."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            cast = eqn.outvars[0].aval
            count += cast.dtype == jnp.bfloat16 and sorted(cast.shape) == sorted(SHAPE)
        count += sum(map(casts, jaxprs_of(eqn)))
    return count


def work_of(
    monkeypatch: pytest.MonkeyPatch, stage: Any, *, loss: Any = models.squares, **options: Any
) -> dict[str, dict[str, int]]:
    """The work in a step's programs, by the kind and stage of an action."""
    traced: dict[str, Any] = {}

    def lower(of: Any, platform: str) -> Any:
        traced[of.fun_name] = of.jaxpr.jaxpr
        return lower_without_devices(of, platform)

    monkeypatch.setattr(program, "lower_without_devices", lower)
    axes, rows = options.pop("axes", {}), options.pop("rows", 8)
    options |= {"mesh": make_mesh(stage=2, **axes), "schedule": "1f1b", "engine": "programs"}
    pipe = Pipeline(models.build(stage, 2), 4, loss_fn=loss, **options)
    x = models.rows(rows)
    (batch,) = padded([(x, x)], 8) if rows < 8 else [(x, x)]
    jax.block_until_ready(pipe.value_and_grad(*batch[:2]))
    (programs,) = pipe.plan.compiled.functions.values()
    found = {"finish": collectives(programs._finish._run.as_text())}
    for (kind, k), run in programs.compiled.items():
        if kind not in ("operand", "gradient"):
            found[f"{kind}{k}"] = collectives(run.as_text())
            name = kind if kind == "begin" else f"{kind}0_{('first', 'last')[k]}"
            found[f"{kind}{k}"]["cast"] = casts(traced[name]) if name in traced else 0
    return {name: of for name, work in found.items() if (of := dict(+work))}


BOTH = {"axes": {"data": 2}}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "plain": (models.Hostile, {}, {"finish": {"all-reduce": 1}}),
    "fsdp": (
        models.Hostile,
        BOTH | {"data_parallel": "fsdp"},
        {
            "F0": {"all-gather": 2},
            "B1": {"all-gather": 2},
            "B0": {"all-gather": 2},
            "finish": {"reduce-scatter": 2, "all-reduce": 1},
        },
    ),
    "zero1": (
        models.Hostile,
        BOTH | {"data_parallel": "zero1"},
        {"finish": {"reduce-scatter": 2, "all-reduce": 1}},
    ),
    "bfloat16": (
        Mixed,
        {},
        # XLA drops the casts of "begin", whose results are not read.
        {
            "begin0": {"cast": 2},
            "begin1": {"cast": 2},
            "F0": {"cast": 2},
            "B1": {"cast": 2},
            "B0": {"cast": 2},
            "finish": {"all-reduce": 1},
        },
    ),
    "padding": (
        Counting,
        BOTH | {"rows": 6, "loss": masked(models.squares), "remat": "stage"},
        {
            "F0": {"all-reduce": 1},
            "B1": {"all-reduce": 1},
            "B0": {"all-reduce": 1},
            "finish": {"all-reduce": 2},
        },
    ),
    "tensor": (
        Parallel,
        {"axes": {"tensor": 2}},
        {
            "F0": {"all-reduce": 1},
            "B1": {"all-reduce": 2},
            "B0": {"all-reduce": 1},
            "finish": {"all-reduce": 2},
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_and_casts_of_each_action_are_pinned(name, monkeypatch):
    stage, options, wanted = CASES[name]
    assert work_of(monkeypatch, stage, **options) == wanted
