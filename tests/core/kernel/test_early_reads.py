"""Reads from host memory that start an action early: bit for bit the same gradients (issue 42).

The memory of idle slots is NaN, so a stash that came back to a wrong place, or too late, shows.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.jaxpr import scopes
from pipeline.insight.forecast.bytes import predict
from schedules import Costs
from tests.core.kernel.test_offload import assert_equal, make, wide, words
from tests.support import mixed
from tests.support.poison import poison  # noqa: F401, a fixture

WAITS = Costs(host=0.8, host_overlap=0)  # an action waits for its own copies
FAMILIES = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2}


def reads(pipe: Pipeline) -> int:
    """Number of reads of a step that start early."""
    program = pipe.plan.training
    return int((program.read_from != program.trash["read_from"]).sum())


@functools.cache
def plain(name: str, remat: Any) -> Any:
    pipe = make(name, 2, FAMILIES[name], 4, remat=remat)
    return pipe.value_and_grad(*words(pipe.num_microbatches))


@pytest.mark.few
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("offload", ["stash", 0.5])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_equal_bit_by_bit(name, offload):
    pipe = make(name, 2, FAMILIES[name], 4, remat=None, offload=offload, costs=WAITS)
    assert reads(pipe) > 0
    assert_equal(pipe.value_and_grad(*words(pipe.num_microbatches)), plain(name, None))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"delayed": True}, {"wrt": lambda path, _: path[0] == "head"}])
def test_other_pipelines(options):
    pipes = [
        make("1f1b", 2, 1, 4, remat=None, offload=offload, costs=WAITS, **options)
        for offload in ("stash", None)
    ]
    assert reads(pipes[0]) > 0
    assert_equal(*(pipe.value_and_grad(*words(4)) for pipe in pipes))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["trees", "images in 4", "images in 8"])
def test_stages_that_are_not_alike(model):
    """A stash may come back beside an action of a stage of another kind."""
    stages = mixed.build(model)

    def run(offload: Any) -> tuple[Pipeline, Any]:
        pipe = Pipeline(
            stages,
            8,
            schedule="zb_v" if len(stages) > 4 else "1f1b",
            mesh=make_mesh(stage=4),
            loss_fn=mixed.loss_of(model),
            remat=None,
            offload=offload,
            costs=WAITS,
        )
        return pipe, pipe.value_and_grad(*mixed.batch(model))

    (pipe, found), (_, wanted) = run("stash"), run(None)
    assert reads(pipe) > 0
    assert_equal(found, wanted)


def test_one_place_more_holds_what_is_on_its_way():
    """GPipe has 8 stashes of 2 MiB on the host, and each comes back to the same place."""
    pipe, x = wide("stash")
    for costs, count in ((None, 0), (WAITS, 1)):
        found = predict(pipe.replace(costs=costs).plan, *pipe._operands(x, x, None))
        assert (found.stashes.count, found.stashes.size) == (count, count * 2 * 2**20)
        assert (found.host_stashes.count, found.host) == (8, 16 * 2**20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "offload"), [*itertools.product(["gpipe", "1f1b"], [0.5, "stash"])]
)
def test_the_compiler_takes_as_many_bytes(schedule, offload):
    """On CPU both memories are one, and all of it is counted as temporaries."""
    pipe, x = wide(offload, schedule=schedule)
    pipe = pipe.replace(costs=WAITS)
    found = predict(pipe.plan, *pipe._operands(x, x, None))
    compiled = pipe.lower(x, x).compile().memory_analysis()
    assert compiled.temp_size_in_bytes == pytest.approx(found.temporaries + found.host, rel=0.15)


def test_describe_counts_them():
    pipe, _ = wide("stash", schedule="1f1b")
    assert "early" not in pipe.describe()
    text = pipe.replace(costs=WAITS).describe()
    assert "4 stashes in host memory, up to 7 of a step read back an action early" in text


def test_with_a_profile_names_are_found():
    """Scopes of actions beside which a stash comes back are found again by their names."""
    pipe, _ = wide("stash", schedule="1f1b")
    program = pipe.replace(costs=WAITS).plan.training
    (slot,) = {n for n, slot in enumerate(program.slots) if any(op.reads_early for op in slot.ops)}
    for op in program.slots[slot].ops:
        place = scopes.place_of_loop(f"ticks0_{program.num_ticks}/slot{slot}/{op.label}/while")
        assert place is not None
        assert place.label == op.label
        trips = [len(list(place.actions(program, rank))) for rank in range(4)]
        found = scopes.trips(program, f"ticks0_{program.num_ticks}/slot{slot}/{op.label}")
        assert found is not None
        assert trips == found.tolist()
