"""The order in which actions are dispatched, and the values that each rank holds meanwhile."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from collectives.compat import HOST_MEMORY, lower_without_devices
from pipeline import Pipeline, make_optimizer
from pipeline.core.programs import messages, program, run
from pipeline.insight.forecast.by_rank import predict
from schedules.lowering.dispatch import Dispatch, Send
from tests.support import models
from tests.support.sizes import CHUNKS


def programs_of(pipe: Pipeline) -> Any:
    """The programs of its step, after a call."""
    x = models.rows(16)
    jax.block_until_ready(pipe.value_and_grad(x, x))
    (programs,) = pipe.plan.compiled.functions.values()
    return programs


def make(schedule: str, S: int = 2, remat: Any = None, **options: Any) -> Pipeline:
    stages = models.build(models.Hostile, S * CHUNKS.get(schedule, 1))
    options = {"loss_fn": models.squares, "engine": "programs", "remat": remat} | options
    return Pipeline(stages, 8, mesh=make_mesh(stage=S), schedule=schedule, **options)


def dispatches(pipe: Pipeline) -> list[Dispatch]:
    """The actions of its step, without messages."""
    return [one for one in programs_of(pipe).order if isinstance(one, Dispatch)]


def test_a_last_forward_that_its_backward_repeats_is_no_program():
    order = dispatches(make("1f1b", S=3, remat="stage"))
    assert {one.action.stage for one in order if one.action.kind == "F"} == {0, 1}


@pytest.mark.few
@pytest.mark.parametrize("family", ["1f1b", "zb_v", "dualpipe_v"])
def test_each_rank_has_its_order_and_no_action_comes_before_its_data(family):
    pipe = make(family)
    order, held = programs_of(pipe).order, [set() for _ in range(2)]
    for one in order:
        if isinstance(one, Send):
            source, target = one.ranks
            held[source].remove(one.value)
            held[target].add(one.value)
            continue
        rank = one.rank
        assert held[rank] >= {value for value, _ in one.reads.values()}
        held[rank] -= {value for value, is_last in one.reads.values() if is_last}
        held[rank] |= set(one.writes.values())
    assert held == [set(), set()]
    for rank, wanted in enumerate(pipe.schedule.orders):
        found = [one.action for one in dispatches(pipe) if one.rank == rank]
        assert found == list(wanted)


def test_every_value_is_given_up_by_its_last_reader():
    order = dispatches(make("zb_h1"))
    reads = Counter(value for one in order for value, is_last in one.reads.values() if is_last)
    assert set(reads) == {value for one in order for value in one.writes.values()}
    assert set(reads.values()) == {1}


@pytest.mark.filterwarnings("ignore:wrt freezes")
def test_what_computes_nothing_is_not_dispatched():
    kinds = Counter(one.action.kind for one in dispatches(make("1f1b", remat="stage")))
    assert kinds == {"F": 8, "B": 16}  # the last stage's backward runs its forward
    frozen = make("zb_h1", wrt=lambda path, _: path[:2] == ("stages", 1))
    kinds = Counter((one.action.kind, one.action.stage) for one in dispatches(frozen))
    assert kinds == {("F", 0): 8, ("F", 1): 8, ("I", 1): 8, ("W", 1): 8}


def test_alike_stages_are_lowered_once(monkeypatch):
    names = []

    def lower(traced: Any, platform: str) -> Any:
        names.append(traced.fun_name)
        return lower_without_devices(traced, platform)

    monkeypatch.setattr(program, "lower_without_devices", lower)
    programs_of(make("1f1b", S=4))
    # The two stages between the first and the last share theirs.
    actions = [f"{kind}0{end}" for kind in "FB" for end in ("_first", "", "_last")]
    assert sorted(names) == sorted(["begin", *actions])


class Wide(nnx.Module):
    """A stage with one residual of a shape that nothing else has."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = models.normal(rngs, models.WIDTH, 5 * models.WIDTH)
        self.down = models.normal(rngs, 5 * models.WIDTH, models.WIDTH)

    def __call__(self, x):
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


def is_hosted(a: jax.Array) -> bool:
    return a.sharding.memory_kind == HOST_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "D", "V", "options", "stashes"),
    [
        ("1f1b", 1, 1, {}, [4, 3, 2, 1]),
        ("zb_h1", 1, 1, {}, None),
        ("interleaved_1f1b", 2, 2, {"remat": "stage"}, None),
        ("1f1b", 1, 1, {"offload": 0.5}, None),
        ("seq1f1b", 1, 1, {"slices": 4}, None),
    ],
)
def test_each_rank_holds_what_is_predicted(family, D, V, options, stashes):
    """Live buffers between actions: to the byte, and of 1F1B S - r residuals on rank r."""
    S, x = 4, models.rows(16)
    if "slices" in options:
        x = jnp.stack([x] * 8, axis=1)
    stages = models.build(Wide, S * V)
    options = {"remat": None, "loss_fn": models.squares, "engine": "programs"} | options
    pipe = Pipeline(stages, 8, mesh=make_mesh(stage=S, data=D), schedule=family, **options)
    jax.block_until_ready(pipe.value_and_grad(x, x))
    (programs,) = pipe.plan.compiled.functions.values()
    devices = [set(programs.meshes.devices(rank)) for rank in range(S)]
    residual = 1, 2, 5 * models.WIDTH
    sizes: list[list[int]] = []
    on_host: list[list[int]] = []
    counts = [0] * S

    def counted(run: Any) -> Any:
        def call(*arguments: Any) -> Any:
            live = [[a for a in jax.live_arrays() if a.sharding.device_set == d] for d in devices]
            for found, is_host in ((sizes, False), (on_host, True)):
                kinds = [[a for a in of if is_hosted(a) == is_host] for of in live]
                found.append([sum(a.nbytes for a in arrays) for arrays in kinds])
            for rank, arrays in enumerate(live):
                counts[rank] = max(counts[rank], sum(a.shape == residual for a in arrays))
            return run(*arguments)

        return call

    programs.compiled = {
        key: run if key[0] == "begin" else counted(run) for key, run in programs.compiled.items()
    }
    jax.block_until_ready(pipe.value_and_grad(x, x))
    # Before the first action no rank holds any value.
    found = [(max(column) - column[0]) / D for column in zip(*sizes, strict=True)]
    predicted = predict(pipe.plan, *pipe.plan.facts.last)
    assert found == [rank.values for rank in predicted]
    assert [max(column) for column in zip(*on_host, strict=True)] == [of.host for of in predicted]
    assert any(of.host for of in predicted) == ("offload" in options)
    if stashes:
        assert counts == stashes == list(schedules.simulate(pipe.schedule).peak_activations)
        assert [rank.counts["stash"] for rank in predicted] == stashes


