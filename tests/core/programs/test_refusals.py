"""Options and calls that programs do not run are refused by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import checkify

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.optimizer import make_optimizer
from pipeline.training.step import Step
from pipeline.vocabulary import VocabularyEmbedding
from tests.support import adding, models
from tests.support.close import assert_close


def make(kind: Any = models.Block, S: int = 2, **options: Any) -> Pipeline:
    options = {"loss_fn": models.squares, "engine": "programs", "schedule": "1f1b"} | options
    mesh = options.pop("mesh", None) or make_mesh(stage=S)
    return Pipeline(models.build(kind, S), 4, mesh=mesh, **options)


def rows() -> tuple[jax.Array, jax.Array]:
    return models.rows(8), models.rows(8, seed=5)


def test_an_engine_that_is_neither():
    with pytest.raises(ValueError, match="engine='loop': must be 'scan' or 'programs'"):
        make(engine="loop")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pattern": "single"}, "pattern='single'"),
        ({"delayed": True}, "delayed=True"),
    ],
)
def test_options_that_only_the_scan_has(options, said):
    with pytest.raises(ValueError, match="engine='programs'") as caught:
        make(**options)
    assert str(caught.value) == (
        f"engine='programs' does not support {said}: it describes exchanges in which all ranks "
        f"keep step, and a rank of programs waits only for its data; leave it out, or use "
        f"engine='scan'"
    )


def test_one_program_of_all_ranks_runs_on_one_mesh():
    embed = VocabularyEmbedding(5, models.WIDTH, rngs=nnx.Rngs(0))
    one, other = (make_mesh(stage=1, devices=[device]) for device in jax.devices()[:2])
    options = {"embed": embed, "vocabulary": "stage", "engine": "programs"}
    with pytest.raises(ValueError, match="vocabulary='stage'") as caught:
        Pipeline(models.build(models.Block, 2), 4, stage_meshes=[one, other], **options)
    assert str(caught.value) == (
        "vocabulary='stage' with stage_meshes=: all ranks run embed or head together, as one "
        "program, and a program runs on one mesh; give mesh=, or use vocabulary='ends'"
    )


@pytest.mark.parametrize(
    "around", [jax.jit, jax.checkpoint, lambda f: lambda x: jax.eval_shape(f, x)]
)
def test_a_step_is_no_part_of_a_trace(around):
    pipe, (x, t) = make(), rows()
    with pytest.raises(ValueError, match="so its calls cannot be traced"):
        around(lambda x: pipe.value_and_grad(x, t)[0])(x)


class Checked(models.Block):
    """A stage with a check."""

    def __call__(self, x):
        checkify.check(jnp.isfinite(x).all(), "a number is not finite")
        return super().__call__(x)


def test_checks_within_a_stage():
    with pytest.raises(ValueError, match=r"a stage has a check \(checkify.check\)"):
        make(Checked).loss(*rows())


class Printing(models.Block):
    """A stage that prints."""

    def __call__(self, x):
        jax.debug.print("{}", x.sum())
        return super().__call__(x)


def test_check_lists_callbacks_that_make_ranks_run_one_at_a_time():
    (said,) = make(Printing).check(*rows())
    assert said.startswith("a stage calls back to Python (debug_")
    assert said.endswith(
        "and on CPUs JAX runs such a program within its call: with engine='programs' ranks run one "
        "at a time; leave the callback out, or use engine='scan'"
    )
    assert make(Printing, engine="scan").check(*rows()) == []


def test_options_of_the_compiler():
    pipe = make()
    optimizer = make_optimizer(pipe, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"compiler_options=.* with engine='programs'"):
        Step(pipe, optimizer, compiler_options={"xla_cpu_enable_fast_math": True})


def test_describe_says_what_each_rank_holds():
    text = make(S=4).describe(*rows())
    assert "a program for each action of a rank, which waits for its data alone" in text
    assert "stashes at most, by rank: 4 3 2 1" in text
    assert "lockstep" not in text


# --- found by a reader of the engine ---


@pytest.mark.filterwarnings("ignore:wrt freezes", "ignore:state that nothing advances")
def test_a_frozen_stage_that_adds_losses():
    options = {"wrt": lambda path, _: path[:2] == ("stages", 1), "remat": None}
    results = [
        make(adding.Adding, engine=engine, **options).value_and_grad(*rows())
        for engine in ("scan", "programs")
    ]
    assert_close(results[1], results[0])


class Counted(models.Words):
    """An embedding that counts its calls."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, words):
        self.calls[...] += 1
        return super().__call__(words)


@pytest.mark.parametrize("S", [1, 2])
def test_state_that_embed_writes(S):
    head, words = models.Readout(nnx.Rngs(2)), models.words(8)
    options = {"loss_fn": models.cross_entropy, "state": nnx.BatchStat, "head": head}
    pipe = make(S=S, embed=Counted(nnx.Rngs(1)), **options)
    pipe.value_and_grad(words, models.words(8, most=models.CLASSES, seed=4))
    assert pipe.embed.calls[...] == 4


class Stateful(models.Block):
    """A block that counts its calls."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return super().__call__(x)


def test_calls_of_an_update_compile_nothing_anew():
    pipe = make(Stateful, state=nnx.BatchStat, after_step=lambda stage: None)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)), accumulate=2)
    for _ in range(6):
        step(*rows())
    assert len(pipe.plan.compiled.functions) == 2


def test_precision_is_a_part_of_a_program():
    pipe = make()
    pipe.loss(*rows())
    with jax.default_matmul_precision("highest"):
        pipe.loss(*rows())
    assert len(pipe.plan.compiled.functions) == 2


@pytest.mark.slow
def test_a_trace_leaves_no_arrays_behind():
    with jax.checking_leaks():
        make(schedule="zb_h1", remat=None).value_and_grad(*rows())
