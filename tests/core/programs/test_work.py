"""The work that each compiled action repeats: collectives, and casts of weights.

What an action does is done M times a step. So a collective or a cast that belongs to a step, not to
a microbatch, shows here, in eight configurations of a model of two stages.
"""

from __future__ import annotations

import math
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
from tests.support import models, tensor_stages
from tests.support.close import assert_close
from tests.support.hlo import MEETINGS, opcode
from tests.support.sizes import CHUNKS
from tests.support.tensor_stages import Parallel

KINDS = (*MEETINGS, "collective-permute")
SHAPE = (models.WIDTH, 16)  # of a weight of `Mixed`
LEAST = math.prod(SHAPE) // 2  # numbers of its half on a data shard; no activation has as many


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
            count += cast.dtype == jnp.bfloat16 and cast.size >= LEAST
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
    for (kind, k, _), run in programs.compiled.items():
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
    "fsdp, whole weights once": (
        models.Hostile,
        BOTH | {"data_parallel": "fsdp", "gather": "step"},
        {
            "begin0": {"all-gather": 2},
            "begin1": {"all-gather": 2},
            "finish": {"reduce-scatter": 2, "all-reduce": 1},
        },
    ),
    "fsdp, whole weights of embed and head once": (
        models.Hostile,
        BOTH
        | {"data_parallel": "fsdp", "gather": "step"}
        | {end: models.Hostile(nnx.Rngs(n)) for n, end in enumerate(("embed", "head"))},
        {
            "begin0": {"all-gather": 6},
            "begin1": {"all-gather": 6},
            "finish": {"reduce-scatter": 6, "all-reduce": 2},
        },
    ),
    "fsdp, whole weights of a chunk": (
        models.Hostile,
        BOTH | {"data_parallel": "fsdp", "gather": "repeat"},
        {
            "gather0": {"all-gather": 2},
            "gather1": {"all-gather": 2},
            "finish": {"reduce-scatter": 2, "all-reduce": 1},
        },
    ),
    "fsdp, bfloat16": (
        Mixed,
        BOTH | {"data_parallel": "fsdp"},
        {
            "begin0": {"cast": 2},
            "begin1": {"cast": 2},
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
        {"begin0": {"cast": 2}, "begin1": {"cast": 2}, "finish": {"all-reduce": 1}},
    ),
    "padding": (
        Counting,
        BOTH | {"rows": 6, "loss": masked(models.squares), "remat": "stage"},
        {
            "begin0": {"all-reduce": 2},
            "begin1": {"all-reduce": 2},
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


@pytest.mark.few
@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel": "fsdp", "gather": "step"},
        {"data_parallel": "fsdp"},
        {"data_parallel": "fsdp", "gather": "action", "schedule": "zb_v", "remat": None},
        {"data_parallel": "fsdp", "gather": "repeat", "schedule": "looped_bfs"},
    ],
)
def test_weights_that_a_step_makes_once_give_the_gradients_of_the_scan(options):
    """Narrow copies of float32 weights, whole and of data shards, and counts of padding."""
    own = {"loss_fn": masked(models.squares), "mesh": make_mesh(stage=2, data=2)}
    given = {"schedule": "1f1b"} | options | own
    stages = models.build(Mixed, 2 * CHUNKS.get(given["schedule"], 1))
    (batch,) = padded([(models.rows(14), models.rows(14, seed=3))], 16)
    pipe = Pipeline(stages, 4, engine="programs", **given)
    wanted = Pipeline(stages, 4, **given).value_and_grad(*batch[:2])
    found = jax.block_until_ready(pipe.value_and_grad(*batch[:2]))
    assert_close(found, wanted, tolerance=1e-6)
    (programs,) = pipe.plan.compiled.functions.values()
    made = programs.ranks[0].once.weights
    share = 2 if options.get("gather") in (None, "action") else 1
    assert [x.size for (x,) in made.values()] == [math.prod(SHAPE) // share] * len(stages)
    assert all(x.dtype == jnp.bfloat16 for (x,) in made.values())


@pytest.mark.slow
def test_narrow_weights_stay_divided_by_an_axis_that_is_left_to_the_compiler():
    stages, ends = models.build(Parallel, 2), tensor_stages.ends(object)
    options = {"compute_dtype": jnp.bfloat16, "mesh": make_mesh(stage=2, tensor=2)} | ends
    options |= {"schedule": "1f1b", "loss_fn": models.cross_entropy, "engine": "programs"}
    pipe = Pipeline(stages, 4, auto_axes=("tensor",), **options)
    batch = models.words(16), models.words(16, most=models.CLASSES, seed=4)
    found = jax.block_until_ready(pipe.value_and_grad(*batch))
    assert_close(found, Pipeline(stages, 4, **options).value_and_grad(*batch), tolerance=2e-2)
    (programs,) = pipe.plan.compiled.functions.values()
    made, _ = programs.compiled["begin", 0, 0].output_shardings
    divided = ["tensor" in str(made[name][0].spec) for name in programs.ranks[0].once.weights]
    assert divided.count(True) == 3  # up, bias and down


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_and_casts_of_each_action_are_pinned(name, monkeypatch):
    stage, options, wanted = CASES[name]
    assert work_of(monkeypatch, stage, **options) == wanted


def test_an_action_takes_only_the_weights_of_its_chunk():
    """A rank of two stages: each of its programs has the leaves of one, and those of the batch."""
    mesh, stages = make_mesh(stage=2), models.build(models.Hostile, 4)
    pipe = Pipeline(stages, 4, mesh=mesh, loss_fn=models.squares, engine="programs")
    x = models.rows(8)
    pipe.value_and_grad(x, x)
    (step,) = pipe.plan.compiled.functions.values()
    weights = [len(jax.tree.leaves(nnx.state(chunk, nnx.Param))) for chunk in pipe.chunks]
    assert len(weights) == 2
    first, last = ({*range(weights[0])}, {*range(weights[0], sum(weights))})
    for (kind, k, _), (program_of, _) in step.programs.items():
        if kind != "begin":
            taken = {n for n in program_of.reads if n < sum(weights)}
            assert taken == (first if step.chunk_of[k] == 0 else last), (kind, k)