def test_describe_says_what_each_rank_holds():
    pipe, x = make("1f1b"), jax.ShapeDtypeStruct((16, models.WIDTH), jnp.float32)
    optimizer = nnx.Optimizer(pipe, optax.sgd(0.1, momentum=0.9), wrt=pipe.wrt)
    text = pipe.describe(x, x, optimizer=optimizer, compiled=True)
    lines = text[text.index("bytes by rank") :].splitlines()
    assert lines[0] == "bytes by rank between actions, predicted:"
    (step,) = pipe.plan.compiled.functions.values()
    for rank, ends in enumerate(("2 stashes and 1 message", "2 messages and 1 stash")):
        wanted = (
            rf"  rank {rank} ([\d,]+): weights [\d,]+, batch [\d,]+, sums [\d,]+, {ends} ([\d,]+); "
            rf"compiled ([\d,]+); sends [\d,]+"
        )
        match = re.fullmatch(wanted, lines[1 + rank])
        assert match, lines[1 + rank]
        predicted, values, compiled = (int(size.replace(",", "")) for size in match.groups())
        keys = [("begin", rank, 0), ("F", rank, 0), ("B", rank, 0)]  # stage = rank
        sizes = [step.compiled[key].memory_analysis() for key in keys]
        beside = [
            one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes
            for one in sizes[1:]  # without what begins the step
        ]
        assert predicted - values + max(beside) <= compiled <= predicted + max(beside)
    assert re.fullmatch(r"  optimizer state on each rank: [\d,]+", lines[3])
    assert "compiled" not in pipe.describe(x, x)


def test_sums_are_added_to_in_place():
    """XLA copies no gradient of a weight in a backward."""
    x, stages = models.rows(16), models.build(Wide, 2)
    options = {"remat": None, "loss_fn": models.squares, "engine": "programs"}
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=2), schedule="1f1b", **options)
    jax.block_until_ready(pipe.value_and_grad(x, x))
    (programs,) = pipe.plan.compiled.functions.values()
    backwards = [programs.compiled["B", stage, 0] for stage in range(2)]
    wide = rf"f32\[(1,)?({models.WIDTH},{5 * models.WIDTH}|{5 * models.WIDTH},{models.WIDTH})\]"
    for one in backwards:
        text = one.as_text()
        assert re.search(wide, text)
        assert not re.search(rf"= {wide}\S* copy\(", text)


@pytest.mark.parametrize(
    ("family", "remat", "offload"),
    [("1f1b", None, 0.5), ("zb_v", "stage", "stash"), ("zb_h1", "stage", "crossings")],
)
def test_values_go_to_host_memory_and_back(family, remat, offload, monkeypatch):
    """Each comes back one action before it is read, and gradients are equal bit by bit."""
    pipe, moved = make(family, S=4, remat=remat, offload=offload), Counter()
    whole, x = pipe.replace(offload=None), models.rows(16)

    def move(value: Any, kind: str | None) -> Any:
        moved[kind] += 1
        held = {a.sharding.memory_kind for a in jax.tree.leaves(value)}
        assert held == {HOST_MEMORY} if kind is None else HOST_MEMORY not in held
        return messages.move(value, kind)

    monkeypatch.setattr(run, "move", move)
    found, order = pipe.value_and_grad(x, x), dispatches(pipe)
    # The second call of the helper runs the step again.
    assert moved[None] == moved[HOST_MEMORY] == 2 * sum(len(one.to_host) for one in order) > 0
    for a, b in zip(*map(jax.tree.leaves, (found, whole.value_and_grad(x, x))), strict=True):
        np.testing.assert_array_equal(a, b)
    for rank in range(4):
        mine = [one for one in order if one.rank == rank]
        for one, later in itertools.pairwise(mine):
            assert set(one.to_device) <= {value for value, _ in later.reads.values()}
    assert "in host memory" in pipe.describe()


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_is_lowered_as_its_programs():
    pipe, types = make("1f1b"), jax.ShapeDtypeStruct((16, models.WIDTH), jnp.float32)
    lowered = pipe.lower(types, types, optimizer=make_optimizer(pipe, optax.adam(1e-3)))
    names = [re.search(r"@jit_(\w+)", one.as_text())[1] for one in lowered]
    actions = ["F0_first", "F0_last", "B0_last", "B0_first"]
    assert sorted(names) == sorted(["begin", *actions, "finish", "update"])
    assert all(one.compile().memory_analysis() for one in lowered)
